"""A weighted mix of data sets: which of them gives global sample g, and which of its own samples that is.

Stride scheduling: sample j of data set d is due at (j + 1/2) / w_d, and samples come in the order in which they fall
due, ties by d. So every (d, j) comes exactly once, no order is stored, and after g samples data set d has given g * w_d
of them to within 1/2 + D * w_d / 2 (D data sets). Whole numbers throughout: with floats, two samples in the billions
could swap places between a run and its resume. Source: Waldspurger and Weihl 1995, MIT TM-528.
"""
import math
import shlex
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from config import ConfigError


@dataclass(frozen=True)
class Blend:
    weights: tuple[int, ...]  # whole numbers in the ratio asked for

    def pick(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:  # 2 x int64 [count]
        """(data set, its sample number) of the global samples first .. first + count."""
        sets = len(self.weights)
        start = self._given(first - sets)  # a whole prefix of the order, at most 2 D samples short of `first`
        stop = self._given(first + count + sets)  # and one that reaches past the last
        due = sorted((self._due(d, j), d, j) for d in range(sets) for j in range(start[d], stop[d]))
        skip = first - sum(start)
        picked = due[skip:skip + count]
        return np.array([d for _, d, _ in picked], np.int64), np.array([j for *_, j in picked], np.int64)

    def _due(self, d: int, j: int) -> int:
        return ((2 * j + 1) << 64) // self.weights[d]

    def _given(self, time: int) -> list[int]:
        """Samples of each data set that are due by the time at which about `time` of all have come."""
        limit = (2 * max(time, 0) << 64) // sum(self.weights)
        return [(-(-(limit + 1) * w // (1 << 64))) // 2 for w in self.weights]  # j with due(d, j) <= limit


def parse(text: str) -> tuple[Blend, list[str]]:
    """ "0.7 a 0.3 b" -> weights and paths; a lone path weighs 1. Raises ConfigError naming data.path."""
    if not text.strip():
        raise ConfigError("data.path: empty; give stdlib, a prefix of .bin/.idx, or a blend \"0.7 a 0.3 b\"")
    if number(text.split()[0]) is None:
        return Blend((1,)), [text.strip()]
    try:
        words = shlex.split(text)  # a path with spaces can be quoted
    except ValueError as e:
        raise ConfigError(f"data.path: {text!r}: {str(e).lower()}") from None
    weights = [number(w) for w in words[::2]]
    if len(words) % 2 or None in weights:
        raise ConfigError(f"data.path: {text!r} is not a blend; weights and paths must take turns: \"0.7 a 0.3 b\"")
    if min(weights) <= 0:
        raise ConfigError(f"data.path: {text!r}: weights must be above 0; leave the data set out instead")
    scale = math.lcm(*(w.denominator for w in weights))
    return Blend(tuple(int(w * scale) for w in weights)), words[1::2]


def number(word: str) -> Fraction | None:
    try:
        return Fraction(word)
    except (ValueError, ZeroDivisionError):
        return None
