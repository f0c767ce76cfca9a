"""Scores of tasks as a function of the loss: the second step from a ladder to what its next size can do.

    score = 1 / (1 + exp(steepness * (loss - middle)))

This is the sigmoid of arXiv 2412.04403, but over the validation loss (as in arXiv 2403.08540) instead of the
loss of the task's answers. Its ends are not fitted: a centered score is 0 for guessing and 1 for no mistake
(docs/training.md), and small runs, which lie near the lower end, could not determine them.

The fit minimizes the sum of squares. The runs are drawn again as for the law of the loss: each draw of both
is of the same runs, and a forecast goes through both.
"""
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy.optimize import least_squares

from plan.laws import INTERVAL, TOLERANCE, Fit, resamples
from plan.points import SCORE, Array, Points

STEEPNESS = (0.3, 1.0, 3.0, 10.0)  # starts of the fit
MIDDLES = (-2.0, -1.0, -0.5, 0.0, 0.5)  # the same, from the mean loss of the points
NUMBERS = ("steepness", "middle")
CENTERED = (f"{SCORE}core", "/centered")  # beginning or end of a name whose score is 0 for guessing


@dataclass(frozen=True)
class ScoreLaw:
    """A fitted sigmoid. theta: steepness, middle; draws [bootstraps, 2]: fits to resampled runs.

    noise: standard deviation of a run's score around it. follows_loss: in 95 % of the draws, the score rises
    by more than that from the highest loss of the runs to the lowest. Guesses do not, and have no middle.
    """
    name: str
    theta: Array
    draws: Array
    noise: float
    follows_loss: bool

    def intervals(self) -> dict[str, tuple[float, float]]:
        """Return {name: (low, high)}, which covers 95 % of the draws."""
        low, high = np.percentile(self.draws, INTERVAL, axis=0)
        return {name: (float(low[n]), float(high[n])) for n, name in enumerate(NUMBERS)}


def is_centered(name: str) -> bool:
    """Return whether a metric of metrics.jsonl is 0 for guessing, which the sigmoid needs."""
    return name.startswith(SCORE) and (name == CENTERED[0] or name.endswith(CENTERED[1]))


def sigmoid(theta: Array, loss: Array) -> Array:
    """Return the scores [.., n] for theta [.., 2] and losses [n] or [.., n]."""
    steepness, middle = np.moveaxis(theta[..., None], -2, 0)  # [.., 1] each
    return 0.5 - 0.5 * np.tanh(steepness * (loss - middle) / 2)


def fit_scores(points: Points, bootstraps: int) -> list[ScoreLaw]:
    """Fit each centered score of the points."""
    laws: list[ScoreLaw] = []
    for name, scores in points.scores.items():
        if not is_centered(name):
            continue
        starts = [
            np.array([steepness, points.loss.mean() + middle])
            for steepness, middle in product(STEEPNESS, MIDDLES)
        ]
        ends = [fit_sigmoid(start, points.loss, scores) for start in starts]
        theta = min(ends, key=lambda end: float(((sigmoid(end, points.loss) - scores) ** 2).sum()))
        draws = np.array([
            fit_sigmoid(theta, points.loss[rows], scores[rows])
            for rows in resamples(len(points), bootstraps)
        ])
        squares = float(((sigmoid(theta, points.loss) - scores) ** 2).sum())
        noise = float(np.sqrt(squares / max(1, len(points) - len(theta))))
        ends = sigmoid(draws, np.array([points.loss.min(), points.loss.max()]))  # [bootstraps, 2]
        least_rise = np.percentile(ends[:, 0] - ends[:, 1], INTERVAL[0])
        laws.append(ScoreLaw(name, theta, draws, noise, follows_loss=bool(least_rise > noise)))
    return laws


def fit_sigmoid(start: Array, loss: Array, scores: Array) -> Array:
    """Return the theta of the least squares that is reached from a start."""
    return least_squares(
        lambda theta: sigmoid(theta, loss) - scores,
        start,
        x_scale="jac",
        xtol=TOLERANCE,
        ftol=TOLERANCE,
        gtol=TOLERANCE,
    ).x


def forecast_score(
    law: ScoreLaw, fit: Fit, parameters: float, tokens: float
) -> tuple[float, tuple[float, float]]:
    """Return the score of another run and its 95 % interval: that of the loss goes through every draw.

    fit: of the same points with as many draws.
    """
    score = float(sigmoid(law.theta, np.array([fit.loss(parameters, tokens)]))[0])
    random = np.random.default_rng(0)
    runs = random.standard_normal((2, len(law.draws)))
    losses = np.exp(fit.predict(fit.draws, parameters, tokens) + fit.noise * runs[0])  # [bootstraps]
    scores = sigmoid(law.draws, losses[:, None])[:, 0] + law.noise * runs[1]
    low, high = np.percentile(scores, INTERVAL)
    return score, (float(low), float(high))
