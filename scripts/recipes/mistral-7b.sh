#!/usr/bin/env bash
# mistral-7b on 256 GPUs.
# arXiv 2310.06825 does not say how the model was trained; our choice: ZeRO-1 over data parallel ranks, 8,192 tokens
# (twice its window).
#
#     sbatch --nodes 32 --gpus-per-node 8 scripts/slurm/train.sbatch scripts/recipes/mistral-7b.sh --data.path PREFIX
#
# Checked against every rule at this size, not run at it. On one node: bash scripts/recipes/mistral-7b.sh MORE. --words prints train.py's arguments, one a line.
set -euo pipefail
WORLD=256
WORDS=(mistral-7b --log.name mistral-7b --train.seq_len 8192 --train.global_batch 512 --train.micro_batch 1
    --parallel.zero 1)
if [ "${*: -1}" = --words ]; then
    printf '%s\n' "${WORDS[@]}" "${@:1:$#-1}"
else
    echo "made for $WORLD GPUs; this is one node" >&2
    cd "$(dirname "$0")/../.."
    exec torchrun --standalone --nproc-per-node "${GPUS:-8}" --signals-to-handle SIGTERM,SIGINT,SIGUSR1 train.py "${WORDS[@]}" "$@"
fi
