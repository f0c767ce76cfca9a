#!/usr/bin/env bash
# llama2-70b on 1,024 GPUs.
# arXiv 2307.09288 gives batch (4M tokens), context and optimizer, not the layout; our choice: tp 8 inside a node, 4
# stages between nodes.
#
#     sbatch --nodes 128 --gpus-per-node 8 scripts/slurm/train.sbatch scripts/recipes/llama2-70b.sh --data.path PREFIX
#
# On one node: bash scripts/recipes/llama2-70b.sh MORE
WORLD=1024
WORDS=(llama2-70b --log.name llama2-70b --train.tokens 2e12 --train.seq_len 4096 --train.global_batch 1024
    --train.micro_batch 1 --optim.lr 1.5e-4 --optim.min_lr 1.5e-5 --optim.warmup 2000 --optim.eps 1e-5
    --parallel.tp 8 --parallel.sp true --parallel.pp 4 --parallel.zero 1)
source "$(dirname "$0")/launch"
