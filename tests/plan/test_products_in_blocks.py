"""What the planner makes of products in blocks: torch's on a chip that has them, if the run asks for them.

Elsewhere those of MXFP8 are our kernel's, at a rate that is no faster than products in 16 bits; those of
NVFP4 are in 16 bits, and one line says so.
"""

import pytest
from tiny_records import SIZE

from config.reading import resolve
from model.sharding import parallel_dims
from plan.record.launches import CHIPS
from plan.record.part import get_amount
from plan.record.role import record_role
from plan.record.work import Facts, judge
from scripts.dry_run import make_program

WORDS = (
    "--train.dtype fp8 --train.fp8_keep 0 --train.seq_len 64 --model.layers 1 "
    "--model.hidden 64 --model.mlp.width 64 --model.mixer.heads 4 --model.mixer.kv_heads 2"
).split()
FACTS = Facts(10.0)
NO_CHIP = "nvfp4: NVIDIA H100 80GB HBM3 has no products of it (sm_100 or newer has)"
UNPROVEN = "nvfp4: the chip's own products, which no GPU has confirmed, are part of train.unproven"


def launches_of_run(recipe, chip, unproven):
    """[(a launch, what it is judged to be)] of a block whose four linears have three products each."""
    words = ["--train.fp8", recipe, "--train.unproven", str(unproven).lower()]
    cfg = resolve("llama3-tiny", None, [*SIZE, *WORDS, *words])
    record = record_role(cfg, parallel_dims(cfg, 1), 0, CHIPS[chip], make_program(cfg))
    return [(launch, judge(launch, FACTS)) for launch in record.launches]


@pytest.mark.parametrize("chip, unproven, kernel, rate", [
    ("h100", False, "fp8_gemm.scaled_kernel", "own fp8, every 32"),
    ("b200", False, "fp8_gemm.scaled_kernel", "own fp8, every 32"),
    ("h100", True, "fp8_gemm.scaled_kernel", "own fp8, every 32"),
    ("b200", True, "aten._scaled_mm", "library fp8"),
])
def test_products_of_mxfp8(chip, unproven, kernel, rate):
    found = [(launch, work) for launch, work in launches_of_run("mxfp8", chip, unproven)
             if "fp8" in (work.rate or "")]
    assert len(found) % 12 == 0 and found
    assert {(launch.kernel, work.rate) for launch, work in found} == {(kernel, rate)}
    assert {work.part for _, work in found} == {"products", "weight gradients"}
    assert all(bool(get_amount(launch, FACTS).products8) == (rate == "library fp8") for launch, _ in found)


@pytest.mark.parametrize("chip, unproven, kernel, said", [
    ("h100", False, "aten.mm", NO_CHIP),
    ("b200", False, "aten.mm", UNPROVEN),
    ("h100", True, "aten.mm", NO_CHIP),
    ("b200", True, "aten._scaled_mm", None),
])
def test_products_of_nvfp4(chip, unproven, kernel, said, capfd):
    found = [(launch, work) for launch, work in launches_of_run("nvfp4", chip, unproven)
             if "nvfp4" in launch.file and launch.kernel == kernel]
    assert len(found) % 12 == 0 and found
    assert {work.part for _, work in found} == {"products"}
    assert all(bool(get_amount(launch, FACTS).products8) == (said is None) for launch, _ in found)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("nvfp4")]
    assert len(lines) == (said is not None) and all(line.startswith(said) for line in lines)
