"""What the planner makes of NVFP4: torch's products on a chip that has them, if the run asks for them.

Elsewhere products in 16 bits, and one line says so.
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
    "--train.dtype fp8 --train.fp8 nvfp4 --train.fp8_keep 0 --train.seq_len 64 --model.layers 1 "
    "--model.hidden 64 --model.mlp.width 64 --model.mixer.heads 4 --model.mixer.kv_heads 2"
).split()
NO_CHIP = "nvfp4: NVIDIA H100 80GB HBM3 has no products of it (sm_100 or newer has)"
UNPROVEN = "nvfp4: the chip's own products, which no GPU has confirmed, are part of train.unproven"


@pytest.mark.parametrize("chip, unproven, kernel, said", [
    ("h100", False, "aten.mm", NO_CHIP),
    ("b200", False, "aten.mm", UNPROVEN),
    ("h100", True, "aten.mm", NO_CHIP),
    ("b200", True, "aten._scaled_mm", None),
])
def test_products(chip, unproven, kernel, said, capfd):
    cfg = resolve("llama3-tiny", None, [*SIZE, *WORDS, "--train.unproven", str(unproven).lower()])
    record = record_role(cfg, parallel_dims(cfg, 1), 0, CHIPS[chip], make_program(cfg))
    facts = Facts(10.0)
    found = [launch for launch in record.launches if "nvfp4" in launch.file and launch.kernel == kernel]
    assert len(found) % 12 == 0 and found  # four linears with three products each
    assert {judge(launch, facts).part for launch in found} == {"products"}
    assert all(bool(get_amount(launch, facts).products8) == (said is None) for launch in found)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("nvfp4")]
    assert len(lines) == (said is not None) and all(line.startswith(said) for line in lines)
