# Sourced by the scripts that requeue their job.

requeue() { # this job, excluding the nodes of the hosts $1: a,b or - for none
    # in an array a plain number may refer to all its jobs
    local job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID} bad before
    job=${job:-$SLURM_JOB_ID}
    bad=$(nodes_of_hosts "$1")
    trap '' TERM # SLURM ends this script as it requeues the job, and a running job excludes no node
    scontrol requeue "$job"
    [ -n "$bad" ] || return 0
    before=$(scontrol show job "$job" | sed -n 's/.*ExcNodeList=\([^ (]*\).*/\1/p')
    echo "requeued without $bad, where a device computes wrongly"
    scontrol update JobId="$job" ExcNodeList="${before:+$before,}$bad"
}

nodes_of_hosts() { # a node's name in SLURM may differ from its hostname
    local node host bad=
    [ "$1" != - ] || return 0
    for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
        host=$(scontrol show node "$node" | sed -n 's/.*NodeHostName=\([^ ]*\).*/\1/p')
        case ",$1," in *",${host:-$node},"*) bad+=${bad:+,}$node ;; esac
    done
    echo "$bad"
}
