#!/usr/bin/env bash
# qwen3-32b on 512 GPUs.
# arXiv 2505.09388 gives data and context (4,096 tokens, then 32,768), not the layout; our choice: tp 8 inside a node,
# ZeRO-1.
#
#     sbatch --nodes 64 --gpus-per-node 8 scripts/slurm/train.sbatch scripts/recipes/qwen3-32b.sh --data.path PREFIX
#
# On one node: bash scripts/recipes/qwen3-32b.sh MORE
WORLD=512
WORDS=(qwen3-32b --log.name qwen3-32b --train.tokens 36e12 --train.seq_len 4096 --train.global_batch 1024
    --train.micro_batch 1 --parallel.tp 8 --parallel.sp true --parallel.zero 1)
source "$(dirname "$0")/launch"
