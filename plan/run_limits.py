"""How many GPUs, or how many steps, keep a run within some days or GPU-hours.

What a number of GPUs takes is known from a search for its best layout, which costs seconds to minutes, so few
numbers are priced. More GPUs are taken to shorten a run by at most their share, and of powers of two to cost
no fewer GPU-hours, but for those near the least that hold the job: there less recompute may save more.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

from plan.whole_run import HOUR, WholeRun

LESS_RECOMPUTE = 1.5  # times as fast are GPUs at most that have room to keep what others compute again
MOST_RISES = 2  # numbers of GPUs, one after the other, that cost no less than fewer do: more are not priced


class PricedRun(NamedTuple):
    """A run on a number of GPUs. run: None where no layout fits. times_memory: then how many times the memory
    of a GPU the smallest layout takes at least; 1 where the rules refuse all of them."""

    gpus: int
    run: WholeRun | None
    times_memory: float = 1.0

    @property
    def days(self) -> float:
        """Infinite where no layout fits."""
        return self.run.days if self.run is not None else math.inf

    @property
    def gpu_hours(self) -> float:
        """Infinite where no layout fits."""
        return self.run.gpu_hours if self.run is not None else math.inf


def numbers_of_gpus(node: int, most: int) -> list[int]:
    """Those that are tried, up to `most`: powers of two of GPUs below a node, then of whole nodes, and three
    times these. node: GPUs of one."""
    powers = [2**power for power in range(max(node, most).bit_length())]
    whole_nodes = sorted({factor * power * node for power in powers for factor in (1, 3)})
    numbers = [power for power in powers if power < node] + whole_nodes
    return [number for number in numbers if number <= most]


def least_gpu_hours(flops: float, peak: float) -> float:
    """Of a run at the peak of a GPU, in FLOP/s: no layout takes fewer. flops: of the run."""
    return flops / peak / HOUR


def fewest_gpus(numbers: Sequence[int], price: Callable[[int], PricedRun], days: float) -> PricedRun | None:
    """Return the fewest of the numbers, which rise, with a run of at most `days`; None if none has one.

    price: is called more than once with a number. Three times a power of two may suit the batch less, so one
    of those is priced last.
    """
    doubled = [number for number in numbers if not is_between(number, numbers)]

    # from below, by the least that a run which is too long could do with
    index = 0
    while index < len(doubled) and (priced := price(doubled[index])).days > days:
        times = priced.times_memory if priced.run is None else priced.days / days / LESS_RECOMPUTE
        if priced.gpus * times > numbers[-1]:
            return None
        index = following(doubled, index, times)

    # one that is between, and those that were passed over
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
    """Of the numbers, which rise, that whose run ends soonest within `gpu_hours`; None if none does.

    price: is called more than once with a number. Three times a power of two may suit the batch less, so one
    of those is priced last.
    """
    doubled = [number for number in numbers if not is_between(number, numbers)]

    # the fewest that are within
    low = rises = 0
    least = math.inf  # GPU-hours
    while (priced := price(doubled[low])).gpu_hours > gpu_hours:
        if priced.run is not None:
            rises = rises + 1 if priced.gpu_hours >= least else 0
            least = min(least, priced.gpu_hours)
        low = following(doubled, low, priced.times_memory)
        if low == len(doubled) or rises == MOST_RISES:
            return None

    # the most
    high = len(doubled)
    while high - low > 1:
        middle = (low + high) // 2
        if price(doubled[middle]).gpu_hours <= gpu_hours:
            low = middle
        else:
            high = middle

    # past what the batch can use, fewer GPUs are as soon
    most = doubled[low]
    beside = [doubled[max(0, low - 1)], *(number for number in numbers if 2 * number == 3 * most)]
    within = [price(number) for number in (most, *beside) if price(number).gpu_hours <= gpu_hours]
    return min(within, key=lambda priced: (priced.days, priced.gpus))


def is_between(number: int, numbers: Sequence[int]) -> bool:
    """Return whether it is half as large again as another one."""
    return any(3 * other == 2 * number for other in numbers)


def following(numbers: Sequence[int], index: int, times: float) -> int:
    """Return the index of the next number that is at least `times` as large."""
    return max(index + 1, bisect_left(numbers, numbers[index] * times))


def most_steps(seconds: float, run_of: Callable[[int], WholeRun]) -> int:
    """Return the most steps whose run takes at most `seconds`; 0 if one step takes longer.

    run_of: the run of a number of steps.
    """
    low, high = 0, 1
    while run_of(high).wall <= seconds:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if run_of(middle).wall <= seconds:
            low = middle
        else:
            high = middle
    return low
