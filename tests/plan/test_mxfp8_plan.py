"""What the planner makes of MXFP8: torch's products on a chip that has them, if the run asks for them.

Elsewhere those of our kernel, at a rate that is no faster than products in 16 bits.
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
    "--train.dtype fp8 --train.fp8 mxfp8 --train.fp8_keep 0 --train.seq_len 64 --model.layers 1 "
    "--model.hidden 64 --model.mlp.width 64 --model.mixer.heads 4 --model.mixer.kv_heads 2"
).split()


@pytest.mark.parametrize("chip, unproven, kernel, rate", [
    ("h100", False, "fp8_gemm.scaled_kernel", "own fp8, every 32"),
    ("b200", False, "fp8_gemm.scaled_kernel", "own fp8, every 32"),
    ("h100", True, "fp8_gemm.scaled_kernel", "own fp8, every 32"),
    ("b200", True, "aten._scaled_mm", "library fp8"),
])
def test_products(chip, unproven, kernel, rate):
    cfg = resolve("llama3-tiny", None, [*SIZE, *WORDS, "--train.unproven", str(unproven).lower()])
    record = record_role(cfg, parallel_dims(cfg, 1), 0, CHIPS[chip], make_program(cfg))
    facts = Facts(10.0)
    found = [launch for launch in record.launches if "fp8" in (judge(launch, facts).rate or "")]
    assert len(found) % 12 == 0 and found  # four linears with three products each
    assert {(launch.kernel, judge(launch, facts).rate) for launch in found} == {(kernel, rate)}
    assert {judge(launch, facts).part for launch in found} == {"products", "weight gradients"}
    assert all(bool(get_amount(launch, facts).products8) == (rate == "library fp8") for launch in found)
