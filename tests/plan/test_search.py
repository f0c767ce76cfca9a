"""The fastest layouts that fit: the same as when every choice is priced; what the user sets stays; nothing
that is too large.
"""

import math
import multiprocessing
from dataclasses import replace

import pytest

from config.reading import resolve
from config.reading.schedules import plan_pipeline
from config.tree import with_values
from config.values import combinations
from plan.communicators import Gpu
from plan.cost import Efficiency, cluster
from plan.search import (
    SearchResult,
    Target,
    compute_axes,
    held_bytes,
    layout_axes,
    least_bytes,
    make_bound,
    make_job,
    price,
    search,
    step_with_bubble,
    with_fixed,
)
from plan.search_processes import best_layouts, receive_result, search_in_processes

SMALL_JOB = ["--train.global_batch", "16", "--train.seq_len", "2048"]


def target(world, c):
    return Target(world, c, Efficiency())


def brute(cfg, world, c, fixed):
    """Every choice, priced."""
    axes = compute_axes(cfg, world, c) | layout_axes(cfg, world)
    result, out = SearchResult(), []
    for values in combinations(with_fixed(axes, fixed)):
        is_interleaved = values["parallel.schedule"] == "interleaved"
        if values["parallel.dp_rep"] == "node" or is_interleaved != (values["parallel.vpp"] is not None):
            continue
        if values["parallel.pp"] == 1 and values["parallel.schedule"] != "1f1b":
            continue
        priced = with_values(cfg, values | {"parallel.sp": values["parallel.tp"] > 1})
        one = price(priced, target(world, c), result)
        out += [one] if one else []
    return sorted(x.forecast.step for x in out)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [80e9, 9e9])
def test_nothing_faster_is_left_out(memory):
    cfg = resolve("llama3.2-1b", None, SMALL_JOB)
    c = replace(cluster("h100-ib"), memory=memory, node=4)
    fixed = {"train.micro_batch": 1, "parallel.dp_rep": 1, "parallel.recompute": "none", "parallel.cp": 1}
    cfg = with_values(cfg, fixed)
    result = search(cfg, target(8, c), fixed, 5)
    found, counts = result.found, result.counts
    every = brute(cfg, 8, c, fixed)
    assert [x.forecast.step for x in found] == every[:5]
    assert counts["priced"] <= len(every) and (counts["too large"] > 0) == (memory < 10e9)
    assert memory < 10e9 or counts["priced"] < len(every) / 2


@pytest.mark.slow
def test_what_is_set_stays_and_what_is_found_fits():
    cfg = resolve("mixtral-8x7b", None, ["--train.global_batch", "64", "--parallel.ep", "8"])
    fixed = {"parallel.ep": 8, "train.micro_batch": 1, "parallel.schedule": "1f1b", "parallel.vpp": None}
    found = search(with_values(cfg, fixed), target(32, cluster("h100-ib")), fixed, 3).found
    assert len(found) == 3 and [x.forecast.step for x in found] == sorted(x.forecast.step for x in found)
    for x in found:
        assert x.cfg.parallel.ep == 8 and x.cfg.parallel.schedule == "1f1b" and x.cfg.train.micro_batch == 1
        assert x.held.total <= 80e9
        plan_pipeline(x.cfg, 32)  # train.py's rules let it pass


def test_the_margin_is_left_where_a_layout_leaves_it():
    cfg = resolve("llama3.2-1b", None, SMALL_JOB)
    fixed = {"train.micro_batch": 1, "parallel.dp_rep": 1, "parallel.pp": 1, "parallel.cp": 1}
    cfg, hardware = with_values(cfg, fixed), cluster("h100-ib")
    every = search(cfg, target(8, hardware), fixed, 10_000).found
    fastest = every[0]

    # the fastest fits, but by less than the margin
    tight = target(8, replace(hardware, memory=fastest.held.total + 0.5 * fastest.held.margin))
    assert search(cfg, tight, fixed, 1).found == [fastest]
    result, found_for = best_layouts(cfg, tight, fixed, 1)
    (other,) = result.found
    assert found_for.leaves_margin and other.held.total + other.held.margin <= tight.cluster.memory
    assert other == next(one for one in every if one.held.total + one.held.margin <= tight.cluster.memory)

    # one layout fits, and by less than the margin
    smallest = min(every, key=lambda one: one.held.total)
    tightest = target(8, replace(hardware, memory=smallest.held.total))
    result, found_for = best_layouts(cfg, tightest, fixed, 1)
    assert result.found[0].held == smallest.held and not found_for.leaves_margin


@pytest.mark.parametrize("memory", [80e9, 9e9])
def test_two_processes_find_what_one_finds(memory):
    cfg = resolve("llama3.2-1b", None, ["--train.global_batch", "16", "--train.seq_len", "4096"])
    here = target(8, replace(cluster("h100-ib"), memory=memory, node=4))
    fixed = {"parallel.cp": 1}
    one = search(cfg, here, fixed, 5, near=0.02)
    two = search_in_processes(cfg, here, fixed, 5, near=0.02)
    assert [each.cfg for each in two.found] == [each.cfg for each in one.found]
    assert [each.forecast for each in two.found] == [each.forecast for each in one.found]
    assert two.counts["priced"] > 0


def test_a_process_that_ends_without_a_result_is_an_error():
    receiving, sending = multiprocessing.Pipe(duplex=False)
    sending.close()
    with pytest.raises(RuntimeError, match="has ended without a result"):
        receive_result(receiving)


def test_no_schedule_is_priced_twice():
    bound = type("B", (), dict(f=1.0, i=1.0, w=1.0, microbatches=4.0, step=12.0, slowdown=1.0))
    one = {"parallel.pp": 1, "parallel.schedule": "1f1b", "parallel.vpp": None}
    assert step_with_bubble(bound, one, 8) == 12.0
    assert step_with_bubble(bound, one | {"parallel.schedule": "zb-v"}, 8) == math.inf  # as 1f1b at pp 1
    two = one | {"parallel.pp": 2}
    assert step_with_bubble(bound, two, 8) == 12.0 + (2 - 1) * (0.5 + 1.0)
    for more in ({"parallel.vpp": 2}, {"parallel.pp": 16}):
        assert step_with_bubble(bound, two | more, 8) == math.inf

    # a place that is twice as slow leaves the others as they are
    bound.slowdown = 2.0
    assert step_with_bubble(bound, two, 8) == 12.0 + (0.5 + 1.0) / 2
    assert step_with_bubble(bound, two | {"parallel.schedule": "zb-h1"}, 8) == 12.0


@pytest.mark.slow(every=7)
@pytest.mark.parametrize("name", ["llama3-8b", "gpt2-medium", "mixtral-8x7b", "deepseek-v2-lite"])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"parallel.tp": 4},
        {"parallel.tp": 2, "parallel.cp": 2},
        {"parallel.recompute": "full", "train.micro_batch": 4},
        {"parallel.tp": 2, "parallel.recompute": "selective"},
    ],
    ids=str,
)
def test_no_layout_that_fits_is_turned_down_unseen(name, keys):
    """The least bytes that a layout is said to hold are not above those that it holds."""
    cfg = resolve(name, None, ["--train.global_batch", "128", "--train.seq_len", "1024"])
    values = {"parallel.tp": 1, "parallel.cp": 1, "parallel.ep": 1, "train.micro_batch": 1}
    values |= {"parallel.recompute": "none"} | keys
    here = target(16, cluster("h100-ib"))
    bound = make_bound(cfg, values, here)
    for more in (
        {"parallel.pp": 1},
        {"parallel.pp": 4},
        {"parallel.pp": 4, "parallel.schedule": "zb-v"},
        {"parallel.pp": 2, "parallel.zero": 3},
        {"parallel.pp": 2, "parallel.zero": 2, "parallel.schedule": "interleaved", "parallel.vpp": 2},
    ):
        one = with_values(cfg, values | {"parallel.sp": values["parallel.tp"] > 1, "parallel.zero": 1} | more)
        assert least_bytes(one, here, bound) <= sum(held_bytes(make_job(one, 16)[0], here.gpu)), more


def test_gpipe_holds_all_microbatches_and_other_schedules_need_only_a_few_to_show_their_peak():
    cfg = resolve(
        "llama3-8b", None, ["--train.global_batch", "64", "--train.seq_len", "1024", "--parallel.pp", "4"]
    )
    held = {}
    for kind in ("gpipe", "1f1b"):
        job, microbatches = make_job(with_values(cfg, {"parallel.schedule": kind}), 4)
        held[kind] = held_bytes(job, Gpu())
        assert microbatches == 64 // cfg.train.micro_batch
    assert held["gpipe"].activations == pytest.approx(microbatches / 4 * held["1f1b"].activations, rel=0.3)
