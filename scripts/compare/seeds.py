"""Statistics over seeds: means with Student's interval, and differences with Welch's.

All intervals hold the true value in CONFIDENCE of cases, if losses over seeds are normally distributed.
"""
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from plan.points import Array

CONFIDENCE = 0.95


@dataclass(frozen=True)
class SeedMean:
    """The mean of `number` seeds. deviation: standard deviation of one of them (over n - 1). half: half the
    width of the interval of the mean. Both are NaN for a single seed."""
    number: int
    mean: float
    deviation: float
    half: float


@dataclass(frozen=True)
class SeedDifference:
    """A difference of two means. half: half the width of its interval, NaN if a side has a single seed."""
    mean: float
    half: float

    @property
    def is_beyond_noise(self) -> bool | None:
        """Whether the interval excludes 0; None without an interval."""
        return None if math.isnan(self.half) else abs(self.mean) > self.half


def quantile(freedom: float) -> float:
    """Return Student's t at which CONFIDENCE lies between -t and t. freedom: degrees of freedom."""
    return float(stdtrit(freedom, 0.5 + CONFIDENCE / 2))


def mean_of_seeds(values: Sequence[float]) -> SeedMean:
    """Return the mean of one loss a seed, with its interval (Student 1908): t(n-1) s / sqrt(n)."""
    mean, half = mean_curve(np.array(values)[:, None])
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    return SeedMean(len(values), float(mean[0]), deviation, float(half[0]))


def mean_curve(values: ArrayLike) -> tuple[Array, Array]:
    """values [seeds, points] -> (means, half widths of their intervals) [points]."""
    curves = np.asarray(values, float)
    number = len(curves)
    if number == 1:
        return curves[0], np.full(curves.shape[1], math.nan)
    return curves.mean(0), quantile(number - 1) * curves.std(0, ddof=1) / math.sqrt(number)


def seed_difference(one: Sequence[float], other: Sequence[float]) -> SeedDifference:
    """Return the mean of one less that of the other, with the interval of unequal variances (Welch 1947)."""
    mean = float(np.mean(one) - np.mean(other))
    if min(len(one), len(other)) < 2:
        return SeedDifference(mean, math.nan)
    parts = [float(np.var(values, ddof=1)) / len(values) for values in (one, other)]
    if sum(parts) == 0:
        return SeedDifference(mean, 0.0)
    each = zip(parts, (one, other))
    freedom = sum(parts) ** 2 / sum(part**2 / (len(values) - 1) for part, values in each)
    return SeedDifference(mean, quantile(freedom) * math.sqrt(sum(parts)))
