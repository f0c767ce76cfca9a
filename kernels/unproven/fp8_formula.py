"""Quantize a matrix by its origin: from memory, or from its formula if it is unwritten.

    formula            result [m, n]                  operands
    norm               LayerNorm or RMSNorm           x [m, n], weight, bias [n], 1 / deviation, mean [m]
    swiglu             silu(gate) * up                gate_up [m, 2n]
    swiglu_backward    the gradient of gate_up        gate_up [m, n], dy [m, n/2]
    rope_backward      the gradient of merged q, k, v dq, dk, dv, cos, sin (fp8_rope.py)

A formula computes each element from operands that are in memory anyway, with the arithmetic and rounding of
the kernel that would have written it. So the 8 bits and the scales equal those of a materialized result, bit
for bit, and the result itself is neither written nor read. A scale that spans more than a tile needs its
maximum first: a norm's producer supplies it, and those of the others take another pass over the operands.
"""
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import fp8
from kernels.fp8 import (
    BLOCK_SIDE,
    GROUP_KINDS,
    PAIR,
    SHARED_KINDS,
    STRIP,
    Maxima,
    Quantized,
    as_stored,
    before_cast,
    cast_tile,
    cast_warps,
    find_maxima,
)
from kernels.fp8_gemm import (
    QuantizedMatrix,
    QuantizedPair,
    quantize_operand,
    quantize_operand_pair,
)
from kernels.fp8_linear import Casts
from kernels.norm import normalized
from kernels.swiglu import silu_times, swiglu_gradients
from kernels.tiles import block_range, inside_matrix, load_fp32, tile_offsets
from kernels.triton_ import ceil_div, power_of_2, tl, triton
from kernels.unproven.fp8_maxima import empty_maxima, reduce_strip_maxima
from kernels.unproven.fp8_origin import Origin, find_origin
from kernels.unproven.fp8_rope import launch_rope_cast, launch_rope_maxima


def find_origin_maxima(x: Origin, kind: str, *, both: bool) -> Maxima:
    """fp8.find_maxima of a matrix by its origin; reuses those that its producer found."""
    if x.kind == kind and x.maxima.rows is not None:
        return x.maxima
    if x.is_written:
        return find_maxima(written(x), kind, both=both)
    launch = launch_rope_maxima if x.formula == "rope_backward" else launch_formula_maxima
    return launch(x, kind) if kind in SHARED_KINDS else Maxima()


def quantize_origin(
    x: Origin, kind: str, dtype: torch.dtype, side: int, largest: Tensor | None
) -> QuantizedMatrix:
    """fp8.quantize of a matrix by its origin."""
    if x.is_written:
        return quantize_operand(written(x), kind, dtype, side, largest)
    if largest is None:
        largest = find_origin_maxima(x, kind, both=False).rows
    ahead, _ = select_cast_launcher(x)(x, kind, dtype, side, Maxima(rows=largest), back=False)
    return QuantizedMatrix(*ahead, kind, side)


def quantize_transposed_origin(
    x: Origin, kind: str, dtype: torch.dtype, side: int, largest: Tensor | None
) -> QuantizedMatrix:
    """fp8.quantize of its transpose. largest is that of the transpose's rows."""
    if x.is_written:
        return quantize_operand(written(x).t(), kind, dtype, side, largest)
    _, back = select_cast_launcher(x)(x, kind, dtype, side, Maxima(columns=largest), ahead=False)
    return QuantizedMatrix(*back, kind, side)


def quantize_origin_pair(
    x: Origin, kind: str, dtype: torch.dtype, side: int, maxima: Maxima
) -> QuantizedPair:
    """fp8.quantize_pair of a matrix by its origin."""
    if x.is_written:
        return quantize_operand_pair(written(x), kind, dtype, side, maxima)
    ahead, back = select_cast_launcher(x)(x, kind, dtype, side, maxima)
    return QuantizedPair(QuantizedMatrix(*ahead, kind, side), QuantizedMatrix(*back, kind, side))


def select_cast_launcher(x: Origin) -> Callable[..., tuple[Quantized, Quantized]]:
    """Return the function that launches the cast of an unwritten result."""
    return launch_rope_cast if x.formula == "rope_backward" else launch_formula_cast


def written(x: Origin) -> Tensor:
    """Return the materialized matrix [m, n]."""
    assert x.is_written and x.operands[0] is not None, f"the result of {x.formula} is not written"
    return x.operands[0]


# of an Fp8Scaling: a linear's matrices by their origins
CASTS = Casts(find_origin, find_origin_maxima, quantize_origin, quantize_transposed_origin,
              quantize_origin_pair)


# ---- Triton ------------------------------------------------------------------------------------------------
# Operands of the formulas: X is the norm's x, or gate_up; DY the gradient of SwiGLU's result; the others are
# the norm's. HALVES of the columns share the same operands: 2 for swiglu_backward, else 1. n counts the
# columns of a half. Tiles are [ROWS, COLUMNS].

class Operands(NamedTuple):
    """The first arguments of the kernels, in order; None if the formula lacks them."""
    x: Tensor
    dy: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    inverse: Tensor | None = None
    mean: Tensor | None = None


@triton.jit
def compute_tile(
    X, DY, WEIGHT, BIAS, INVERSE, MEAN, rows, columns, m, n,
    FORMULA: tl.constexpr,
    HALF: tl.constexpr,
):
    """Compute a tile of the result, in half number HALF, rounded like X; 0 beyond the matrix."""
    inside = inside_matrix(rows, columns, m, n)
    if FORMULA == "norm":
        x = load_fp32(X + tile_offsets(rows, columns, n), inside)
        inverse = tl.load(INVERSE + rows, rows < m, 0.0)
        mean = inverse  # unused by RMSNorm
        if MEAN is not None:
            mean = tl.load(MEAN + rows, rows < m, 0.0)
        result = normalized(x, mean, inverse, WEIGHT, BIAS, columns, n, LAYER=MEAN is not None)
    else:
        offsets = tile_offsets(rows, columns, 2 * n)  # of the gate; `up` is n elements later
        gate = load_fp32(X + offsets, inside)
        up = load_fp32(X + n + offsets, inside)
        if FORMULA == "swiglu":
            result = silu_times(gate, up)
        else:
            dy = load_fp32(DY + tile_offsets(rows, columns, n), inside)
            dgate, dup = swiglu_gradients(dy, gate, up)
            result = dup if HALF else dgate
    return tl.where(inside, result.to(X.dtype.element_ty).to(tl.float32), 0.0)


@triton.jit
def formula_maxima_kernel(
    X, DY, WEIGHT, BIAS, INVERSE, MEAN, OF_ROWS, OF_COLUMNS, m, n,
    FORMULA: tl.constexpr,
    HALVES: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the maxima of one strip of ROWS rows: one number in OF_ROWS [strips] (tensor), or for each row
    in OF_ROWS [m], and for each column of the result in OF_COLUMNS [strips, columns] (row)."""
    strip = tl.program_id(0).to(tl.int64)
    rows = block_range(strip, ROWS)
    largest = tl.zeros((ROWS,), tl.float32)
    for first in range(0, n, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        for half in tl.static_range(HALVES):  # the second finds its operands in cache
            result = compute_tile(
                X, DY, WEIGHT, BIAS, INVERSE, MEAN, rows, columns, m, n, FORMULA=FORMULA, HALF=half
            )
            largest = tl.maximum(largest, tl.max(tl.abs(result), 1))
            if KIND == "row":
                of_columns = OF_COLUMNS + (strip * HALVES + half) * n + columns
                tl.store(of_columns, tl.max(tl.abs(result), 0), columns < n)
    if KIND == "row":
        tl.store(OF_ROWS + rows, largest, rows < m)
    else:
        tl.store(OF_ROWS + strip, tl.max(largest, 0))


@triton.jit
def formula_cast_kernel(
    X, DY, WEIGHT, BIAS, INVERSE, MEAN, Q, SCALE, MAXIMA, Q_BACK, SCALE_BACK, MAXIMA_BACK, m, n, parts,
    FORMULA: tl.constexpr,
    HALVES: tl.constexpr,
    KIND: tl.constexpr,
    AHEAD: tl.constexpr,
    BACK: tl.constexpr,
    FLOOR: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Run fp8.cast_tile on one tile of each half. Programs: tiles down, tiles across (of a half), 1."""
    down = tl.program_id(0)
    across = tl.program_id(1)
    tiles_across = tl.num_programs(1)
    matrix = tl.program_id(2).to(tl.int64)  # there is one
    rows = block_range(down.to(tl.int64), ROWS)
    columns = block_range(across, COLUMNS)
    # the second half finds its operands in cache
    for half in tl.static_range(HALVES):  # pyright: ignore[reportGeneralTypeIssues]
        result = compute_tile(
            X, DY, WEIGHT, BIAS, INVERSE, MEAN, rows, columns, m, n, FORMULA=FORMULA, HALF=half
        )
        cast_tile(
            result, Q, SCALE, MAXIMA, Q_BACK, SCALE_BACK, MAXIMA_BACK,
            rows, half * n + columns, m, HALVES * n, (half + 1) * n, matrix, parts,
            down, half * tiles_across + across, tl.num_programs(0), HALVES * tiles_across,
            KIND=KIND,
            GIVEN=KIND == "tensor" or KIND == "row",
            AHEAD=AHEAD,
            BACK=BACK,
            FLOOR=FLOOR,
            LARGEST=LARGEST,
            PARTS=PARTS,
        )


def get_operands(x: Origin) -> Operands:
    """Return the arguments of the kernels."""
    first, *others = x.operands
    assert first is not None
    return Operands(first, None, *others) if x.formula == "norm" else Operands(first, *others)


def num_halves(x: Origin) -> int:
    """Return into how many parts with the same operands its columns are split."""
    return 2 if x.formula == "swiglu_backward" else 1


def launch_formula_maxima(x: Origin, kind: str) -> Maxima:
    """Return the maxima of a result for scales of kind tensor or row."""
    m, n = x.shape
    operands = get_operands(x)
    of_rows, of_columns = empty_maxima(operands.x, m, n, kind)
    formula_maxima_kernel[(ceil_div(m, STRIP),)](
        *operands, of_rows, of_columns, m, n // num_halves(x),
        FORMULA=x.formula,
        HALVES=num_halves(x),
        KIND=kind,
        ROWS=STRIP,
        COLUMNS=BLOCK_SIDE,
        num_warps=8,
    )
    return reduce_strip_maxima(of_rows, of_columns)


def launch_formula_cast(
    x: Origin,
    kind: str,
    dtype: torch.dtype,
    side: int,
    maxima: Maxima,
    *,
    ahead: bool = True,
    back: bool = True,
) -> tuple[Quantized, Quantized]:
    """Run fp8.launch_cast on an unwritten result."""
    m, n = x.shape
    operands = get_operands(x)
    rows, columns = (side, side) if kind in GROUP_KINDS else PAIR
    quantized, transposed, maxima, parts = before_cast(
        operands.x, (1, m, n), kind, dtype, side, maxima, ahead=ahead, back=back
    )
    width = n // num_halves(x)
    formula_cast_kernel[(ceil_div(m, rows), ceil_div(width, columns), 1)](
        *operands, *quantized, maxima.rows, *transposed, maxima.columns, m, width, parts,
        FORMULA=x.formula,
        HALVES=num_halves(x),
        KIND=kind,
        AHEAD=ahead,
        BACK=back,
        FLOOR=fp8.MIN_ABSOLUTE_MAXIMUM,
        LARGEST=fp8.MAX_VALUE[dtype],
        ROWS=rows,
        COLUMNS=columns,
        PARTS=power_of_2(parts),
        num_warps=cast_warps(rows, columns),
    )
    return as_stored(quantized, kind), as_stored(transposed, kind)
