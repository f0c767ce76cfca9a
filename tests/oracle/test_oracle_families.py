"""Every family trains as transformers' model does under a training loop written by hand (theirs.py), to a
relative 1e-9.

The core of the tests has one variant of each family (documents apart or not, one or two sequences a
microbatch), in turn; --all has every variant. The table: pytest tests/oracle -q -s
"""

import itertools

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: the reference is made of it")

import compare  # noqa: E402
import families  # noqa: E402

EVERY = (*families.DENSE, *families.MIXTURES, *families.LATENTS, *families.EXPERTS_OF_THEIR_OWN)
FAMILIES = {f.name: f for f in EVERY}
VARIANTS = tuple(itertools.product((False, True), (1, 2)))  # documents apart, sequences a microbatch
def core() -> list[tuple]:
    return [(name, *VARIANTS[(3 * i + 3) % 4]) for i, name in enumerate(FAMILIES)]


def others() -> list:
    every = [(name, *variant) for name in FAMILIES for variant in VARIANTS]
    return [pytest.param(*case, marks=pytest.mark.slow) for case in every if case not in core()]


@pytest.mark.parametrize("name,docs,micro", [*core(), *others()])
def test_a_family_trains_as_the_model_of_transformers(place, note, name, docs, micro):
    family = families.variant(FAMILIES[name], docs, micro)
    row, run, *_ = compare.prove(*place, family)
    compare.check_first(run.first, families.STD, family.config.get("num_hidden_layers", 2))
    note(row)
