#!/usr/bin/env bash
# mixtral-8x7b on 128 GPUs.
# arXiv 2401.04088 does not say how it was trained; our choice: an expert a rank inside a node, tp 4 with sequence parallelism, 4 stages.
#
#     sbatch --nodes 16 --gpus-per-node 8 scripts/slurm/train.sbatch scripts/recipes/mixtral-8x7b.sh --data.path PREFIX
#
# Checked against every rule at this size, not run at it. On one node: bash scripts/recipes/mixtral-8x7b.sh MORE. --words prints train.py's arguments, one a line.
set -euo pipefail
WORLD=128
WORDS=(mixtral-8x7b --log.name mixtral-8x7b --train.tokens 1e12 --train.seq_len 4096 --train.global_batch 1024 --train.micro_batch 1 --train.dtype bf16
    --optim.lr 3e-4 --optim.warmup 2000 --parallel.tp 4 --parallel.sp true --parallel.pp 4 --parallel.ep 8 --parallel.zero 1)
if [ "${*: -1}" = --words ]; then
    printf '%s\n' "${WORDS[@]}" "${@:1:$#-1}"
else
    echo "made for $WORLD GPUs; this is one node" >&2
    cd "$(dirname "$0")/../.."
    exec torchrun --standalone --nproc-per-node "${GPUS:-8}" --signals-to-handle SIGTERM,SIGINT,SIGUSR1 train.py "${WORDS[@]}" "$@"
fi
