"""The Slurm batch file that `scripts.plan --sbatch` writes: a job of scripts/slurm/train.sbatch with its
nodes, GPUs per node, and arguments of train.py."""
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
    lines = SCRIPT_FILE.read_text(encoding="utf-8").splitlines()
    directives = [line for line in lines if line.startswith(DIRECTIVES) and "--job-name" not in line]
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
        *directives,
        "set -uo pipefail",
        "",
        'cd "${SLURM_SUBMIT_DIR:?start this with sbatch}" || exit 1',
        f'exec bash {SCRIPT} {words} "$@" # the same process: SLURM\'s signal reaches it',
        "",
    ])


def write_batch_file(file: Path, text: str) -> None:
    """Write the file. Raises ConfigError if it has been created meanwhile, or cannot be written."""
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        raise ConfigError(f"--sbatch: {file}: {error.strerror}") from None
