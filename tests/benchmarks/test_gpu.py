"""The GPU's bench runs: every case of it through the interpreter, at a size that it can bear."""

import pytest
import torch

from benchmarks.gpu import table_row
from benchmarks.gpu_case import Size
from benchmarks.gpu_memory import memory_cases
from benchmarks.gpu_products import product_cases
from kernels import fp8_grouped, grouped_gemm, linear, newton_schulz, triton_

TINY = Size(
    batch=1,
    seq=32,
    hidden=64,
    ffn=32,
    heads=2,
    kv=1,
    vocab=96,
    rows=4,
    experts=4,
    top_k=2,
    expert_ffn=16,
    params=100,
)


@pytest.mark.skipif(not triton_.TRITON_AVAILABLE, reason="no Triton for this platform")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the bench itself runs here")
def test_every_case_runs(monkeypatch):
    monkeypatch.setattr(triton_, "DEVICES", ("cpu",))
    for module, names in ((linear, ("TILE",)), (grouped_gemm, ("TILE", "WGRAD"))):
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name) | {"M": 16, "N": 16, "K": 16})
    for name in ("TILE", "EXACT", "EACH"):
        monkeypatch.setattr(fp8_grouped, name, getattr(fp8_grouped, name) | {"M": 16, "N": 16})
    monkeypatch.setattr(newton_schulz, "TILE", newton_schulz.TILE | {"M": 32, "K": 16})
    cpu = torch.device("cpu")
    cases = memory_cases(TINY, cpu, torch.bfloat16) | product_cases(TINY, cpu, torch.bfloat16)
    assert len(cases) > 20
    for name, case in cases.items():
        case.ours()  # an error here is an error
        assert case.work > 0 and table_row(name, case, cpu, 1.0)["kernel"] == name
