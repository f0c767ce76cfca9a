"""Products of 8-bit floats with scales: y = (q_a s_a) (q_b s_b)^T, summed in fp32.

On a GPU, operands with a scale a tensor or a row go to torch._scaled_mm (cuBLASLt, CUTLASS); blocks, and whatever is added to
fp32, to one Triton kernel. It multiplies the tensor cores' partial sum of each 128 columns by both scales before it adds it to
fp32 (DeepSeek-V3, arXiv 2412.19437, 3.3.2: Hopper's own sum of 8-bit products keeps 14 bits), so one kernel serves every kind
of scale. Elsewhere the definition: both operands widened, exactly, and multiplied in fp32 (fp64: in fp64).
Both operands lie with the summed dimension last: Hopper's fp8 tensor cores read them no other way.
"""
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import fp8
from kernels.linear import add_tile, skewed
from kernels.triton_ import DTYPES, TensorDescriptor, ceil_div, fits, tl, triton

TILE = {"M": 128, "N": 128, "GROUP": 8, "num_warps": 8, "num_stages": 4}  # where all rows of B in a tile have one scale
EACH = {**TILE, "N": 64}  # where each has its own: more of them do not fit the registers
SMALLEST = 32  # columns that a tensor core multiplies at once
STEP = 128  # columns between two additions to fp32, where no block says so


class Quantized(NamedTuple):
    """q [m, n], scale: kernels/fp8.py. largest: what the scale was made from, where other ranks had a say in it."""
    q: Tensor
    scale: Tensor
    kind: str
    side: int
    largest: Tensor | None = None

    def wide(self) -> Tensor:
        return fp8.dequantize(self.q, self.scale, self.kind, self.scale.dtype, self.side)


def quantize(x: Tensor, kind: str, dtype: torch.dtype, side: int, largest: Tensor | None = None) -> Quantized:
    """largest: see kernels/fp8.py."""
    return Quantized(*fp8.quantize(x, kind, dtype, side, largest), kind, side, largest)


def product(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """a [m, k], b [n, k] -> a b^T [m, n] in dtype."""
    if a.kind in ("tensor", "row") and dtype == torch.bfloat16 and a.q.device.type == "cuda":
        return torch._scaled_mm(a.q, b.q.t(), scale_a=a.scale, scale_b=b.scale.t(), out_dtype=dtype,
                               use_fast_accum=a.q.dtype == fp8.E4M3)  # not for gradients: they keep the sum's bits, as in torchao
    if dtype in DTYPES and triton_fits(a, b):
        return launch(a, b, a.q.new_empty(a.q.shape[0], b.q.shape[0], dtype=dtype), False)
    return (a.wide() @ b.wide().t()).to(dtype)


def add_product(into: Tensor | None, a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """into [m, n] += a b^T, in its own dtype; None: return a b^T in dtype."""
    if into is None:
        return product(a, b, dtype)
    if into.dtype in DTYPES and into.is_contiguous() and triton_fits(a, b):
        return launch(a, b, into, True)
    return into.addmm_(a.wide().to(into.dtype), b.wide().t().to(into.dtype))


# ---- Triton ------------------------------------------------------------------------------------------------------------------

@triton.jit
def scaled_kernel(A, B, Y, A_SCALE, B_SCALE, m, n, k, a_row, a_step, b_row, b_step, SHARED: tl.constexpr, ADD: tl.constexpr,
                  M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr):
    """One tile of Y [m, n] = (or, ADD: +=) A B^T. A, B: descriptors of [m, k] and [n, k], in blocks of [M, K] and [N, K]. Strides of
    the scales: from row to row, and from K columns to the next; 0: the same one. SHARED: rows of B with one scale."""
    tiles_m, tiles_n = tl.cdiv(m, M), tl.cdiv(n, N)
    band = tl.program_id(0) // (GROUP * tiles_n)  # as wgrad_kernel: tiles side by side form a square
    height = tl.minimum(tiles_m - band * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * tiles_n)
    row, column = (band * GROUP + within % height) * M, within // height * N
    rows, columns = row + tl.arange(0, M), column + tl.arange(0, N)
    total = tl.zeros((M, N), tl.float32)
    for step in range(0, tl.cdiv(k, K)):  # what lies beyond the tensors reads as 0
        part = tl.dot(A.load([row, step * K]), B.load([column, step * K]).T)
        a = tl.load(A_SCALE + rows * a_row + step * a_step, rows < m, 0.0)
        if SHARED == N:  # the tile's rows of B have one scale
            total += part * (a * tl.load(B_SCALE + column // N * b_row + step * b_step))[:, None]
        else:
            b = tl.load(B_SCALE + columns // SHARED * b_row + step * b_step, columns < n, 0.0)
            total += part * a[:, None] * b[None, :]
    if ADD:
        add_tile(Y, total, row, column, m, n, M, N)
    else:
        tl.store(Y + rows.to(tl.int64)[:, None] * n + columns[None, :], total.to(Y.dtype.element_ty), (rows < m)[:, None] & (columns < n)[None, :])


def triton_fits(a: Quantized, b: Quantized) -> bool:
    why = skewed(a.q, b.q)
    if a.kind in ("group", "block") and a.side < SMALLEST:
        why = f"blocks of {a.side} are below the {SMALLEST} that a tensor core multiplies at once"
    return a.q.numel() > 0 and b.q.numel() > 0 and fits("fp8 GEMM", a.scale, why=why)


def steps(x: Quantized) -> tuple[int, int]:
    """Strides of the scales from row (of scales) to row, and from block to block of columns."""
    return 0 if x.kind == "tensor" else x.scale.stride(0), 1 if x.kind in ("group", "block") else 0


def launch(a: Quantized, b: Quantized, y: Tensor, add: bool) -> Tensor:
    """a: a scale a tensor, row or group. y [m, n], contiguous."""
    (m, k), n = a.q.shape, b.q.shape[0]
    shared = {"tensor": TILE["N"], "block": b.side}.get(b.kind, 1)
    tile = TILE if shared == TILE["N"] else EACH
    step = a.side if a.kind == "group" else STEP
    scaled_kernel[(ceil_div(m, tile["M"]) * ceil_div(n, tile["N"]),)](
        TensorDescriptor(a.q, a.q.shape, a.q.stride(), [tile["M"], step]), TensorDescriptor(b.q, b.q.shape, b.q.stride(), [tile["N"], step]),
        y, a.scale, b.scale, m, n, k, *steps(a), *steps(b), SHARED=shared, ADD=add, K=step, **tile)
    return y
