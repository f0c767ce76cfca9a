"""y_i = x_i W_i^T of several experts, whose rows lie one after the other (kernels/grouped_gemm.py), in fp8.

    recipe       x, W     dy     a scale of x and dy    of W_i               sources
    tensorwise   e4m3     e5m2   a row                  the expert's matrix  arXiv 2209.05433
    rowwise      e4m3     e5m2   a row                  a row                torchao
    blockwise    e4m3     e4m3   1 x 128                128 x 128            DeepSeek-V3, arXiv 2412.19437, 3.3

y = x W^T and dx = dy W run on 8 bits; dW = dy^T x stays in the dtype of x. It sums over an expert's tokens, which would have to
share scales for that, and which tokens those are, and in what order, is the layout's doing: of three products the third would
be the one that changes with the number of ranks. A token's own scales come along wherever it is computed.
"""
import torch
from torch import Tensor

from kernels.fp8 import E4M3, E5M2
from kernels.fp8_gemm import Quantized, quantize, steps
from kernels.fp8_gemm import triton_fits as readable
from kernels.grad import wide
from kernels.grouped_gemm import give_wgrad, grouped_forward, shares, triton_fits, whose
from kernels.triton_ import TensorDescriptor, ceil_div, power_of_2, tl, triton

RECIPES = {"tensorwise": ("row", "matrix", E5M2), "rowwise": ("row", "row", E5M2), "blockwise": ("group", "block", E4M3)}  # x and dy; W; dy in
TILE = {"M": 128, "N": 128, "num_warps": 8, "num_stages": 4}  # where all rows of W in a tile have one scale
EACH = {**TILE, "N": 64}  # where each has its own
STEP = 128  # columns between two additions to fp32, where no block says so


def scaled_grouped_linear(x: Tensor, weight: Tensor, counts, recipe: str, side: int) -> Tensor:
    """As kernels/grouped_gemm.py's grouped_linear. x [m, n], weight [experts * o, n] -> [m, o]. recipe, side: of a block, which divides
    n and o."""
    return _ScaledGrouped.apply(x, weight, counts, recipe, side)


def matrices(weight: Tensor, kind: str, side: int) -> Quantized:
    """weight [e, o, n], or such a one's transpose -> the experts' one below the other, [e * o, n]."""
    e, o, n = weight.shape
    if kind != "matrix":
        return quantize(weight.reshape(e * o, n), kind, E4M3, side)
    largest = torch.linalg.vector_norm(weight, float("inf"), (1, 2), dtype=wide(weight.dtype))
    return quantize(weight.reshape(e * o, n), "row", E4M3, side, largest.repeat_interleave(o)[:, None])


def grouped_product(a: Quantized, b: Quantized, counts: "list[int] | Tensor", experts: int, dtype: torch.dtype) -> Tensor:
    """a [m, k], b [experts * o, k] -> [m, o] in dtype. counts: rows of each expert; where Triton runs, their offsets there."""
    if isinstance(counts, Tensor):
        return launch(a, b, counts, experts, dtype)
    return grouped_forward(a.wide(), b.wide().view(experts, -1, b.q.shape[1]), counts).to(dtype)


# ---- Triton ------------------------------------------------------------------------------------------------------------------

@triton.jit
def scaled_grouped_kernel(A, B, Y, A_SCALE, B_SCALE, OFFSETS, experts, inner, outer, a_row, a_step, b_row, b_step, SHARED: tl.constexpr,
                          M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr):
    """Y [m, outer] = A [m, inner] times its expert's rows of B, [outer, inner] of [experts * outer, inner]. A, B: descriptors, in blocks
    of [M, K] and [N, K]. Strides of the scales, SHARED: as in kernels/fp8_gemm.py's."""
    tiles_n = tl.cdiv(outer, N)
    tile, column = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n * N
    there, expert, row, end = whose(OFFSETS, experts, tile, M, EXPERTS)
    if there:
        rows, columns, first = row + tl.arange(0, M), column + tl.arange(0, N), expert * outer
        total = tl.zeros((M, N), tl.float32)
        for step in range(0, tl.cdiv(inner, K)):  # what lies beyond the columns reads as 0
            part = tl.dot(A.load([row, step * K]), B.load([first + column, step * K]).T)
            a = tl.load(A_SCALE + rows * a_row + step * a_step, rows < end, 0.0)
            if SHARED == N:  # the tile's rows of B have one scale
                total += part * (a * tl.load(B_SCALE + (first + column) // N * b_row + step * b_step))[:, None]
            else:
                b = tl.load(B_SCALE + (first + columns) // SHARED * b_row + step * b_step, columns < outer, 0.0)
                total += part * a[:, None] * b[None, :]
        tl.store(Y + rows.to(tl.int64)[:, None] * outer + columns[None, :], total.to(Y.dtype.element_ty),
                 (rows < end)[:, None] & (columns < outer)[None, :])


def launch(a: Quantized, b: Quantized, offsets: Tensor, experts: int, dtype: torch.dtype) -> Tensor:
    """a [m, k] with a scale a row or group, b [experts * o, k] -> [m, o]."""
    (m, k), outer = a.q.shape, b.q.shape[0] // experts
    shared = b.side if b.kind == "block" else 1
    tile, step = TILE if shared == TILE["N"] else EACH, a.side if a.kind == "group" else STEP
    y = torch.empty(m, outer, dtype=dtype, device=a.q.device)
    scaled_grouped_kernel[((ceil_div(m, tile["M"]) + experts) * ceil_div(outer, tile["N"]),)](
        TensorDescriptor(a.q, a.q.shape, a.q.stride(), [tile["M"], step]), TensorDescriptor(b.q, b.q.shape, b.q.stride(), [tile["N"], step]),
        y, a.scale, b.scale, offsets, experts, k, outer, *steps(a), *steps(b), SHARED=shared, K=step, EXPERTS=power_of_2(experts), **tile)
    return y


class _ScaledGrouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, counts, recipe, side):
        split = weight.view(len(counts), -1, x.shape[1])
        kind, of_weight, _ = RECIPES[recipe]
        a, b = quantize(x, kind, E4M3, side), matrices(split, of_weight, side)
        ctx.triton = triton_fits(x, split) and readable(a, b)
        ctx.save_for_backward(x)
        ctx.weight, ctx.experts, ctx.counts = weight, len(counts), shares(counts, ctx.triton, x.device)
        ctx.recipe, ctx.side = recipe, side
        return grouped_product(a, b, ctx.counts, ctx.experts, x.dtype)

    @staticmethod
    def backward(ctx, dy):
        (x,), dy, dx = ctx.saved_tensors, dy.contiguous(), None
        kind, of_weight, dtype = RECIPES[ctx.recipe]
        if ctx.needs_input_grad[0]:
            back = matrices(ctx.weight.view(ctx.experts, -1, x.shape[1]).transpose(1, 2), of_weight, ctx.side)
            dx = grouped_product(quantize(dy, kind, dtype, ctx.side), back, ctx.counts, ctx.experts, dy.dtype)
        return dx, give_wgrad(ctx, dy, x), None, None, None
