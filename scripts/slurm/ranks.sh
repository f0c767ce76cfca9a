# Sourced by train.sbatch and interactive.sh, in the folder of the checkout: how the ranks of a job are started.
# shellcheck source=scripts/slurm/environment.sh
source "${BEVATRON_ENVIRONMENT:-scripts/slurm/environment.sh}" || exit 1 # SLURM itself sets ENVIRONMENT
export PYTHON=${PYTHON:-python}

IMAGE=()
if [ -n "${CONTAINER:-}" ]; then
    IMAGE=(--container-image="$CONTAINER" --container-workdir="$PWD"
        --container-mounts="$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}")
fi

read_words() { # sets WORDS, those of train.py. A recipe prints its own with --words.
    # shellcheck disable=SC2034
    case ${1:-} in
        *.sh) mapfile -t WORDS < <(bash "$@" --words) ;;
        *) WORDS=("$@") ;;
    esac
}

start_ranks() { # one launcher a node
    # Static rendezvous: ranks follow the nodes, and the head is a node of this job, not the host that sbatch
    # was typed on. A node's name in SLURM need not be that of its host: then its address counts. The port is
    # below those that Linux gives to clients (from 32768 on). MASTER_ADDR and MASTER_PORT choose others.
    HEAD=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
    getent hosts "$HEAD" > /dev/null ||
        HEAD=$(scontrol show node "$HEAD" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
    PORT=${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))}
    # as many as were asked for: a job that has its nodes alone (--exclusive) sees all of their GPUs
    GPUS=${GPUS_PER_NODE:-${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}}
    GPUS=${GPUS##*:} # of h100:8
    # seals what ranks say of failures in their store; srun passes it on to all nodes
    BEVATRON_STORE_SECRET=${BEVATRON_STORE_SECRET:-$("$PYTHON" -c 'import secrets; print(secrets.token_hex(16))')}
    export HEAD PORT GPUS BEVATRON_STORE_SECRET
    # The variables of a task are known inside srun alone; hence the quotes.
    # shellcheck disable=SC2016
    srun --ntasks-per-node=1 --kill-on-bad-exit=1 "${IMAGE[@]}" bash -c 'exec "$PYTHON" -m scripts.launch \
        --nproc "$GPUS" --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --rdzv "$HEAD:$PORT" -- "$@"' \
        train "$@"
}
