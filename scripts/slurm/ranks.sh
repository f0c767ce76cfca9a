# Sourced by train.sbatch, preflight.sbatch and interactive.sh in the folder of the checkout: launches the ranks of a job.
# shellcheck source=scripts/slurm/cluster.sh
source scripts/slurm/cluster.sh

IMAGE=()
if [ -n "${CONTAINER:-}" ]; then
    IMAGE=(--container-image="$CONTAINER" --container-workdir="$PWD"
        --container-mounts="$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}")
fi

read_words() { # sets WORDS, the arguments of train.py. A recipe prints its own with --words.
    # shellcheck disable=SC2034
    case ${1:-} in
        *.sh) mapfile -t WORDS < <(bash "$@" --words) ;;
        *) WORDS=("$@") ;;
    esac
}

meet() { # sets where ranks meet, and their number on a node
    # Static rendezvous: ranks are in node order, and the head is a node of this job, not the host that sbatch
    # was typed on. A node's name in SLURM may differ from its hostname; its address then counts. The port is
    # below Linux's ephemeral ports (from 32768 on). MASTER_ADDR and MASTER_PORT override both.
    HEAD=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
    getent hosts "$HEAD" > /dev/null ||
        HEAD=$(scontrol show node "$HEAD" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
    PORT=${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))}
    # the number requested: a job with --exclusive nodes sees all of their GPUs
    GPUS=${GPUS_PER_NODE:-${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}}
    GPUS=${GPUS##*:} # of h100:8
    # signs the ranks' failure messages in their store; srun passes it on to all nodes
    BEVATRON_STORE_SECRET=${BEVATRON_STORE_SECRET:-$("$PYTHON" -c 'import secrets; print(secrets.token_hex(16))')}
    export HEAD PORT GPUS BEVATRON_STORE_SECRET
}

start_ranks() { # one launcher a node
    meet
    # A task's variables only exist inside srun; hence the quotes.
    # shellcheck disable=SC2016
    srun --ntasks-per-node=1 --kill-on-bad-exit=1 "${IMAGE[@]}" bash -c 'exec "$PYTHON" -m scripts.launch \
        --nproc "$GPUS" --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --rdzv "$HEAD:$PORT" -- "$@"' \
        train "$@"
}
