"""Every layout trains like one process: layouts chosen by hand, and some drawn from the lattice.

The whole lattice runs on demand: python -m scripts.verify NAME --world 8 --layouts all. And the proof is
proven: planted bugs (lab/proof/mutate/table.yaml) must be seen; a draw of them here, all of them by python -m
scripts.mutate.
"""

import random

import pytest

from config.reading.tiny import tiny_config
from lab.proof import lattice
from lab.proof.mutate import table
from lab.proof.mutate.checkout import ROOT, copy_checkout
from lab.proof.verify.cells import chosen
from lab.proof.verify.cells import words as to_arguments
from lab.proof.verify.trial import prove

CORE = (
    ("llama3-tiny", 4, "pp2 tp2 sp zero3 zb-v mb2"),
    ("llama3-tiny", 4, "cp2 tp2 sp zero1 mb1 cp-ring docs"),
    ("gpt2-tiny", 4, "pp2 dp2 zero2 interleaved mb1"),
    ("qwen3-tiny", 4, "cp2 tp2 zero3 mb1 cp-ulysses full"),
    ("llama3.2-tiny", 4, "pp2 dp2 zero3 dualpipe-v mb1"),
    ("mistral-tiny", 4, "pp2 cp2 zero0 zb-h1 mb1 cp-ring"),
    ("deepseek-v3-tiny", 4, "pp2 tp2 sp zero2 zb-h1 mb1"),
    ("deepseek-v2-lite-tiny", 4, "cp2 tp2 zero1 mb1 cp-ring docs"),
    ("qwen2-moe-tiny", 4, "cp2 tp2 ep2 etp2 sp zero3 mb1 padded"),
    ("mixtral-tiny", 4, "dp2 tp2 ep4 no-sp zero1 mb1"),
    ("dots1-tiny", 4, "pp2 dp2 ep2 zero2 zb-v mb1"),
    ("qwen3-moe-tiny", 4, "pp2 tp2 etp2 sp zero0 dualpipe-v mb1"),
    ("shared-keys-tiny", 4, "pp2 cp2 zero2 interleaved mb1 cp-ring"),
    ("llama3-tiny", 8, "pp2 rep2 dp2 zero3 1f1b mb1"),
    ("llama3-tiny", 8, "pp2 cp2 tp2 sp zero2 zb-h1 mb2 cp-ring"),
)
IN_CORE = (0, 8)  # of the rest the core has two steps: tests/test_two_steps.py
DRAWN = (
    ("llama3-tiny", 8, 3),
    ("llama3-tiny", 4, 4),
    ("gpt2-tiny", 4, 2),
    ("qwen3-tiny", 4, 2),
    ("mistral-tiny", 4, 2),
    ("llama3.2-tiny", 6, 1),
    ("deepseek-v3-tiny", 4, 2),
    ("mixtral-tiny", 4, 2),
    ("qwen2-moe-tiny", 4, 1),
    ("qwen3-moe-tiny", 4, 1),
    ("olmoe-tiny", 4, 1),
    ("dots1-tiny", 4, 1),
)
PLANTED = 3
SEED = 0


def found(name: str, world: int) -> lattice.Lattice:
    return lattice.find_layouts(tiny_config(name, world), world)


@pytest.mark.slow(core=["-".join(map(str, CORE[at])) for at in IN_CORE])
@pytest.mark.parametrize("name,world,words", CORE)
def test_a_layout_trains_like_one_process(ranks, tmp_path, name, world, words):
    f = found(name, world)
    cell = chosen(f, "1", set(words.split()), 0)[0]
    first, _ = prove(ranks(world), f.config(cell), tmp_path)
    assert not first.is_wrong, f"{to_arguments(cell, world)}: {first}"


@pytest.mark.slow
@pytest.mark.parametrize("name,world,n", DRAWN)
def test_drawn_layouts_train_like_one_process(ranks, tmp_path, name, world, n):
    f = found(name, world)
    for cell in lattice.draw_cells(f, n, SEED):
        first, _ = prove(ranks(world), f.config(cell), tmp_path)
        assert not first.is_wrong, f"{to_arguments(cell, world)}: {first}"


@pytest.fixture(scope="module")
def base():
    with copy_checkout(ROOT) as folder:
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "bug", random.Random(SEED).sample(table.read_table(), PLANTED), ids=lambda bug: bug.fault[:50]
)
def test_a_planted_bug_is_seen(base, bug):
    (mutant,) = table.mutants([bug])
    verdict = table.judge_by_verify(mutant, base)
    assert verdict.stage == "verify", f"verify did not see: {bug.fault}: {verdict.by}"
