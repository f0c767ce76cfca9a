"""The lattice: every layout that the rules let pass, and cells that meet every legal pair of values."""

import itertools
import random

import pytest

from config.reading.tiny import tiny_config
from lab.proof import lattice


def found(world, name="llama3-tiny"):
    return lattice.find_layouts(tiny_config(name, world), world)


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("world, seed", [(1, 0), (1, 1), (2, 2), (2, 3), (3, 4)])
def test_cover_meets_every_layout_and_every_legal_pair(world, seed, monkeypatch):
    """With some of the switches: all cells with all of them are too many to enumerate."""
    some = random.Random(seed).sample(sorted(lattice.SWITCHES), 4)
    switches = {key: values if key in some else values[:1] for key, values in lattice.SWITCHES.items()}
    monkeypatch.setattr(lattice, "SWITCHES", switches)
    f = found(world)
    every, cells = list(lattice.all_cells(f)), lattice.covering_cells(f)
    assert all(f.is_legal(c) for c in cells) and len(cells) <= 3 * len(f.layouts) + 50
    axes = [k for k in cells[0] if k not in lattice.SWITCHES]
    assert {tuple(c[k] for k in axes) for c in cells} == {tuple(c[k] for k in axes) for c in every}
    met, legal = (set().union(*map(lattice.pairs_with_switches, some)) for some in (cells, every))
    assert met == legal


def test_a_walk_meets_every_choice_once(monkeypatch):
    monkeypatch.setattr(lattice, "SWITCHES", {"a": (1, 2, 3), "b": (1, 2), "c": (1, 2, 3, 4)})
    walks = [list(lattice.switches(random.Random(seed))) for seed in range(5)]
    assert all(len(walk) == len({str(v) for v in walk}) == 24 for walk in walks) and walks[0] != walks[1]
    monkeypatch.setattr(lattice, "SWITCHES", {"a": (1,)})
    assert list(lattice.switches(random.Random(0))) == [{"a": 1}]


def test_nothing_legal_is_left_out():
    """An independent count: every value of every axis at world 4, straight through the rules."""
    f = found(4)
    axes = {key: (1, 2, 4) for key in lattice.DEGREES} | lattice.LAYOUT
    some = [dict(zip(axes, v)) for v in itertools.product(*axes.values())][::7]
    first = {key: values[0] for key, values in lattice.SWITCHES.items()}
    assert [
        v for v in some if 4 % (v["tp"] * v["pp"] * v["cp"] * v["dp_rep"]) == 0 and f.is_legal(v | first)
    ] == [v for v in some if v in f.layouts]
    assert f.layouts and f.refused


def test_a_branch_that_begins_a_ramp_reads_what_its_phases_leave():
    """train.py refuses it where a later length follows and spans are longer than sequences."""
    f = found(1)
    first = {key: values[0] for key, values in lattice.SWITCHES.items()}
    whole = {**f.layouts[0], **first, "start": "branch", "phases": "phases", "ramp": True}
    assert f.is_legal(whole)
    assert not f.is_legal({**whole, "source": "raw"})
    assert f.is_legal({**whole, "source": "raw", "ramp": False})
    assert f.is_legal({**whole, "source": "raw", "phases": None})


def test_draws_repeat_by_seed_and_differ_between_seeds():
    f = found(4)
    assert lattice.draw_cells(f, 9, 1) == lattice.draw_cells(f, 9, 1) != lattice.draw_cells(f, 9, 2)
    assert len({str(c) for c in lattice.draw_cells(f, 40, 0)}) == 40
