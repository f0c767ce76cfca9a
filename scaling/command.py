"""Scaling experiments, from a ladder of models to the loss of the next one.

    python -m scripts.scaling ladder [--out FOLDER] [--depths 2,3,4,5,6] [--flops 1e12] [--budgets 4]
    python -m scripts.scaling fit FOLDER
    python -m scripts.scaling next FOLDER --depth 7

`ladder` trains models of one family (scaling/ladder.py) for the same budgets of FLOPs. What is done is
skipped, so the same command finishes a ladder that was stopped. --show prints its sizes, and trains nothing;
--rung N runs one size alone, as an array job does (scripts/scaling/). Keys of train.py hold for all runs.

`fit` gives the laws and the best sizes, with figures and points.csv, in FOLDER/fit; of a CSV with the columns
run, parameters, tokens, flops and loss, with --points.

`next` foretells the loss of a size that is not in the ladder, trains it, and says by how much it was missed.
"""
import argparse
import json
from pathlib import Path

import numpy as np

from config import ConfigError, dotted_overrides
from scaling import figures
from scaling.experiment import final_loss, ladder_points, run_ladder, training_curves
from scaling.ladder import (
    Ladder,
    check_ladder,
    describe_ladder,
    read_ladder,
    runs_of,
    write_ladder,
)
from scaling.laws import CHINCHILLA, KAPLAN, Fit, fit_law
from scaling.optimum import Optimum, envelope_optimum, isoflop_optimum, parametric_optimum
from scaling.points import Points, check_enough, read_points, write_points
from scaling.report import LossForecast, as_tree, forecast_line, law_lines, optimum_lines

# For a laptop: bytes of the source of Python's standard library.
LAPTOP_SETTINGS = {
    "data.tokenizer": "bytes",
    "model.vocab": "257",
    "train.seq_len": "128",
    "train.micro_batch": "16",
    "train.global_batch": "16",
    "train.max_minutes": "none",
    "optim.lr": "6e-3",
    "optim.warmup": "20",
    "eval.batches": "64",
}


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)

    ladder = commands.add_parser("ladder", help="train the models of a ladder")
    ladder.add_argument("--out", type=Path, default=Path("runs/ladder"), help="folder of the runs")
    ladder.add_argument("--recipe", default="quickstart", help="of train.py, for what the depth leaves open")
    ladder.add_argument("--depths", default="2,3,4,5,6", help="numbers of layers: the dial")
    ladder.add_argument("--flops", type=float, default=1e12, help="the first budget, FLOPs of a run")
    ladder.add_argument("--budgets", type=int, default=4)
    ladder.add_argument("--ratio", type=int, default=2, help="between one budget and the next")
    ladder.add_argument("--aspect", type=int, default=16, help="width for each layer")
    ladder.add_argument("--head-dim", type=int, default=16, help="channels of a head")
    ladder.add_argument("--rung", type=int, help="run one size alone: its place in --depths, from 0")
    ladder.add_argument("--ranks", type=int, default=1, help="processes of a run, on this node")
    ladder.add_argument("--show", action="store_true", help="print the sizes and budgets, and train nothing")

    fit = commands.add_parser("fit", help="fit the laws to finished runs")
    fit.add_argument("folder", type=Path, nargs="?", help="of a ladder")
    fit.add_argument("--points", type=Path, help="a CSV of runs, instead of a ladder")
    fit.add_argument("--out", type=Path, help="folder of the results (default: FOLDER/fit)")
    fit.add_argument("--bootstraps", type=int, default=1000, help="fits to runs drawn again")
    fit.add_argument("--json", action="store_true", help="print one JSON object")

    following = commands.add_parser("next", help="foretell the loss of the next size, and run it")
    following.add_argument("folder", type=Path)
    following.add_argument("--depth", type=int, help="of the next size (default: one more than the largest)")
    following.add_argument("--predict", action="store_true", help="foretell only")
    following.add_argument("--ranks", type=int, default=1, help="processes of a run, on this node")
    following.add_argument("--bootstraps", type=int, default=1000)
    return parser


def main(argv: list[str]) -> int:
    args, rest = arguments().parse_known_args(argv)
    if args.command == "ladder":
        return ladder_command(args, rest)
    if rest:
        raise ConfigError(f"{rest[0]}: no such option; see python -m scripts.scaling {args.command} --help")
    return fit_command(args) if args.command == "fit" else next_command(args)


def say(text: str) -> None:
    print(text, flush=True)


# ---- ladder ------------------------------------------------------------------------------------------------


def ladder_command(args: argparse.Namespace, rest: list[str]) -> int:
    ladder = Ladder(
        recipe=args.recipe,
        depths=parse_depths(args.depths),
        flops=args.flops,
        budgets=args.budgets,
        ratio=args.ratio,
        aspect=args.aspect,
        head_dim=args.head_dim,
        settings=parse_settings(args.recipe, rest),
    )
    check_ladder(ladder)
    if args.rung is not None and not 0 <= args.rung < len(ladder.depths):
        raise ConfigError(f"--rung: {args.rung}, and the places of --depths {args.depths} are 0 to "
                          f"{len(ladder.depths) - 1}")
    if args.ranks < 1:
        raise ConfigError(f"--ranks: {args.ranks}; at least 1")
    say(describe_ladder(ladder))
    if args.show:
        return 0
    write_ladder(ladder, args.out)
    depth = None if args.rung is None else ladder.depths[args.rung]
    code = run_ladder(ladder, runs_of(ladder, depth), args.out, ranks=args.ranks, report=say)
    if code == 0 and args.rung is None:
        say(f"next     python -m scripts.scaling fit {args.out}")
    return code


def parse_depths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--depths: {text!r} is no list of whole numbers, as 2,3,4,5,6") from error


def parse_settings(recipe: str, rest: list[str]) -> tuple[tuple[str, str], ...]:
    """The --section.key VALUE of a command line, over the laptop's where the recipe is the laptop's."""
    settings = dict(LAPTOP_SETTINGS) if recipe == "quickstart" else {}
    for section, values in dotted_overrides(rest).items():
        for key, value in values.items():
            settings[f"{section}.{key}"] = value
    return tuple(settings.items())


# ---- fit ---------------------------------------------------------------------------------------------------


def fit_command(args: argparse.Namespace) -> int:
    if (args.folder is None) == (args.points is None):
        raise ConfigError("fit: needs the folder of a ladder, or --points CSV")
    if args.bootstraps < 0:
        raise ConfigError(f"--bootstraps: {args.bootstraps}; at least 0")
    if args.points is not None:
        points, ladder = read_points(args.points), None
        out = args.out or args.points.with_suffix("")
    else:
        ladder = read_ladder(args.folder)
        points, out = ladder_points(ladder, args.folder), args.out or args.folder / "fit"
    check_enough(points)

    fits = [fit_law(law, points, args.bootstraps) for law in (CHINCHILLA, KAPLAN)]
    out.mkdir(parents=True, exist_ok=True)
    write_points(points, out / "points.csv")
    budgets = np.geomspace(points.flops.min(), points.flops.max(), 4)
    if ladder is not None:
        budgets = np.array(ladder.all_flops())
    optima = [parametric_optimum(fits[0], points.flops_factor, budgets)]
    if ladder is not None:
        optima = ladder_optima(ladder, args.folder, points, out) + optima
    figures.draw_contours(points, fits[0], optima[-1], out / "contours.png")
    figures.draw_fit(points, fits[0], out / "fit.png")

    tree = as_tree(fits, optima)
    (out / "fit.json").write_text(json.dumps(tree, indent=1) + "\n")
    if args.json:
        say(json.dumps(tree))
        return 0
    for fit in fits:
        say("\n".join(law_lines(fit, points)) + "\n")
    shown = [float(budgets[0]), float(budgets[-1]), 10 * float(budgets[-1])]
    say("\n".join(optimum_lines(optima, shown)))
    say(f"\nfigures, points.csv and fit.json in {out}")
    if ladder is not None:
        say(f"next     python -m scripts.scaling next {args.folder}")
    return 0


def ladder_optima(ladder: Ladder, folder: Path, points: Points, out: Path) -> list[Optimum]:
    """The two approaches that need a ladder, with their figures."""
    sizes = {run.depth: float(run.parameters) for run in runs_of(ladder)}
    curves = {sizes[depth]: curve for depth, curve in training_curves(ladder, folder).items()}
    along_curves = envelope_optimum(curves, points.flops_factor)
    figures.draw_envelope(curves, out / "envelope.png")

    budget_of = {run.name: run.budget for run in runs_of(ladder)}
    at_equal_flops, parabolas = isoflop_optimum(points, budget_of)
    figures.draw_isoflop(points, parabolas, out / "isoflop.png")
    return [along_curves, at_equal_flops]


# ---- next --------------------------------------------------------------------------------------------------


def next_command(args: argparse.Namespace) -> int:
    ladder = read_ladder(args.folder)
    points = ladder_points(ladder, args.folder)
    check_enough(points)
    depth = args.depth or max(ladder.depths) + 1
    if depth in ladder.depths:
        raise ConfigError(f"--depth: {depth} is in the ladder; the next size is one that is not")

    # foretold and written down before it is run
    fit = fit_law(CHINCHILLA, points, args.bootstraps)
    runs = runs_of(ladder, depth)
    for run in runs:
        say(forecast_line(forecast(fit, run.name, run.parameters, run.tokens)))
    if args.predict:
        return 0
    code = run_ladder(ladder, runs, args.folder, ranks=args.ranks, report=say)
    if code:
        return code

    told = []
    for run in runs:
        measured = final_loss(args.folder / run.name, run.steps)
        told.append(forecast(fit, run.name, run.parameters, run.tokens, measured))
        say(forecast_line(told[-1]))
    report = [{**forecast.__dict__, "miss": forecast.miss} for forecast in told]
    (args.folder / f"next-{depth}.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0


def forecast(
    fit: Fit, name: str, parameters: int, tokens: int, measured: float | None = None
) -> LossForecast:
    return LossForecast(
        name,
        parameters,
        tokens,
        fit.loss(parameters, tokens),
        fit.loss_interval(parameters, tokens),
        measured,
    )


