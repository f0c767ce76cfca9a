"""Scaling laws: the loss of a model with N parameters trained on D tokens, and their fit.

    chinchilla   E + A / N^alpha + B / D^beta                          (arXiv 2203.15556, equation 2)
    kaplan       ((N_c / N)^(alpha_N / alpha_D) + D_c / D)^alpha_D     (arXiv 2001.08361, equation 1.5)

N counts all parameters in the first, and those without embeddings in the second, as in the two papers, or all
if the points do not say how many those are.

The fit follows arXiv 2203.15556, section 3.3: minimize the sum of Huber losses, delta 1e-3, of the
differences of log losses, from a grid of starts. The minimizer does not stop too early, which arXiv
2404.10102 found to be the problem of the published fit. Intervals are percentiles over bootstrap fits,
resampled with replacement as there. The interval of a loss that is forecast also has the noise of a run, and
is wider where points are few (Student's t).
"""
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from math import exp, hypot, inf

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.stats import norm, t

from plan.points import Array, Points

HUBER_DELTA = 1e-3  # for log losses
TOLERANCE = 1e-12  # relative, for the sum and the parameters
DIFFERENCE = 1e-6  # step of a parameter for its derivative
INTERVAL = (2.5, 97.5)  # percentiles: 95 %
MAX_EXPONENT = 709.0  # of e, in a float


@dataclass(frozen=True)
class Law:
    """A law in its minimized form.

    log_loss(theta [.., k], log N [n], log D [n]) -> log of the loss [.., n].
    numbers(theta [k]) -> {name: value} as printed in papers.
    grid: start values for each element of theta.
    without_embeddings: whether N leaves out embeddings, if the points know their number.
    """
    name: str
    formula: str
    log_loss: Callable[[Array, Array, Array], Array]
    numbers: Callable[[Array], dict[str, float]]
    grid: tuple[tuple[float, ...], ...]
    without_embeddings: bool = False

    def counts_non_embedding(self, points: Points) -> bool:
        return self.without_embeddings and points.non_embedding is not None

    def sizes(self, points: Points) -> Array:
        """Return N of each run, as counted by this law: [n]."""
        if self.without_embeddings and points.non_embedding is not None:
            return points.non_embedding
        return points.parameters


@dataclass(frozen=True)
class Fit:
    """A fitted law. theta [k]; draws [bootstraps, k]: fits to resampled runs.

    noise: standard deviation of a run's log loss, from the residuals. freedom: runs less numbers of the law.
    """
    law: Law
    theta: Array
    draws: Array
    noise: float
    freedom: int

    @property
    def numbers(self) -> dict[str, float]:
        return self.law.numbers(self.theta)

    def intervals(self) -> dict[str, tuple[float, float]]:
        """Return {name: (low, high)}, which covers 95 % of the draws."""
        drawn = [self.law.numbers(theta) for theta in self.draws]
        result: dict[str, tuple[float, float]] = {}
        for name in self.numbers:
            low, high = np.percentile([numbers[name] for numbers in drawn], INTERVAL)
            result[name] = float(low), float(high)
        return result

    def loss(self, parameters: float, tokens: float) -> float:
        """Predict the loss in nats per token."""
        return float(np.exp(self.predict(self.theta, parameters, tokens)))

    def loss_interval(self, parameters: float, tokens: float) -> tuple[float, float]:
        """Return the 95 % interval of the loss of another run, if the law holds there.

        It joins the interval of the draws' predictions and that of a run around the law.
        """
        middle = float(self.predict(self.theta, parameters, tokens))
        low, high = np.percentile(self.predict(self.draws, parameters, tokens), INTERVAL)
        quantile = INTERVAL[1] / 100
        of_run = norm.ppf(quantile) * self.noise
        widening = t.ppf(quantile, self.freedom) / norm.ppf(quantile)
        below = widening * hypot(middle - low, of_run)
        above = widening * hypot(high - middle, of_run)
        return exp(middle - below), exp_or_inf(middle + above)

    def predict(self, theta: Array, parameters: float, tokens: float) -> Array:
        """Map theta [.., k] to the log of the loss [..]."""
        log_n, log_d = np.log([parameters]), np.log([tokens])
        return self.law.log_loss(theta, log_n, log_d)[..., 0]


# ---- the laws ----------------------------------------------------------------------------------------------


def chinchilla_log_loss(theta: Array, log_n: Array, log_d: Array) -> Array:
    """Return the log of the loss; theta is log A, log B, log E, alpha, beta."""
    log_a, log_b, log_e, alpha, beta = np.moveaxis(theta[..., None], -2, 0)  # [.., 1] each
    by_size = log_a - alpha * log_n
    by_tokens = log_b - beta * log_d
    return np.logaddexp(np.logaddexp(by_size, by_tokens), log_e)


def exp_or_inf(exponent: float) -> float:
    """Return exp, or inf on overflow: a fit diverges there for a number that the runs do not determine."""
    return exp(exponent) if exponent < MAX_EXPONENT else inf


def chinchilla_numbers(theta: Array) -> dict[str, float]:
    log_a, log_b, log_e, alpha, beta = map(float, theta)
    return {
        "A": exp_or_inf(log_a),
        "B": exp_or_inf(log_b),
        "E": exp_or_inf(log_e),
        "alpha": alpha,
        "beta": beta,
    }


def kaplan_log_loss(theta: Array, log_n: Array, log_d: Array) -> Array:
    """Return the log of the loss; theta is log N_c, log D_c, alpha_N, alpha_D."""
    log_nc, log_dc, alpha_n, alpha_d = np.moveaxis(theta[..., None], -2, 0)
    by_size = alpha_n / alpha_d * (log_nc - log_n)
    return alpha_d * np.logaddexp(by_size, log_dc - log_d)


def kaplan_numbers(theta: Array) -> dict[str, float]:
    log_nc, log_dc, alpha_n, alpha_d = map(float, theta)
    return {"N_c": exp_or_inf(log_nc), "D_c": exp_or_inf(log_dc), "alpha_N": alpha_n, "alpha_D": alpha_d}


CHINCHILLA = Law(
    "chinchilla",
    "E + A / N^alpha + B / D^beta",
    chinchilla_log_loss,
    chinchilla_numbers,
    grid=(  # as in arXiv 2203.15556, appendix D.2
        (0.0, 5.0, 10.0, 15.0, 20.0, 25.0),
        (0.0, 5.0, 10.0, 15.0, 20.0, 25.0),
        (-1.0, -0.5, 0.0, 0.5, 1.0),
        (0.0, 0.5, 1.0, 1.5, 2.0),
        (0.0, 0.5, 1.0, 1.5, 2.0),
    ),
)
KAPLAN = Law(
    "kaplan",
    "((N_c / N)^(alpha_N / alpha_D) + D_c / D)^alpha_D",
    kaplan_log_loss,
    kaplan_numbers,
    grid=(
        (5.0, 10.0, 15.0, 20.0, 25.0, 30.0),
        (5.0, 10.0, 15.0, 20.0, 25.0, 30.0),
        (0.05, 0.1, 0.2, 0.4),
        (0.05, 0.1, 0.2, 0.4),
    ),
    without_embeddings=True,
)


# ---- the fit -----------------------------------------------------------------------------------------------


def fit_law(
    law: Law,
    points: Points,
    bootstraps: int = 1000,
    seed: int = 0,
    tell: Callable[[int], object] = lambda done: None,
) -> Fit:
    """Fit the law by the least sum of Huber losses over the points, and to `bootstraps` resampled sets of
    runs.

    `tell` is called before each resampled fit with the number of finished ones.
    """
    ends = [minimize_from(start, law, points) for start in best_starts(law, points)]
    theta = min(ends, key=lambda end: float(huber_sum(law, end, points)))
    draws: list[Array] = []
    for done, rows in enumerate(resamples(len(points), bootstraps, seed)):
        tell(done)
        draws.append(minimize_from(theta, law, points.take(rows)))
    freedom = max(1, len(points) - len(theta))
    noise = float(np.sqrt((residuals(theta, law, points) ** 2).sum() / freedom))
    return Fit(law, theta, np.array(draws or [theta]), noise, freedom)


def resamples(runs: int, bootstraps: int, seed: int = 0) -> Iterator[NDArray[np.intp]]:
    """Yield indices of runs drawn with replacement, the same for each law of the same points: [runs]."""
    random = np.random.default_rng(seed)
    for _ in range(bootstraps):
        yield random.integers(0, runs, runs)


def best_starts(law: Law, points: Points) -> Array:
    """Return the grid point with the least sum for each pair of exponents, the last two numbers: [.., k].

    The best points overall lie close together, and would end in the same minimum.
    """
    starts: list[Array] = []
    for exponents in product(*law.grid[-2:]):
        grid = np.array([(*others, *exponents) for others in product(*law.grid[:-2])])
        starts.append(grid[huber_sum(law, grid, points).argmin()])
    return np.array(starts)


def huber_sum(law: Law, theta: Array, points: Points) -> Array:
    """Return the sum of Huber losses [..] for theta [.., k]."""
    distance = np.abs(residuals(theta, law, points))
    linear = HUBER_DELTA * (distance - HUBER_DELTA / 2)
    return np.where(distance <= HUBER_DELTA, distance**2 / 2, linear).sum(-1)


def minimize_from(start: Array, law: Law, points: Points) -> Array:
    """Minimize huber_sum from a start, and return theta: [k].

    Residuals are in units of delta: the minimizer stops at an absolute size of the gradient.
    """
    result = least_squares(
        lambda theta: residuals(theta, law, points) / HUBER_DELTA,
        start,
        jac=lambda theta: jacobian(theta, law, points) / HUBER_DELTA,  # pyright: ignore[reportArgumentType]
        loss="huber",
        f_scale=1.0,
        x_scale="jac",
        xtol=TOLERANCE,
        ftol=TOLERANCE,
    )
    return result.x


def residuals(theta: Array, law: Law, points: Points) -> Array:
    """Return predicted minus measured log losses: theta [.., k] -> [.., n]."""
    predicted = law.log_loss(theta, np.log(law.sizes(points)), np.log(points.tokens))
    return predicted - np.log(points.loss)


def jacobian(theta: Array, law: Law, points: Points) -> Array:
    """Return the derivatives of the residuals, by central differences, since a law is smooth: [n, k]."""
    shifts = DIFFERENCE * np.eye(len(theta))
    above, below = residuals(theta + shifts, law, points), residuals(theta - shifts, law, points)
    return ((above - below) / (2 * DIFFERENCE)).T
