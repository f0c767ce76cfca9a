"""Products in fp8: the Triton kernel beside the definition, and what is lost against fp32."""

import pytest
import torch
from training import BF16, START, bound

from kernels import fp8_gemm
from kernels.fp8 import BLOCK_SIDE, E4M3, E5M2, GROUP_KINDS, MX_SIDE
from kernels.fp8_gemm import quantize_operand, scaled_product, write_scaled_product

PAIRS = [("group", "block"), ("group", "group"), ("mx", "mx"), ("row", "row"), ("tensor", "tensor")]


def operands(m, n, k, kinds, dtype=E4M3, side=32, device="cpu"):
    a, b = (
        torch.randn(m, k, device=device) * torch.logspace(-2, 2, m, device=device)[:, None],
        torch.randn(n, k, device=device),
    )
    return (a, b), (quantize_operand(a, kinds[0], dtype, side), quantize_operand(b, kinds[1], E4M3, side))


@pytest.mark.slow
@pytest.mark.parametrize("kinds", PAIRS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("m, n, k", [(37, 80, 96), (16, 32, 32), (5, 96, 112)])
def test_triton_product(interpreted, small_products, monkeypatch, kinds, dtype, m, n, k):
    """The kernel sums the same products: in another order, so within fp32's error."""
    if interpreted.type == "cpu":
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


def sum_bound(a):
    """Sums of products of 8-bit numbers keep 14 bits on Hopper (arXiv 2412.19437, 3.3.2): each step of 32
    columns that the tensor cores sum before fp32 does may cut 2^-13.
    """
    columns = a.q.shape[1]
    if a.kind in GROUP_KINDS:
        step = a.side
    else:
        step = columns if fp8_gemm.takes_fast_accumulation(a) else fp8_gemm.EXACT
    return min(columns, step) / 32 * 2.0**-13


@pytest.mark.slow(every=4)
@pytest.mark.gpu("fp8_gemm.scaled_kernel")
@pytest.mark.parametrize("kinds", [("tensor", "tensor"), ("row", "row"), ("group", "block"), ("mx", "mx")])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("add", [False, True])
def test_at_training_sizes(training, kinds, dtype, add):
    """Beside the product of the numbers that the operands stand for. add: to fp32, as a weight gradient."""
    sizes = (training.tokens, training.inner), (training.ffn, training.inner)
    a, b = (
        quantize_operand(training.randn(*size), kind, bits, MX_SIDE if kind == "mx" else BLOCK_SIDE)
        for size, kind, bits in zip(sizes, kinds, (dtype, E4M3))
    )

    def ours():
        if not add:
            return {"y": scaled_product(a, b, BF16)}
        into = torch.full((training.tokens, training.ffn), START, device=training.device)
        return {"y": write_scaled_product(into, a, b, BF16, add=True) - START}

    rounding = bound(4, training.inner, torch.float32) if add else bound(1, training.inner)
    training.check(
        ours,
        lambda: {"y": a.dequantized() @ b.dequantized().t()},
        {"y": rounding + sum_bound(a)},
        is_ours=not fp8_gemm.library_multiplies(a),
    )


def test_one_scale_a_tile_of_rows(small_products):
    """128 rows of a weight block are one tile's: the kernel then loads one number for them."""
    side = fp8_gemm.TILE["N"]
    _, (a, b) = operands(20, 70, 64, ("group", "block"), side=side, device=small_products)
    want = a.dequantized() @ b.dequantized().t()
    assert (
        fp8_gemm.launch_scaled_product(a, b, torch.empty_like(want), False) - want
    ).norm() <= 1e-6 * want.norm()


@pytest.mark.parametrize(
    "kinds, bound",
    [
        (("group", "block"), 0.04),
        (("mx", "mx"), 0.04),
        (("row", "row"), 0.04),
        (("tensor", "tensor"), 0.05),
    ],
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


# ---- the library's weight gradient -------------------------------------------------------------------------


def in_fp32(a, b, dtype, out=None):
    """What the library does where it is able to."""
    product = (a.dequantized() @ b.dequantized().t()).to(dtype)
    return product if out is None else out.copy_(product)


def rounds(a, b, dtype, out=None):
    return in_fp32(a, b, torch.bfloat16).float()


def in_16_bits(a, b, dtype, out=None):
    return in_fp32(a, b, torch.bfloat16)


def forgets_scales(a, b, dtype, out=None):
    return a.q.float() @ b.q.float().t()


def forgets_where(a, b, dtype, out=None):
    return in_fp32(a, b, dtype)


def writes_elsewhere(a, b, dtype, out=None):
    product = in_fp32(a, b, dtype)
    if out is not None:
        out.set_(product)
    return product


def refuses(a, b, dtype, out=None):
    raise RuntimeError("Only bf16 high precision output types are supported for row-wise scaling.\nmore")


@pytest.mark.parametrize("kind", ["tensor", "row"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("library, obstacle", [
    (in_fp32, None),
    (rounds, "a wrong result"),
    (in_16_bits, "a wrong result"),
    (forgets_scales, "a wrong result"),
    (forgets_where, "a wrong result"),
    (writes_elsewhere, "a wrong result"),
    (refuses, "Only bf16 high precision output types are supported for row-wise scaling."),
])
def test_the_library_is_tried_before_it_is_used(monkeypatch, library, obstacle, kind, dtype):
    monkeypatch.setattr(fp8_gemm, "multiply_by_library", library)
    assert fp8_gemm.obstacle_to_fp32(torch.device("cpu"), kind, dtype) == obstacle


@pytest.mark.parametrize("kind", ["tensor", "row"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_torchs_own_product_passes_the_trial(kind, dtype):
    """torch._scaled_mm has a CPU twin, which takes the same layouts of operands and scales."""
    assert fp8_gemm.obstacle_to_fp32(torch.device("cpu"), kind, dtype) is None


def test_where_it_returns_fp32_it_is_added_to_the_weight_gradient(monkeypatch):
    calls = []
    monkeypatch.setattr(fp8_gemm, "library_multiplies", lambda a: a.kind in ("tensor", "row"))
    monkeypatch.setattr(fp8_gemm, "library_returns_fp32", lambda device, kind, dtype: kind == "tensor")

    def library(a, b, dtype, out=None):
        calls.append(out)
        return in_fp32(a, b, dtype, out)

    monkeypatch.setattr(fp8_gemm, "multiply_by_library", library)
    for kind, count in (("tensor", 1), ("row", 0), ("group", 0)):
        _, (a, b) = operands(48, 32, 64, (kind, kind), E5M2)
        into = torch.ones(48, 32)
        assert write_scaled_product(into, a, b, torch.bfloat16, add=True) is into
        torch.testing.assert_close(into, 1 + a.dequantized() @ b.dequantized().t())
        assert calls == [None] * count, kind
        unwritten = torch.full_like(into, float("nan"))
        write_scaled_product(unwritten, a, b, torch.bfloat16, add=False)
        torch.testing.assert_close(unwritten, a.dequantized() @ b.dequantized().t())
        assert len(calls) == 2 * count and all(one is unwritten for one in calls[count:])
        calls.clear()
    _, (a, b) = operands(48, 32, 64, ("tensor", "tensor"), E5M2)
    write_scaled_product(torch.ones(48, 32, dtype=torch.float64), a, b, torch.float64, add=True)  # not fp32
    assert not calls


def test_sizes_that_the_library_refuses_do_not_reach_it():
    _, (a, _) = operands(16, 16, 40, ("tensor", "tensor"))
    assert not fp8_gemm.library_multiplies(a)


def test_long_sums_of_gradients_are_added_to_fp32_on_the_way():
    """Scales along the sum, or E4M3 as in a forward: not."""
    def exact(kinds, dtype):
        _, (a, b) = operands(16, 16, 64, kinds, dtype)
        return fp8_gemm.steps_of(a, b).EXACT * fp8_gemm.steps_of(a, b).K

    assert exact(("tensor", "tensor"), E5M2) == exact(("row", "row"), E5M2) == fp8_gemm.EXACT
    assert exact(("row", "row"), E4M3) == exact(("group", "group"), E4M3) == 0
