"""MXFP8 bit for bit: beside the format's specification, written down here in numpy, and beside torchao.

The bits of torchao 0.18.0 are in tests/kernels/mxfp8_torchao.txt; tests/kernels/mxfp8_table.py made it.
"""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from mxfp8_table import SIDE, blocks, scale_codes

from kernels.fp8 import E4M3, dequantize, quantize, quantize_pair, quantize_reference
from kernels.fp8_gemm import QuantizedMatrix, quantize_operand
from kernels.fp8_linear import Fp8Scaling, scaled_linear
from kernels.unproven import mx_gemm

BLOCKS = blocks()


def in_bytes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [m, 32 g] -> the bytes of our elements [m, 32 g] and of our scales [m, g]."""
    q, scale = quantize_reference(x, "mx", E4M3, SIDE)
    return q.view(torch.uint8), scale.to(torch.float8_e8m0fnu).view(torch.uint8)


# ---- the specification: OCP Microscaling Formats v1.0 ------------------------------------------------------


def e4m3_number(code: int) -> float:
    """Section 5.3.1: bias 7, three bits of mantissa, subnormals; 0x7F is NaN."""
    exponent, mantissa = code >> 3 & 15, code & 7
    return mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3_NUMBERS = np.array([e4m3_number(code) for code in range(0x7F)])
LARGEST = E4M3_NUMBERS[-1]


def e4m3_codes(x: np.ndarray) -> list[int]:
    """x [32] in fp64 -> the nearest numbers, the even one of two; what is larger than all saturates."""
    distance = np.abs(E4M3_NUMBERS - np.minimum(np.abs(x), LARGEST)[:, None])  # [32, codes]
    is_odd = np.arange(0x7F) & 1
    nearest = np.where(distance == distance.min(1, keepdims=True), is_odd, 2).argmin(1)
    return (nearest | np.signbit(x).astype(int) << 7).tolist()


def rounded_up(quotient: float) -> int:
    """The smallest exponent whose power of two is at least `quotient`, within those of E8M0."""
    exponent = -127
    while exponent < 127 and 2.0**exponent < quotient:
        exponent += 1
    return exponent


def by_specification(block: np.ndarray) -> tuple[int, list[int]]:
    """-> the byte of the scale, and those of the elements; for finite numbers.

    The quotient is rounded to fp32, as in arXiv 2506.08027. With the smallest scale the elements are 0.
    """
    quotient = np.abs(block).max() / np.float32(LARGEST)
    exponent = rounded_up(float(quotient))
    factor = 2.0**-exponent if exponent > -127 else 1.0
    return exponent + 127, e4m3_codes(block.astype(np.float64) * factor)


@pytest.mark.parametrize("name", [name for name, block in BLOCKS.items() if np.isfinite(block).all()])
def test_the_specification(name):
    q, scale = in_bytes(torch.from_numpy(BLOCKS[name])[None])
    assert (int(scale), q[0].tolist()) == by_specification(BLOCKS[name])


def test_the_specification_of_random_blocks_of_every_size():
    stream = np.random.default_rng(3)
    x = stream.standard_normal((64, SIDE)) * np.logspace(-44, 37, 64)[:, None]
    x = x.astype(np.float32)
    q, scale = in_bytes(torch.from_numpy(x))
    for row, block in enumerate(x):
        assert (int(scale[row]), q[row].tolist()) == by_specification(block), row


def test_a_largest_element_just_above_448_takes_the_next_scale():
    """Where fp32's log2, as torchao computes it without a GPU, rounds the exponent down."""
    for exponent in (-100, -3, 0, 5, 100):
        largest = np.nextafter(np.float32(448.0), np.float32(449.0)) * np.float32(2.0**exponent)
        _, scale = in_bytes(torch.full((1, SIDE), float(largest)))
        assert int(scale) == 127 + exponent + 1


def test_no_element_saturates_where_the_floor_of_the_specification_does():
    """The rule of section 6.3, floor(log2 largest) - 8, clips what lies above 448 of 512; ours takes one more
    there, and the same exponent elsewhere (arXiv 2506.08027).
    """
    for largest in np.linspace(257.0, 511.0, 128):
        block = torch.full((1, SIDE), float(largest))
        _, scale = in_bytes(block)
        floor = int(np.floor(np.log2(largest))) - 8 + 127
        assert int(scale) == floor + (largest > 448.0)
        read = dequantize(*quantize_reference(block, "mx", E4M3, SIDE), "mx", side=SIDE)
        assert (read - block).abs().max() <= largest * 2.0**-4


# ---- torchao -----------------------------------------------------------------------------------------------


def torchao_table() -> dict[str, list[str]]:
    lines = Path(__file__).with_name("mxfp8_torchao.txt").read_text().splitlines()
    return {name: values for name, *values in map(str.split, lines)}


TABLE = torchao_table()


@pytest.mark.parametrize("name", BLOCKS)
def test_torchao_has_the_same_bits(name):
    scale_code, codes = TABLE[name]
    q, scale = in_bytes(torch.from_numpy(BLOCKS[name])[None])
    assert scale.numpy().tobytes().hex() == scale_code
    got, want = q.numpy()[0], np.frombuffer(bytes.fromhex(codes), np.uint8)
    is_nan = want & 0x7F == 0x7F  # the sign of NaN says nothing
    assert ((got == want) | is_nan & (got & 0x7F == 0x7F)).all()


def test_fp64_rounds_alike():
    """Proofs in fp64 take the same 8 bits and scales of what fp32 can hold, too."""
    for name, block in BLOCKS.items():
        x = torch.from_numpy(block)[None]
        want, got = in_bytes(x), in_bytes(x.double())
        is_tiny = np.abs(block).max() < 2.0**-110  # whose quotient is subnormal in fp32 alone
        if np.isfinite(block).all() and not is_tiny:
            assert all(map(torch.equal, got, want)), name


# ---- both orientations and the kernel ----------------------------------------------------------------------


def test_columns_are_quantized_along_themselves():
    """The transpose has scales of 32 rows of one column: dequantized, it differs from the rows' own."""
    x = torch.randn(96, 64) * torch.logspace(-3, 3, 96)[:, None]
    ahead, back = quantize_pair(x, "mx", E4M3, SIDE)
    for (q, scale), matrix in ((ahead, x), (back, x.t().contiguous())):
        rows, columns = matrix.shape
        of_blocks = matrix.reshape(-1, SIDE).numpy()
        want = [by_specification(block) for block in of_blocks[::7]]
        codes = q.view(torch.uint8).reshape(-1, SIDE)[::7].tolist()
        bytes_of_scales = scale.to(torch.float8_e8m0fnu).view(torch.uint8).reshape(-1)[::7].tolist()
        assert scale.shape == (rows, columns // SIDE)
        assert [(scale, codes) for scale, codes in zip(bytes_of_scales, codes)] == want


def test_the_kernel_has_the_same_bits(interpreted):
    x = torch.from_numpy(np.stack([block for block in BLOCKS.values() if np.isfinite(block).all()]))
    x = x.reshape(-1, SIDE).repeat(1, 2).to(interpreted)
    for part in (x, x.t()):
        check_kernel(part)


def test_the_kernel_at_the_ends(interpreted):
    x = np.stack([BLOCKS[name] for name in ("infinite", "minus_infinite")])
    check_kernel(torch.from_numpy(x).to(interpreted))


def check_kernel(x: torch.Tensor) -> None:
    q, scale = quantize(x, "mx", E4M3, SIDE)
    want, want_scale = quantize_reference(x, "mx", E4M3, SIDE)
    assert torch.equal(q.view(torch.uint8), want.view(torch.uint8)) and torch.equal(scale, want_scale)


def test_three_products_by_hand():
    """y, dx and dW of a linear, each from operands that are quantized along the dim that it sums over."""
    x, w, dy = (torch.randn(*size) for size in ((64, 96), (32, 96), (64, 32)))
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = scaled_linear(leaves[0], leaves[1], None, None, Fp8Scaling("mxfp8", SIDE))
    dx, dw = torch.autograd.grad(y, leaves, dy)

    def read(matrix: torch.Tensor) -> torch.Tensor:
        """Quantized along its rows, by the specification, and back."""
        pairs = [by_specification(block) for block in matrix.reshape(-1, SIDE).numpy()]
        numbers = [
            [E4M3_NUMBERS[code & 0x7F] * (-1) ** (code >> 7) * 2.0 ** (scale - 127) for code in codes]
            for scale, codes in pairs
        ]
        return torch.tensor(numbers, dtype=torch.float64).view(matrix.shape)

    wants = (
        read(x) @ read(w).t(),
        read(dy) @ read(w.t().contiguous()).t(),
        read(dy.t().contiguous()) @ read(x.t().contiguous()).t(),
    )
    for got, want in zip((y.detach(), dx, dw), wants):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


# ---- what the library of a GPU reads (kernels/unproven/mx_gemm.py) -----------------------------------------


def test_layout_of_scales():
    """Place by place, as cuBLAS's manual has it; and the digest of torchao's."""
    codes = scale_codes()
    scale = torch.from_numpy(codes).view(torch.float8_e8m0fnu).float()
    laid = mx_gemm.swizzled_scales(scale).view(torch.uint8).numpy()
    assert hashlib.sha256(laid.tobytes()).hexdigest() == TABLE["layout"][0]

    rows, columns = codes.shape
    tiles_across = -(-columns // 4)
    want = np.zeros(-(-rows // 128) * tiles_across * 512, np.uint8)
    for row in range(rows):
        for column in range(columns):
            tile = row // 128 * tiles_across + column // 4
            want[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = codes[row, column]
    assert (laid == want).all()


def test_bytes_of_scales():
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(mx_gemm.e8m0_bytes(codes.view(torch.float8_e8m0fnu).float()), codes)


def from_layout(laid: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Invert swizzled_scales."""
    across = -(-columns // 4)
    tiles = laid.view(torch.uint8).view(-1, across, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(-1, 4 * across)
    return tiles[:rows, :columns].contiguous().view(torch.float8_e8m0fnu).float()


def like_the_library(a, b, scale_a, scale_b, out_dtype, out=None):
    """What torch._scaled_mm does on sm_100."""
    def operand(q, laid):
        scale = from_layout(laid, q.shape[0], q.shape[1] // SIDE)
        return QuantizedMatrix(q, scale, "mx", SIDE).dequantized()

    y = (operand(a, scale_a) @ operand(b.t(), scale_b).t()).to(out_dtype)
    return y if out is None else out.copy_(y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_library_is_tried_before_it_is_used(monkeypatch, dtype):
    def without_layout(a, b, scale_a, scale_b, out_dtype, out=None):
        flat = scale_a.view(torch.uint8)[: a.shape[0] * (a.shape[1] // SIDE)]
        laid = mx_gemm.swizzled_scales(flat.view(torch.float8_e8m0fnu).float().view(a.shape[0], -1))
        return like_the_library(a, b, laid, scale_b, out_dtype, out)

    def refuses(*args, **kwargs):
        raise RuntimeError("no such chip\nmore")

    for library, obstacle in (
        (like_the_library, None),
        (without_layout, "a wrong result"),
        (refuses, "no such chip"),
    ):
        monkeypatch.setattr(torch, "_scaled_mm", library)
        assert mx_gemm.obstacle_to_library(torch.device("cpu"), dtype) == obstacle


def test_products_of_the_library(monkeypatch):
    """A layer through it, beside the definition: the same operands reach it."""
    calls = []

    def library(*args, **kwargs):
        calls.append(kwargs["out_dtype"])
        return like_the_library(*args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", library)
    monkeypatch.setattr(mx_gemm, "library_multiplies", lambda device, dtype: True)
    a, b = (quantize_operand(torch.randn(rows, 96), "mx", E4M3, SIDE) for rows in (160, 64))
    want = a.dequantized() @ b.dequantized().t()
    assert torch.equal(mx_gemm.product(a, b, torch.bfloat16), want.bfloat16())
    into = torch.ones(160, 64)
    assert mx_gemm.write_product(into, a, b, torch.bfloat16, add=True) is into
    torch.testing.assert_close(into, 1 + want)
    assert torch.equal(mx_gemm.write_product(into, a, b, torch.bfloat16, add=False), want)
    assert calls == [torch.bfloat16, torch.float32, torch.float32]


def test_a_chip_without_the_format_says_what_runs(interpreted, capfd):
    a = quantize_operand(torch.randn(32, 64, device=interpreted), "mx", E4M3, SIDE)
    mx_gemm.product(a, a, torch.bfloat16)
    said = capfd.readouterr().err
    assert "our own kernel" in said and "slower than bf16" in said
