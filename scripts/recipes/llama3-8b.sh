#!/usr/bin/env bash
# llama3-8b on 512 GPUs.
# arXiv 2407.21783 gives the layout of the 405B alone; our choice: ZeRO-2 over data parallel ranks.
#
#     sbatch --nodes 64 --gpus-per-node 8 scripts/slurm/train.sbatch scripts/recipes/llama3-8b.sh --data.path PREFIX
#
# On one node: bash scripts/recipes/llama3-8b.sh MORE
WORLD=512
WORDS=(llama3-8b --log.name llama3-8b --train.tokens 15e12 --train.seq_len 8192 --train.global_batch 512
    --train.micro_batch 1 --optim.lr 3e-4 --optim.warmup 8000 --parallel.zero 2)
source "$(dirname "$0")/launch"
