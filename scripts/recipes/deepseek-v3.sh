#!/usr/bin/env bash
# deepseek-v3 on 2,048 GPUs.
# arXiv 2412.19437, sections 3.2 and 4.2: 16 stages, experts over 64 ranks, ZeRO-1, no tensor parallelism, on 2,048 GPUs; 14.8T tokens,
# 4,096 long, batches of up to 15,360 sequences, lr 2.2e-4 after 2,000 steps of warmup. The paper's DualPipe keeps
# activations in fp8; in bf16 our dualpipe-v would hold 148 GiB of a GPU's 79, and 86 with full recompute (scripts.plan). So this is 1f1b,
# with full recompute in the stages that hold the most microbatches: 72 GiB. Whole batches and a cosine instead of its ramp and its decay in
# three pieces; bf16 instead of its fp8 (train.dtype fp8, train.fp8 blockwise).
#
#     sbatch --nodes 256 --gpus-per-node 8 scripts/slurm/train.sbatch scripts/recipes/deepseek-v3.sh --data.path PREFIX
#
# On one node: bash scripts/recipes/deepseek-v3.sh MORE
WORLD=2048
WORDS=(deepseek-v3 --log.name deepseek-v3 --train.tokens 14.8e12 --train.seq_len 4096 --train.global_batch 15360 --train.micro_batch 1 --train.dtype bf16
    --optim.lr 2.2e-4 --optim.min_lr 7.3e-6 --optim.warmup 2000 --parallel.pp 16 --parallel.schedule 1f1b
    --parallel.ep 64 --parallel.zero 1
    --parallel.recompute_stages full,full,full,full,full,full,full,full,full,none,none,none,none,none,none,none)
source "$(dirname "$0")/launch"
