"""Slurm batch files that run scripts/slurm/train.sbatch: one job with its nodes, GPUs per node, and arguments
of train.py (`scripts.plan --sbatch`), or an array of one-node jobs, a task for each run (`scripts.grid
--sbatch`)."""
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from config import ConfigError

SCRIPT = Path("scripts") / "slurm" / "train.sbatch"  # launches the ranks, saves in time and requeues
SCRIPT_FILE = Path(__file__).resolve().parent.parent / SCRIPT
DIRECTIVES = ("#SBATCH", "##SBATCH")


class NodeShape(NamedTuple):
    """Number of nodes of a job, and GPUs per node."""
    nodes: int
    gpus: int


def node_shape(gpus: int, node: int) -> NodeShape:
    """Divide the GPUs of a job among nodes of `node` GPUs.

    Raises ConfigError if the last node would have fewer than the others.
    """
    if gpus <= node:
        return NodeShape(1, gpus)
    nodes, rest = divmod(gpus, node)
    if rest:
        raise ConfigError(f"--sbatch: {gpus} GPUs do not fill their nodes of {node}; "
                          f"use --gpus {nodes * node} or {(nodes + 1) * node}")
    return NodeShape(nodes, node)


def check_writable(file: Path) -> None:
    """Raise ConfigError if the file exists or cannot be written, or if its launch script is missing."""
    if not SCRIPT_FILE.exists():
        raise ConfigError(f"--sbatch: {SCRIPT} is not there; plan in a checkout")
    if file.exists():
        raise ConfigError(f"--sbatch: {file} exists; give another name, or remove it")
    if not file.parent.is_dir():
        raise ConfigError(f"--sbatch: {file.parent}: no such folder")


def batch_text(shape: NodeShape, *, title: str, file: Path, name: str, words: str) -> str:
    """Return the batch file: `title` is a comment, `name` the job's, `words` train.py's quoted arguments."""
    return "\n".join([
        "#!/usr/bin/env bash",
        f"# {title}",
        "# In the folder of the checkout; more arguments of train.py may follow:",
        "#",
        f"#     sbatch {file} --data.path PREFIX",
        "#",
        f"# {SCRIPT} says what it does. A line that begins with ##SBATCH counts once it has one # less.",
        f"#SBATCH --job-name={name}",
        f"#SBATCH --nodes={shape.nodes}",
        f"#SBATCH --gpus-per-node={shape.gpus}",
        *directives("--job-name"),
        "set -uo pipefail",
        "",
        'cd "${SLURM_SUBMIT_DIR:?start this with sbatch}" || exit 1',
        f'exec bash {SCRIPT} {words} "$@" # the same process: SLURM\'s signal reaches it',
        "",
    ])


def array_text(
    runs: Sequence[list[str]], *, ranks: int, has_gpus: bool, title: str, file: Path, name: str
) -> str:
    """Return the batch file of an array whose task N runs train.py with the arguments runs[N].

    `ranks`: of each run, on one node, with as many GPUs (`has_gpus`) and CPU cores: one launcher starts them.
    `title` is a comment, `name` the job's.
    """
    tasks = [f"    {number}) WORDS=({shlex.join(words)}) ;;" for number, words in enumerate(runs)]
    return "\n".join([
        "#!/usr/bin/env bash",
        f"# {title}",
        "# In the folder of the checkout; %2 runs two at a time:",
        "#",
        f"#     sbatch --array 0-{len(runs) - 1}%2 {file}",
        "#",
        f"# Each task is a job of {SCRIPT}, which says what it does. A run takes {ranks} of the cores of a",
        "# node. A line that begins with ##SBATCH counts once it has one # less.",
        f"#SBATCH --job-name={shlex.quote(name)}",
        f"#SBATCH --array=0-{len(runs) - 1}",
        "#SBATCH --nodes=1",
        *([f"#SBATCH --gpus-per-node={ranks}"] if has_gpus else []),
        f"#SBATCH --cpus-per-task={ranks}",
        "#SBATCH --output=slurm-%A-%a.out",
        *directives("--job-name", "--exclusive", "--output"),
        "set -uo pipefail",
        "",
        'cd "${SLURM_SUBMIT_DIR:?start this with sbatch}" || exit 1',
        f"export GPUS_PER_NODE={ranks} # the ranks that the launcher starts",
        "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # which srun does not inherit from SLURM 22.05 on",
        "case ${SLURM_ARRAY_TASK_ID:?start this with sbatch} in",
        *tasks,
        '    *) echo "error: task $SLURM_ARRAY_TASK_ID: no such run" >&2; exit 2 ;;',
        "esac",
        f'exec bash {SCRIPT} "${{WORDS[@]}}" "$@" # the same process: SLURM\'s signal reaches it',
        "",
    ])


def directives(*left_out: str) -> list[str]:
    """Return the lines of SCRIPT for sbatch, without those that have one of these words."""
    lines = SCRIPT_FILE.read_text(encoding="utf-8").splitlines()
    found = [line for line in lines if line.startswith(DIRECTIVES)]
    return [line for line in found if not any(word in line for word in left_out)]


def write_batch_file(file: Path, text: str) -> None:
    """Write the file. Raises ConfigError if it has been created meanwhile, or cannot be written."""
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        raise ConfigError(f"--sbatch: {file}: {error.strerror}") from None
