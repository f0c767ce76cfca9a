#!/usr/bin/env bash
# deepseek-v3 on 2,048 GPUs.
# arXiv 2412.19437, sections 3.2 and 4.2: 16 stages, experts over 64 ranks, ZeRO-1, no tensor parallelism, on 2,048 GPUs; 14.8T tokens,
# 4,096 long, batches of up to 15,360 sequences, lr 2.2e-4 after 2,000 steps of warmup. The paper's DualPipe is dualpipe-v here (the same
# stages folded onto half the weights); its batch ramp and its decay in three pieces have no key yet: whole batches, cosine. It trains in fp8, this in bf16.
#
#     sbatch --nodes 256 --gpus-per-node 8 scripts/slurm/train.sbatch scripts/recipes/deepseek-v3.sh --data.path PREFIX
#
# On one node: bash scripts/recipes/deepseek-v3.sh MORE
WORLD=2048
WORDS=(deepseek-v3 --log.name deepseek-v3 --train.tokens 14.8e12 --train.seq_len 4096 --train.global_batch 15360 --train.micro_batch 1 --train.dtype bf16
    --optim.lr 2.2e-4 --optim.min_lr 7.3e-6 --optim.warmup 2000 --parallel.pp 16 --parallel.schedule dualpipe-v
    --parallel.ep 64 --parallel.zero 1)
source "$(dirname "$0")/launch"
