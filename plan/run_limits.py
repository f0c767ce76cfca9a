"""The number of GPUs, or of steps, that keeps a run within given days or GPU-hours.

Pricing a number of GPUs takes a search for its best layout, seconds to minutes, so few numbers are priced.
More GPUs are assumed to shorten a run at most in proportion, and powers of two not to reduce the GPU-hours,
except near the smallest number that fits the job, where less recompute may save more.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

from plan.whole_run import HOUR, WholeRun

LESS_RECOMPUTE = 1.5  # maximum speedup of GPUs with enough memory to avoid recompute
MAX_RISES = 2  # stop after this many consecutive numbers that do not reduce the cost


class PricedRun(NamedTuple):
    """A run on a number of GPUs. `run` is None if no layout fits; `times_memory` is then the smallest
    layout's memory relative to a GPU, at least, or 1 if the rules refuse all layouts."""

    gpus: int
    run: WholeRun | None
    times_memory: float = 1.0

    @property
    def days(self) -> float:
        """Days of the run, infinite if no layout fits."""
        return self.run.days if self.run is not None else math.inf

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of the run, infinite if no layout fits."""
        return self.run.gpu_hours if self.run is not None else math.inf


def candidate_gpu_counts(node: int, most: int) -> list[int]:
    """Return the candidates up to `most`: powers of two of GPUs below a node of `node` GPUs, then of whole
    nodes, and three times these."""
    powers = [2**power for power in range(max(node, most).bit_length())]
    whole_nodes = sorted({factor * power * node for power in powers for factor in (1, 3)})
    numbers = [power for power in powers if power < node] + whole_nodes
    return [number for number in numbers if number <= most]


def least_gpu_hours(flops: float, peak: float) -> float:
    """Return the GPU-hours of a run of `flops` at a GPU's peak in FLOP/s: a lower bound for any layout."""
    return flops / peak / HOUR


def fewest_gpus(numbers: Sequence[int], price: Callable[[int], PricedRun], days: float) -> PricedRun | None:
    """Return the fewest of the ascending numbers with a run of at most `days`, or None.

    `price` may be called repeatedly with the same number. Three times a power of two may divide the batch
    less well, so one of those is priced last.
    """
    doubled = [number for number in numbers if not is_between(number, numbers)]

    # ascending, skipping numbers that cannot be enough given the time of a run that is too long
    index = 0
    while index < len(doubled) and (priced := price(doubled[index])).days > days:
        times = priced.times_memory if priced.run is None else priced.days / days / LESS_RECOMPUTE
        if priced.gpus * times > numbers[-1]:
            return None
        index = following(doubled, index, times)

    # one in between, and those that were skipped
    found = numbers.index(doubled[index]) if index < len(doubled) else len(numbers)
    while found > 0:
        fewer = found - 1
        if price(numbers[fewer]).days > days and numbers[fewer] not in doubled:
            fewer -= 1
        if price(numbers[fewer]).days > days:
            break
        found = fewer
    return price(numbers[found]) if found < len(numbers) else None


def soonest_gpus(
    numbers: Sequence[int], price: Callable[[int], PricedRun], gpu_hours: float
) -> PricedRun | None:
    """Return the one of the ascending numbers whose run ends soonest within `gpu_hours`, or None.

    `price` may be called repeatedly with the same number. Three times a power of two may divide the batch
    less well, so one of those is priced last.
    """
    doubled = [number for number in numbers if not is_between(number, numbers)]

    # the fewest within the limit
    low = rises = 0
    least = math.inf  # GPU-hours
    while (priced := price(doubled[low])).gpu_hours > gpu_hours:
        if priced.run is not None:
            rises = rises + 1 if priced.gpu_hours >= least else 0
            least = min(least, priced.gpu_hours)
        low = following(doubled, low, priced.times_memory)
        if low == len(doubled) or rises == MAX_RISES:
            return None

    # the most
    high = len(doubled)
    while high - low > 1:
        middle = (low + high) // 2
        if price(doubled[middle]).gpu_hours <= gpu_hours:
            low = middle
        else:
            high = middle

    # beyond what the batch can use, fewer GPUs are as fast
    most = doubled[low]
    beside = [doubled[max(0, low - 1)], *(number for number in numbers if 2 * number == 3 * most)]
    within = [price(number) for number in (most, *beside) if price(number).gpu_hours <= gpu_hours]
    return min(within, key=lambda priced: (priced.days, priced.gpus))


def is_between(number: int, numbers: Sequence[int]) -> bool:
    """Return whether a number is 1.5 times another one."""
    return any(3 * other == 2 * number for other in numbers)


def following(numbers: Sequence[int], index: int, times: float) -> int:
    """Return the index of the next number that is at least `times` as large."""
    return max(index + 1, bisect_left(numbers, numbers[index] * times))


def most_steps(seconds: float, forecast_run: Callable[[int], WholeRun]) -> int:
    """Return the most steps whose run takes at most `seconds`, or 0 if one step takes longer.

    `forecast_run` returns the run with a number of steps.
    """
    low, high = 0, 1
    while forecast_run(high).wall <= seconds:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if forecast_run(middle).wall <= seconds:
            low = middle
        else:
            high = middle
    return low
