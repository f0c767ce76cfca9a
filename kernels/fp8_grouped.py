"""y_i = x_i W_i^T of several experts, whose rows follow each other (kernels/grouped_gemm.py), in fp8.

    recipe       x, W    dy      a scale of x and dy   of W_i               source
    tensorwise   e4m3    e5m2    a row                 the expert's matrix  arXiv 2209.05433
    rowwise      e4m3    e5m2    a row                 a row                torchao
    blockwise    e4m3    e4m3    1 x 128               128 x 128            DeepSeek-V3, arXiv 2412.19437, 3.3

y = x W^T and dx = dy W run in 8 bits. A token has scales of its own, which go with it wherever it is
computed. dW = dy^T x stays in the dtype of x: it is a sum over an expert's tokens, which would have to share
scales for it, and the layout decides which tokens these are, and in which order. So of the three products,
this one would change with the number of ranks.
"""
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.fp8 import E4M3, E5M2
from kernels.fp8_gemm import QuantizedMatrix, Recipe, quantize_operand, step_sizes
from kernels.fp8_gemm import triton_fits as fp8_gemm_fits
from kernels.grad import accumulation_dtype
from kernels.grouped_gemm import (
    accumulate_wgrad,
    expert_of_tile,
    grouped_forward,
    triton_fits,
    wgrad_in_triton,
)
from kernels.tiles import inside_matrix, tile_offsets
from kernels.triton_ import TensorDescriptor, ceil_div, power_of_2, tl, triton

RECIPES = {
    "tensorwise": Recipe("row", "matrix", E5M2),
    "rowwise": Recipe("row", "row", E5M2),
    "blockwise": Recipe("group", "block", E4M3),
}
TILE = {"M": 128, "N": 128, "num_warps": 8, "num_stages": 4}  # if all rows of W in a tile share a scale
EACH = {**TILE, "N": 64}  # if each row has its own
STEP = 128  # columns between two additions to fp32, unless the scales are those of groups


def scaled_grouped_linear(
    x: Tensor, weight: Tensor, counts: Sequence[int] | Tensor, recipe: str, side: int
) -> Tensor:
    """As kernels/grouped_gemm.py's grouped_linear: x [m, n], weight [experts * o, n] -> [m, o].

    recipe: one of RECIPES. side: of a block; it divides n and o.
    """
    return _ScaledGrouped.apply(x, weight, counts, recipe, side)


def quantized_experts(weight: Tensor, kind: str, side: int) -> QuantizedMatrix:
    """weight [e, o, n], or a transposed view of this shape -> all experts below each other, [e * o, n].

    kind: of the scales, also "matrix": one for each expert.
    """
    experts, o, n = weight.shape
    stacked = weight.reshape(experts * o, n)
    if kind != "matrix":
        return quantize_operand(stacked, kind, E4M3, side)
    dtype = accumulation_dtype(weight.dtype)
    largest = torch.linalg.vector_norm(weight, float("inf"), (1, 2), dtype=dtype)  # [e]
    row_largest = largest.repeat_interleave(o)[:, None]  # [e * o, 1]
    return quantize_operand(stacked, "row", E4M3, side, row_largest)


def grouped_product(
    a: QuantizedMatrix,
    b: QuantizedMatrix,
    counts: list[int] | Tensor,
    experts: int,
    dtype: torch.dtype,
) -> Tensor:
    """a [m, k], b [experts * o, k] -> [m, o] in dtype.

    counts: number of rows of each expert; for Triton, the offsets on the device (grouped_gemm.offsets_of).
    """
    if isinstance(counts, Tensor):
        return launch_grouped_product(a, b, counts, experts, dtype)
    weight = b.dequantized().view(experts, -1, b.q.shape[1])
    return grouped_forward(a.dequantized(), weight, counts).to(dtype)


# ---- Triton ----------------------------------------------------------------------------------------------

@triton.jit
def scaled_grouped_kernel(
    A, B, Y, A_SCALE, B_SCALE, OFFSETS, experts, inner, outer, a_row, a_step, b_row, b_step,
    SHARED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """One tile [M, N] of Y [m, outer] = A [m, inner] times the rows of B of its expert.

    B [experts * outer, inner] has [outer, inner] of each expert. A, B: descriptors, in blocks of [M, K] and
    [N, K]. Strides of the scales, SHARED: as in kernels/fp8_gemm.py.
    """
    tiles_across = tl.cdiv(outer, N)
    tile = tl.program_id(0) // tiles_across
    column = tl.program_id(0) % tiles_across * N
    exists, expert, row, end = expert_of_tile(OFFSETS, experts, tile, M=M, EXPERTS=EXPERTS)
    if exists:
        rows = row + tl.arange(0, M)
        columns = column + tl.arange(0, N)
        first = expert * outer  # of the expert's rows of B
        total = tl.zeros((M, N), tl.float32)
        for step in range(0, tl.cdiv(inner, K)):
            # what the tensor cores sum: K products
            a = A.load([row, step * K])  # [M, K]; beyond the columns, a load gives 0
            b = B.load([first + column, step * K])  # [N, K]
            part = tl.dot(a, b.T)

            # times the scales of their rows
            a_scale = tl.load(A_SCALE + rows * a_row + step * a_step, rows < end, 0.0)  # [M]
            if SHARED == N:  # the tile's rows of B share a scale
                b_scale = tl.load(B_SCALE + (first + column) // N * b_row + step * b_step)
                total += part * (a_scale * b_scale)[:, None]
            else:
                b_pointers = B_SCALE + (first + columns) // SHARED * b_row + step * b_step
                b_scale = tl.load(b_pointers, columns < outer, 0.0)  # [N]
                total += part * a_scale[:, None] * b_scale[None, :]

        pointers = Y + tile_offsets(rows, columns, outer)
        tl.store(pointers, total, inside_matrix(rows, columns, end, outer))


def launch_grouped_product(
    a: QuantizedMatrix,
    b: QuantizedMatrix,
    offsets: Tensor,
    experts: int,
    dtype: torch.dtype,
) -> Tensor:
    """As grouped_product: a [m, k] with scales a row or group, b [experts * o, k] -> [m, o]."""
    m, k = a.q.shape
    outer = b.q.shape[0] // experts
    shared = b.side if b.kind == "block" else 1
    tile = TILE if shared == TILE["N"] else EACH
    step = a.side if a.kind == "group" else STEP
    tiles_m = ceil_div(m, tile["M"]) + experts  # an expert has at most one tile that is not full
    tiles_n = ceil_div(outer, tile["N"])
    y = torch.empty(m, outer, dtype=dtype, device=a.q.device)
    scaled_grouped_kernel[(tiles_m * tiles_n,)](
        TensorDescriptor.from_tensor(a.q, [tile["M"], step]),
        TensorDescriptor.from_tensor(b.q, [tile["N"], step]),
        y, a.scale, b.scale, offsets, experts, k, outer, *step_sizes(a), *step_sizes(b),
        SHARED=shared,
        K=step,
        EXPERTS=power_of_2(experts),
        **tile,
    )
    return y


# ---- autograd --------------------------------------------------------------------------------------------

class _ScaledGrouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, counts: Sequence[int] | Tensor, recipe: str, side: int
    ) -> Tensor:
        by_expert = weight.view(len(counts), -1, x.shape[1])
        a = quantize_operand(x, RECIPES[recipe].activation_kind, E4M3, side)
        b = quantized_experts(by_expert, RECIPES[recipe].weight_kind, side)
        ctx.save_for_backward(x)
        ctx.weight = weight  # the Parameter itself, which has main_grad
        ctx.experts = len(counts)
        ctx.triton = triton_fits(x, by_expert) and fp8_gemm_fits(a, b)
        ctx.counts = wgrad_in_triton(counts, ctx.triton, x.device)
        ctx.recipe = RECIPES[recipe]
        ctx.side = side
        return grouped_product(a, b, ctx.counts, ctx.experts, x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors
        dy = dy.contiguous()
        dx = None
        if ctx.needs_input_grad[0]:
            by_expert = ctx.weight.view(ctx.experts, -1, x.shape[1])
            transposed = quantized_experts(by_expert.transpose(1, 2), ctx.recipe.weight_kind, ctx.side)
            kind, _, dtype = ctx.recipe
            quantized_dy = quantize_operand(dy, kind, dtype, ctx.side)
            dx = grouped_product(quantized_dy, transposed, ctx.counts, ctx.experts, dy.dtype)
        return dx, accumulate_wgrad(ctx, dy, x), None, None, None
