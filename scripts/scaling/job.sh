# Sourced by the scripts of array jobs, in the folder of the checkout: runs one part of an experiment, which saves before
# the time limit, and puts what is not finished back into the queue.

# shellcheck source=scripts/slurm/environment.sh
source "${BEVATRON_ENVIRONMENT:-scripts/slurm/environment.sh}" || exit 1

# as many as were asked for: a job that has its node alone (--exclusive) sees all of the node's GPUs
RANKS=${GPUS_PER_NODE:-${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}}
RANKS=${RANKS##*:} # of h100:8

run_part() { # the words of `python -m scripts.scaling`
    local run code
    "${PYTHON:-python}" -m scripts.scaling "$@" &
    run=$!
    # shellcheck disable=SC2064
    trap "kill -USR1 $run" USR1
    wait "$run"
    code=$?
    while kill -0 "$run" 2> /dev/null; do # the signal ended the wait, not the run
        wait "$run"
        code=$?
    done
    if [ "$code" -eq 75 ]; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
    return "$code"
}
