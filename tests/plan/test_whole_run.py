"""A whole run: expected wall time and the best interval between saves, beside a simulation of failures."""

import math
import random

import pytest

from config.reading import resolve
from plan.run_report import checkpoint_bytes
from plan.whole_run import (
    GPU_HOURS_BETWEEN_FAILURES,
    Reliability,
    batch_costs,
    best_interval,
    wall_seconds,
    whole_run,
)


def simulated(training: float, interval: float, blocking: float, restart: float, between: float) -> float:
    """Seconds of one run whose failures are drawn: what is not saved is trained again."""
    clock = done = 0.0
    failure = random.expovariate(1 / between)
    while done < training:
        end = clock + interval + blocking
        if end <= failure:
            clock, done = end, done + interval
            continue
        # a failure while the job starts again starts it again
        clock = failure
        while True:
            failure = clock + random.expovariate(1 / between)
            if failure >= clock + restart:
                clock += restart
                break
            clock = failure
    return clock


@pytest.mark.parametrize(
    "interval, blocking, restart", [(20.0, 1.0, 0.0), (50.0, 5.0, 30.0), (8.0, 4.0, 90.0)]
)
def test_the_expected_time_is_that_of_drawn_failures(interval, blocking, restart):
    random.seed(1)
    numbers = {"interval": interval, "blocking": blocking, "restart": restart, "between": 100.0}
    times = [simulated(1000.0, **numbers) for _ in range(2000)]
    mean = sum(times) / len(times)
    deviation = math.sqrt(sum((time - mean) ** 2 for time in times) / len(times) / (len(times) - 1))
    assert abs(wall_seconds(1000.0, **numbers) - mean) < 4 * deviation


@pytest.mark.parametrize("blocking", [0.01, 1.0, 20.0, 150.0])
def test_no_interval_is_better_than_the_best(blocking):
    """But by a thousandth: it is an estimate (a tenth where a save takes as long as a failure is away)."""
    between = 100.0
    times = [wall_seconds(1.0, 0.01 * 1.05**n, blocking, 0.0, between) for n in range(250)]
    found = wall_seconds(1.0, best_interval(blocking, between), blocking, 0.0, between)
    assert found <= min(times) * (1.001 if blocking < between else 1.1)


def test_the_best_interval_is_near_that_of_young():
    assert best_interval(1.0, 20_000.0) == pytest.approx(math.sqrt(2 * 1.0 * 20_000.0), rel=0.01)


def test_llama_3_on_its_cluster():
    """arXiv 2407.21783, section 3.3.4: 419 interruptions in 54 days of 16,384 GPUs; over 90 % of the time was
    effective. A save that takes seconds, and starts of some minutes, give as much."""
    reliability = Reliability(restart=600.0, blocking=5.0, writing=60.0)
    assert reliability.between_failures(16_384) == pytest.approx(54 * 86_400 / 419)
    run = whole_run(15.6e12, 16_000_000, 4.6, 16_384, reliability)
    assert run.steps == 975_000
    assert run.failures == pytest.approx(run.wall / (54 * 86_400 / 419))
    assert 0.9 < run.ettr < 0.96
    assert run.gpu_hours == pytest.approx(run.days * 24 * 16_384)
    assert run.megawatt_hours(700, 1.0) == pytest.approx(run.gpu_hours * 700e-6)


def test_a_save_is_written_before_the_next_begins():
    slow = Reliability(GPU_HOURS_BETWEEN_FAILURES, restart=60.0, blocking=0.1, writing=900.0)
    assert whole_run(1e12, 1_000_000, 2.0, 1024, slow).every == 450
    assert whole_run(3e6, 1_000_000, 2.0, 1024, slow).every == 3  # once, at the end


def test_a_job_that_fails_before_it_begins_never_ends():
    hopeless = Reliability(gpu_hours=1e-6, restart=600.0)
    assert whole_run(1e12, 1_000_000, 2.0, 1024, hopeless).wall == math.inf


@pytest.mark.parametrize("optimizer, copies", [("adamw", 3), ("lion", 2), ("sgd", 2)])
def test_a_checkpoint_has_masters_and_moments(optimizer, copies):
    words = ["--optim.name", optimizer, "--parallel.pp", "4", "--train.ema", "0.9"]
    cfg = resolve("llama3-8b", None, words)
    weights = 4 * 8_030_261_248  # of Llama 3 8B, in fp32
    assert checkpoint_bytes(cfg) == pytest.approx((copies + 1) * weights, rel=1e-3)


def test_muon_has_one_moment_of_hidden_matrices():
    of = {name: checkpoint_bytes(resolve("llama3-8b", None, ["--optim.name", name]))
          for name in ("adamw", "muon")}  # fmt: skip
    ends = 2 * 128_256 * 4096  # the embedding and the head
    assert of["adamw"] - of["muon"] == pytest.approx(4 * (8_030_261_248 - ends), rel=1e-3)


def test_batches_beside_the_noise_scale():
    """At the noise scale both are twice the least; (steps - 1) (tokens - 1) is 1 everywhere."""
    assert batch_costs(1e6, 1e6) == (2.0, 2.0)
    for batch in (1e4, 3e5, 7e7):
        steps, tokens = batch_costs(batch, 1e6)
        assert (steps - 1) * (tokens - 1) == pytest.approx(1.0)
