"""The results of a fit, as text and as JSON."""
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lab.scaling.optimum import Optimum
from lab.scaling.scores import NUMBERS, ScoreLaw, sigmoid
from plan.laws import Fit, huber_sum
from plan.points import NON_EMBEDDING, Points

LEFT_WIDTH = 12 + 9 + 16  # columns of optimum_lines: an approach, its exponent and interval
BUDGET_WIDTH = 2 + 30  # columns of a budget
UNDETERMINED = 10.0  # ratio of an interval's ends beyond which a number is undetermined


@dataclass(frozen=True)
class ScoreForecast:
    """A score's prediction for a run. measured: the score, once it has run and has been given the task."""
    name: str
    score: float
    interval: tuple[float, float]
    measured: float | None = None


@dataclass(frozen=True)
class LossForecast:
    """The law's prediction for a run, made before it. measured: its loss, once it has run."""
    name: str
    parameters: int
    tokens: int
    loss: float
    interval: tuple[float, float]
    measured: float | None = None
    scores: tuple[ScoreForecast, ...] = ()

    @property
    def miss(self) -> float | None:
        """The relative error, positive if the run was worse than predicted."""
        return None if self.measured is None else self.measured / self.loss - 1


def law_lines(fit: Fit, points: Points) -> list[str]:
    """Return the numbers of a law with their intervals, and its residuals."""
    intervals = fit.intervals()
    lines = [f"{fit.law.name}: loss = {fit.law.formula}, {len(points)} runs of {len(points.sizes)} sizes"]
    if fit.law.counts_non_embedding(points):
        lines.append("  N counts the parameters without embeddings")
    elif fit.law.without_embeddings:
        lines.append(f"  N counts all parameters: the points have no column {NON_EMBEDDING}")
    for name, value in fit.numbers.items():
        low, high = intervals[name]
        unknown = "" if is_determined(low, high) else "   not determined by these points"
        lines.append(f"  {name:<8}{value:>14.5g}   95 %: {low:.5g} to {high:.5g}{unknown}")
    predicted = np.exp(fit.law.log_loss(fit.theta, np.log(fit.law.sizes(points)), np.log(points.tokens)))
    error = np.abs(predicted / points.loss - 1)
    lines.append(f"  error of a run: median {np.median(error):.2%}, largest {error.max():.2%}; "
                 f"sum of Huber losses {float(huber_sum(fit.law, fit.theta, points)):.3g}")
    return lines


def score_lines(law: ScoreLaw, points: Points) -> list[str]:
    """Return the numbers of a score's law with their intervals, and its residuals."""
    intervals = law.intervals()
    told = [
        f"{name} {value:.4g} (95 %: {intervals[name][0]:.4g} to {intervals[name][1]:.4g})"
        for name, value in zip(NUMBERS, law.theta)
    ]
    error = np.abs(sigmoid(law.theta, points.loss) - points.scores[law.name])
    lines = [
        f"{law.name} = 1 / (1 + exp(steepness (loss - middle)))",
        f"  {', '.join(told)}",
        f"  error of a run: median {np.median(error):.3f}, largest {error.max():.3f}",
    ]
    if not law.follows_loss:
        lines.append("  these points do not show that it follows the loss")
    return lines


def is_determined(low: float, high: float) -> bool:
    """Return whether the ends of an interval, both positive, are within a power of ten."""
    return high < UNDETERMINED * low


def optimum_lines(optima: list[Optimum], budgets: list[float], width: int | None = None) -> list[str]:
    """Return the optimal sizes and tokens of each approach, for as many of the largest budgets as fit into a
    terminal of this width.
    """
    if width is not None:
        fitting = (width - LEFT_WIDTH) // BUDGET_WIDTH
        budgets = budgets[-max(1, fitting):]
    lines = [f"{'approach':<12}{'N ~ C^a':>9}{'95 %':>16}"
             + "".join(f"  {f'{flops:.2g} FLOPs':>30}" for flops in budgets)]
    for optimum in optima:
        interval = ""
        if optimum.exponent_interval is not None:
            interval = "{:.3f} to {:.3f}".format(*optimum.exponent_interval)
        line = f"{optimum.approach:<12}{optimum.parameters.exponent:>9.3f}{interval:>16}"
        for flops in budgets:
            size, tokens = optimum.parameters(flops), optimum.tokens(flops)
            line += f"  {f'{size:.3g} par., {tokens:.3g} tok.':>30}"
        lines.append(line)
    return lines


def forecast_line(forecast: LossForecast) -> str:
    low, high = forecast.interval
    line = (f"{forecast.name}: {forecast.parameters:,} parameters, {forecast.tokens:,} tokens: "
            f"predicted {forecast.loss:.4f} (95 %: {low:.4f} to {high:.4f})")
    if forecast.miss is not None:
        line += f", measured {forecast.measured:.4f}, missed by {forecast.miss:+.2%}"
    return line


def score_line(forecast: ScoreForecast) -> str:
    low, high = forecast.interval
    line = f"  {forecast.name}: predicted {forecast.score:.3f} (95 %: {low:.3f} to {high:.3f})"
    if forecast.measured is not None:
        line += f", measured {forecast.measured:.3f}, missed by {forecast.measured - forecast.score:+.3f}"
    return line


def as_tree(
    fits: list[Fit],
    optima: list[Optimum],
    points: Points,
    missing: Mapping[str, str],
    scores: Sequence[ScoreLaw] = (),
) -> dict[str, Any]:
    """Return the results as a JSON tree. `missing` is {approach: why it failed}."""
    laws = {}
    for fit in fits:
        laws[fit.law.name] = {
            "numbers": {name: finite_or_none(value) for name, value in fit.numbers.items()},
            "intervals": {
                name: (finite_or_none(low), finite_or_none(high))
                for name, (low, high) in fit.intervals().items()
            },
            "counts_embeddings": not fit.law.counts_non_embedding(points),
        }
    best = {
        optimum.approach: {
            "exponent": optimum.parameters.exponent,
            "exponent_interval": optimum.exponent_interval,
            "intercept": optimum.parameters.intercept,
            "flops_factor": optimum.flops_factor,
        }
        for optimum in optima
    }
    of_scores = {
        law.name: {
            "numbers": dict(zip(NUMBERS, law.theta.tolist())),
            "intervals": law.intervals(),
            "noise": law.noise,
            "follows_loss": law.follows_loss,
        }
        for law in scores
    }
    return {"laws": laws, "optima": best, "scores": of_scores, "missing": dict(missing)}


def finite_or_none(value: float) -> float | None:
    """Return the value, or None if it is not finite, which JSON cannot represent."""
    return value if np.isfinite(value) else None
