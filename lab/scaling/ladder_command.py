"""The commands of a ladder: `ladder` trains it, `fit` fits its laws, `next` tests them on another size."""
import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np

from config import ConfigError
from config.terminal import output_width, wrapped
from lab.scaling import figures
from lab.scaling.experiment import (
    final_loss,
    final_scores,
    kept_line,
    ladder_points,
    run_ladder,
    training_curves,
)
from lab.scaling.ladder import (
    Ladder,
    LadderRun,
    check_ladder,
    describe_ladder,
    get_runs,
    read_ladder,
    warmup_line,
    write_ladder,
)
from lab.scaling.optimum import Optimum, envelope_optimum, isoflop_optimum, parametric_optimum
from lab.scaling.report import (
    LossForecast,
    ScoreForecast,
    as_tree,
    forecast_line,
    law_lines,
    optimum_lines,
    score_line,
    score_lines,
)
from lab.scaling.scores import ScoreLaw, fit_scores, forecast_score
from lab.scaling.settings import LAPTOP_LADDER, LAPTOP_SETTINGS, get_jobs, parse_settings, say
from plan.laws import CHINCHILLA, KAPLAN, Fit, Law, fit_law
from plan.points import Array, Points, check_enough, read_points, write_points

MIN_BOOTSTRAPS = 2  # a percentile needs several draws
SECONDS_BETWEEN_LINES = 10.0  # interval of progress lines

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
        settings=parse_settings(args.recipe, rest, LAPTOP_SETTINGS | LAPTOP_LADDER),
    )
    check_ladder(ladder)
    if args.rung is not None and not 0 <= args.rung < len(ladder.depths):
        raise ConfigError(f"--rung: {args.rung}, and the places of --depths {args.depths} are 0 to "
                          f"{len(ladder.depths) - 1}")
    depth = None if args.rung is None else ladder.depths[args.rung]
    if args.kept:
        say(kept_line(args.out / run.name for run in get_runs(ladder, depth)))
        return 0
    jobs = get_jobs(args)
    say(describe_ladder(ladder))
    say_warmups(ladder, ladder.depths)
    if args.show:
        return 0
    write_ladder(ladder, args.out)
    code = run_ladder(ladder, get_runs(ladder, depth), args.out, ranks=args.ranks, jobs=jobs, report=say)
    if code == 0 and args.rung is None:
        say(f"next     python -m scripts.scaling fit {args.out}")
    return code


def say_warmups(ladder: Ladder, depths: Iterable[int]) -> None:
    """Print a line for each size whose shortest run has a longer warmup than a separate run."""
    for depth in depths:
        line = warmup_line(ladder, depth)
        if line is not None:
            say("\n".join(wrapped(line, output_width())))


def parse_depths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--depths: {text!r} is not a list of whole numbers, such as 2,3,4,5,6") from error


# ---- fit ---------------------------------------------------------------------------------------------------


def fit_command(args: argparse.Namespace) -> int:
    if (args.folder is None) == (args.points is None):
        raise ConfigError("fit: needs the folder of a ladder, or --points CSV")
    check_bootstraps(args.bootstraps)
    if args.points is not None:
        points, ladder = read_points(args.points), None
        out = args.out or args.points.with_suffix("")
    else:
        ladder = read_ladder(args.folder)
        points, out = ladder_points(ladder, args.folder), args.out or args.folder / "fit"
    check_enough(points)

    fits = [fit_with_progress(law, points, args.bootstraps) for law in (CHINCHILLA, KAPLAN)]
    out.mkdir(parents=True, exist_ok=True)
    write_points(points, out / "points.csv")
    budgets = np.geomspace(points.flops.min(), points.flops.max(), 4)
    if ladder is not None:
        budgets = np.array(ladder.all_flops())
    found = Approaches()
    if ladder is not None:
        add_ladder_optima(found, ladder, args.folder, points, out)
    by_law = found.add(
        "parametric", lambda: parametric_optimum(fits[0], points.flops_factor, budgets), out / "contours.png"
    )
    figures.draw_contours(points, fits[0], by_law, out / "contours.png")
    figures.draw_fit(points, fits[0], out / "fit.png")

    scores = fit_scores(points, args.bootstraps)
    if scores:
        figures.draw_scores(points, scores, out / "scores.png")
    tree = as_tree(fits, found.optima, points, found.missing, scores)
    (out / "fit.json").write_text(json.dumps(tree, indent=1) + "\n")
    if args.json:
        say(json.dumps(tree))
        return 0
    for fit in fits:
        say("\n".join(law_lines(fit, points)) + "\n")
    for law in scores:
        say("\n".join(score_lines(law, points)) + "\n")
    shown = [float(budgets[0]), float(budgets[-1]), 10 * float(budgets[-1])]
    if found.optima:
        say("\n".join(optimum_lines(found.optima, shown, output_width())))
    for approach, why in found.missing.items():
        say("\n".join(wrapped(f"{approach}: not available: {why}", output_width())))
    say(f"\nfigures, points.csv and fit.json in {out}")
    if ladder is not None:
        say(f"next     python -m scripts.scaling next {args.folder}")
    return 0


def fit_with_progress(law: Law, points: Points, bootstraps: int) -> Fit:
    """Call fit_law, with progress lines on stderr."""
    told = time.monotonic()

    def tell(done: int) -> None:
        nonlocal told
        if time.monotonic() >= told + SECONDS_BETWEEN_LINES:
            told = time.monotonic()
            print(f"{law.name}: {done:,} of {bootstraps:,} fits to runs drawn again", file=sys.stderr)

    return fit_law(law, points, bootstraps, tell=tell)


def check_bootstraps(count: int) -> None:
    """Raise ConfigError if there are too few bootstraps."""
    if count < MIN_BOOTSTRAPS:
        raise ConfigError(f"--bootstraps: {count}; at least {MIN_BOOTSTRAPS}, from which the intervals are")


@dataclass
class Approaches:
    """The optima of the approaches that worked. missing: {approach: why it did not}."""
    optima: list[Optimum] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, find: Callable[[], Optimum], picture: Path) -> Optimum | None:
        """Add an approach's optimum. If it fails, remove the picture of an earlier fit."""
        try:
            optimum = find()
        except ConfigError as error:
            self.missing[name] = str(error).removeprefix("fit: ")
            picture.unlink(missing_ok=True)
            return None
        self.optima.append(optimum)
        return optimum


def add_ladder_optima(found: Approaches, ladder: Ladder, folder: Path, points: Points, out: Path) -> None:
    """Add the two approaches that need a ladder, with their figures."""
    sizes = {run.depth: float(run.parameters) for run in get_runs(ladder)}
    budget_of = {run.name: run.budget for run in get_runs(ladder)}

    def along_curves() -> Optimum:
        curves: dict[float, tuple[Array, Array]] = {}
        for depth, curve in training_curves(ladder, folder).items():
            curves[sizes[depth]] = curve
        optimum = envelope_optimum(curves, points.flops_factor)
        figures.draw_envelope(curves, out / "envelope.png")
        return optimum

    def at_equal_flops() -> Optimum:
        optimum, parabolas = isoflop_optimum(points, budget_of)
        figures.draw_isoflop(points, parabolas, out / "isoflop.png")
        return optimum

    found.add("envelope", along_curves, out / "envelope.png")
    found.add("isoflop", at_equal_flops, out / "isoflop.png")


# ---- next --------------------------------------------------------------------------------------------------


def next_command(args: argparse.Namespace) -> int:
    check_bootstraps(args.bootstraps)
    ladder = read_ladder(args.folder)
    points = ladder_points(ladder, args.folder)
    check_enough(points)
    depth = max(ladder.depths) + 1 if args.depth is None else args.depth
    if depth < 1:
        raise ConfigError(f"--depth: {depth}; at least 1")
    if depth in ladder.depths:
        raise ConfigError(f"--depth: {depth} is in the ladder; the next size is one that is not")

    # the prediction is written before the run
    fit = fit_with_progress(CHINCHILLA, points, args.bootstraps)
    scores = fit_scores(points, args.bootstraps)
    runs = get_runs(ladder, depth)
    for run in runs:
        say_forecast(forecast(run, fit, scores))
    say_warmups(ladder, [depth])
    if args.predict:
        return 0
    code = run_ladder(ladder, runs, args.folder, ranks=args.ranks, jobs=1, report=say)
    if code:
        return code

    told = []
    for run in runs:
        measured = final_loss(args.folder / run.name, run.steps)
        if measured is not None and math.isnan(measured):  # run_ladder has reported it
            continue
        told.append(forecast(run, fit, scores, measured, final_scores(args.folder / run.name, run.steps)))
        say_forecast(told[-1])
    report = [{**asdict(forecast), "miss": forecast.miss} for forecast in told]
    (args.folder / f"next-{depth}.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0


def say_forecast(forecast: LossForecast) -> None:
    for line in (forecast_line(forecast), *map(score_line, forecast.scores)):
        say("\n".join(wrapped(line, output_width())))


def forecast(
    run: LadderRun,
    fit: Fit,
    laws: Sequence[ScoreLaw],
    measured: float | None = None,
    measured_scores: Mapping[str, float] = MappingProxyType({}),
) -> LossForecast:
    """Return what the laws say of a run. Scores that do not follow the loss are left out."""
    scores = [
        ScoreForecast(
            law.name,
            *forecast_score(law, fit, run.parameters, run.tokens),
            measured_scores.get(law.name),
        )
        for law in laws
        if law.follows_loss
    ]
    return LossForecast(
        run.name,
        run.parameters,
        run.tokens,
        loss=fit.loss(run.parameters, run.tokens),
        interval=fit.loss_interval(run.parameters, run.tokens),
        measured=measured,
        scores=tuple(scores),
    )
