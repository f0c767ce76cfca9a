#!/usr/bin/env bash
# olmoe-1b-7b on 256 GPUs.
# arXiv 2409.02060: fully sharded data parallel, 5.1T tokens, 1,024 sequences of 4,096, lr 4e-4. Ours shards gradients and
# optimizer state (zero 2) and keeps the experts of a layer on the 8 ranks of a node.
#
#     sbatch --nodes 32 --gpus-per-node 8 scripts/slurm/train.sbatch scripts/recipes/olmoe-1b-7b.sh --data.path PREFIX
#
# Checked against every rule at this size, not run at it. On one node: bash scripts/recipes/olmoe-1b-7b.sh MORE. --words prints train.py's arguments, one a line.
set -euo pipefail
WORLD=256
WORDS=(olmoe-1b-7b --log.name olmoe-1b-7b --train.tokens 5.1e12 --train.seq_len 4096 --train.global_batch 1024 --train.micro_batch 4 --train.dtype bf16
    --optim.lr 4e-4 --optim.warmup 2500 --optim.eps 1e-8 --parallel.ep 8 --parallel.zero 2)
if [ "${*: -1}" = --words ]; then
    printf '%s\n' "${WORDS[@]}" "${@:1:$#-1}"
else
    echo "made for $WORLD GPUs; this is one node" >&2
    cd "$(dirname "$0")/../.."
    exec torchrun --standalone --nproc-per-node "${GPUS:-8}" --signals-to-handle SIGTERM,SIGINT,SIGUSR1 train.py "${WORDS[@]}" "$@"
fi
