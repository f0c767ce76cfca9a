#!/usr/bin/env bash
# The same start inside an allocation, as in a terminal: what you see is what the ranks print, Ctrl-C saves and stops.
#
#     salloc --nodes 2 --gpus-per-node 8 --time 1:00:00
#     bash scripts/slurm/interactive.sh llama3-8b --train.steps 20 --log.name try
#
# Arguments are those of train.sbatch. Nothing is requeued; the exit code is that of the ranks.
set -uo pipefail

cd "$(dirname "$0")/../.." || exit 1
: "${SLURM_JOB_ID:?start this inside salloc}"
# shellcheck source=scripts/slurm/ranks.sh
source scripts/slurm/ranks.sh
read_words "$@"
trap : INT # srun hears it too: it passes it on to the ranks, which save
start_ranks "${WORDS[@]}"
