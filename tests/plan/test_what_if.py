"""Forecasts under other links, a slow rank and jitter: what they must keep to, whatever the layout is."""
import math
import random
from dataclasses import replace

import pytest

from config import ConfigError
from config.reading import resolve
from config.tree import with_values
from plan.cost import Efficiency, cluster, forecast
from plan.near_ties import NEAR
from plan.search import SearchResult, Target, make_job, price, search
from plan.what_if import WhatIf, cluster_under, expected_largest, forecast_under, parse_what_if, waiting_ranks

H100 = cluster("h100-ib")
WORLD = 16
LAYOUTS = [  # of parallel
    {"zero": 1},
    {"zero": 3},
    {"tp": 2, "sp": True, "cp": 2, "zero": 1},
    {"tp": 8, "sp": True, "zero": 2},
    {"pp": 4, "zero": 1},
    {"pp": 2, "tp": 2, "sp": True, "schedule": "zb-v", "zero": 1},
    {"pp": 2, "schedule": "interleaved", "vpp": 2, "zero": 1},
]


def priced(keys, **what):
    """(job, microbatches, step) of a layout; what: of WhatIf."""
    cfg = resolve("llama3.2-1b", None, ["--train.global_batch", "64", "--train.micro_batch", "1"])
    cfg = with_values(cfg, {f"parallel.{key}": value for key, value in keys.items()})
    job, microbatches = make_job(cfg, WORLD)
    what_if = WhatIf(**what)
    under = forecast_under(job, microbatches, cluster_under(H100, what_if), Efficiency(), what_if)
    return job, microbatches, under


@pytest.mark.parametrize("keys", LAYOUTS, ids=str)
def test_nothing_changed_is_the_forecast_and_worse_is_never_faster(keys):
    job, microbatches, now = priced(keys)
    assert now == forecast(job, microbatches, H100, Efficiency())
    for name, values in {
        "links": (1.0, 0.7, 0.3, 0.05), "slow_rank": (1.0, 1.1, 1.5, 4.0), "jitter": (0.0, 0.01, 0.1, 0.5)
    }.items():
        steps = [priced(keys, **{name: value})[2].step for value in values]
        assert steps[0] == now.step and steps == sorted(steps)
        assert steps[-1] > now.step


@pytest.mark.parametrize("keys", LAYOUTS, ids=str)
@pytest.mark.parametrize("times", [1.2, 3.0])
def test_a_slow_rank_costs_its_own_compute_and_no_more_than_all_slow_ones(keys, times):
    job, microbatches, now = priced(keys)
    slow = priced(keys, slow_rank=times)[2]
    assert slow.step <= now.step * times * (1 + 1e-12)
    assert slow.step >= now.step + (times - 1) * now.compute - sum(now.exposed.values()) - now.bubble
    for place in range(job.layout.pp):  # it is where that hurts most
        slowdown = [1.0] * job.layout.pp
        slowdown[place] = times
        assert forecast(job, microbatches, H100, Efficiency(), tuple(slowdown)).step <= slow.step


def test_without_a_pipeline_a_slow_rank_is_its_factor():
    now, slow = priced({"zero": 1})[2], priced({"zero": 1}, slow_rank=1.5)[2]
    assert slow.compute == pytest.approx(1.5 * now.compute, rel=1e-12)
    assert slow.optimizer == pytest.approx(1.5 * now.optimizer, rel=1e-12)


@pytest.mark.parametrize("n", [1, 2, 8, 64, 1024])
def test_the_expected_largest_bounds_drawn_normals(n):
    """A bound of the expected largest, and near it where n is large."""
    draw = random.Random(n)
    drawn = sum(max(draw.gauss(0, 0.05) for _ in range(n)) for _ in range(400)) / 400
    formula = expected_largest(0.05, n)
    assert formula == 0.05 * math.sqrt(2 * math.log(n))
    assert drawn <= formula + 0.01
    assert n < 64 or drawn > 0.75 * formula


@pytest.mark.parametrize("zero", [1, 2])
def test_the_cost_of_jitter_bounds_that_of_drawn_times(zero):
    """Steps of a job whose ranks wait at each op (ZeRO 2), or once a step: never longer than the formula."""
    job, microbatches, now = priced({"zero": zero})
    sigma, ops = 0.1, 2 * microbatches
    draw = random.Random(zero)
    steps = []
    for _ in range(200):
        times = [[draw.gauss(1, sigma) for _ in range(WORLD)] for _ in range(ops)]
        steps.append(sum(map(max, times)) if zero == 2 else max(map(sum, zip(*times))))
    drawn = sum(steps) / len(steps) / ops - 1  # share of the compute
    formula = priced({"zero": zero}, jitter=sigma)[2].step / now.step - 1
    assert 0.5 * formula < drawn * now.compute / now.step < formula


def test_ranks_that_wait_for_each_other_are_those_of_the_layout():
    def waiting(**keys):
        job = priced(keys)[0]
        return tuple(waiting_ranks(job.layout, job.cfg.parallel.zero))

    assert waiting(zero=1) == (1, 16) and waiting(zero=3) == (16, 1)
    assert waiting(tp=2, sp=True, pp=2, zero=1) == (4, 4)
    assert waiting(dp_rep=4, zero=2) == (4, 4)


@pytest.mark.slow
@pytest.mark.parametrize("what", [{"slow_rank": 1.3}, {"jitter": 0.05}, {"links": 0.1}], ids=str)
def test_the_search_under_it_leaves_out_nothing_faster(what):
    """Against every layout that the search without it finds, priced under it."""
    cfg = resolve("llama3.2-1b", None, ["--train.global_batch", "32", "--train.seq_len", "2048"])
    fixed = {"train.micro_batch": 1, "parallel.recompute": "none", "parallel.cp": 1, "parallel.dp_rep": 1}
    what_if = WhatIf(**what)
    now = Target(8, H100, Efficiency())
    under = replace(now, cluster=cluster_under(H100, what_if), what_if=what_if)
    every = search(cfg, now, fixed, 10_000).found
    best = min(price(one.cfg, under, SearchResult()).forecast.step for one in every)
    result = search(cfg, under, fixed, 1, near=NEAR)
    assert result.found[0].forecast.step == best
    assert len(every) > 50 and result.counts["priced"] < len(every)


@pytest.mark.parametrize(
    "text, says",
    [
        ("rain=1", "--what-if: no 'rain'; there are links=0.5, slow-rank=1.2 and jitter=0.05"),
        ("links=0", "--what-if: links=0: must be finite and be above 0"),
        ("slow-rank=0.9", "--what-if: slow-rank=0.9: must be finite and not be below 1"),
        ("jitter=nan", "--what-if: jitter=nan: must be finite and not be below 0"),
        ("jitter", "--what-if: jitter: needs a number"),
    ],
)
def test_what_means_nothing_is_refused(text, says):
    with pytest.raises(ConfigError) as error:
        parse_what_if(text)
    assert str(error.value).startswith(says)
