#!/usr/bin/env bash
# qwen2.5-72b on 1,024 GPUs.
# arXiv 2412.15115 gives data and context (4,096 tokens, then 32,768), not the layout; our choice: tp 8 inside a node,
# 4 stages.
#
#     sbatch --nodes 128 --gpus-per-node 8 scripts/slurm/train.sbatch scripts/recipes/qwen2.5-72b.sh --data.path PREFIX
#
# On one node: bash scripts/recipes/qwen2.5-72b.sh MORE
WORLD=1024
WORDS=(qwen2.5-72b --log.name qwen2.5-72b --train.tokens 18e12 --train.seq_len 4096 --train.global_batch 1024
    --train.micro_batch 1 --parallel.tp 8 --parallel.sp true --parallel.pp 4 --parallel.zero 1)
source "$(dirname "$0")/launch"
