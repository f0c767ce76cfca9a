#!/usr/bin/env bash
# gpt2-xl on 8 GPUs.
# Radford et al. 2019 does not say how GPT-2 was trained; our choice: data parallel, its 25 heads divide by no tp.
# train: 1,024 tokens, 512 sequences (both from the paper)
#
#     sbatch --nodes 1 --gpus-per-node 8 scripts/slurm/train.sbatch scripts/recipes/gpt2-xl.sh --data.path PREFIX
#
# Checked against every rule at this size, not run at it. On one node: bash scripts/recipes/gpt2-xl.sh MORE. --words prints train.py's arguments, one a line.
set -euo pipefail
WORLD=8
WORDS=(gpt2-xl --log.name gpt2-xl --train.seq_len 1024 --train.global_batch 512 --train.micro_batch 8
    --parallel.zero 1)
if [ "${*: -1}" = --words ]; then
    printf '%s\n' "${WORDS[@]}" "${@:1:$#-1}"
else
    echo "made for $WORLD GPUs; this is one node" >&2
    cd "$(dirname "$0")/../.."
    exec torchrun --standalone --nproc-per-node "${GPUS:-8}" --signals-to-handle SIGTERM,SIGINT,SIGUSR1 train.py "${WORDS[@]}" "$@"
fi
