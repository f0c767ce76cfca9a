"""FP8 GEMMs with scales: y = (q_a s_a) (q_b s_b)^T, accumulated in fp32.

On a GPU, operands with a scale per tensor or row go to torch._scaled_mm (cuBLASLt, CUTLASS), including weight
gradients, which are added to fp32, if the library can return fp32 there (library_returns_fp32). All other
products use one Triton kernel; those of MXFP8, too, which sm_100 could run in its tensor cores
(kernels/unproven/mx_gemm.py). Without kernels the reference runs: both operands are dequantized, which is
exact, and multiplied in fp32 (fp64: in fp64).

Hopper's tensor cores accumulate 8-bit products in 14 bits (DeepSeek-V3, arXiv 2412.19437, 3.3.2), known as
fast accumulation. The forward's products, of E4M3 with E4M3, use it unchanged, in the library and in the
kernel. Those of gradients (E5M2) do not: the library is told not to (use_fast_accum), and the kernel promotes
the tensor cores' sum to fp32 every EXACT columns. Scales that change along the contracted dim (blockwise,
mxfp8) are applied to the sum of each `side` columns, before it is added to fp32. All others are applied at
the end.

Both operands have the contracted dim last, because Hopper's fp8 tensor cores can read no other layout.
"""
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels import fp8
from kernels.fp8 import Maxima
from kernels.linear import skewed
from kernels.tiles import program_tile, write_tile
from kernels.triton_ import (
    DTYPES,
    TensorDescriptor,
    ceil_div,
    kernel_is_available,
    print_once,
    tl,
    triton,
)

# launch parameters, unless the scales change along the contracted dim and each row of B has a separate one
TILE = {"M": 128, "N": 128, "GROUP": 8, "num_warps": 8, "num_stages": 4}
EACH = {**TILE, "N": 64}  # otherwise: more rows do not fit the registers
SMALLEST = 32  # columns that a tensor core multiplies at once
STEP = 128  # columns that are multiplied at a time, unless the scales are per group
EXACT = 512  # columns between promotions to fp32 in products without fast accumulation
UNIT = 16  # the library needs matrix sizes that are multiples of this
MX_CHIP = (10, 0)  # the first capability whose tensor cores multiply MXFP8


class Recipe(NamedTuple):
    """Formats of a layer's operands."""
    activation_kind: str  # kind of the scales of x and dy
    weight_kind: str  # kind of the scales of W
    gradient_dtype: torch.dtype  # dtype of dy; x and W are E4M3


class QuantizedMatrix(NamedTuple):
    """A matrix [m, n] quantized by kernels/fp8.py.

    kind may also be "matrix": stacked matrices, `side` rows each, with one scale per matrix.
    """
    q: Tensor
    scale: Tensor
    kind: str
    side: int

    def dequantized(self) -> Tensor:
        """Return [m, n] in the dtype of the scale."""
        return fp8.dequantize(self.q, self.scale, self.kind, self.scale.dtype, self.side)


Operand = Any  # a QuantizedMatrix, or one of another format (kernels/nvfp4.py)


class QuantizedPair(NamedTuple):
    """A matrix and its transpose."""
    ahead: Operand
    back: Operand


def quantize_operand(
    x: Tensor, kind: str, dtype: torch.dtype, side: int, largest: Tensor | None = None
) -> QuantizedMatrix:
    """Run fp8.quantize, which documents the arguments."""
    q, scale = fp8.quantize(x, kind, dtype, side, largest)
    return QuantizedMatrix(q, scale, kind, side)


def quantize_operand_pair(
    x: Tensor, kind: str, dtype: torch.dtype, side: int, maxima: Maxima = Maxima()
) -> QuantizedPair:
    """Run fp8.quantize_pair, which documents the arguments."""
    ahead, back = fp8.quantize_pair(x, kind, dtype, side, maxima)
    return QuantizedPair(QuantizedMatrix(*ahead, kind, side), QuantizedMatrix(*back, kind, side))


def scaled_product(a: QuantizedMatrix, b: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """a [m, k], b [n, k] -> a b^T [m, n] in dtype."""
    if library_multiplies(a) and dtype == torch.bfloat16:
        return multiply_by_library(a, b, dtype)
    if dtype in DTYPES and triton_fits(a, b):
        y = a.q.new_empty(a.q.shape[0], b.q.shape[0], dtype=dtype)
        return launch_scaled_product(a, b, y, add=False)
    return (a.dequantized() @ b.dequantized().t()).to(dtype)


def write_scaled_product(
    into: Tensor | None, a: QuantizedMatrix, b: QuantizedMatrix, dtype: torch.dtype, add: bool
) -> Tensor:
    """Compute into [m, n] = (or, add: +=) a b^T, in its dtype. With into None, return the result in dtype."""
    if into is None:
        return scaled_product(a, b, dtype)
    if into.dtype == torch.float32 and library_multiplies(a):
        if library_returns_fp32(a.q.device, a.kind, a.q.dtype):
            return write_by_library(into, a, b, add)
    if into.dtype in DTYPES and into.is_contiguous() and triton_fits(a, b):
        return launch_scaled_product(a, b, into, add)
    left = a.dequantized().to(into.dtype)
    right = b.dequantized().to(into.dtype)
    return into.addmm_(left, right.t()) if add else torch.mm(left, right.t(), out=into)


def takes_fast_accumulation(a: QuantizedMatrix) -> bool:
    """Whether the tensor cores' own sum is good enough: it is for a forward, not for gradients."""
    return a.q.dtype == fp8.E4M3


# ---- the GPU's library -------------------------------------------------------------------------------------

def library_multiplies(a: QuantizedMatrix) -> bool:
    """Whether the library takes operands like a [m, k], with sizes that are multiples of UNIT."""
    has_scales = a.kind in fp8.SHARED_KINDS
    return has_scales and a.q.device.type == "cuda" and a.q.shape[1] % UNIT == 0


def multiply_by_library(
    a: QuantizedMatrix, b: QuantizedMatrix, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Run scaled_product on operands with a scale per tensor or row. The result is written to `out`."""
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]  # missing in torch's stubs
        a.q,
        b.q.t(),
        scale_a=a.scale,
        scale_b=b.scale.t(),
        out_dtype=dtype,
        use_fast_accum=takes_fast_accumulation(a),
        out=out,
    )


def write_by_library(into: Tensor, a: QuantizedMatrix, b: QuantizedMatrix, add: bool) -> Tensor:
    """into = a b^T in fp32 without a copy, or (add) into += a b^T, which the library cannot do itself."""
    if add:
        return into.add_(multiply_by_library(a, b, torch.float32))
    return multiply_by_library(a, b, torch.float32, out=into)


@cache
def library_returns_fp32(device: torch.device, kind: str, dtype: torch.dtype) -> bool:
    """Whether multiply_by_library returns and writes fp32 products on this device: tried once, on a small one
    with a known result. If not, a line says so.

    kind is that of the scales, dtype that of a; b is E4M3.
    """
    why = obstacle_to_fp32(device, kind, dtype)
    if why is not None:
        print_once(f"weight gradient of {dtype} with scales a {kind}: torch._scaled_mm does not return fp32 "
                   f"here ({why}); our own kernel runs instead, and is slower")
    return why is None


def obstacle_to_fp32(device: torch.device, kind: str, dtype: torch.dtype) -> str | None:
    """Return why the library cannot be used for weight gradients; None if it can."""
    rows, columns, inner = 16, 32, 48
    a = torch.ones(rows, inner, device=device)
    b = torch.full((columns, inner), 8.0, device=device)
    b[:, 0] = 9.0  # the sum of the products is 385, which 16 bits would round
    scales: list[Tensor] = []
    for count in (rows, columns):
        powers = torch.arange(count if kind == "row" else 1, device=device) % 3 - 1
        scales.append(2.0**powers[:, None])
    quantized_a = QuantizedMatrix(a.to(dtype), scales[0], kind, fp8.BLOCK_SIDE)
    quantized_b = QuantizedMatrix(b.to(fp8.E4M3), scales[1], kind, fp8.BLOCK_SIDE)
    want = 385.0 * scales[0] * scales[1].t()
    written = torch.full((rows, columns), float("nan"), device=device)
    address = written.data_ptr()
    try:
        result = multiply_by_library(quantized_a, quantized_b, torch.float32)
        write_by_library(written, quantized_a, quantized_b, add=False)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        return str(error).splitlines()[0]
    is_in_place = written.data_ptr() == address
    is_exact = result.dtype == torch.float32 and bool((result == want).all() and (written == want).all())
    return None if is_in_place and is_exact else "a wrong result"


# ---- Triton ----------------------------------------------------------------------------------------------

@triton.jit
def scaled_tile(
    A, B, A_SCALE, B_SCALE, row, row_end, column, column_end, k, a_row, a_step, b_row, b_step,
    BY_STEP: tl.constexpr,
    SHARED: tl.constexpr,
    EXACT: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Multiply M rows of A, from `row`, with N rows of B, from `column`, including their scales: [M, N].

    A, B are descriptors of [m, k] and [n, k], in blocks of [M, K] and [N, K]. Rows from row_end and
    column_end on have no scales. BY_STEP: the scales change every K columns, a_step and b_step further. a_row
    and b_row are the strides of the scales between rows, 0 if all share one. SHARED is the number of rows of
    B per scale. EXACT is the number of steps between promotions to fp32, or 0 if the tensor cores accumulate
    everything.
    """
    rows = row + tl.arange(0, M)
    columns = column + tl.arange(0, N)
    a_scales = A_SCALE + rows * a_row
    b_scales = B_SCALE + columns // SHARED * b_row
    total = tl.zeros((M, N), tl.float32)
    part = tl.zeros((M, N), tl.float32)  # the tensor cores' accumulator
    for step in range(0, tl.cdiv(k, K)):
        a = A.load([row, step * K])  # [M, K]; out of bounds, a load returns 0
        b = B.load([column, step * K])  # [N, K]
        if BY_STEP:
            product = tl.dot(a, b.T)
            a_scale = tl.load(a_scales + step * a_step, rows < row_end, 0.0)  # [M]
            if SHARED == N:  # the tile's rows of B share a scale
                b_scale = tl.load(B_SCALE + column // N * b_row + step * b_step)
                total += product * (a_scale * b_scale)[:, None]
            else:
                b_scale = tl.load(b_scales + step * b_step, columns < column_end, 0.0)  # [N]
                total += product * a_scale[:, None] * b_scale[None, :]
        else:
            part = tl.dot(a, b.T, part)
            if EXACT:
                if step % EXACT == EXACT - 1:
                    total += part
                    part = tl.zeros((M, N), tl.float32)

    if not BY_STEP:
        a_scale = tl.load(a_scales, rows < row_end, 0.0)
        b_scale = tl.load(b_scales, columns < column_end, 0.0)
        total = (total + part) * a_scale[:, None] * b_scale[None, :]
    return total


@triton.jit
def scaled_kernel(
    A, B, Y, A_SCALE, B_SCALE, m, n, k, a_row, a_step, b_row, b_step,
    BY_STEP: tl.constexpr,
    SHARED: tl.constexpr,
    EXACT: tl.constexpr,
    ADD: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute one tile [M, N] of Y [m, n] = (or, ADD: +=) A B^T. The arguments are those of scaled_tile."""
    row, column = program_tile(m, n, M=M, N=N, GROUP=GROUP)
    total = scaled_tile(
        A, B, A_SCALE, B_SCALE, row, m, column, n, k, a_row, a_step, b_row, b_step,
        BY_STEP=BY_STEP,
        SHARED=SHARED,
        EXACT=EXACT,
        M=M,
        N=N,
        K=K,
    )
    write_tile(Y, total, row, column, num_rows=m, num_columns=n, ADD=ADD)


def triton_fits(a: QuantizedMatrix, b: QuantizedMatrix) -> bool:
    """Whether the kernel can multiply these matrices."""
    why = skewed(a.q, b.q)
    if a.kind not in fp8.SHARED_KINDS and a.side < SMALLEST:
        why = f"blocks of {a.side} are below the {SMALLEST} that a tensor core multiplies at once"
    if a.q.numel() == 0 or b.q.numel() == 0:
        return False
    fits = kernel_is_available("fp8 GEMM", a.scale, why=why)
    if fits and a.kind == "mx":
        print_once(f"mxfp8: {obstacle_to_mx(a.q.device)}; our own kernel multiplies in 8 bits and scales the "
                   f"sum of every {a.side} columns in fp32: the same numbers, expected slower than bf16")
    return fits


def obstacle_to_mx(device: torch.device) -> str:
    """Return why the tensor cores do not multiply MXFP8."""
    if device.type != "cuda":
        return "the interpreter has no tensor cores"
    if torch.cuda.get_device_capability(device) < MX_CHIP:
        return f"{torch.cuda.get_device_name(device)} has no products of it (sm_100 or newer has)"
    return "the chip's own products, which no GPU has confirmed, are part of train.unproven"


class Steps(NamedTuple):
    """How scaled_tile steps along the contracted dim. The fields are its arguments."""
    a_row: int
    a_step: int
    b_row: int
    b_step: int
    BY_STEP: bool
    SHARED: int
    EXACT: int
    K: int


def steps_of(a: QuantizedMatrix, b: QuantizedMatrix) -> Steps:
    """Choose the steps for a, with scales per tensor, row or group."""
    by_step = a.kind in fp8.GROUP_KINDS
    step = a.side if by_step else STEP
    return Steps(
        *scale_strides(a),
        *scale_strides(b),
        BY_STEP=by_step,
        SHARED=b.side if b.kind in ("block", "matrix") else 1,
        EXACT=0 if by_step or takes_fast_accumulation(a) else EXACT // step,
        K=step,
    )


def get_tile(steps: Steps) -> dict[str, int]:
    """Return the launch parameters."""
    return EACH if steps.BY_STEP and steps.SHARED != TILE["N"] else TILE


def scale_strides(x: QuantizedMatrix) -> tuple[int, int]:
    """Return the strides from one row of scales to the next, and from one block of columns to the next."""
    row_stride = 0 if x.kind == "tensor" else x.scale.stride(0)
    column_stride = x.scale.stride(1) if x.kind in (*fp8.GROUP_KINDS, "block") else 0
    return row_stride, column_stride


def launch_scaled_product(a: QuantizedMatrix, b: QuantizedMatrix, y: Tensor, add: bool) -> Tensor:
    """y = (or, add: +=) a b^T. a has scales per tensor, row or group. y [m, n] is contiguous."""
    m, k = a.q.shape
    n = b.q.shape[0]
    steps = steps_of(a, b)
    tile = get_tile(steps)
    tiles = ceil_div(m, tile["M"]) * ceil_div(n, tile["N"])
    scaled_kernel[(tiles,)](
        TensorDescriptor.from_tensor(a.q, [tile["M"], steps.K]),
        TensorDescriptor.from_tensor(b.q, [tile["N"], steps.K]),
        y, a.scale, b.scale, m, n, k,
        ADD=add,
        **steps._asdict(),
        **tile,
    )
    return y
