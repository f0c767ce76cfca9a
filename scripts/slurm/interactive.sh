#!/usr/bin/env bash
# The same launch inside an allocation, as in a terminal: it prints the ranks' output, and Ctrl-C saves and stops.
#
#     salloc --nodes 2 --gpus-per-node 8 --time 1:00:00
#     bash scripts/slurm/interactive.sh llama3-8b --train.steps 20 --log.name try
#
# It takes the arguments of train.sbatch. Nothing is requeued; the exit code is that of the ranks.
set -uo pipefail

cd "$(dirname "$0")/../.." || exit 1
: "${SLURM_JOB_ID:?start this inside salloc}"
# shellcheck source=scripts/slurm/ranks.sh
source scripts/slurm/ranks.sh
read_words "$@"
trap : INT # srun gets the signal too, and forwards it to the ranks, which save
start_ranks "${WORDS[@]}"
