#!/usr/bin/env bash
# llama3.1-405b on 8,192 GPUs.
# arXiv 2407.21783, table 4, first row: tp 8, cp 1, pp 16, dp 64, 8,192 tokens, 32 sequences a dp rank: 16M tokens a
# step on 8,192 GPUs.
# The paper shards with FSDP but keeps whole weights for the backward (our zero 2) and interleaves its stages with a schedule of
# its own; 126 layers divide over 16 ranks unevenly, so we take 1f1b, the nearest that holds one stage a rank.
# Norms are computed again, and their outputs gathered again over tp (arXiv 2205.05198, section 4.2.2): 66 GiB of a GPU's 79,
# and 127 without (scripts.plan).
#
#     sbatch --nodes 1024 --gpus-per-node 8 scripts/slurm/train.sbatch scripts/recipes/llama3.1-405b.sh --data.path PREFIX
#
# On one node: bash scripts/recipes/llama3.1-405b.sh MORE
WORLD=8192
WORDS=(llama3.1-405b --log.name llama3.1-405b --train.tokens 15.6e12 --train.seq_len 8192 --train.global_batch 2048
    --train.micro_batch 1 --optim.lr 8e-5 --optim.min_lr 8e-7 --optim.warmup 8000 --parallel.tp 8 --parallel.sp true
    --parallel.pp 16 --parallel.schedule 1f1b --parallel.zero 2 --parallel.recompute selective
    --parallel.recompute_parts norm)
source "$(dirname "$0")/launch"
