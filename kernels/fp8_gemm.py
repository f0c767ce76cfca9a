"""Products of 8-bit floats with scales: y = (q_a s_a) (q_b s_b)^T, summed in fp32.

On a GPU, operands with a scale a tensor or a row go to torch._scaled_mm (cuBLASLt, CUTLASS). Blocks, and
products that are added to fp32, go to one Triton kernel. It multiplies the tensor cores' partial sum of each
128 columns by both scales before it adds it to fp32 (DeepSeek-V3, arXiv 2412.19437, 3.3.2: Hopper's own sum
of 8-bit products keeps 14 bits), so one kernel serves every kind of scale. Elsewhere the definition runs:
both operands are dequantized, which is exact, and multiplied in fp32 (fp64: in fp64).

Both operands have the summed dim last, because Hopper's fp8 tensor cores can read no other layout.
"""
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import fp8
from kernels.linear import skewed
from kernels.tiles import tile_of_program, write_tile
from kernels.triton_ import DTYPES, TensorDescriptor, ceil_div, kernel_is_available, tl, triton

# launch parameters if all rows of B in a tile share a scale
TILE = {"M": 128, "N": 128, "GROUP": 8, "num_warps": 8, "num_stages": 4}
EACH = {**TILE, "N": 64}  # if each row has its own: more rows do not fit the registers
SMALLEST = 32  # columns that a tensor core multiplies at once
STEP = 128  # columns between two additions to fp32, unless the scales are those of groups


class Recipe(NamedTuple):
    """How the operands of a layer are quantized."""
    activation_kind: str  # kind of the scales of x and dy
    weight_kind: str  # of W
    gradient_dtype: torch.dtype  # of dy; x and W are E4M3


class QuantizedMatrix(NamedTuple):
    """A matrix [m, n] as kernels/fp8.py quantizes it.

    largest: what the scale was computed from, if quantize_operand was given it.
    """
    q: Tensor
    scale: Tensor
    kind: str
    side: int
    largest: Tensor | None = None

    def dequantized(self) -> Tensor:
        """[m, n] in the dtype of the scale."""
        return fp8.dequantize(self.q, self.scale, self.kind, self.scale.dtype, self.side)


def quantize_operand(
    x: Tensor, kind: str, dtype: torch.dtype, side: int, largest: Tensor | None = None
) -> QuantizedMatrix:
    """fp8.quantize, which has the arguments."""
    q, scale = fp8.quantize(x, kind, dtype, side, largest)
    return QuantizedMatrix(q, scale, kind, side, largest)


def scaled_product(a: QuantizedMatrix, b: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """a [m, k], b [n, k] -> a b^T [m, n] in dtype."""
    has_library = a.kind in ("tensor", "row") and a.q.device.type == "cuda"
    if has_library and dtype == torch.bfloat16:
        return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]  # missing in torch's stubs
            a.q,
            b.q.t(),
            scale_a=a.scale,
            scale_b=b.scale.t(),
            out_dtype=dtype,
            use_fast_accum=a.q.dtype == fp8.E4M3,  # gradients (E5M2) keep the sum's bits, as in torchao
        )
    if dtype in DTYPES and triton_fits(a, b):
        y = a.q.new_empty(a.q.shape[0], b.q.shape[0], dtype=dtype)
        return launch_scaled_product(a, b, y, add=False)
    return (a.dequantized() @ b.dequantized().t()).to(dtype)


def write_scaled_product(
    into: Tensor | None, a: QuantizedMatrix, b: QuantizedMatrix, dtype: torch.dtype, add: bool
) -> Tensor:
    """into [m, n] = (or, add: +=) a b^T, in the dtype of `into`. If into is None: returns a b^T in dtype."""
    if into is None:
        return scaled_product(a, b, dtype)
    if into.dtype in DTYPES and into.is_contiguous() and triton_fits(a, b):
        return launch_scaled_product(a, b, into, add)
    left = a.dequantized().to(into.dtype)
    right = b.dequantized().to(into.dtype)
    return into.addmm_(left, right.t()) if add else torch.mm(left, right.t(), out=into)


# ---- Triton ----------------------------------------------------------------------------------------------

@triton.jit
def scaled_kernel(
    A, B, Y, A_SCALE, B_SCALE, m, n, k, a_row, a_step, b_row, b_step,
    SHARED: tl.constexpr,
    ADD: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One tile [M, N] of Y [m, n] = (or, ADD: +=) A B^T.

    A, B: descriptors of [m, k] and [n, k], in blocks of [M, K] and [N, K].
    a_row, b_row: strides of the scales from row to row; a_step, b_step: from K columns to the next K. A
    stride is 0 where both have the same scale. SHARED: number of rows of B that share a scale.
    """
    row, column = tile_of_program(m, n, M=M, N=N, GROUP=GROUP)
    rows = row + tl.arange(0, M)
    columns = column + tl.arange(0, N)

    total = tl.zeros((M, N), tl.float32)
    for step in range(0, tl.cdiv(k, K)):
        # what the tensor cores sum: K products
        a = A.load([row, step * K])  # [M, K]; beyond the tensors, a load gives 0
        b = B.load([column, step * K])  # [N, K]
        part = tl.dot(a, b.T)

        # times the scales of their rows
        a_scale = tl.load(A_SCALE + rows * a_row + step * a_step, rows < m, 0.0)  # [M]
        if SHARED == N:  # the tile's rows of B share a scale
            b_scale = tl.load(B_SCALE + column // N * b_row + step * b_step)
            total += part * (a_scale * b_scale)[:, None]
        else:
            b_pointers = B_SCALE + columns // SHARED * b_row + step * b_step
            b_scale = tl.load(b_pointers, columns < n, 0.0)  # [N]
            total += part * a_scale[:, None] * b_scale[None, :]

    write_tile(Y, total, row, column, num_rows=m, num_columns=n, ADD=ADD)


def triton_fits(a: QuantizedMatrix, b: QuantizedMatrix) -> bool:
    """Whether the kernel multiplies these matrices."""
    why = skewed(a.q, b.q)
    if a.kind in ("group", "block") and a.side < SMALLEST:
        why = f"blocks of {a.side} are below the {SMALLEST} that a tensor core multiplies at once"
    if a.q.numel() == 0 or b.q.numel() == 0:
        return False
    return kernel_is_available("fp8 GEMM", a.scale, why=why)


def step_sizes(x: QuantizedMatrix) -> tuple[int, int]:
    """Strides of the scales: from a row of scales to the next, and from a block of columns to the next."""
    row_stride = 0 if x.kind == "tensor" else x.scale.stride(0)
    column_stride = 1 if x.kind in ("group", "block") else 0
    return row_stride, column_stride


def launch_scaled_product(a: QuantizedMatrix, b: QuantizedMatrix, y: Tensor, add: bool) -> Tensor:
    """y = (or, add: +=) a b^T. a: with scales a tensor, row or group. y [m, n], contiguous."""
    m, k = a.q.shape
    n = b.q.shape[0]
    shared = {"tensor": TILE["N"], "block": b.side}.get(b.kind, 1)
    tile = TILE if shared == TILE["N"] else EACH
    step = a.side if a.kind == "group" else STEP
    tiles = ceil_div(m, tile["M"]) * ceil_div(n, tile["N"])
    scaled_kernel[(tiles,)](
        TensorDescriptor.from_tensor(a.q, [tile["M"], step]),
        TensorDescriptor.from_tensor(b.q, [tile["N"], step]),
        y, a.scale, b.scale, m, n, k, *step_sizes(a), *step_sizes(b),
        SHARED=shared,
        ADD=add,
        K=step,
        **tile,
    )
    return y
