"""The optimal model size for a FLOP budget: the three approaches of arXiv 2203.15556, section 3.

    envelope    the size with the lowest loss at a given FLOP count, along the training curves (section 3.1)
    isoflop     the vertex of a parabola through the losses of all sizes at one budget (section 3.2)
    parametric  the minimum of a fitted law under FLOPs = factor N D (section 3.3)

Each yields N = k C^a and, with it, D = C / (factor N), which grows as C^(1 - a).
"""
from dataclasses import dataclass

import numpy as np

from config import ConfigError
from plan.laws import INTERVAL, Fit
from plan.points import Array, Points, smoothed

ENVELOPE_BINS = 100  # log-spaced budgets at which the envelope is evaluated


@dataclass(frozen=True)
class PowerLaw:
    """y = exp(intercept) x^exponent."""
    exponent: float
    intercept: float

    def __call__(self, x: float) -> float:
        return float(np.exp(self.intercept + self.exponent * np.log(x)))


@dataclass(frozen=True)
class Optimum:
    """How the optimal number of parameters grows with the budget.

    exponent_interval: the 95 % bootstrap interval, None if there are too few runs to resample.
    budgets, sizes: the optima that the power law is fitted to, if any.
    """
    approach: str
    parameters: PowerLaw
    flops_factor: float
    exponent_interval: tuple[float, float] | None
    budgets: Array
    sizes: Array

    def tokens(self, flops: float) -> float:
        return flops / (self.flops_factor * self.parameters(flops))


def fit_power_law(x: Array, y: Array) -> PowerLaw:
    exponent, intercept = np.polyfit(np.log(x), np.log(y), 1)
    return PowerLaw(float(exponent), float(intercept))


# ---- along the curves --------------------------------------------------------------------------------------


def envelope_optimum(curves: dict[float, tuple[Array, Array]], flops_factor: float) -> Optimum:
    """Return the envelope optimum of curves {parameters: (FLOPs [steps], loss [steps])}, in training order.

    Before the decay of the learning rate, losses are higher than those of finished runs, for all sizes alike:
    this compares sizes with each other, not with the other approaches.
    """
    smooth = {size: (flops, smoothed(flops, loss)) for size, (flops, loss) in curves.items()}
    budgets, sizes, _ = envelope(smooth)
    law = fit_power_law(budgets, sizes)
    return Optimum(
        approach="envelope",
        parameters=law,
        flops_factor=flops_factor,
        exponent_interval=None,
        budgets=budgets,
        sizes=sizes,
    )


def envelope(curves: dict[float, tuple[Array, Array]]) -> tuple[Array, Array, Array]:
    """Return (budgets, the size with the lowest loss at each, that loss), within what all sizes reached.

    A loss that is not finite is never the lowest.
    """
    low = max(flops[0] for flops, _ in curves.values())
    high = min(flops[-1] for flops, _ in curves.values())
    if not low < high:
        raise ConfigError("fit: the training curves of the sizes have no FLOPs in common, and an envelope "
                          "compares them at equal FLOPs; give all sizes the same budgets")
    budgets = np.geomspace(low, high, ENVELOPE_BINS)
    sizes = np.array(list(curves))
    losses = np.array([np.interp(np.log(budgets), np.log(flops), loss) for flops, loss in curves.values()])
    losses[np.isnan(losses)] = np.inf
    known = np.isfinite(losses).any(0)
    if not known.any():
        raise ConfigError("fit: no training curve has a finite loss where all sizes were trained")
    best = losses.argmin(0)
    return budgets[known], sizes[best][known], losses.min(0)[known]




# ---- at equal FLOPs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parabola:
    """loss = least + curvature (log N - log_size)^2, at one budget."""
    flops: float
    log_size: float
    least: float
    curvature: float

    def __call__(self, parameters: Array) -> Array:
        return self.least + self.curvature * (np.log(parameters) - self.log_size) ** 2


def isoflop_optimum(points: Points, budget_of: dict[str, int]) -> tuple[Optimum, list[Parabola]]:
    """Return the isoflop optimum, where `budget_of` is {run: index of its budget}.

    Raises ConfigError if a budget has no interior optimum.
    """
    parabolas: list[Parabola] = []
    for budget in sorted(set(budget_of.values())):
        rows = np.array([row for row, run in enumerate(points.runs) if budget_of[run] == budget])
        parabolas.append(fit_parabola(points.take(rows), budget))
    budgets = np.array([parabola.flops for parabola in parabolas])
    sizes = np.exp([parabola.log_size for parabola in parabolas])
    if len(parabolas) < 2:
        raise ConfigError("fit: one budget has one optimum, and a power law needs two or more; add budgets")
    law = fit_power_law(budgets, sizes)
    return Optimum("isoflop", law, points.flops_factor, None, budgets, sizes), parabolas


def fit_parabola(points: Points, budget: int) -> Parabola:
    """Fit a parabola to the losses of all sizes at one budget, by least squares.

    Raises ConfigError if there are fewer than three sizes, or if the losses have no interior minimum.
    """
    if len(points.sizes) < 3:
        raise ConfigError(f"fit: budget {budget + 1} has {len(points.sizes)} sizes; a parabola needs three")
    log_n = np.log(points.parameters)
    curvature, slope, constant = np.polyfit(log_n, points.loss, 2)
    flops = float(np.exp(np.log(points.flops).mean()))
    vertex = -slope / (2 * curvature)
    if curvature <= 0 or not log_n.min() <= vertex <= log_n.max():
        which = "smaller" if points.loss[log_n.argmin()] < points.loss[log_n.argmax()] else "larger"
        raise ConfigError(f"fit: at {flops:.3g} FLOPs no size of the ladder is the best, since the loss "
                          f"falls to its end; add {which} sizes (--depths), or change the budget")
    least = float(np.polyval((curvature, slope, constant), vertex))
    return Parabola(flops, float(vertex), least, float(curvature))


# ---- from a law --------------------------------------------------------------------------------------------


def parametric_optimum(fit: Fit, flops_factor: float, budgets: Array) -> Optimum:
    """Return the optimum of the law E + A / N^alpha + B / D^beta (arXiv 2203.15556, equation 4):
    N = G (C / factor)^a with a = beta / (alpha + beta), G = (alpha A / (beta B))^(1 / (alpha + beta)).

    Raises ConfigError if the fitted loss does not fall with both N and D.
    """
    alpha, beta = fit.theta[3:]
    if alpha <= 0 or beta <= 0:
        raise ConfigError(f"fit: alpha {alpha:.2g} and beta {beta:.2g}, and a loss that falls with size and "
                          "tokens has both above 0; the runs are too few or too alike: widen the ladder")
    law = parametric_power_law(fit.theta, flops_factor)
    exponents = fit.draws[:, 4] / (fit.draws[:, 3] + fit.draws[:, 4])
    low, high = np.percentile(exponents, INTERVAL)
    sizes = np.array([law(flops) for flops in budgets])
    return Optimum(
        approach="parametric",
        parameters=law,
        flops_factor=flops_factor,
        exponent_interval=(float(low), float(high)),
        budgets=budgets,
        sizes=sizes,
    )


def parametric_power_law(theta: Array, flops_factor: float) -> PowerLaw:
    """Return the power law for theta: log A, log B, log E, alpha, beta."""
    log_a, log_b, _, alpha, beta = theta
    exponent = beta / (alpha + beta)
    log_g = (np.log(alpha / beta) + log_a - log_b) / (alpha + beta)
    return PowerLaw(float(exponent), float(log_g - exponent * np.log(flops_factor)))
