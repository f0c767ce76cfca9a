#!/usr/bin/env bash
# llama3-70b on 2,048 GPUs.
# arXiv 2407.21783 gives the layout of the 405B alone; our choice: its tp 8 with 4 stages.
#
#     sbatch --nodes 256 --gpus-per-node 8 scripts/slurm/train.sbatch scripts/recipes/llama3-70b.sh --data.path PREFIX
#
# On one node: bash scripts/recipes/llama3-70b.sh MORE
WORLD=2048
WORDS=(llama3-70b --log.name llama3-70b --train.tokens 15e12 --train.seq_len 8192 --train.global_batch 1024
    --train.micro_batch 1 --optim.lr 1.5e-4 --optim.warmup 8000 --parallel.tp 8 --parallel.sp true --parallel.pp 4
    --parallel.zero 1)
source "$(dirname "$0")/launch"
