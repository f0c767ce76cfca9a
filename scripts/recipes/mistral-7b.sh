#!/usr/bin/env bash
# mistral-7b on 256 GPUs.
# arXiv 2310.06825 does not say how the model was trained; our choice: ZeRO-1 over data parallel ranks, 8,192 tokens
# (twice its window).
#
#     sbatch --nodes 32 --gpus-per-node 8 scripts/slurm/train.sbatch scripts/recipes/mistral-7b.sh --data.path PREFIX
#
# On one node: bash scripts/recipes/mistral-7b.sh MORE
WORLD=256
WORDS=(mistral-7b --log.name mistral-7b --train.seq_len 8192 --train.global_batch 512 --train.micro_batch 1
    --parallel.zero 1)
source "$(dirname "$0")/launch"
