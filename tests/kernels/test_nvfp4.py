"""NVFP4 bit for bit: beside appendix B of arXiv 2509.25149, written down here in numpy, and beside torchao.

The bits of torchao 0.18.0 are in tests/kernels/nvfp4_torchao.txt; tests/kernels/nvfp4_table.py made it.
"""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from nvfp4_table import SIDE, TENSOR, blocks
from test_mxfp8 import E4M3_NUMBERS

from kernels import nvfp4_linear
from kernels.fp8 import E4M3
from kernels.fp8_linear import scaled_linear
from kernels.nvfp4 import Nvfp4Matrix, e2m1_codes, e2m1_numbers, hadamard, quantize, unpack
from kernels.nvfp4_linear import Nvfp4Scaling
from kernels.unproven import mx_gemm, nvfp4_gemm
from parallel.rng import DropoutRng
from parallel.sharding.boxes import Box
from parallel.tensor.rounding import GradientRounding, element_bits

F32 = np.float32


def largest(x: torch.Tensor) -> torch.Tensor:
    return x.abs().max().view(1, 1).to(torch.promote_types(x.dtype, torch.float32))


# ---- the specification: arXiv 2509.25149, appendix B -------------------------------------------------------


def number(code: int) -> float:
    """E2M1: bias 1, one bit of mantissa, and a subnormal."""
    exponent, mantissa = code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if code & 8 else size


E2M1_NUMBERS = np.array([number(code) for code in range(8)])


def nearest(x: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The code of the nearest number, the even one of two; what is larger than all saturates."""
    distance = np.abs(numbers - np.minimum(np.abs(x), numbers[-1])[..., None].astype(np.float64))
    is_odd = np.arange(len(numbers)) & 1
    return np.where(distance == distance.min(-1, keepdims=True), is_odd, 2).argmin(-1)


def stochastic(x: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """The code of the number above |x| if the draw, in [0, 1), is below x's share of the way; else below."""
    size = np.minimum(np.abs(x), 6.0).astype(np.float64)
    below = np.searchsorted(E2M1_NUMBERS, size, side="right") - 1
    above = np.minimum(below + 1, 7)
    gap = E2M1_NUMBERS[above] - E2M1_NUMBERS[below]
    share = np.where(gap > 0, (size - E2M1_NUMBERS[below]) / np.where(gap > 0, gap, 1), 0)
    return np.where(draws < share, above, below)


def by_specification(
    x: np.ndarray, rows: int = 1, draws: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, float]:
    """x [m, n] in fp32 -> (codes [m, n], codes of the scales [m/rows, n/16], s_dec), each step in fp32."""
    with np.errstate(divide="ignore", invalid="ignore"):
        s_enc = F32(6 * 448) / np.abs(x).max()  # equation 1
        s_dec = F32(1) / s_enc
        m, n = x.shape
        tiles = x.reshape(m // rows, rows, n // SIDE, SIDE)
        s_dec_b = np.abs(tiles).max((1, 3)) / F32(6)
        scale_codes = nearest(s_dec_b * s_enc, E4M3_NUMBERS)
        read = E4M3_NUMBERS[scale_codes].astype(F32)
        s_enc_b = np.where(read == 0, F32(0), F32(1) / (read * s_dec))
        scaled = (tiles * s_enc_b[:, None, :, None]).reshape(m, n)
    codes = nearest(scaled, E2M1_NUMBERS) if draws is None else stochastic(scaled, draws)
    return codes | np.signbit(x).astype(int) << 3, scale_codes, float(s_dec)


def check(x: torch.Tensor, rows: int = 1) -> Nvfp4Matrix:
    got = quantize(x, largest(x), rows=rows)
    codes, scale_codes, s_dec = by_specification(x.numpy(), rows)
    assert (got.scale.view(torch.uint8).numpy() == scale_codes).all()
    assert (unpack(got.codes).numpy() == codes).all()
    assert float(got.tensor_scale) == s_dec
    return got


def test_all_codes():
    codes = torch.arange(16, dtype=torch.uint8)
    numbers = e2m1_numbers(codes, torch.float32)
    assert numbers.tolist() == [number(code) for code in range(16)]
    assert torch.equal(e2m1_codes(numbers[None])[0], codes)
    assert torch.equal(numbers.signbit(), codes >= 8)  # of zero, too


def test_elements_round_to_nearest_even_and_saturate():
    """Every 1/64 from -8 to 8: all ties, their neighbors in fp32, and what is larger than 6."""
    grid = torch.arange(-512, 513) / 64
    beside = [torch.nextafter(grid, torch.tensor(far)) for far in (9.0, -9.0)]
    x = torch.stack((grid, *beside))
    want = nearest(x.numpy(), E2M1_NUMBERS) | np.signbit(x.numpy()).astype(int) << 3
    assert (e2m1_codes(x).numpy() == want).all()


@pytest.mark.parametrize("rows", [1, SIDE])
def test_random_matrices_of_every_size(rows):
    """Blocks from the largest down to zeros, through scales that are subnormal in E4M3."""
    sizes = torch.logspace(0, -24, 25, base=2.0).repeat_interleave(SIDE)[:, None]
    for size in (1e-20, 1.0, 3e30):
        got = check(torch.randn(len(sizes), 64) * sizes * size, rows)
        read = got.scale.float()
        assert (read == 0).any() and ((read > 0) & (read < 2.0**-6)).any() and (read >= 256).any()


def test_blocks_of_zeros():
    x = torch.zeros(2, 32)
    x[0, 0] = 3.0
    torch.testing.assert_close(check(x).dequantized(), x)
    none = quantize(torch.zeros(2, 32), torch.zeros(1, 1))
    assert (none.dequantized() == 0).all() and none.tensor_scale.isfinite()


@pytest.mark.parametrize("sick", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_never_hidden(sick):
    """Nothing of the tensor is finite then: E2M1 has no such number."""
    x = torch.randn(4, 32)
    x[2, 20] = sick
    for bits in (None, torch.zeros(4, 32, dtype=torch.int64)):
        assert not quantize(x, largest(x), bits=bits).dequantized().isfinite().any()


def test_a_weight_and_its_transpose_have_the_same_numbers():
    """And so has the transpose, quantized itself: its blocks are the same (arXiv 2509.25149, 4.3)."""
    w = torch.randn(48, 80) * torch.logspace(-2, 2, 48)[:, None]
    ahead = check(w, SIDE)
    assert ahead.scale.shape == (3, 5)
    for back in (ahead.transposed(), check(w.t().contiguous(), SIDE)):
        assert torch.equal(back.dequantized(), ahead.dequantized().t())


def test_a_transposed_view_is_laid_out_as_a_matrix():
    """As a GPU's library reads it."""
    x = torch.randn(64, 48)
    want, got = (quantize(view, largest(x)) for view in (x.t().contiguous(), x.t()))
    assert all(map(torch.Tensor.is_contiguous, got))
    assert all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in zip(got, want))


def test_fp64_rounds_alike():
    x, most = torch.from_numpy(np.stack(list(blocks().values()))), torch.full((1, 1), TENSOR)
    want, got = quantize(x, most), quantize(x.double(), most.double())
    assert torch.equal(got.codes, want.codes) and torch.equal(got.scale.float(), want.scale.float())
    assert got.dequantized().dtype == torch.float64
    torch.testing.assert_close(got.dequantized(), want.dequantized().double(), rtol=1e-6, atol=0)


# ---- torchao -----------------------------------------------------------------------------------------------


LINES = Path(__file__).with_name("nvfp4_torchao.txt").read_text().splitlines()
TABLE = {name: values for name, *values in map(str.split, LINES)}


@pytest.mark.parametrize("name", blocks())
def test_torchao_has_the_same_bits(name):
    got = quantize(torch.from_numpy(blocks()[name])[None], torch.full((1, 1), TENSOR))
    assert [part.view(torch.uint8).numpy().tobytes().hex() for part in (got.scale, got.codes)] == TABLE[name]


# ---- stochastic rounding (section 4.4) ---------------------------------------------------------------------

KEYS = ("layers.3.attn.q.weight", "layers.3.attn.k.weight")
WHOLE = (Box.whole(KEYS[0], (32, 64)), Box.whole(KEYS[1], (16, 64)))
OUTPUTS = 48


def generator(step=0, sequences=(0, 1), positions=tuple(range(16)), seed=7) -> DropoutRng:
    return DropoutRng(seed, step, torch.tensor(sequences), torch.tensor(positions))


def test_the_mean_over_steps_is_the_number():
    """Each element goes up as often as a coin of its probability: within 5 deviations of the binomial."""
    steps = 500
    dy = torch.randn(32, OUTPUTS)
    dy[:, ::SIDE] = 7.0  # the largest of each block and of the tensor: 6 exactly
    total = torch.zeros(32, OUTPUTS, dtype=torch.float64)
    drawn = torch.zeros(32, OUTPUTS, dtype=torch.float64)
    for step in range(steps):
        bits = element_bits(generator(step), WHOLE)
        total += quantize(dy, largest(dy), bits=bits).dequantized()
        drawn += (bits >> 24 & 0xFFFFFF) / 2.0**24  # those of the weight's gradient
    unit = 7.0 / 6  # of E2M1 at the scale of every block
    size = dy.double().abs() / unit
    gap = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    share = size / gap % 1
    deviation = unit * gap * (share * (1 - share) / steps).sqrt()
    assert ((total / steps - dy).abs() <= 5 * deviation + 1e-6).all()
    assert (dy.double() - quantize(dy, largest(dy)).dequantized()).abs().mean() > 8 * deviation.mean()
    assert ((drawn / steps - 0.5).abs() <= 5 * (1 / 12 / steps) ** 0.5).all()


def test_bits_are_those_of_the_element_on_any_rank():
    """Of rows that tp divides, of tokens that cp divides, and in micro-batches of another size."""
    whole = element_bits(generator(), WHOLE).view(2, 16, OUTPUTS)
    halves = [
        tuple(Box(key, (2 * rows, 64), (half * rows, 0), (rows, 64)) for key, rows in zip(KEYS, (16, 8)))
        for half in (0, 1)
    ]
    of_tp = [element_bits(generator(), boxes).view(2, 16, 24) for boxes in halves]
    assert torch.equal(torch.cat((of_tp[0][..., :16], of_tp[1][..., :16]), -1), whole[..., :32])
    assert torch.equal(torch.cat((of_tp[0][..., 16:], of_tp[1][..., 16:]), -1), whole[..., 32:])
    of_cp = element_bits(generator(positions=(4, 5, 6, 7, 12, 13)), WHOLE).view(2, 6, OUTPUTS)
    assert torch.equal(of_cp, whole[:, [4, 5, 6, 7, 12, 13]])
    assert torch.equal(element_bits(generator(sequences=(1,)), WHOLE), whole[1])


def test_no_two_elements_share_their_bits():
    drawn = [
        element_bits(generator(step, seed=seed), (box,))
        for step, seed, box in itertools.product((0, 1), (7, 8), WHOLE)
    ]
    flat = torch.cat([bits.flatten() for bits in drawn])
    assert len(flat.unique()) == len(flat)


# ---- the Hadamard transform (section 4.2) ------------------------------------------------------------------

SIGNS = [-1, 1, -1, 1, -1, 1, 1, 1, -1, 1, 1, 1, 1, 1, 1, 1]  # ours, for every layer, step and run


def transform() -> np.ndarray:
    """H diag(s) / 4, of Sylvester's matrix."""
    matrix = np.ones((1, 1))
    for _ in range(4):
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    return matrix * SIGNS / 4


def test_the_transform_is_the_matrix():
    x = torch.randn(48, 5, dtype=torch.float64)
    want = np.concatenate([transform() @ part for part in x.numpy().reshape(3, SIDE, 5)])
    assert np.abs(hadamard(x).numpy() - want).max() < 1e-14


def test_the_transform_leaves_products_as_they_are():
    """Exactly, where sums are exact."""
    a, b = (torch.randint(-40, 41, (64, columns)).double() for columns in (5, 7))
    assert torch.equal(hadamard(a).t() @ hadamard(b), a.t() @ b)


def test_an_outlier_costs_less(monkeypatch):
    """Inputs around 0.5, and one token of 16 that is 30 times as large, whose gradient is 0. Without the
    transform the others round to what the outlier's scale leaves them, and most of their product is lost.

    (Of independent numbers around 0 the transform keeps more, too, but as noise: its error is no smaller.)
    """
    x, dy = 0.5 + 0.2 * torch.randn(1024, 64).abs(), 1 + 0.3 * torch.randn(1024, OUTPUTS)
    x[5::SIDE] *= 30
    dy[5::SIDE] = 0
    exact = dy.t() @ x
    bits = element_bits(generator(sequences=range(64)), WHOLE)

    def error() -> float:
        w = torch.zeros(OUTPUTS, 64, requires_grad=True)
        scaling = Nvfp4Scaling("nvfp4", SIDE, start_pass=lambda: lambda: bits)
        scaled_linear(x, w, None, None, scaling).backward(dy)
        return float((w.grad - exact).norm() / exact.norm())

    mixed = error()
    monkeypatch.setattr(nvfp4_linear, "hadamard", lambda x, side: x.float())
    assert mixed < 0.4 and error() > 0.5


# ---- the linear --------------------------------------------------------------------------------------------


def read(x: np.ndarray, rows: int = 1, draws: np.ndarray | None = None) -> np.ndarray:
    """Quantized by the specification, and back."""
    codes, scale_codes, s_dec = by_specification(x.astype(F32), rows, draws)
    numbers = np.array([number(code) for code in range(16)])[codes]
    scale = E4M3_NUMBERS[scale_codes].repeat(rows, 0).repeat(SIDE, 1)
    return numbers * scale * s_dec


def test_three_products_by_hand():
    """y, dx and dW of a linear, each from operands that are quantized along the dim that it sums over."""
    x, w, dy = (torch.randn(*size) for size in ((32, 64), (OUTPUTS, 64), (32, OUTPUTS)))
    bits = element_bits(generator(), WHOLE)
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = scaled_linear(*leaves, None, None, Nvfp4Scaling("nvfp4", SIDE, start_pass=lambda: lambda: bits))
    dx, dw = torch.autograd.grad(y, leaves, dy)

    def mixed(matrix: torch.Tensor) -> np.ndarray:
        tokens = matrix.numpy().reshape(-1, SIDE, matrix.shape[1])
        return np.concatenate([transform() @ part for part in tokens])

    low, high = ((bits >> shift & 0xFFFFFF).numpy() / 2.0**24 for shift in (0, 24))
    weight = read(w.numpy(), SIDE)
    wants = (
        read(x.numpy()) @ weight.T,
        read(dy.numpy(), draws=low) @ weight,
        read(mixed(dy).T, draws=high.T) @ read(mixed(x).T).T,
    )
    for got, want in zip((y.detach(), dx, dw), wants):
        assert np.linalg.norm(got.numpy() - want) < 1e-5 * np.linalg.norm(want)


def test_a_gradient_without_bits_is_an_error():
    w = torch.randn(OUTPUTS, 64, requires_grad=True)
    y = scaled_linear(torch.randn(32, 64), w, None, None, Nvfp4Scaling("nvfp4", SIDE))
    with pytest.raises(ValueError, match="random bits"):
        y.sum().backward()
    with pytest.raises(ValueError, match="generator of its pass"):
        GradientRounding().start_pass(WHOLE)


# ---- what the library of a GPU reads (kernels/unproven/nvfp4_gemm.py) --------------------------------------


def from_layout(laid: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Invert mx_gemm.in_tiles."""
    across = -(-columns // 4)
    tiles = laid.view(torch.uint8).view(-1, across, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(-1, 4 * across)
    return tiles[:rows, :columns].contiguous().view(E4M3)


def like_the_library(a, b, scale_a, scale_b, out_dtype):
    """What torch._scaled_mm does on sm_100: low bits first, scales of 16 in tiles."""
    def operand(q, laid):
        codes = q.view(torch.uint8)
        scale = from_layout(laid, len(codes), codes.shape[1] * 2 // SIDE)
        return Nvfp4Matrix(codes, scale, torch.ones(1, 1)).unscaled(torch.float32)

    assert a.dtype == torch.float4_e2m1fn_x2 and out_dtype == torch.float32
    return operand(a, scale_a) @ operand(b.t(), scale_b).t()


def test_the_library_is_tried_before_it_is_used(monkeypatch):
    def swapped(a, b, scale_a, scale_b, out_dtype):
        codes = a.view(torch.uint8)
        high_first = (codes >> 4 | codes << 4).view(torch.float4_e2m1fn_x2)
        return like_the_library(high_first, b, scale_a, scale_b, out_dtype)

    def without_layout(a, b, scale_a, scale_b, out_dtype):
        codes = a.view(torch.uint8)
        flat = scale_a.view(torch.uint8)[: codes.numel() * 2 // SIDE].view(len(codes), -1)
        return like_the_library(a, b, mx_gemm.in_tiles(flat).view(E4M3), scale_b, out_dtype)

    def refuses(*args, **kwargs):
        raise RuntimeError("no such chip\nmore")

    for library, obstacle in (
        (like_the_library, None),
        (swapped, "a wrong result"),
        (without_layout, "a wrong result"),
        (refuses, "no such chip"),
    ):
        monkeypatch.setattr(torch, "_scaled_mm", library)
        assert nvfp4_gemm.obstacle_to_library(torch.device("cpu")) == obstacle


def test_products_of_the_library(monkeypatch):
    """Beside the definition: the same operands reach it, those of a weight with a scale a row."""
    monkeypatch.setattr(torch, "_scaled_mm", like_the_library)
    monkeypatch.setattr(nvfp4_gemm, "library_multiplies", lambda device: True)
    x, w = torch.randn(160, 96), torch.randn(64, 96)
    a, b = quantize(x, largest(x)), quantize(w, largest(w), rows=SIDE)
    product, write = nvfp4_gemm.PRODUCTS
    want = a.dequantized() @ b.dequantized().t()
    torch.testing.assert_close(product(a, b, torch.bfloat16), want.bfloat16())
    into = torch.ones(160, 64)
    assert write(into, a, b, torch.bfloat16, True) is into
    torch.testing.assert_close(into, 1 + want)
    torch.testing.assert_close(write(into, a, b, torch.bfloat16, False), want)
