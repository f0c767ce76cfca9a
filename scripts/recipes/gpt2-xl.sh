#!/usr/bin/env bash
# gpt2-xl on 8 GPUs.
# Radford et al. 2019 does not say how GPT-2 was trained; our choice: data parallel, its 25 heads divide by no tp.
# train: 1,024 tokens, 512 sequences (both from the paper)
#
#     sbatch --nodes 1 --gpus-per-node 8 scripts/slurm/train.sbatch scripts/recipes/gpt2-xl.sh --data.path PREFIX
#
# On one node: bash scripts/recipes/gpt2-xl.sh MORE
WORLD=8
WORDS=(gpt2-xl --log.name gpt2-xl --train.seq_len 1024 --train.global_batch 512 --train.micro_batch 8
    --parallel.zero 1)
source "$(dirname "$0")/launch"
