#!/usr/bin/env bash
# llama2-7b on 256 GPUs.
# arXiv 2307.09288 gives batch (4M tokens), context and optimizer, not the layout; our choice: ZeRO-1 over data
# parallel ranks.
#
#     sbatch --nodes 32 --gpus-per-node 8 scripts/slurm/train.sbatch scripts/recipes/llama2-7b.sh --data.path PREFIX
#
# On one node: bash scripts/recipes/llama2-7b.sh MORE
WORLD=256
WORDS=(llama2-7b --log.name llama2-7b --train.tokens 2e12 --train.seq_len 4096 --train.global_batch 1024
    --train.micro_batch 1 --optim.lr 3e-4 --optim.min_lr 3e-5 --optim.warmup 2000 --optim.eps 1e-5 --parallel.zero 1)
source "$(dirname "$0")/launch"
