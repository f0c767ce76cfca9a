# Sourced first by every .sbatch of scripts/ and by interactive.sh, in the folder of the checkout: the environment of
# a job on your cluster. environment.sh has what needs a shell (modules), configs/site.yaml the variables.
# shellcheck source=scripts/slurm/environment.sh
source "${BEVATRON_ENVIRONMENT:-scripts/slurm/environment.sh}" || exit 1 # SLURM itself sets ENVIRONMENT
export PYTHON=${PYTHON:-python}

if [ -n "${BEVATRON_SITE:-}" ] || [ -e configs/site.yaml ]; then
    EXPORTS=$("$PYTHON" -m scripts.submit --exports) || exit 2
    eval "$EXPORTS"
fi
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun inherits none from 22.05 on
