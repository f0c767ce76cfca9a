"""kernels/norm.py with a result that is left to the fp8 linear that reads it: the formula `norm`.

The forward finds the statistics and max |y|, and writes no y.
"""
import torch
from torch import Tensor

from kernels.grad import accumulate_summed_grad
from kernels.norm import (
    FORWARD_PER_WARP,
    PROGRAMS,
    add_rows,
    launch_backward,
    launch_meta,
    normalized,
    row_statistics,
    triton_supports,
)
from kernels.norm import add_norm as written_add_norm
from kernels.tiles import inside_matrix, tile_offsets
from kernels.triton_ import ceil_div, num_processors, tl, triton
from kernels.unproven.fp8_maxima import empty_maxima_of_programs, reduce_strip_maxima
from kernels.unproven.fp8_origin import Origin, Reader, deferred_tensor


def add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    compiled: bool = False,
    *,
    reader: Reader,
) -> tuple[Tensor, Tensor]:
    """kernels.norm.add_norm, whose first result `reader` computes, if there are kernels for it."""
    is_fused = triton_supports(x, residual, weight, bias) and reader.takes(x, weight, bias)
    if not is_fused:
        return written_add_norm(x, residual, weight, bias, eps, compiled)
    return _UnwrittenNorm.apply(x, residual, weight, bias, eps, reader)


# ---- Triton ------------------------------------------------------------------------------------------------
# The arguments are those of kernels/norm.py.

@triton.jit
def deferred_kernel(
    X, RESIDUAL, WEIGHT, BIAS, TOTAL, SCALE, MEAN, OF_ROWS, OF_COLUMNS, n, d, eps,
    KIND: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    LAYER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Run forward_kernel on every num_programs-th tile of ROWS rows, writing max |Y| instead of Y.

    KIND is that of the scales of Y, see store_maxima; a group's maxima are found by the cast.
    """
    columns = tl.arange(0, BLOCK)
    largest = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(tl.program_id(0) * ROWS, n, tl.num_programs(0) * ROWS):
        rows = first + tl.arange(0, ROWS)
        inside = inside_matrix(rows, columns, n, d)
        offsets = tile_offsets(rows, columns, d)

        x = add_rows(X, RESIDUAL, TOTAL, offsets, inside, HAS_RESIDUAL=HAS_RESIDUAL)  # [ROWS, BLOCK]
        mean, scale = row_statistics(x, inside, d, eps, LAYER=LAYER)
        tl.store(SCALE + rows, scale, rows < n)
        if LAYER:
            tl.store(MEAN + rows, mean, rows < n)
        if KIND == "tensor" or KIND == "row":
            y = normalized(x, mean, scale, WEIGHT, BIAS, columns, d, LAYER=LAYER)
            largest = add_maxima(largest, y.to(X.dtype.element_ty), OF_ROWS, rows, inside, n, KIND=KIND)
    store_maxima(largest, OF_ROWS, OF_COLUMNS, columns, d, KIND=KIND)


@triton.jit
def add_maxima(largest, y, OF_ROWS, rows, inside, n, KIND: tl.constexpr):
    """Update `largest` with the rows y [ROWS, BLOCK], rounded as in memory. Row maxima go to OF_ROWS."""
    size = tl.where(inside, tl.abs(y.to(tl.float32)), 0.0)
    if KIND == "row":
        tl.store(OF_ROWS + rows, tl.max(size, 1), rows < n)
    return tl.maximum(largest, size)


@triton.jit
def store_maxima(largest, OF_ROWS, OF_COLUMNS, columns, d, KIND: tl.constexpr):
    """Store a program's maxima: one number in OF_ROWS [programs] (tensor), or one per column in OF_COLUMNS
    [programs, d] (row)."""
    program = tl.program_id(0).to(tl.int64)
    if KIND == "tensor":
        tl.store(OF_ROWS + program, tl.max(tl.max(largest, 1), 0))
    if KIND == "row":
        tl.store(OF_COLUMNS + program * d + columns, tl.max(largest, 0), columns < d)


def launch_deferred(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    kind: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Run launch_forward with y left to the fp8 linear that reads it. kind is that of the linear's scales."""
    shape = x.shape
    d = shape[-1]
    n = x.numel() // d
    x = x.contiguous()
    total = x
    if residual is not None:
        residual = residual.contiguous()
        total = torch.empty_like(x)
    scale = x.new_empty(n, dtype=torch.float32)
    mean = None if bias is None else torch.empty_like(scale)

    meta = launch_meta(d, FORWARD_PER_WARP)
    programs = min(PROGRAMS * num_processors(x.device), ceil_div(n, meta["ROWS"]))
    of_rows, of_columns = empty_maxima_of_programs(x, kind, programs)
    deferred_kernel[(programs,)](
        x, residual, weight, bias, total, scale, mean, of_rows, of_columns, n, d, eps,
        KIND=kind,
        HAS_RESIDUAL=residual is not None,
        LAYER=bias is not None,
        **meta,
    )
    maxima = reduce_strip_maxima(of_rows, of_columns)
    origin = Origin("norm", (n, d), (total, weight, bias, scale, mean), kind, maxima)
    return deferred_tensor(origin, shape, like=x), total, scale, mean


# ---- autograd ----------------------------------------------------------------------------------------------

class _UnwrittenNorm(torch.autograd.Function):
    """Returns (y, x + residual), or (y, x) without a residual; y is unwritten."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        reader: Reader,
    ) -> tuple[Tensor, Tensor]:
        y, total, scale, mean = launch_deferred(x, residual, weight, bias, eps, reader.kind)
        ctx.save_for_backward(total, scale, mean)
        ctx.weight = weight
        ctx.bias = bias
        ctx.has_residual = residual is not None
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    def backward(ctx, dy: Tensor | None, dresidual: Tensor | None) -> tuple[Tensor | None, ...]:
        x, scale, mean = ctx.saved_tensors
        if dy is None:  # y is unused
            return dresidual, dresidual if ctx.has_residual else None, None, None, None, None
        dx, dweight, dbias = launch_backward(dy, dresidual, x, ctx.weight, scale, mean)
        dweight = accumulate_summed_grad(ctx.weight, dweight)
        if dbias is not None:
            dbias = accumulate_summed_grad(ctx.bias, dbias)
        return dx, dx if ctx.has_residual else None, dweight, dbias, None, None
