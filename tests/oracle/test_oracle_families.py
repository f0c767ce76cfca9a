"""Every family trains as transformers' model does under a training loop written by hand (theirs.py), to a
relative 1e-9.

The core of the tests has some variants (documents apart or not, one or two sequences a microbatch), --all has
every variant of every family. The table: pytest tests/oracle -q -s
"""

import itertools

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: the reference is made of it")

import compare  # noqa: E402
import families  # noqa: E402

FAMILIES = {f.name: f for f in (*families.DENSE, *families.MIXTURES, *families.LATENTS)}
VARIANTS = tuple(itertools.product((False, True), (1, 2)))  # documents apart, sequences a microbatch
THOROUGH = (
    "llama2",
    "mistral",
    "mixtral",
    "deepseek-v3",
)  # one dense, one with a window, one mixture, one with latent attention


def core() -> list[tuple]:
    """Documents apart, one and two sequences a microbatch, of four families; a variant of every other one, in
    turn.
    """
    every = [(name, *variant) for name in THOROUGH for variant in VARIANTS if variant[0]]
    rest = [name for name in FAMILIES if name not in THOROUGH]
    return every + [(name, *VARIANTS[(3 * i + 3) % 4]) for i, name in enumerate(rest)]


def others() -> list:
    every = [(name, *variant) for name in FAMILIES for variant in VARIANTS]
    return [pytest.param(*case, marks=pytest.mark.slow) for case in every if case not in core()]


@pytest.mark.parametrize("name,docs,micro", [*core(), *others()])
def test_family(place, note, name, docs, micro):
    family = families.variant(FAMILIES[name], docs, micro)
    row, run, *_ = compare.prove(*place, family)
    compare.check_first(run.first, families.STD, family.config.get("num_hidden_layers", 2))
    note(row)
