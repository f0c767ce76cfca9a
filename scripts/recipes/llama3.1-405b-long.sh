#!/usr/bin/env bash
# llama3.1-405b-long on 16,384 GPUs.
# arXiv 2407.21783, table 4, last row: tp 8, cp 16, pp 16, dp 8, 131,072 tokens, 16 sequences a dp rank: 16M tokens a
# step on 16,384 GPUs.
# The paper's context parallelism gathers keys and values; ours passes them round a ring (parallel.cp_kind). Its long-context stages
# start from the checkpoint of llama3.1-405b.sh: give --checkpoint.init_from. Norms are computed again, as there.
#
#     sbatch --nodes 2048 --gpus-per-node 8 scripts/slurm/train.sbatch scripts/recipes/llama3.1-405b-long.sh --data.path PREFIX
#
# On one node: bash scripts/recipes/llama3.1-405b-long.sh MORE
WORLD=16384
WORDS=(llama3.1-405b --log.name llama3.1-405b-long --train.tokens 8e11 --train.seq_len 131072
    --train.global_batch 128 --train.micro_batch 1 --optim.lr 8e-5 --optim.min_lr 8e-7 --parallel.tp 8
    --parallel.sp true --parallel.cp 16 --parallel.pp 16 --parallel.schedule 1f1b --parallel.zero 2
    --parallel.recompute selective --parallel.recompute_parts norm)
source "$(dirname "$0")/launch"
