"""Where a kernel does not run on a device that has kernels, a line says so and what it costs: of each kernel.

A line that is missing here is a run that is slower, or rounds more, without a word.
"""

import pathlib
import re
from dataclasses import replace

import pytest
import torch

from build import check_device
from config import ConfigError, TrainConfig
from config.reading import defaults
from kernels import (
    adam,
    cross_entropy,
    embedding,
    fp8,
    fp8_gemm,
    grouped_gemm,
    linear,
    norm,
    partial_attention,
    permute,
    rope,
    router,
    swiglu,
    triton_,
)
from kernels.unproven import head_norm, latent_heads

INSTEAD = "; the slower torch reference runs instead"
F64 = torch.float64


def filled(*shape, dtype=F64):
    return torch.full(shape, 0.5, dtype=dtype)


def call_adam(dtype=F64):
    state = [filled(8, dtype=dtype) for _ in range(4)]
    adam.adamw(*state, adam.AdamWStep(0.1, 0.9, 0.9, 1e-8, 0.0, 1, torch.ones(()), torch.tensor(True)))


def call_cross_entropy():
    targets = torch.zeros(4, dtype=torch.int64)
    cross_entropy.linear_cross_entropy(filled(4, 8), filled(16, 8), targets, 1.0, 16)


def call_permute():
    slots = torch.arange(8).view(4, 2)
    permute.permute(filled(4, 8), torch.arange(8) // 2, slots)
    permute.unpermute(filled(8, 8), torch.arange(8) // 2, slots)


def call_rope():
    table = filled(1, 4, 1, 4)
    rope.apply_rope(filled(1, 4, 2, 8), table, table)


def call_head_norm():
    table = filled(1, 4, 1, 4)
    head_norm.split_normalize_and_rotate(
        filled(1, 4, 4, 8), filled(8), filled(8), table, table, heads=2, kv=1, eps=1e-5)


def call_latent_heads():
    table = filled(1, 4, 1, 2)
    latent_heads.rotate_heads(filled(1, 4, 2, 12), table, table, nope_dim=8, pairs=True)
    latent_heads.keys_and_values(
        filled(1, 4, 2, 14), filled(1, 4, 4), (table, table), nope_dim=8, pairs=True)


def call_router():
    counted = torch.ones(1, 4, dtype=torch.bool)
    choice = router.choose_experts(filled(1, 4, 8), router.RoutingRule(top_k=2), counted=counted)
    router.router_statistics(choice.sums, torch.ones(()), aux_loss=0.0, z_loss=0.0)


def call_fp8_gemm():
    a = fp8_gemm.quantize_operand(filled(16, 16), "tensor", fp8.E4M3, 16)
    fp8_gemm.scaled_product(a, a, torch.bfloat16)


BF16 = torch.bfloat16
IDS = torch.zeros(4, dtype=torch.int64)
LONG = norm.MAX_ROW + 1  # elements of a row that is too long for the registers of a program
CASES = {  # what the line begins with: (a call that the kernel does not take, the rest of the line)
    "norm": (lambda: norm.rms_norm(filled(2, 8), filled(8), 1e-5), "no kernel for float64"),
    "norm ": (
        lambda: norm.rms_norm(filled(1, LONG, dtype=BF16), filled(LONG, dtype=BF16), 1e-5),
        f"rows of {LONG} are longer than {norm.MAX_ROW}",
    ),
    "cross entropy": (call_cross_entropy, "no kernel for float64"),
    "AdamW": (call_adam, "no kernel for float64"),
    "rope": (call_rope, "no kernel for float64"),
    "head norm": (call_head_norm, "no kernel for float64"),
    "latent heads": (call_latent_heads, "no kernel for float64"),
    "swiglu": (lambda: swiglu.swiglu(filled(2, 8)), "no kernel for float64"),
    "swiglu ": (lambda: swiglu.weighted_swiglu(filled(2, 8), filled(2)), "no kernel for float64"),
    "gelu": (lambda: swiglu.gelu(filled(2, 8)), "no kernel for float64"),
    "permute": (call_permute, "no kernel for float64"),
    "unpermute": (call_permute, "no kernel for float64"),
    "embedding gradient": (
        lambda: embedding.add_rows(filled(9, 8), IDS, filled(4, 8), (9, 8)),
        "no kernel for float64",
    ),
    "embedding gradient ": (
        lambda: embedding.add_rows(filled(8, 9, dtype=BF16).t(), IDS, filled(4, 8, dtype=BF16), (9, 8)),
        "a gradient that is not contiguous",
    ),
    "weight gradient": (
        lambda: linear.write_wgrad(
            filled(3, 8, dtype=torch.float32),
            filled(4, 3, dtype=BF16),
            filled(4, 8, dtype=BF16),
            add=True,
        ),
        "rows that are not aligned to 16 bytes",
    ),
    "grouped GEMM": (
        lambda: grouped_gemm.grouped_linear(filled(4, 8), filled(2 * 8, 8), [2, 2]), "no kernel for float64"),
    "grouped GEMM ": (
        lambda: grouped_gemm.grouped_linear(filled(4, 7, dtype=BF16), filled(2 * 8, 7, dtype=BF16), [2, 2]),
        "rows that are not aligned to 16 bytes",
    ),
    "attention": (
        lambda: partial_attention.attention_part(
            filled(1, 4, 2, 8), filled(1, 4, 2, 8), filled(1, 4, 2, 8), None),
        "no kernel for float64",
    ),
    "router": (call_router, "no kernel for float64"),
    "router statistics": (call_router, "no kernel for float64"),
    "fp8 quantization": (
        lambda: fp8.quantize(filled(16, 16), "tensor", fp8.E4M3, 16),
        "no kernel for float64",
    ),
    "fp8 GEMM": (call_fp8_gemm, "no kernel for float64"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_that_cannot_run_says_so_once(interpreted, capfd, name):
    call, why = CASES[name]
    for _ in range(2):
        call()
    said = capfd.readouterr().err.splitlines()
    assert said.count(f"{name.strip()}: {why}{INSTEAD}") == 1, said


def test_every_kernel_is_in_the_table():
    named = set()
    for path in pathlib.Path(triton_.__file__).parent.rglob("*.py"):
        named |= set(re.findall(r'kernel_is_available\(\s*"([^"]+)"', path.read_text()))
    assert named == {name.strip() for name in CASES} and len(named) > 12


# ---- a GPU without any of our kernels ----------------------------------------------------------------------


@pytest.fixture
def on_a_gpu(interpreted, monkeypatch):
    """The interpreter's device is asked as a GPU is."""
    triton_.why_no_kernels.cache_clear()
    yield
    triton_.why_no_kernels.cache_clear()


def said_by_a_step(capfd) -> list[str]:
    """The lines of a step that calls three kernels."""
    x = filled(2, 8, dtype=torch.float32)
    norm.rms_norm(x, filled(8, dtype=torch.float32), 1e-5)
    swiglu.swiglu(x)
    call_adam(torch.float32)
    return capfd.readouterr().err.splitlines()


@pytest.mark.parametrize("system, says", [
    ("rocm", "torch is built for ROCm 6.4, where our kernels are untested"),
    ("no triton", "Triton is not installed (pip install triton)"),
])
def test_a_gpu_where_no_kernel_runs_is_told_so_in_one_line(on_a_gpu, monkeypatch, capfd, system, says):
    if system == "rocm":
        monkeypatch.setattr(torch.version, "hip", "6.4")
    else:
        monkeypatch.setattr(triton_, "TRITON_AVAILABLE", False)
    (line,) = said_by_a_step(capfd)
    assert line.startswith(f"kernels: {says}; plain torch operations run instead")


def test_a_chip_that_is_too_old_is_named(on_a_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    for capability, obstacle in (((7, 5), "Tesla T4 is older"), ((8, 0), None), ((12, 0), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        triton_.why_no_kernels.cache_clear()
        why = triton_.why_no_kernels(torch.device("cuda", 0))
        assert why is None if obstacle is None else why.startswith(obstacle)


def test_rocm_loads_no_triton(monkeypatch):
    """Its capabilities, (9, 4) of an MI300X, look like Hopper's: the tables must not be asked."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert triton_.load()[3] is triton_.StandInKernel
    monkeypatch.setattr(torch.version, "hip", None)
    assert (triton_.load()[2] is not None) == triton_.TRITON_AVAILABLE


def test_fp8_is_refused_under_rocm(monkeypatch):
    """Its capability is above NVIDIA's (8, 9), and its fp8 has other formats."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    cfg = replace(defaults(), train=TrainConfig(dtype="fp8"))
    check_device(cfg, gpu)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(ConfigError, match="use bf16"):
        check_device(cfg, gpu)
