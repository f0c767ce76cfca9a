"""Groups of layouts that a forecast cannot tell apart, and how two layouts differ."""
from dataclasses import replace

import pytest

from config.reading import resolve
from config.tree import with_values
from plan.cost import Forecast, cluster
from plan.efficiency import get_efficiency
from plan.near_ties import NEAR, difference, near_groups
from plan.search import (
    LAYOUT_KEYS,
    Best,
    Candidate,
    MemoryUse,
    PricedLayout,
    Target,
    compute_axes,
    layout_axes,
    search,
)

CFG = resolve("llama3-8b", None, [])
GIB = 2**30


def found(step: float, *, nbytes: int = 0, exposed: dict[str, float] | None = None, **keys) -> PricedLayout:
    """A layout with keys of parallel. Its step is compute, but for what is exposed."""
    cfg = with_values(CFG, {f"parallel.{key}": value for key, value in keys.items()})
    waits = exposed or {}
    forecast = Forecast(step, compute=step - sum(waits.values()), exposed=waits)
    return PricedLayout(cfg, 8, forecast, MemoryUse(nbytes, 0, 0, 0))


def test_a_group_begins_with_a_fastest_and_reaches_as_far_as_the_error():
    """A chain of near ties is not one group: the last of it is not near the first."""
    steps = [1.0, 1.0 + 0.9 * NEAR, 1.0 + 1.8 * NEAR, 1.0 + 2.7 * NEAR]
    groups = near_groups([found(step) for step in reversed(steps)])
    assert [[one.forecast.step for one in group] for group in groups] == [steps[:2], steps[2:]]


def test_in_a_group_fewer_kinds_then_the_lower_zero_then_the_faster():
    layouts = [
        found(1.0, tp=2, zero=1),
        found(1.001, zero=3),
        found(1.012, zero=1, nbytes=1),
        found(1.004, zero=1, nbytes=2),
    ]
    (group,) = near_groups(layouts)
    assert [one.forecast.step for one in group] == [1.004, 1.012, 1.001, 1.0]
    layouts.append(found(0.97, pp=8, tp=8))  # faster beyond the error: before all that is simpler
    assert near_groups(layouts)[0][0].forecast.step == 0.97


def test_a_difference_names_keys_milliseconds_and_bytes():
    first = found(2.0, tp=1, zero=1)
    other = found(2.5, tp=8, zero=1, exposed={"tp": 0.7, "data": 0.0001}, nbytes=3 * GIB)
    told = difference(other, first)
    assert told.keys == {"parallel.tp": (8, 1)} and told.memory == 3 * GIB
    assert sum(told.parts.values()) == pytest.approx(told.seconds) == pytest.approx(0.5)
    assert list(told.parts)[:2] == ["exposed tp", "compute"]
    words = "parallel.tp 8 (first: 1) · 500 ms slower: exposed tp +700, compute -200 · 3.0 GiB more"
    assert str(told) == words
    back = str(difference(first, other))
    assert "500 ms faster: exposed tp -700, compute +200 · 3.0 GiB less" in back


def test_equal_times_are_said_to_be_equal():
    told = difference(found(2.0001, zero=2), found(2.0, zero=1))
    assert str(told) == "parallel.zero 2 (first: 1) · as fast · 0.0 GiB less"


def test_a_layout_that_was_passed_over_for_a_near_tie_is_taken_once_it_is_not_near():
    best = Best(1, near=0.02)
    best.add(found(1.0, tp=2, cp=2, pp=2))
    best.add(found(1.015))  # as fast, and the simplest
    candidate = Candidate(found(1.0, tp=2).cfg, None, least=1.005)
    assert not best.could_take(candidate)

    best.add(found(0.99, tp=2, cp=2, pp=2))
    assert best.pop_passed_over() == [candidate] and best.could_take(candidate)
    assert best.pop_passed_over() == []


SMALL = resolve("qwen3-0.6b", None, ["--train.global_batch", "64", "--train.seq_len", "4096"])
NODE = cluster("h100-ib")


def test_the_keys_of_a_layout_are_those_that_are_searched():
    axes = compute_axes(SMALL, 8, NODE) | layout_axes(SMALL, 8)
    assert {*axes, "parallel.sp", "parallel.ep_chunks"} == set(LAYOUT_KEYS)


@pytest.mark.parametrize("memory", [14e9, 80e9])  # the fastest layout is not the simplest; it is
def test_the_first_does_not_depend_on_how_many_are_asked_for(memory):
    """Only near ties that could come first are looked at."""
    fixed = {"parallel.cp": 1, "train.micro_batch": 2}
    cfg, target = with_values(SMALL, fixed), Target(4, replace(NODE, memory=memory), get_efficiency(NODE))
    few, all_of_them = (search(cfg, target, fixed, top, near=NEAR) for top in (1, 10_000))
    assert few.counts["priced"] < all_of_them.counts["priced"]
    assert near_groups(few.found)[0][0].cfg == near_groups(all_of_them.found)[0][0].cfg
