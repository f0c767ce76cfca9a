"""Slurm batch files that run scripts/slurm/train.sbatch: one job with its nodes, GPUs per node, and arguments
of train.py (`scripts.plan --sbatch`), or an array of one-node jobs, a task for each run (`scripts.grid
--sbatch`)."""
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from config import ConfigError
from config.site import SITE_VARIABLE, SiteSettings, stated_options

SCRIPT = Path("scripts") / "slurm" / "train.sbatch"  # launches the ranks, saves in time and requeues
SCRIPT_FILE = Path(__file__).resolve().parent.parent / SCRIPT


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


def check_site(site: str | None, sbatch: Path | None) -> None:
    """Raise ConfigError for a --site that nothing reads."""
    if site is not None and sbatch is None:
        raise ConfigError(f"--site: {site} does nothing without --sbatch FILE; add that, or leave it out")


def check_writable(file: Path) -> None:
    """Raise ConfigError if the file exists or cannot be written, or if its launch script is missing."""
    if not SCRIPT_FILE.exists():
        raise ConfigError(f"--sbatch: {SCRIPT} is not there; plan in a checkout")
    if file.exists():
        raise ConfigError(f"--sbatch: {file} exists; give another name, or remove it")
    if not file.parent.is_dir():
        raise ConfigError(f"--sbatch: {file.parent}: no such folder")


def batch_text(
    shape: NodeShape, *, title: str, file: Path, name: str, words: str, site: SiteSettings = SiteSettings()
) -> str:
    """Return the batch file: `title` is a comment, `name` the job's, `words` train.py's quoted arguments."""
    cores = [f"--cpus-per-gpu={site.cores_per_rank}"] if site.cores_per_rank else []
    return "\n".join([
        "#!/usr/bin/env bash",
        f"# {title}",
        "# In the folder of the checkout; more arguments of train.py may follow:",
        "#",
        f"#     sbatch {file} --data.path PREFIX",
        "#",
        f"# {SCRIPT} says what it does.",
        *directives(
            f"--job-name={name}",
            f"--nodes={shape.nodes}",
            f"--gpus-per-node={shape.gpus}",
            *cores,
            *site.sbatch_options(),
        ),
        "set -uo pipefail",
        "",
        'cd "${SLURM_SUBMIT_DIR:?start this with sbatch}" || exit 1',
        *site_lines(site),
        f'exec bash {SCRIPT} {words} "$@" # the same process: SLURM\'s signal reaches it',
        "",
    ])


def array_text(
    runs: Sequence[list[str]], *, ranks: int, has_gpus: bool, title: str, file: Path, name: str,
    site: SiteSettings = SiteSettings(),
) -> str:
    """Return the batch file of an array whose task N runs train.py with the arguments runs[N].

    `ranks`: of each run, on one node, with as many GPUs if `has_gpus`; one launcher starts them. Each rank
    has site.cores_per_rank CPU cores, one by default. `title` is a comment, `name` the job's.
    """
    cores = ranks * (site.cores_per_rank or 1)
    tasks = [f"    {number}) WORDS=({shlex.join(words)}) ;;" for number, words in enumerate(runs)]
    return "\n".join([
        "#!/usr/bin/env bash",
        f"# {title}",
        "# In the folder of the checkout; %2 runs two at a time:",
        "#",
        f"#     sbatch --array 0-{len(runs) - 1}%2 {file}",
        "#",
        f"# Each task is a job of {SCRIPT}, which says what it does. A run takes {cores} of the cores of a",
        "# node.",
        *directives(
            f"--job-name={shlex.quote(name)}",
            f"--array=0-{len(runs) - 1}",
            "--nodes=1",
            *([f"--gpus-per-node={ranks}"] if has_gpus else []),
            f"--cpus-per-task={cores}",
            "--output=slurm-%A-%a.out",
            *site.sbatch_options(),
            without=("--exclusive",),
        ),
        "set -uo pipefail",
        "",
        'cd "${SLURM_SUBMIT_DIR:?start this with sbatch}" || exit 1',
        *site_lines(site),
        f"export GPUS_PER_NODE={ranks} # the ranks that the launcher starts",
        "case ${SLURM_ARRAY_TASK_ID:?start this with sbatch} in",
        *tasks,
        '    *) echo "error: task $SLURM_ARRAY_TASK_ID: no such run" >&2; exit 2 ;;',
        "esac",
        f'exec bash {SCRIPT} "${{WORDS[@]}}" "$@" # the same process: SLURM\'s signal reaches it',
        "",
    ])


def directives(*options: str, without: Sequence[str] = ()) -> list[str]:
    """Return #SBATCH lines of these options, then those of SCRIPT for other options.

    without: names of options of SCRIPT to leave out.
    """
    own = [f"#SBATCH {option}" for option in options]
    left_out = {*stated_options(own), *without}
    lines = SCRIPT_FILE.read_text(encoding="utf-8").splitlines()
    of_script = [line for line in lines if line.startswith("#SBATCH")]
    return [*own, *(line for line in of_script if not stated_options([line]) & left_out)]


def site_lines(site: SiteSettings) -> list[str]:
    """Return the line that makes the job read the same site file, none for the usual file."""
    return [f"export {SITE_VARIABLE}={shlex.quote(str(site.file))}"] if site.file else []


def write_batch_file(file: Path, text: str) -> None:
    """Write the file. Raises ConfigError if it has been created meanwhile, or cannot be written."""
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        raise ConfigError(f"--sbatch: {file}: {error.strerror}") from None
