"""Every family trains as transformers' model does under a training loop written by hand (theirs.py), to a
relative 1e-9.

A fixed core of variants (documents apart or not, one or two sequences a microbatch) and a draw of the others
that differs from commit to commit. ORACLE=all in the environment runs every variant of every family. The
table: pytest tests/oracle -q -s
"""

import itertools
import os
import random

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: the reference is made of it")

import compare  # noqa: E402
import families  # noqa: E402
from draw import commit_seed  # noqa: E402

FAMILIES = {f.name: f for f in (*families.DENSE, *families.MIXTURES, *families.LATENTS)}
VARIANTS = tuple(itertools.product((False, True), (1, 2)))  # documents apart, sequences a microbatch
THOROUGH = (
    "llama2",
    "mistral",
    "mixtral",
    "deepseek-v3",
)  # one dense, one with a window, one mixture, one with latent attention
DRAWN = 2


def core() -> list[tuple]:
    """Documents apart, one and two sequences a microbatch, of four families; a variant of every other one, in
    turn.
    """
    every = [(name, *variant) for name in THOROUGH for variant in VARIANTS if variant[0]]
    others = [name for name in FAMILIES if name not in THOROUGH]
    return every + [(name, *VARIANTS[(3 * i + 3) % 4]) for i, name in enumerate(others)]


def drawn() -> list[tuple]:
    rest = [(name, *variant) for name in FAMILIES for variant in VARIANTS if (name, *variant) not in core()]
    if os.environ.get("ORACLE") == "all":
        return rest
    return random.Random(commit_seed()).sample(rest, DRAWN)


@pytest.mark.parametrize("name,docs,micro", [*core(), *drawn()])
def test_family(place, note, name, docs, micro):
    family = families.variant(FAMILIES[name], docs, micro)
    row, run, *_ = compare.prove(*place, family)
    compare.check_first(run.first, families.STD, family.config.get("num_hidden_layers", 2))
    note(row)
