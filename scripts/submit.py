"""Submit a job with what the site file says: account, partition, time, GPUs and cores, nodes to exclude.

    python -m scripts.submit --nodes 16 scripts/slurm/train.sbatch llama3-8b --parallel.tp 2
    python -m scripts.submit --print --nodes 16 scripts/slurm/train.sbatch llama3-8b

The arguments are those of sbatch. The options from configs/site.yaml, or from the file of BEVATRON_SITE or
--site, come before them, so yours win. configs/site.example.yaml lists the keys.
"""
import argparse
import os
import shlex
import shutil
import sys
from pathlib import Path

from config import ConfigError
from config.command_line import CommandParser
from config.site import (
    SITE_VARIABLE,
    SiteSettings,
    export_lines,
    option_names,
    read_site,
    stated_options,
)

GPU_OPTIONS = {"--gpus-per-node", "--gpus", "-G", "--gpus-per-task", "--gpus-per-socket", "--gres=gpu"}
CORE_OPTIONS = {"--cpus-per-task", "--cpus-per-gpu", "-c"}


def arguments() -> argparse.ArgumentParser:
    parser = CommandParser(prog="python -m scripts.submit", description=__doc__)
    parser.add_argument("--site", metavar="FILE", default=os.environ.get(SITE_VARIABLE),
                        help="the site file; none: BEVATRON_SITE, or configs/site.yaml")
    parser.add_argument("--print", action="store_true",
                        help="print the command of sbatch, and submit nothing")
    parser.add_argument("--exports", action="store_true",
                        help="print shell lines that set a job's variables (scripts/slurm/cluster.sh)")
    return parser


def main(argv: list[str]) -> int:
    args, sbatch_arguments = arguments().parse_known_args(argv)
    site = read_site(args.site)
    if args.exports:
        print("\n".join(export_lines(site, os.environ)))
        return 0

    options = site.sbatch_options() + node_options(site, sbatch_arguments)
    command = ["sbatch", *options, *sbatch_arguments]
    variables = {SITE_VARIABLE: str(site.file)} if site.file else {}  # the job reads the same file
    if args.print:
        prefix = ["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []
        print(shlex.join([*prefix, *command]))
        return 0

    program = shutil.which("sbatch")
    if program is None:
        raise ConfigError("sbatch: no such program; submit where SLURM is, or see the command with --print")
    os.execve(program, command, {**os.environ, **variables})


def node_options(site: SiteSettings, sbatch_arguments: list[str]) -> list[str]:
    """Return the options for GPUs and cores, except where the arguments or the script state them.

    A script that states its cores runs on as many GPUs as it says, also if that is none. Raises ConfigError
    if the arguments name no script.
    """
    places = [place for place, word in enumerate(sbatch_arguments) if word.endswith((".sbatch", ".sh"))]
    if not places:
        raise ConfigError("SCRIPT: missing; name what is submitted, such as scripts/slurm/train.sbatch")
    script = Path(sbatch_arguments[places[0]])
    if not script.is_file():
        raise ConfigError(f"{script}: no such script; submit in the folder of the checkout")
    of_script = stated_options(script.read_text(encoding="utf-8").splitlines())
    stated = option_names(sbatch_arguments[:places[0]]) | of_script

    options: list[str] = []
    if site.gpus_per_node and not stated & GPU_OPTIONS and not of_script & CORE_OPTIONS:
        options.append(f"--gpus-per-node={site.gpus_per_node}")
    if site.gpus_per_node and site.cores_per_rank and not stated & CORE_OPTIONS:
        options.append(f"--cpus-per-gpu={site.cores_per_rank}")
    return options


def run(argv: list[str]) -> int:
    """Run main; a ConfigError is one line and its exit code. runtime.failure would import torch for this."""
    try:
        return main(argv)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
