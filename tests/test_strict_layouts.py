"""Nothing is used before it has arrived: whole runs of layouts that start every exchange, in strict mode.

gloo forgives what NCCL does not (parallel/wire/strict.py). In the core of the tests, tests/test_two_steps.py
looks for it in the steps, and in a save after one.
"""

import pytest

from config.reading.tiny import tiny_config
from lab.proof import lattice
from lab.proof.verify.cells import chosen
from lab.proof.verify.cells import words as to_arguments
from lab.proof.verify.trial import prove

STRICT = (
    ("llama3-tiny", 4, "pp2 tp2 sp zero3 zb-v mb2"),
    ("llama3-tiny", 4, "cp2 tp2 sp zero1 mb1 cp-ring offload"),
    ("mixtral-tiny", 4, "dp2 tp2 ep4 zero1 mb1"),
    ("deepseek-v3-tiny", 4, "pp2 tp2 ep2 sp zero2 mb1"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name,world,words", STRICT)
def test_nothing_is_used_before_it_has_arrived(ranks, tmp_path, name, world, words):
    found = lattice.find_layouts(tiny_config(name, world), world)
    cell = chosen(found, "1", set(words.split()), 0)[0]
    first, _ = prove(ranks(world), found.config(cell), tmp_path, is_strict=True)
    assert not first.is_wrong, f"{to_arguments(cell, world)}: {first}"
