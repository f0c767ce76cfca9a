#!/usr/bin/env bash
# mixtral-8x7b on 128 GPUs.
# arXiv 2401.04088 does not say how it was trained; our choice: an expert a rank inside a node, tp 4 with sequence parallelism, 4 stages.
#
#     sbatch --nodes 16 --gpus-per-node 8 scripts/slurm/train.sbatch scripts/recipes/mixtral-8x7b.sh --data.path PREFIX
#
# On one node: bash scripts/recipes/mixtral-8x7b.sh MORE
WORLD=128
WORDS=(mixtral-8x7b --log.name mixtral-8x7b --train.tokens 1e12 --train.seq_len 4096 --train.global_batch 1024 --train.micro_batch 1 --train.dtype bf16
    --optim.lr 3e-4 --optim.warmup 2000 --parallel.tp 4 --parallel.sp true --parallel.pp 4 --parallel.ep 8 --parallel.zero 1)
source "$(dirname "$0")/launch"
