# Sourced first by every .sbatch of scripts/ and by interactive.sh: the environment of a job on your cluster.
# Everything is commented out: by default a job has the environment of the shell that submits it. Uncomment the
# lines that you need, or name your own file: BEVATRON_ENVIRONMENT=my-cluster.sh sbatch ...

# ---- programs: modules, a virtual environment, or a container ----
# module purge
# module load cuda python
# source .venv/bin/activate
# export PYTHON=/shared/bevatron/bin/python      # instead of the `python` on PATH
# export CONTAINER=/shared/images/bevatron.sqsh  # ranks run in it (srun of enroot/pyxis; Containerfile makes one);
#                                                # the host still needs a Python with PyYAML for this script
# export CONTAINER_MOUNTS=/shared/data           # beside this folder, which is always there

# ---- network: the values depend on your cluster (see NCCL's manual); none was measured here ----
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
# export NCCL_IB_HCA=mlx5
# export NCCL_DEBUG=WARN

# ---- W&B: runs of one job side by side ----
# export WANDB_RUN_GROUP=job-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}
