"""Grouped products in fp8: near the exact ones, tokens on their own, experts apart; the Triton kernel beside
the definition.
"""

import pytest
import torch
from test_fp8_gemm import sum_bound
from test_grouped_gemm import definition, uneven_counts
from training import BF16, bound

from kernels import fp8, fp8_gemm, fp8_grouped
from kernels.fp8_grouped import (
    RECIPES,
    grouped_product,
    quantize_operand,
    quantized_experts,
    scaled_grouped_linear,
)
from kernels.fp8_linear import Fp8Scaling, scaled_linear
from kernels.grouped_gemm import row_tiles

SHARES = {"uneven": (5, 0, 17, 16, 1), "all to one": (0, 0, 39), "even": (16, 16), "nothing": (0, 0)}
SIDE = 32


def case(counts, o=64, n=96, dtype=torch.bfloat16, device="cpu"):
    g = torch.Generator().manual_seed(0)
    x, weight, dy = (
        torch.randn(*size, generator=g) for size in ((sum(counts), n), (len(counts) * o, n), (sum(counts), o))
    )
    x, dy = (
        x * torch.logspace(-2, 2, len(x))[:, None],
        dy * torch.logspace(1, -1, len(dy))[:, None],
    )  # tokens of very different size
    weight = weight.view(len(counts), o, n) * torch.logspace(-1, 1, len(counts))[:, None, None]  # and experts
    return x.to(device, dtype), weight.view(-1, n).to(device, dtype), dy.to(device, dtype)


def trained(x, weight, dy, counts, recipe, side=SIDE):
    """-> y, dx, dW."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = scaled_grouped_linear(x, weight, counts, recipe, side)
    return y.detach(), *torch.autograd.grad(y, (x, weight), dy)


def close(a, b):
    """An 8-bit number that was rounded the other way would show at 1e-3."""
    assert ((a - b).norm(dim=1) <= 1e-12 * b.norm(dim=1)).all()


@pytest.mark.parametrize("counts", SHARES.values(), ids=SHARES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_near_the_exact_products(counts, recipe):
    """Row by row and expert by expert: none is so small that another's scale drowns it. dW has the rounding
    of bf16 alone.
    """
    x, weight, dy = case(counts)
    exact = [t.double().requires_grad_() for t in (x, weight)]
    want = torch.cat(
        [rows @ w.t() for rows, w in zip(exact[0].split(counts), exact[1].view(len(counts), -1, x.shape[1]))]
    )
    want = want.detach(), *torch.autograd.grad(want, exact, dy.double())
    got = trained(x, weight, dy, counts, recipe)
    for a, b, bound in zip(got, want, (0.06, 0.09, 0.006)):
        size = b.norm(dim=1)
        off = (a.double() - b).norm(dim=1)
        assert (off <= bound * size + 1e-12).all(), (off / size).max()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_tokens_result_depends_on_no_other(recipe):
    """Other neighbours, another order, another number of experts: the same 8 bits forward and back, so the
    same in fp64.
    """
    counts = (5, 3, 9)
    x, weight, dy = case(counts, dtype=torch.float64)
    y, dx, _ = trained(x, weight, dy, counts, recipe)
    for keep in ([0, 1, 2, 3, 4], [6, 5], [16, 9, 12]):
        expert = 0 if keep[0] < 5 else 1 if keep[0] < 8 else 2
        alone = weight.view(3, -1, x.shape[1])[expert]
        got = trained(x[keep], alone, dy[keep], (len(keep),), recipe)
        close(got[0], y[keep])
        close(got[1], dx[keep])


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
def test_one_expert_is_a_linear(recipe):
    """kernels/fp8_linear.py has the same scales for y and dx; its dW is in 8 bits."""
    x, weight, dy = case((32,), dtype=torch.float64)
    got = trained(x, weight, dy, (32,), recipe)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    y = scaled_linear(x, weight, None, None, Fp8Scaling(recipe, SIDE))
    dx = torch.autograd.grad(y, x, dy)[0]
    close(got[0], y)
    close(got[1], dx)


@pytest.mark.slow(core=["64-rowwise-uneven"])
@pytest.mark.parametrize("name", [name for name in SHARES if name != "nothing"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("side", [SIDE, 64])
def test_triton(interpreted, small_products, monkeypatch, given, name, recipe, side):
    """side 64: more rows of the weight than a tile has columns share a scale."""
    if interpreted.type == "cpu":
        monkeypatch.setattr(fp8_gemm, "STEP", 32)
        monkeypatch.setattr(fp8_gemm, "EXACT", 64)
    counts = SHARES[name]
    x, weight, dy = case(counts, 64, 128, device=interpreted)
    kind, of_weight, _ = RECIPES[recipe]
    a, b = (
        quantize_operand(x, kind, fp8_grouped.E4M3, side),
        quantized_experts(weight, len(counts), of_weight, side).ahead,
    )
    want = grouped_product(a, b, list(counts), len(counts), torch.float32)
    got = grouped_product(a, b, row_tiles(counts, len(x), interpreted), len(counts), torch.float32)
    assert (got - want).norm() <= 1e-6 * want.norm()
    kept, leaf = given(weight, 1.0), x.detach().requires_grad_()
    y = scaled_grouped_linear(leaf, kept, torch.tensor(counts, device=interpreted), recipe, side)
    assert y.grad_fn.triton
    y.backward(dy)
    y, dx = y.detach(), leaf.grad
    for a, b in zip(
        (y, dx, kept.main_grad - 1), trained(x.float(), weight.float(), dy.float(), counts, recipe, side)
    ):
        assert (a - b).norm() <= (4e-3 if a.dtype == torch.bfloat16 else 1e-6) * b.norm()


@pytest.mark.gpu("fp8_grouped.scaled_grouped_kernel")
@pytest.mark.parametrize("recipe", RECIPES)
def test_at_training_sizes(training, recipe):
    counts = uneven_counts(training)
    rows = row_tiles(counts, sum(counts), training.device)
    kind, weight_kind, _ = RECIPES[recipe]
    x = training.randn(sum(counts), training.inner)
    weight = training.randn(training.experts * 2 * training.expert_ffn, training.inner)
    a = quantize_operand(x, kind, fp8.E4M3, fp8.BLOCK_SIDE)
    b = quantized_experts(weight, training.experts, weight_kind, fp8.BLOCK_SIDE).ahead
    training.check(
        lambda: {"y": grouped_product(a, b, rows, training.experts, BF16)},
        lambda: {"y": definition(a.dequantized(), b.dequantized(), counts)},
        {"y": bound(1, training.inner) + sum_bound(a)},
    )


def test_rows_that_the_copy_engine_cannot_read_take_the_loop(interpreted, capfd):
    x, weight, dy = case((3, 4), 24, 40, device=interpreted)
    want = trained(x.cpu(), weight.cpu(), dy.cpu(), (3, 4), "rowwise")
    for a, b in zip(trained(x, weight, dy, (3, 4), "rowwise"), want):
        torch.testing.assert_close(a.cpu(), b)
    assert "not aligned to 16 bytes" in capfd.readouterr().err
