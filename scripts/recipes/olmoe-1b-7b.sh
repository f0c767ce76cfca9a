#!/usr/bin/env bash
# olmoe-1b-7b on 256 GPUs.
# arXiv 2409.02060: fully sharded data parallel, 5.1T tokens, 1,024 sequences of 4,096, lr 4e-4. Ours shards gradients and
# optimizer state (zero 2) and keeps the experts of a layer on the 8 ranks of a node.
#
#     sbatch --nodes 32 --gpus-per-node 8 scripts/slurm/train.sbatch scripts/recipes/olmoe-1b-7b.sh --data.path PREFIX
#
# On one node: bash scripts/recipes/olmoe-1b-7b.sh MORE
WORLD=256
WORDS=(olmoe-1b-7b --log.name olmoe-1b-7b --train.tokens 5.1e12 --train.seq_len 4096 --train.global_batch 1024 --train.micro_batch 4 --train.dtype bf16
    --optim.lr 4e-4 --optim.warmup 2500 --optim.eps 1e-8 --parallel.ep 8 --parallel.zero 2)
source "$(dirname "$0")/launch"
