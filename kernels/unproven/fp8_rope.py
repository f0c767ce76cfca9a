"""Quantize the gradient of a merged projection from those of q, k and v: the formula `rope_backward`.

The projection's output is split into heads and rotated (kernels/rope.py). Its gradient [tokens, channels] is
that of q and of k, rotated back, next to that of v. If its sole consumer is an fp8 linear, it is computed
from where attention wrote the three, tile by tile, with the bits of kernels/rope.py, and never written.

Its tiles are halves of heads, left and right: each pair of channels is rotated once, and a program, which
processes several heads of the same tokens, loads their angles once. A scale per group would need both halves
before they are cast: for blockwise and mxfp8 scales the gradient is written.
"""
import torch
from torch import Tensor

from kernels import fp8
from kernels.fp8 import (
    PAIR,
    SHARED_KINDS,
    STRIP,
    Maxima,
    Quantized,
    as_stored,
    before_cast,
    cast_tile,
)
from kernels.rope import SplitRope, per_sequence, turn_back
from kernels.tiles import block_range, inside_matrix, load_fp32
from kernels.triton_ import ceil_div, power_of_2, tl, triton
from kernels.unproven.fp8_maxima import empty_maxima, reduce_strip_maxima
from kernels.unproven.fp8_origin import Origin, Reader, deferred_tensor

HEADS = 8  # per program of the cast
CAST_WARPS = 16  # both halves of a head, their angles and their casts fit the threads' registers


def split_heads_and_apply_rope(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv: int,
    compiled: bool = False,
    *,
    reader: Reader,
) -> tuple[Tensor, Tensor, Tensor]:
    """kernels.rope.split_heads_and_apply_rope. `reader`, the fp8 linear that produced qkv, computes its
    gradient, if there are kernels for it."""
    return SplitRopeForReader.apply(qkv, cos, sin, heads, kv, compiled, reader)


def computes_gradient(reader: Reader, dq: Tensor, dk: Tensor, dv: Tensor) -> bool:
    """Whether the casts of a linear can compute the gradient of its result from these [b, s, heads, d]."""
    are_alike = all(x.stride(-1) == 1 and x.dtype == dq.dtype for x in (dq, dk, dv))
    return reader.kind in SHARED_KINDS and are_alike and reader.takes(dq, dk, dv)


def deferred_gradient(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, shape: tuple[int, ...]
) -> Tensor:
    """Return split_backward as an unwritten tensor, left to the linear that reads it."""
    b, s, heads, d = dq.shape
    matrix = b * s, (heads + 2 * dk.shape[2]) * d
    tables = per_sequence(cos, b), per_sequence(sin, b)
    return deferred_tensor(Origin("rope_backward", matrix, (dq, dk, dv, *tables)), shape, like=dq)


class SplitRopeForReader(torch.autograd.Function):
    """kernels.rope.SplitRope, with a backward for the reader."""

    @staticmethod
    def forward(
        ctx,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: int,
        kv: int,
        compiled: bool,
        reader: Reader,
    ) -> tuple[Tensor, ...]:
        ctx.reader = reader
        return SplitRope.forward(ctx, qkv, cos, sin, heads, kv, compiled)

    @staticmethod
    def backward(ctx, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.triton and computes_gradient(ctx.reader, dq, dk, dv):
            cos, sin = ctx.saved_tensors
            return deferred_gradient(dq, dk, dv, cos, sin, ctx.shape), *[None] * 6
        return *SplitRope.backward(ctx, dq, dk, dv), None


# ---- Triton ------------------------------------------------------------------------------------------------
# s: tokens of a sequence; heads: of q; kv: of k and of v. Strides of COS and SIN are over sequences and
# tokens; those of DQ, DK and DV also over heads. HALF: half of a head's channels, in tiles [ROWS, BLOCK].

@triton.jit
def load_halves(X, batch, position, head, strides, inside, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Load the left and right channels of one head of X for some tokens, in fp32: two of [ROWS, BLOCK]."""
    of_token = batch * strides[0] + position * strides[1] + head * strides[2]
    pointers = X + of_token[:, None] + tl.arange(0, BLOCK)[None, :]
    return load_fp32(pointers, inside), load_fp32(pointers + HALF, inside)


@triton.jit
def load_tables(
    COS, SIN, batch, position, strides, inside, BLOCK: tl.constexpr
) -> "tuple[tl.tensor, tl.tensor]":
    """Load cos and sin [ROWS, BLOCK] of some tokens."""
    offsets = (batch * strides[0] + position * strides[1])[:, None] + tl.arange(0, BLOCK)[None, :]
    return tl.load(COS + offsets, inside, 0.0), tl.load(SIN + offsets, inside, 0.0)


@triton.jit
def head_gradient(
    DQ, DK, DV, cos, sin, batch, position, head, heads, kv, dq_strides, dk_strides, dv_strides, inside,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
) -> "tuple[tl.tensor, tl.tensor]":
    """Compute both halves of one head of the merged gradient, rounded like DQ; 0 outside."""
    if head < heads:
        left, right = load_halves(DQ, batch, position, head, dq_strides, inside, HALF=HALF, BLOCK=BLOCK)
        left, right = turn_back(left, right, cos, sin)
    elif head < heads + kv:
        left, right = load_halves(
            DK, batch, position, head - heads, dk_strides, inside, HALF=HALF, BLOCK=BLOCK
        )
        left, right = turn_back(left, right, cos, sin)
    else:
        left, right = load_halves(
            DV, batch, position, head - heads - kv, dv_strides, inside, HALF=HALF, BLOCK=BLOCK
        )
    DTYPE: tl.constexpr = DQ.dtype.element_ty
    return left.to(DTYPE).to(tl.float32), right.to(DTYPE).to(tl.float32)


@triton.jit
def rope_maxima_kernel(
    DQ, DK, DV, COS, SIN, OF_ROWS, OF_COLUMNS, m, s, heads, kv,
    table_strides, dq_strides, dk_strides, dv_strides,
    HALF: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """fp8_formula.formula_maxima_kernel for this formula: the maxima of one strip of ROWS rows."""
    strip = tl.program_id(0).to(tl.int64)
    rows = block_range(strip, ROWS)
    pairs = tl.arange(0, BLOCK)
    inside = inside_matrix(rows, pairs, m, HALF)
    batch = rows // s
    position = rows % s
    cos, sin = load_tables(COS, SIN, batch, position, table_strides, inside, BLOCK=BLOCK)

    all_heads = heads + 2 * kv
    largest = tl.zeros((ROWS,), tl.float32)
    for head in range(0, all_heads):
        left, right = head_gradient(
            DQ, DK, DV, cos, sin, batch, position, head, heads, kv,
            dq_strides, dk_strides, dv_strides, inside,
            HALF=HALF, BLOCK=BLOCK,
        )
        left = tl.abs(left)
        right = tl.abs(right)
        largest = tl.maximum(largest, tl.max(tl.maximum(left, right), 1))
        if KIND == "row":
            of_columns = OF_COLUMNS + (strip * all_heads + head) * (2 * HALF) + pairs
            tl.store(of_columns, tl.max(left, 0), pairs < HALF)
            tl.store(of_columns + HALF, tl.max(right, 0), pairs < HALF)
    if KIND == "row":
        tl.store(OF_ROWS + rows, largest, rows < m)
    else:
        tl.store(OF_ROWS + strip, tl.max(largest, 0))


@triton.jit
def rope_cast_kernel(
    DQ, DK, DV, COS, SIN, Q, SCALE, MAXIMA, Q_BACK, SCALE_BACK, MAXIMA_BACK, m, s, heads, kv, parts,
    table_strides, dq_strides, dk_strides, dv_strides,
    HALF: tl.constexpr,
    KIND: tl.constexpr,
    AHEAD: tl.constexpr,
    BACK: tl.constexpr,
    FLOOR: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Run fp8.cast_tile on both halves of HEADS heads. Programs: tiles down, HEADS across."""
    down = tl.program_id(0)
    rows = block_range(down.to(tl.int64), ROWS)
    pairs = tl.arange(0, BLOCK)
    inside = inside_matrix(rows, pairs, m, HALF)
    batch = rows // s
    position = rows % s
    cos, sin = load_tables(COS, SIN, batch, position, table_strides, inside, BLOCK=BLOCK)

    all_heads = heads + 2 * kv
    first_head = tl.program_id(1) * HEADS
    for head in range(first_head, tl.minimum(first_head + HEADS, all_heads)):
        left, right = head_gradient(
            DQ, DK, DV, cos, sin, batch, position, head, heads, kv,
            dq_strides, dk_strides, dv_strides, inside,
            HALF=HALF, BLOCK=BLOCK,
        )
        for half in tl.static_range(2):  # pyright: ignore[reportGeneralTypeIssues]
            tile = 2 * head + half
            cast_tile(
                right if half else left, Q, SCALE, MAXIMA, Q_BACK, SCALE_BACK, MAXIMA_BACK,
                rows, tile * HALF + pairs, m, all_heads * (2 * HALF), (tile + 1) * HALF, 0, parts,
                down, tile, tl.num_programs(0), 2 * all_heads,
                KIND=KIND,
                GIVEN=True,
                AHEAD=AHEAD,
                BACK=BACK,
                FLOOR=FLOOR,
                LARGEST=LARGEST,
                PARTS=PARTS,
            )


def places(x: Origin) -> dict[str, object]:
    """Return the keyword arguments of the kernels that locate the operands' elements."""
    dq, dk, dv, cos, _ = operands(x)
    half = dq.shape[3] // 2
    return {
        "s": dq.shape[1],
        "heads": dq.shape[2],
        "kv": dk.shape[2],
        "table_strides": cos.stride()[:2],
        "dq_strides": dq.stride()[:3],
        "dk_strides": dk.stride()[:3],
        "dv_strides": dv.stride()[:3],
        "HALF": half,
        "BLOCK": power_of_2(half),
    }


def operands(x: Origin) -> list[Tensor]:
    """Return dq, dk, dv, cos and sin."""
    return [operand for operand in x.operands if operand is not None]


def launch_rope_maxima(x: Origin, kind: str) -> Maxima:
    """Return the maxima of the gradient for scales of kind tensor or row."""
    m, n = x.shape
    of_rows, of_columns = empty_maxima(operands(x)[0], m, n, kind)
    rope_maxima_kernel[(ceil_div(m, STRIP),)](
        *operands(x), of_rows, of_columns, m,
        **places(x),
        KIND=kind,
        ROWS=STRIP,
        num_warps=8,
    )
    return reduce_strip_maxima(of_rows, of_columns)


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
    """Run fp8.launch_cast on the gradient."""
    assert kind in SHARED_KINDS, "the gradient is written for other scales"
    m, n = x.shape
    dq, dk, *_ = operands(x)
    rows = PAIR[0]
    across = ceil_div(dq.shape[2] + 2 * dk.shape[2], HEADS)
    quantized, transposed, maxima, parts = before_cast(
        dq, (1, m, n), kind, dtype, side, maxima, ahead=ahead, back=back
    )
    rope_cast_kernel[(ceil_div(m, rows), across)](
        *operands(x), *quantized, maxima.rows, *transposed, maxima.columns, m,
        **places(x),
        parts=parts,
        KIND=kind,
        AHEAD=ahead,
        BACK=back,
        FLOOR=fp8.MIN_ABSOLUTE_MAXIMUM,
        LARGEST=fp8.MAX_VALUE[dtype],
        ROWS=rows,
        HEADS=HEADS,
        PARTS=power_of_2(parts),
        num_warps=CAST_WARPS,
    )
    return as_stored(quantized, kind), as_stored(transposed, kind)
