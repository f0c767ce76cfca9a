# Sourced by the scripts of array jobs in the folder of the checkout: runs one part of an experiment, which saves
# before the time limit, and requeues the job until it has finished, as long as its runs make progress.

# shellcheck source=scripts/slurm/cluster.sh
source scripts/slurm/cluster.sh
# shellcheck source=scripts/slurm/requeue.sh
source scripts/slurm/requeue.sh

# the number requested: a job with an --exclusive node sees all of its GPUs
RANKS=${GPUS_PER_NODE:-${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}}
RANKS=${RANKS##*:} # of h100:8

run_part() { # takes the arguments of `python -m scripts.scaling`
    local before after run='' asked='' code again hosts
    read -r before _ < <("$PYTHON" -m scripts.scaling "$@" --kept)
    trap 'asked=1; [ -z "$run" ] || kill -USR1 "$run"' USR1 # before the run starts: a signal may be that early
    "$PYTHON" -m scripts.scaling "$@" &
    run=$!
    [ -z "$asked" ] || kill -USR1 "$run"
    wait "$run"
    code=$?
    while kill -0 "$run" 2> /dev/null; do # the signal ended the wait, not the run
        wait "$run"
        code=$?
    done
    [ "$code" -ne 0 ] || return 0
    read -r after again hosts < <("$PYTHON" -m scripts.scaling "$@" --kept)
    if [ "$again" = 1 ] || { [ "$again" = - ] && [ "$code" -eq 75 ]; }; then
        if [ "$after" != "$before" ]; then
            requeue "$hosts"
        else
            echo "no new checkpoint since the last start: not requeued" >&2
        fi
    fi
    return "$code"
}
