"""The table of axes: each row is a key and a degree of the mesh, and is read by all that name a layout."""

from dataclasses import fields

import pytest

from config.axes import AXES, axis_degrees, ranks_of_layout, ranks_of_microbatch
from config.reading import rules
from config.reading.tiny import tiny_config
from config.tree import with_values
from lab.proof import lattice
from lab.proof.verify.cells import words
from lab.proof.verify.overrides import CELL_WORDS
from model.describe import mesh_of_one_stage
from model.sharding import parallel_dims
from parallel.topology.dims import FACTORIZATIONS, GROUP_AXES, ParallelDims, min_world_size
from plan import auto, count

WORLD = 8


def test_a_row_for_each_degree_of_the_mesh():
    degrees = {field.name for field in fields(ParallelDims)} - {"world", "_"}
    assert {axis.dims for axis in AXES} == degrees == set(ParallelDims(1).degrees())
    assert degrees < {axis for axes in FACTORIZATIONS for axis in axes}


@pytest.mark.parametrize("axis", AXES, ids=lambda axis: axis.key)
def test_an_axis_is_known_to_all_that_name_a_layout(axis):
    """A degree of 2 beside cp 2: in the mesh, in names of layouts, and in the header of a run."""
    two = {"cp": 2, axis.key: 2}
    keys = {f"parallel.{key}": degree for key, degree in two.items()} | {"parallel.zero": 1}
    cfg = with_values(tiny_config("mixtral-tiny", WORLD), keys)
    degrees, dims = axis_degrees(cfg.parallel), parallel_dims(cfg, WORLD)
    assert degrees == {other.key: two.get(other.key, 1) for other in AXES}
    assert dims.degrees() == ParallelDims(WORLD).degrees() | {"cp": 2, axis.dims: 2}
    assert mesh_of_one_stage(cfg).dims.size(axis.dims) == (1 if axis.key in ("pp", "dp_rep") else 2)
    assert WORLD // ranks_of_microbatch(degrees) == dims.group_size("dp_replicate", "dp_shard")
    assert WORLD // ranks_of_layout(degrees) == dims.dp_shard

    word = f"{axis.word}2"
    values = lattice.default_switches() | {key: choices[0] for key, choices in lattice.LAYOUT.items()}
    assert {word, f"dp{dims.dp_shard}"} <= set(words(values | degrees, WORLD))
    assert word in auto.layout_text(cfg, WORLD).split()
    assert word in CELL_WORDS[f"parallel.{axis.key}"]
    assert axis.key == "dp_rep" or f"{axis.word} 2 " in count.layout_line(cfg, WORLD)
    assert axis.key == "dp_rep" or word in dims.to_text()


def test_degrees_that_do_not_divide_are_refused():
    cfg = with_values(tiny_config("llama3-tiny", WORLD), {"parallel.tp": 3})
    assert rules.validate(cfg, 6).message == "parallel.tp: 3 does not divide model.mixer.heads=8"
    assert rules.validate(cfg, 8).message == (
        "parallel.tp*pp*cp*dp_rep = 3*1*1*1 = 3 does not divide the world size 8"
    )
    for degrees in ({"tp": 3}, {"pp": 16}, {"ep": 3}, {"tp": 2, "dp_replicate": 4, "etp": 4}):
        with pytest.raises(ValueError, match=r"^8 ranks cannot be pp \d+ x dp_replicate"):
            ParallelDims(WORLD, **degrees)


@pytest.mark.parametrize("degrees", [dict(tp=2, pp=2, cp=2, ep=3, etp=2), dict(dp_replicate=2, ep=3)])
def test_a_rank_has_its_place_in_each_group(degrees):
    dims = ParallelDims(24, **degrees)
    for rank in range(24):
        for axes in GROUP_AXES.values():
            ranks = dims.group(rank, *axes)
            assert ranks in dims.groups(*axes) and len(ranks) == dims.group_size(*axes)
            assert ranks[dims.place(rank, *axes)] == rank
    assert ParallelDims(min_world_size(dims.degrees()), **degrees).dp_shard == 3
