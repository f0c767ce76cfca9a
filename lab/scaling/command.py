"""Scaling experiments, from a ladder of models to the loss of the next one.

    python -m scripts.scaling ladder [--out FOLDER] [--depths 2,3,4,5,6] [--flops 6e11] [--budgets 4]
    python -m scripts.scaling fit FOLDER
    python -m scripts.scaling next FOLDER --depth 7
    python -m scripts.scaling sweep --rates 2e-3,4e-3,8e-3 --batches 8,16,32 --tokens 1e6
    python -m scripts.scaling systems --ranks 1,2 --layout "" --layout "tp 2"

`ladder` trains models of one family (lab/scaling/ladder.py) for the same FLOP budgets. Finished runs are
skipped, so the same command resumes a ladder that was stopped; larger depths may be added. --show prints its
sizes without training; --rung N runs a single size, as an array job does (scripts/scaling/). Keys of train.py
apply to all runs.

`fit` writes the laws and the optimal sizes, with figures and points.csv, to FOLDER/fit. With --points it fits
a CSV with the columns run, parameters, tokens, flops and loss; N of Kaplan's law is the column
parameters_without_embeddings, if there is one.

`next` predicts the loss of a size that is not in the ladder, trains it, and reports the error.

`sweep` trains one model at every rate and batch for the same tokens, and reports the best rate of each batch
and the critical batch against the gradient noise scale (lab/scaling/sweep.py). All runs are validated on the
same sequences.

`systems` runs a few steps on more and more ranks, in one or more layouts, with the same batch (strong
scaling) and with a growing one (weak), and prints efficiency and MFU against the planner's forecast
(lab/scaling/systems.py).
"""
import argparse
from pathlib import Path

from config import ConfigError
from config.command_line import CommandParser
from lab.scaling.ladder_command import fit_command, ladder_command, next_command
from lab.scaling.sweep_command import sweep_command, systems_command
from lab.scaling.systems import MODES

KEPT_HELP = "print what the array jobs of scripts/scaling/ ask before they requeue, and train nothing"


def arguments() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m scripts.scaling",
        description=__doc__,
    )
    commands = parser.add_subparsers(dest="command", required=True)

    ladder = commands.add_parser("ladder", help="train the models of a ladder")
    ladder.add_argument("--out", type=Path, default=Path("runs/ladder"), help="folder of the runs")
    ladder.add_argument("--recipe", default="quickstart", help="of train.py, for what the depth leaves open")
    ladder.add_argument("--depths", default="2,3,4,5,6", help="numbers of layers: the dial")
    ladder.add_argument("--flops", type=float, default="6e11", help="the first budget, FLOPs of a run")
    ladder.add_argument("--budgets", type=int, default=4, help="how many, from --flops on")
    ladder.add_argument("--ratio", type=int, default=2, help="between one budget and the next")
    ladder.add_argument("--aspect", type=int, default=12, help="width for each layer")
    ladder.add_argument("--head-dim", type=int, default=12, help="channels of a head")
    ladder.add_argument("--rung", type=int, help="run one size alone: its place in --depths, from 0")
    ladder.add_argument("--ranks", type=int, default=1, help="processes of a run, on this node")
    ladder.add_argument("--jobs", type=int, help="sizes that are trained at a time (default: for the "
                        "quickstart one a core, else 1)")
    ladder.add_argument("--show", action="store_true", help="print the sizes and budgets, and train nothing")

    ladder.add_argument("--kept", action="store_true", help=KEPT_HELP)

    fit = commands.add_parser("fit", help="fit the laws to finished runs")
    fit.add_argument("folder", type=Path, nargs="?", help="of a ladder")
    fit.add_argument("--points", type=Path, help="a CSV of runs, instead of a ladder")
    fit.add_argument("--out", type=Path, help="folder of the results (default: FOLDER/fit)")
    fit.add_argument("--bootstraps", type=int, default=1000, help="fits to runs drawn again")
    fit.add_argument("--json", action="store_true", help="print one JSON object")

    following = commands.add_parser("next", help="predict the loss of the next size, and run it")
    following.add_argument("folder", type=Path, help="of a ladder")
    following.add_argument("--depth", type=int, help="of the next size (default: one more than the largest)")
    following.add_argument("--predict", action="store_true", help="foretell only")
    following.add_argument("--ranks", type=int, default=1, help="processes of a run, on this node")
    following.add_argument("--bootstraps", type=int, default=1000, help="fits to runs drawn again")

    sweep = commands.add_parser("sweep", help="learning rates and batch sizes, and the critical batch")
    sweep.add_argument("--out", type=Path, default=Path("runs/sweep"), help="folder of the runs")
    sweep.add_argument("--recipe", default="quickstart", help="of train.py")
    sweep.add_argument("--rates", default="1e-3,2e-3,4e-3,8e-3", help="of optim.lr")
    sweep.add_argument("--batches", default="4,8,16,32,64", help="sequences of a step")
    sweep.add_argument("--tokens", type=float, default="1e6", help="of each run")
    sweep.add_argument("--target", type=float, help="training loss to which steps are counted (default: one "
                       "that every batch reaches)")
    sweep.add_argument("--ranks", type=int, default=1, help="processes of a run, on this node")
    sweep.add_argument("--jobs", type=int, help="runs at a time (default: as of a ladder)")
    sweep.add_argument("--only", type=int, help="one run alone, by its place from 0, as an array job does")
    sweep.add_argument("--kept", action="store_true", help=KEPT_HELP)

    systems = commands.add_parser("systems", help="strong and weak scaling over ranks and layouts")
    systems.add_argument("--out", type=Path, default=Path("runs/systems"), help="folder of the runs")
    systems.add_argument("--recipe", default="quickstart", help="of train.py")
    systems.add_argument("--ranks", default="1,2", help="numbers of processes")
    systems.add_argument("--layout", action="append", help="keys of parallel.*, such as 'tp 2, zero 1'; '' "
                         "is data parallelism alone; may be given several times (default: '' and 'zero 1')")
    systems.add_argument("--mode", choices=(*MODES, "both"), default="both",
                         help="the same batch on all ranks, one that grows with them, or both")
    systems.add_argument("--steps", type=int, default=12, help="of each run")
    systems.add_argument("--cluster", help="of configs/clusters.yaml, for the forecast (default: on a CPU "
                         "this machine is measured)")
    systems.add_argument("--launcher", help="a command that starts all ranks of train.py and takes its words "
                         "(default: they are started on this node)")
    systems.add_argument("--only", type=int, help="run this one of --ranks alone, as a job of a cluster does")
    return parser


def main(argv: list[str]) -> int:
    args, rest = arguments().parse_known_args(argv)
    takes_keys = {"ladder": ladder_command, "sweep": sweep_command, "systems": systems_command}
    if args.command in takes_keys:
        return takes_keys[args.command](args, rest)
    if rest:
        raise ConfigError(f"{rest[0]}: no such option; see python -m scripts.scaling {args.command} --help")
    return fit_command(args) if args.command == "fit" else next_command(args)
