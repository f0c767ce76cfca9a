"""Products in fp8: the Triton kernel beside the definition, and what is lost against fp32."""

import pytest
import torch

from kernels import fp8_gemm
from kernels.fp8 import E4M3, E5M2
from kernels.fp8_gemm import quantize_operand, scaled_product, write_scaled_product

SMALL = {"M": 16, "N": 32, "GROUP": 2}
PAIRS = [("group", "block"), ("group", "group"), ("row", "row"), ("tensor", "tensor")]


def operands(m, n, k, kinds, dtype=E4M3, side=32, device="cpu"):
    a, b = (
        torch.randn(m, k, device=device) * torch.logspace(-2, 2, m, device=device)[:, None],
        torch.randn(n, k, device=device),
    )
    return (a, b), (quantize_operand(a, kinds[0], dtype, side), quantize_operand(b, kinds[1], E4M3, side))


@pytest.mark.parametrize("kinds", PAIRS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("m, n, k", [(37, 80, 96), (16, 32, 32), (5, 96, 112)])
def test_triton_product(interpreted, monkeypatch, kinds, dtype, m, n, k):
    """The kernel sums the same products: in another order, so within fp32's error."""
    if interpreted.type == "cpu":
        monkeypatch.setattr(fp8_gemm, "TILE", SMALL)
        monkeypatch.setattr(fp8_gemm, "EACH", {**SMALL, "N": 16})
        monkeypatch.setattr(fp8_gemm, "STEP", 16)
        monkeypatch.setattr(fp8_gemm, "EXACT", 32)
    _, (a, b) = operands(m, n, k, kinds, dtype, device=interpreted)
    assert fp8_gemm.triton_fits(a, b)
    want = a.dequantized().double() @ b.dequantized().double().t()
    got = fp8_gemm.launch_scaled_product(a, b, torch.empty(m, n, device=interpreted), False)
    assert (got - want).norm() <= 1e-6 * want.norm()
    into = torch.ones(m, n, device=interpreted)
    assert (
        write_scaled_product(into, a, b, torch.bfloat16, True) is into
        and (into - 1 - want).norm() <= 1e-6 * want.norm()
    )
    into.fill_(float("nan"))
    assert torch.equal(write_scaled_product(into, a, b, torch.bfloat16, False), got)
    low = fp8_gemm.launch_scaled_product(
        a, b, torch.empty(m, n, device=interpreted, dtype=torch.bfloat16), False
    )
    assert torch.equal(low, got.bfloat16())


def test_one_scale_a_tile_of_rows(interpreted, monkeypatch):
    """128 rows of a weight block are one tile's: the kernel then loads one number for them."""
    monkeypatch.setattr(
        fp8_gemm, "TILE", {"M": 16, "N": 32, "GROUP": 2} if interpreted.type == "cpu" else fp8_gemm.TILE
    )
    _, (a, b) = operands(
        20, 70, 64, ("group", "block"), side=32 if interpreted.type == "cpu" else 128, device=interpreted
    )
    want = a.dequantized() @ b.dequantized().t()
    assert (
        fp8_gemm.launch_scaled_product(a, b, torch.empty_like(want), False) - want
    ).norm() <= 1e-6 * want.norm()


@pytest.mark.parametrize(
    "kinds, bound", [(("group", "block"), 0.04), (("row", "row"), 0.04), (("tensor", "tensor"), 0.05)]
)
def test_definition_is_near_the_exact_product(kinds, bound):
    (x, w), (a, b) = operands(64, 48, 128, kinds)
    want = x @ w.t()
    assert (scaled_product(a, b, torch.float32) - want).norm() <= bound * want.norm()
    product = scaled_product(a, b, torch.float32)
    into = torch.full((64, 48), float("nan"))
    assert torch.equal(write_scaled_product(into, a, b, torch.bfloat16, False), product)
    assert torch.equal(write_scaled_product(into, a, b, torch.bfloat16, True), 2 * product)
    assert write_scaled_product(None, a, b, torch.bfloat16, False).dtype == torch.bfloat16


def test_blocks_too_small_for_a_tensor_core_take_the_other_way(interpreted, capfd):
    (x, w), (a, b) = operands(16, 16, 32, ("group", "block"), side=16, device=interpreted)
    torch.testing.assert_close(scaled_product(a, b, torch.float32), a.dequantized() @ b.dequantized().t())
    assert "below the 32" in capfd.readouterr().err


@pytest.mark.parametrize("kinds", [("tensor", "tensor"), ("row", "row")])
def test_the_library_takes_what_it_is_given(kinds):
    """torch._scaled_mm has a CPU twin: the same layouts of operands and scales that a GPU gets."""
    _, (a, b) = operands(32, 48, 64, kinds)
    try:
        got = torch._scaled_mm(a.q, b.q.t(), scale_a=a.scale, scale_b=b.scale.t(), out_dtype=torch.bfloat16)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"this torch has none for the CPU: {error}")
    want = a.dequantized() @ b.dequantized().t()
    assert (got.float() - want).norm() <= 5e-3 * want.norm()
