"""Quantizes the gradient of a merged projection from those of q, k and v: the formula `rope_backward`.

The projection's result is split into heads and rotated (kernels/rope.py). Its gradient [tokens, channels] is
that of q and of k, turned back, beside that of v. An fp8 linear alone reads it: so it is computed from where
attention wrote the three, tile by tile, with the bits of rope.merge_gradients_kernel, and never written.

A tile has channels of q, of k or of v alone. A program has several tiles of the same tokens: the angles of
these come from memory once.
"""
import torch
from torch import Tensor

from kernels import fp8
from kernels.fp8 import (
    BLOCK_SIDE,
    PAIR,
    STRIP,
    Maxima,
    Quantized,
    as_stored,
    before_cast,
    cast_tile,
    cast_warps,
)
from kernels.fp8_origin import Origin
from kernels.rope import columns_of_tile, turn_back
from kernels.tiles import block_range, inside_matrix, load_fp32
from kernels.triton_ import ceil_div, power_of_2, tl, triton

TILES = 8  # of a program of the cast


# ---- Triton ------------------------------------------------------------------------------------------------
# sizes: tokens of a sequence, channels of q, channels of k. Strides of COS and SIN over sequences and tokens;
# those of DQ, DK and DV over heads as well. HALF: half of the channels of a head.

@triton.jit
def head_offsets(batch, position, columns, strides, HALF: tl.constexpr):
    """Where the left channel of the pair of each element is: int64 [ROWS, COLUMNS]. columns: of all heads."""
    head = columns // (2 * HALF)
    pair = columns % HALF
    of_token = batch.to(tl.int64) * strides[0] + position.to(tl.int64) * strides[1]
    return of_token[:, None] + (head.to(tl.int64) * strides[2] + pair)[None, :]


@triton.jit
def turned_back(X, COS, SIN, batch, position, columns, inside, table_strides, strides, HALF: tl.constexpr):
    """Some columns of the heads of X for some tokens, turned back, in fp32."""
    offsets = head_offsets(batch, position, columns, strides, HALF=HALF)
    left = load_fp32(X + offsets, inside)
    right = load_fp32(X + HALF + offsets, inside)
    of_token = batch.to(tl.int64) * table_strides[0] + position.to(tl.int64) * table_strides[1]
    angles = of_token[:, None] + (columns % HALF)[None, :]
    cos = tl.load(COS + angles, inside, 0.0)
    sin = tl.load(SIN + angles, inside, 0.0)
    new_left, new_right = turn_back(left, right, cos, sin)
    is_left = columns % (2 * HALF) < HALF
    return tl.where(is_left[None, :], new_left, new_right)


@triton.jit
def merged_tile(
    DQ, DK, DV, COS, SIN, rows, first, m, n,
    sizes, table_strides, dq_strides, dk_strides, dv_strides,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile [ROWS, COLUMNS] of the gradient, from column `first` on, rounded as DQ is; 0 beyond row m."""
    columns = first + tl.arange(0, COLUMNS)
    inside = inside_matrix(rows, columns, m, n)
    token = rows.to(tl.int32)
    batch = token // sizes[0]
    position = token % sizes[0]
    first_of_v = sizes[1] + sizes[2]
    if first < sizes[1]:
        result = turned_back(
            DQ, COS, SIN, batch, position, columns, inside, table_strides, dq_strides, HALF=HALF
        )
    elif first < first_of_v:
        result = turned_back(
            DK, COS, SIN, batch, position, columns - sizes[1], inside, table_strides, dk_strides, HALF=HALF
        )
    else:
        channels = columns - first_of_v
        offsets = head_offsets(batch, position, channels, dv_strides, HALF=HALF)
        is_right = channels % (2 * HALF) >= HALF
        result = load_fp32(DV + offsets + tl.where(is_right, HALF, 0)[None, :], inside)
    return tl.where(inside, result.to(DQ.dtype.element_ty).to(tl.float32), 0.0)


@triton.jit
def rope_maxima_kernel(
    DQ, DK, DV, COS, SIN, OF_ROWS, OF_COLUMNS, m, n,
    sizes, table_strides, dq_strides, dk_strides, dv_strides,
    HALF: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """fp8_formula.formula_maxima_kernel of this formula: the maxima of one strip of ROWS rows."""
    strip = tl.program_id(0).to(tl.int64)
    rows = block_range(strip, ROWS)
    largest = tl.zeros((ROWS,), tl.float32)
    for first in range(0, n, COLUMNS):
        result = merged_tile(
            DQ, DK, DV, COS, SIN, rows, first, m, n,
            sizes, table_strides, dq_strides, dk_strides, dv_strides,
            HALF=HALF, COLUMNS=COLUMNS,
        )
        largest = tl.maximum(largest, tl.max(tl.abs(result), 1))
        if KIND == "row":
            of_columns = OF_COLUMNS + strip * n + first + tl.arange(0, COLUMNS)
            tl.store(of_columns, tl.max(tl.abs(result), 0))
    if KIND == "row":
        tl.store(OF_ROWS + rows, largest, rows < m)
    else:
        tl.store(OF_ROWS + strip, tl.max(largest, 0))


@triton.jit
def rope_cast_kernel(
    DQ, DK, DV, COS, SIN, Q, SCALE, MAXIMA, Q_BACK, SCALE_BACK, MAXIMA_BACK, m, n, parts,
    sizes, table_strides, dq_strides, dk_strides, dv_strides,
    HALF: tl.constexpr,
    KIND: tl.constexpr,
    AHEAD: tl.constexpr,
    BACK: tl.constexpr,
    FLOOR: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """fp8.cast_tile of TILES tiles beside each other. Programs: tiles down, TILES of them across."""
    down = tl.program_id(0)
    rows = block_range(down.to(tl.int64), ROWS)
    tiles_across = n // COLUMNS
    first_tile = tl.program_id(1) * TILES
    for across in range(first_tile, tl.minimum(first_tile + TILES, tiles_across)):
        result = merged_tile(
            DQ, DK, DV, COS, SIN, rows, across * COLUMNS, m, n,
            sizes, table_strides, dq_strides, dk_strides, dv_strides,
            HALF=HALF, COLUMNS=COLUMNS,
        )
        cast_tile(
            result, Q, SCALE, MAXIMA, Q_BACK, SCALE_BACK, MAXIMA_BACK,
            rows, block_range(across, COLUMNS), m, n, n, 0, parts,
            down, across, tl.num_programs(0), tiles_across,
            KIND=KIND,
            GIVEN=KIND != "group",
            AHEAD=AHEAD,
            BACK=BACK,
            FLOOR=FLOOR,
            LARGEST=LARGEST,
            PARTS=PARTS,
        )


def places(x: Origin) -> dict[str, int | tuple[int, ...]]:
    """The arguments of the kernels that say where the elements of the operands are."""
    dq, dk, dv, cos, _ = operands(x)
    d = dq.shape[3]
    return {
        "sizes": (dq.shape[1], dq.shape[2] * d, dk.shape[2] * d),
        "table_strides": cos.stride()[:2],
        "dq_strides": dq.stride()[:3],
        "dk_strides": dk.stride()[:3],
        "dv_strides": dv.stride()[:3],
        "HALF": d // 2,
    }


def operands(x: Origin) -> list[Tensor]:
    """dq, dk, dv, cos and sin."""
    return [operand for operand in x.operands if operand is not None]


def launch_rope_maxima(x: Origin, kind: str) -> Maxima:
    """The maxima of the gradient for scales of kind tensor or row."""
    m, n = x.shape
    dq, dk, *_ = operands(x)
    strips = ceil_div(m, STRIP)
    of_rows = dq.new_empty(strips if kind == "tensor" else (m, 1), dtype=torch.float32)
    of_columns = dq.new_empty(strips, n, dtype=torch.float32) if kind == "row" else None
    rope_maxima_kernel[(strips,)](
        *operands(x), of_rows, of_columns, m, n,
        **places(x),
        KIND=kind,
        ROWS=STRIP,
        COLUMNS=columns_of_tile(dq, dk, kind, BLOCK_SIDE),
        num_warps=8,
    )
    if of_columns is None:
        return Maxima(of_rows, of_rows)
    return Maxima(of_rows, of_columns.amax(0)[:, None])


def launch_rope_cast(
    x: Origin,
    kind: str,
    dtype: torch.dtype,
    side: int,
    maxima: Maxima,
    *,
    ahead: bool = True,
    back: bool = True,
) -> tuple[Quantized, Quantized]:
    """fp8.launch_cast of the gradient."""
    m, n = x.shape
    dq, dk, *_ = operands(x)
    columns = columns_of_tile(dq, dk, kind, side)
    rows = side if kind == "group" else PAIR[0]
    quantized, transposed, maxima, parts = before_cast(
        dq, (1, m, n), kind, dtype, side, maxima, ahead=ahead, back=back
    )
    rope_cast_kernel[(ceil_div(m, rows), ceil_div(n // columns, TILES))](
        *operands(x), *quantized, maxima.rows, *transposed, maxima.columns, m, n, parts,
        **places(x),
        KIND=kind,
        AHEAD=ahead,
        BACK=back,
        FLOOR=fp8.MIN_ABSOLUTE_MAXIMUM,
        LARGEST=fp8.MAX_VALUE[dtype],
        ROWS=rows,
        COLUMNS=columns,
        TILES=TILES,
        PARTS=power_of_2(parts),
        num_warps=cast_warps(rows, columns),
    )
    return as_stored(quantized, kind), as_stored(transposed, kind)
