# Sourced first in every job of scripts/ (by cluster.sh): settings that need a shell, such as modules. Everything is
# commented out: by default a job has the environment of the shell that submits it. Uncomment the lines that you
# need, or name your own file: BEVATRON_ENVIRONMENT=my-cluster.sh sbatch ...
# Account, partition, network, container and other variables belong in configs/site.yaml (configs/site.example.yaml).

# module purge
# module load cuda python
# source .venv/bin/activate
# export PYTHON=/shared/bevatron/bin/python  # instead of the `python` on PATH

# W&B: runs of one job side by side
# export WANDB_RUN_GROUP=job-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}
