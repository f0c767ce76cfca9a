"""Numbers of GPUs and of steps within a limit, against all numbers, on drawn costs of a run."""

import math
import random

import pytest

from plan.run_limits import (
    PricedRun,
    candidate_gpu_counts,
    fewest_gpus,
    is_between,
    least_gpu_hours,
    most_steps,
    soonest_gpus,
)
from plan.whole_run import DAY, Reliability, WholeRun, whole_run


def test_numbers_of_gpus_by_hand():
    assert candidate_gpu_counts(8, 64) == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    assert candidate_gpu_counts(72, 300) == [1, 2, 4, 8, 16, 32, 64, 72, 144, 216, 288]
    assert candidate_gpu_counts(8, 3) == [1, 2]
    assert [n for n in candidate_gpu_counts(8, 100)
            if is_between(n, candidate_gpu_counts(8, 100))] == [24, 48, 96]


def drawn_runs(seed: int) -> tuple[list[int], dict[int, PricedRun]]:
    """Numbers of GPUs, and the run on each: on few GPUs none, or one that takes more GPU-hours; three times a
    power of two takes more, or has no layout; from some number on each doubling costs more, and none fits.
    """
    draw = random.Random(seed)
    numbers = candidate_gpu_counts(8, 8192)
    needed = draw.choice((0.7, 3.0, 20.0, 100.0))  # GPUs whose memory holds the job
    used, most = draw.choice((64, 512, 8192)), draw.choice((256, 4096, 8192))
    work, growth = draw.uniform(100, 1e5), draw.uniform(0.3, 1.2)  # GPU-days, and what they grow by
    runs: dict[int, PricedRun] = {}
    for number in numbers:
        is_odd = is_between(number, numbers)
        has_layout = needed <= number <= most and not (is_odd and draw.random() < 0.3)
        if not has_layout:
            runs[number] = PricedRun(number, None, max(1.0, needed / number))
            continue
        share = draw.uniform(1.0, 1.3) if is_odd else 1.0
        share *= 1.2 if number < 2 * needed else 1.0
        share *= 1.0 if number <= used else (number / used) ** growth
        wall = work * share / number * DAY
        runs[number] = PricedRun(number, WholeRun(number, 10, wall, wall, every=1, failures=0.0))
    return numbers, runs


@pytest.mark.parametrize("seed", range(300))
def test_the_fewest_within_days_and_the_next_fewer_is_not(seed):
    numbers, runs = drawn_runs(seed)
    days = math.exp(random.Random(seed).uniform(-1, 7))
    asked: set[int] = set()
    found = fewest_gpus(numbers, lambda number: asked.add(number) or runs[number], days)
    within = [number for number in numbers if runs[number].days <= days]
    if found is None:
        assert not within
        return
    index = numbers.index(found.gpus)
    assert found == runs[found.gpus] and found.days <= days
    assert index == 0 or runs[numbers[index - 1]].days > days
    assert found.gpus == within[0]
    assert asked >= set(numbers[max(0, index - 1):index + 1])  # seen, and not concluded
    assert max(asked) <= 2 * found.gpus  # the larger ones cost the longest searches


@pytest.mark.parametrize("seed", range(300))
def test_the_soonest_within_gpu_hours_and_the_next_more_is_not_or_no_sooner(seed):
    numbers, runs = drawn_runs(seed)
    hours = math.exp(random.Random(seed).uniform(7, 15))
    asked: set[int] = set()
    found = soonest_gpus(numbers, lambda number: asked.add(number) or runs[number], hours)
    within = [number for number in numbers if runs[number].gpu_hours <= hours]
    if found is None:
        assert not [number for number in within if not is_between(number, numbers)]
        return
    assert found.gpu_hours <= hours
    for other in numbers[numbers.index(found.gpus) + 1:][:2]:
        assert runs[other].gpu_hours > hours or runs[other].days >= found.days
    assert len(asked) <= 14  # of 24


@pytest.mark.parametrize("days, gpus, priced", [(12.5, 512, {32, 256, 384, 512}), (0.5, None, {32})])
def test_numbers_that_cannot_do_are_not_priced(days, gpus, priced):
    """A run that is 16 times too long is followed by about 16 times the GPUs, not by the next number; and no
    other number where none is enough.
    """
    asked: set[int] = set()

    def price(number: int) -> PricedRun:
        asked.add(number)
        wall = 6400 / number * DAY
        return PricedRun(number, WholeRun(number, 10, wall, wall, every=1, failures=0.0))

    found = fewest_gpus(candidate_gpu_counts(8, 4096)[6:], price, days)
    assert (found.gpus if found else None) == gpus and asked == priced


@pytest.mark.parametrize("seconds", [0.5, 3.0, 1000.0, 3e6])
def test_the_most_steps_have_room_and_one_more_has_not(seconds):
    reliability = Reliability(500.0, restart=100.0, blocking=2.0, writing=4.0)

    def forecast_run(steps: int) -> WholeRun:
        return whole_run(steps * 1000, 1000, 0.7, 64, reliability)

    steps = most_steps(seconds, forecast_run)
    assert forecast_run(steps + 1).wall > seconds
    assert steps == 0 or forecast_run(steps).wall <= seconds
    assert (steps == 0) == (seconds < 2.7)  # a step and its save


def test_a_job_that_never_ends_has_no_room_for_a_step():
    hopeless = Reliability(gpu_hours=1e-6, restart=600.0)
    assert most_steps(1e9, lambda steps: whole_run(steps, 1, 1.0, 64, hopeless)) == 0


def test_no_run_beats_the_peak():
    assert least_gpu_hours(3600 * 1e15, 1e15) == 1.0
