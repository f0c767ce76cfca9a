"""y_i = x_i W_i^T for several experts with consecutive rows (kernels/grouped_gemm.py), in fp8.

    recipe       x, W    dy      a scale of x and dy   of W_i               source
    tensorwise   e4m3    e5m2    a row                 the expert's matrix  arXiv 2209.05433
    rowwise      e4m3    e5m2    a row                 a row                torchao
    blockwise    e4m3    e4m3    1 x 128               128 x 128            DeepSeek-V3, arXiv 2412.19437, 3.3
    mxfp8        e4m3    e4m3    1 x 32                1 x 32               arXiv 2506.08027

y = x W^T and dx = dy W run in 8 bits. A token has separate scales, which travel with it wherever it is
computed. dW = dy^T x stays in the dtype of x: it is a sum over an expert's tokens, which would have to share
scales, and the layout decides which tokens these are, and in which order. So of the three products, only this
one would change with the number of ranks.
"""
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import grouped_gemm
from kernels.expert_order import host_counts
from kernels.fp8 import E4M3, E5M2, Maxima, quantize_pair
from kernels.fp8_gemm import (
    QuantizedMatrix,
    QuantizedPair,
    Recipe,
    Steps,
    quantize_operand,
    quantize_operand_pair,
    scaled_tile,
    steps_of,
)
from kernels.fp8_gemm import triton_fits as fp8_gemm_fits
from kernels.fp8_weight import quantize_once
from kernels.grouped_gemm import (
    RowTiles,
    accumulate_wgrad,
    grouped_forward,
    row_tiles,
    triton_fits,
)
from kernels.tiles import inside_matrix, tile_offsets
from kernels.triton_ import TensorDescriptor, ceil_div, tl, triton

RECIPES = {
    "tensorwise": Recipe("row", "matrix", E5M2),
    "rowwise": Recipe("row", "row", E5M2),
    "blockwise": Recipe("group", "block", E4M3),
    "mxfp8": Recipe("mx", "mx", E4M3),
}
# M: as in grouped_gemm.TILE, by which row_tiles splits the rows. Two programs fit a processor: one runs the
# prologue or epilogue of a tile, with few products, while the other multiplies
TILE = {"M": 128, "N": 128, "num_warps": 8, "num_stages": 3}
EXACT = {**TILE, "num_stages": 4}  # with promotion to fp32 along the way: registers for one program
EACH = {**EXACT, "N": 64}  # if scales change along the contracted dim, and each row of W has a separate one


def scaled_grouped_linear(
    x: Tensor, weight: Tensor, counts: Sequence[int] | Tensor, recipe: str, side: int
) -> Tensor:
    """Like grouped_linear in kernels/grouped_gemm.py: x [m, n], weight [experts * o, n] -> [m, o].

    recipe is one of RECIPES. side is that of a block; it divides n and o.
    """
    return _ScaledGrouped.apply(x, weight, counts, recipe, side)


def quantized_experts(weight: Tensor, experts: int, kind: str, side: int) -> QuantizedPair:
    """Quantize the stacked weights [e o, n] of all experts, and the experts' transposes [e n, o].

    Cached until the values change. kind is that of the scales, or "matrix": one for each expert.
    """
    def quantize(_: Maxima) -> QuantizedPair:
        matrices = weight.view(experts, -1, weight.shape[1])
        if kind != "matrix":
            return quantize_operand_pair(matrices, kind, E4M3, side)
        ahead, back = quantize_pair(matrices, "tensor", E4M3)
        rows, columns = matrices.shape[1:]
        return QuantizedPair(
            QuantizedMatrix(*ahead, kind, side=rows), QuantizedMatrix(*back, kind, side=columns)
        )

    return quantize_once(weight, Maxima, quantize)


def grouped_product(
    a: QuantizedMatrix,
    b: QuantizedMatrix,
    rows: list[int] | RowTiles,
    experts: int,
    dtype: torch.dtype,
) -> Tensor:
    """a [m, k], b [experts * o, k] -> [m, o] in dtype.

    rows is the number per expert; for Triton, their tiles on the device (grouped_gemm.row_tiles).
    """
    if isinstance(rows, RowTiles):
        return launch_grouped_product(a, b, rows, experts, dtype)
    weight = b.dequantized().view(experts, -1, b.q.shape[1])
    return grouped_forward(a.dequantized(), weight, rows).to(dtype)


# ---- Triton ----------------------------------------------------------------------------------------------

@triton.jit
def scaled_grouped_kernel(
    A, B, Y, A_SCALE, B_SCALE, TILES, inner, outer, a_row, a_step, b_row, b_step,
    BY_STEP: tl.constexpr,
    SHARED: tl.constexpr,
    EXACT: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Compute one tile [M, N] of Y [m, outer] = A [m, inner] times the rows of B of its expert.

    B [experts * outer, inner] has [outer, inner] per expert. TILES are those of a RowTiles. The other
    arguments are those of scaled_tile in kernels/fp8_gemm.py. A loop over tiles, as in 16 bits, would take
    the registers of the second program per processor.
    """
    tiles_across = tl.cdiv(outer, N)
    tile = tl.program_id(0) // tiles_across
    column = tl.program_id(0) % tiles_across * N
    if tile < tl.load(TILES):
        entry = TILES + (1 + tile) * 4
        expert = tl.load(entry)
        row = tl.load(entry + 1)
        end = tl.load(entry + 2)
        first = expert * outer  # of the expert's rows of B
        total = scaled_tile(
            A, B, A_SCALE, B_SCALE, row, end, first + column, first + outer, inner,
            a_row, a_step, b_row, b_step,
            BY_STEP=BY_STEP,
            SHARED=SHARED,
            EXACT=EXACT,
            M=M,
            N=N,
            K=K,
        )
        rows = row + tl.arange(0, M)
        columns = column + tl.arange(0, N)
        pointers = Y + tile_offsets(rows, columns, outer)
        tl.store(pointers, total, inside_matrix(rows, columns, end, outer))


def get_tile(steps: Steps) -> dict[str, int]:
    """Return the launch parameters."""
    if steps.BY_STEP:
        return EXACT if steps.SHARED == EXACT["N"] else EACH
    return EXACT if steps.EXACT else TILE


def launch_grouped_product(
    a: QuantizedMatrix,
    b: QuantizedMatrix,
    rows: RowTiles,
    experts: int,
    dtype: torch.dtype,
) -> Tensor:
    """Run grouped_product: a [m, k] with scales per row or group, b [experts * o, k] -> [m, o]."""
    m, k = a.q.shape
    outer = b.q.shape[0] // experts
    steps = steps_of(a, b)
    tile = get_tile(steps)
    assert tile["M"] == grouped_gemm.TILE["M"], "row_tiles divide the rows for both kinds of products"
    most_tiles = (len(rows.tiles) - 1) * ceil_div(outer, tile["N"])
    y = torch.empty(m, outer, dtype=dtype, device=a.q.device)
    scaled_grouped_kernel[(most_tiles,)](
        TensorDescriptor.from_tensor(a.q, [tile["M"], steps.K]),
        TensorDescriptor.from_tensor(b.q, [tile["N"], steps.K]),
        y, a.scale, b.scale, rows.tiles, k, outer,
        **steps._asdict(),
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
        b = quantized_experts(weight, len(counts), RECIPES[recipe].weight_kind, side).ahead
        ctx.save_for_backward(x)
        ctx.weight = weight  # the Parameter itself, which has main_grad
        ctx.experts = len(counts)
        ctx.triton = triton_fits(x, by_expert) and fp8_gemm_fits(a, b)
        if ctx.triton:
            ctx.rows = row_tiles(counts, len(x), x.device)
            ctx.counts = ctx.rows.offsets
        else:
            ctx.rows = host_counts(counts, len(x))
            ctx.counts = ctx.rows
        ctx.recipe = RECIPES[recipe]
        ctx.side = side
        return grouped_product(a, b, ctx.rows, ctx.experts, x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors
        dy = dy.contiguous()
        dx = None
        if ctx.needs_input_grad[0]:
            kind, weight_kind, dtype = ctx.recipe
            transposed = quantized_experts(ctx.weight, ctx.experts, weight_kind, ctx.side).back
            quantized_dy = quantize_operand(dy, kind, dtype, ctx.side)
            dx = grouped_product(quantized_dy, transposed, ctx.rows, ctx.experts, dy.dtype)
        return dx, accumulate_wgrad(ctx, dy, x), None, None, None
