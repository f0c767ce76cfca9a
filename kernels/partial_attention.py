"""Attention over a part of the keys, and the merge of such parts: what ring attention is made of.

    out_i, lse_i = attention_part(q, k_i, v_i, mask_i)    softmax over these keys alone, with its logsumexp
    merge_partial(out, lse, out_i, lse_i)                 in place: exactly one softmax over both sets of keys
    dq, dk, dv = partial_backward(...)                    one part's share, from the merged lse and delta

The algebra is that of online softmax (arXiv 1805.02867) and of FlashAttention's backward (arXiv 2307.08691).
With the merged lse, the true probabilities of a part are exp(scores - lse), whatever the other parts hold;
delta is <dout, out>. Everything is in fp32 or better, because what is summed over parts must not be rounded
in between. One tile of queries at a time bounds the memory.

On a GPU the same functions are three Triton kernels: the forward, dq, and dk with dv. Each program owns what
it writes. So there are no atomics, and the gradients are the same bits every time. Programs skip the blocks
that no query sees, and mask only the blocks that hold a boundary (kernels/attention_mask.py).
"""
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.attention_mask import AttentionMask, MaskLike
from kernels.grad import accumulation_dtype
from kernels.tiles import block_range, inside_matrix
from kernels.triton_ import ceil_div, chip_name, kernel_is_available, tl, triton

TILE = 512  # queries whose scores exist together, without Triton
MAX_HEAD_DIM = 256
MAX_OFFSET = 2**31  # elements: the kernels count tokens times strides in int32
DELTA_ROWS = 64  # queries of a program that computes delta

# {chip (kernels/triton_.py): {padded head dim: (BLOCK_M queries, BLOCK_N keys, warps, pipeline stages)}}
# The largest that tests/kernels/aot.py compiles without a spill. Blackwell keeps accumulators in memory of
# their own, and wants one stage.
BlockTable = dict[int, dict[int, tuple[int, int, int, int]]]
FORWARD_BLOCKS: BlockTable = {
    8: {64: (128, 128, 8, 3), 128: (128, 64, 8, 3), 256: (64, 32, 8, 2)},
    9: {64: (128, 128, 8, 3), 128: (128, 64, 8, 3), 256: (128, 32, 8, 2)},
    10: {64: (128, 128, 8, 3), 128: (128, 64, 8, 3), 256: (128, 32, 8, 2)},
}
DQ_BLOCKS: BlockTable = {
    8: {64: (128, 64, 8, 3), 128: (128, 32, 8, 3), 256: (64, 32, 8, 2)},
    9: {64: (128, 64, 8, 3), 128: (128, 32, 8, 3), 256: (64, 32, 8, 2)},
    10: {64: (128, 64, 8, 3), 128: (128, 32, 8, 3), 256: (64, 32, 8, 2)},
}
DKV_BLOCKS: BlockTable = {
    8: {64: (32, 128, 8, 2), 128: (32, 64, 8, 2), 256: (16, 64, 8, 1)},
    9: {64: (64, 128, 8, 2), 128: (32, 128, 8, 3), 256: (16, 64, 8, 2)},
    10: {64: (64, 128, 8, 1), 128: (64, 128, 8, 1), 256: (16, 64, 8, 1)},
}
FP32_BLOCKS = (32, 32, 4, 1)  # four bytes an element, and no tensor cores: for parity, not for speed


def attention_part(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskLike, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over these keys alone, and the logsumexp of its scores.

    q [b, s_q, h, d], k [b, s_k, g, d], v [b, s_k, g, e], where h is a multiple of g.
    mask: an AttentionMask, or bool [b or 1, 1, s_q, s_k]; None: every query sees every key.
    Returns out [b, s_q, h, e], in `dtype` (None: fp32 or better), and lse [b, s_q, h]. A query that sees no
    key has out 0 and lse -inf.
    """
    if triton_supports_part(q, k, v, mask):
        assert not isinstance(mask, Tensor)  # triton_supports_part refuses a dense mask
        return launch_forward(q, k, v, mask, dtype or torch.float32)
    out, lse = partial_reference(q, k, v, dense(mask))
    return out.to(dtype or out.dtype), lse


def merge_partial(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """In place: (out, lse) become those of both sets of keys. lse must not be -inf in both.

    out, other [b, s_q, h, e]; lse, other_lse [b, s_q, h].
    """
    both = torch.logaddexp(lse, other_lse)
    share = torch.exp(lse - both)[..., None]
    other_share = torch.exp(other_lse - both)[..., None]
    out.mul_(share).addcmul_(other, other_share)
    lse.copy_(both)


def partial_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike,
    lse: Tensor,
    delta: Tensor,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """This part's share of dq, and dk and dv of its keys: in fp32 or better, or written to `into`.

    dout [b, s_q, h, e]; lse and delta [b, s_q, h], merged over all parts. The rest: as for attention_part.
    """
    if triton_supports_part(q, k, v, mask):
        assert not isinstance(mask, Tensor)  # triton_supports_part refuses a dense mask
        return launch_backward(dout, q, k, v, mask, lse, delta, into)
    grads = partial_backward_reference(dout, q, k, v, dense(mask), lse, delta)
    if into is None:
        return grads
    for out, grad in zip(into, grads):
        out.copy_(grad)
    return into


# ---- the definition ----------------------------------------------------------------------------------------
# r = h / g: the query heads that share a key head; t: the queries of a tile

def partial_reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """attention_part in plain torch, with a dense mask."""
    b, s_q, h, _ = q.shape
    out = q.new_empty(b, s_q, h, v.shape[-1], dtype=accumulation_dtype(q.dtype))
    lse = out.new_empty(b, s_q, h)
    values = by_group(v)  # [b, g, 1, s_k, e]
    for rows, scores in visible_tiles(q, k, mask):
        row_lse = scores.logsumexp(-1, keepdim=True)  # [b, g, r, t, 1]
        finite_lse = row_lse.clamp_min(torch.finfo(row_lse.dtype).min)  # no NaN where all scores are -inf
        probs = torch.exp(scores - finite_lse)
        out[:, rows] = by_token(probs @ values)
        lse[:, rows] = by_token(row_lse)[..., 0]
    return out, lse


def partial_backward_reference(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    lse: Tensor,
    delta: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """partial_backward in plain torch, with a dense mask."""
    groups = k.shape[2]
    scale = math.sqrt(q.shape[-1])
    dq = q.new_empty(q.shape, dtype=accumulation_dtype(q.dtype))
    keys = by_group(k)  # [b, g, 1, s_k, d]
    values = by_group(v)  # [b, g, 1, s_k, e]
    dk = torch.zeros_like(keys)
    dv = torch.zeros_like(values)

    for rows, scores in visible_tiles(q, k, mask):
        row_q = by_group(q[:, rows], groups)  # [b, g, r, t, d]
        row_dout = by_group(dout[:, rows], groups)  # [b, g, r, t, e]
        row_lse = by_group(lse[:, rows, :, None], groups)  # [b, g, r, t, 1]
        row_delta = by_group(delta[:, rows, :, None], groups)  # [b, g, r, t, 1]

        probs = torch.exp(scores - row_lse)  # [b, g, r, t, s_k]
        dv += (probs.transpose(-1, -2) @ row_dout).sum(2, keepdim=True)
        dprobs = row_dout @ values.transpose(-1, -2)
        dscores = probs * (dprobs - row_delta) / scale
        dq[:, rows] = by_token(dscores @ keys)
        dk += (dscores.transpose(-1, -2) @ row_q).sum(2, keepdim=True)
    return dq, by_token(dk), by_token(dv)


def visible_tiles(q: Tensor, k: Tensor, mask: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Tiles of queries: (which, their scores [b, g, r, t, s_k], -inf where a query does not see a key)."""
    scale = math.sqrt(q.shape[-1])
    keys = by_group(k).transpose(-1, -2)  # [b, g, 1, d, s_k]
    for start in range(0, q.shape[1], TILE):
        rows = slice(start, min(start + TILE, q.shape[1]))
        scores = by_group(q[:, rows], k.shape[2]) / scale @ keys
        if mask is not None:
            scores = scores.masked_fill(~mask[:, :, None, rows], -math.inf)
        yield rows, scores


def by_group(x: Tensor, groups: int | None = None) -> Tensor:
    """[b, s, h, d] -> [b, groups, h / groups, s, d], in fp32 or better. groups: the key heads (None: h)."""
    x = x.to(accumulation_dtype(x.dtype)).transpose(1, 2)
    return x.unflatten(1, (groups or x.shape[1], -1))


def by_token(x: Tensor) -> Tensor:
    """[b, g, r, s, d] -> [b, s, g r, d]."""
    return x.flatten(1, 2).transpose(1, 2)


def dense(mask: MaskLike) -> Tensor | None:
    return mask.dense_mask if isinstance(mask, AttentionMask) else mask


# ---- Triton ------------------------------------------------------------------------------------------------
# Scores are in base 2, since exp2 is one instruction: `scale` is log2(e) / sqrt(d).
# x_strides: of batch, token and head of X, in elements; channels are adjacent.
# rows, columns: a block of queries and a block of keys; BLOCK_M, BLOCK_N: how many these are.
# HEAD_DIM, VALUE_DIM: channels of a head of Q and K, and of V. A tile has more, see `padded`.
# FIRST_KEY, QUERY_END: as in kernels/attention_mask.py. offset: the position of query row 0 among the keys.
# CAUSAL: there is a mask. BOUNDED: it has FIRST_KEY and QUERY_END. MASKED: some pairs are not visible.

LOG2E = tl.constexpr(math.log2(math.e))


@triton.constexpr_function
def padded(dim):
    """The channels of a tile: a power of two, and at least 16, for the tensor cores."""
    return max(16, 1 << (dim - 1).bit_length())


@triton.jit
def sequence_and_head(heads):
    """Which sequence and which head of it this program works on, if dim 1 of the grid counts both: int64."""
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    return batch, head


@triton.jit
def head_of(X, strides, batch, head):
    """Where one head of one sequence of X begins."""
    return X + batch * strides[0] + head * strides[2]


@triton.jit
def load_rows(X, rows, stride, n, EDGE: tl.constexpr, DIM: tl.constexpr):
    """Rows `rows` of X [n, DIM] -> [rows, padded(DIM)], 0 outside X. EDGE: some rows may be n or more."""
    channels = tl.arange(0, padded(DIM))
    pointers = X + rows[:, None] * stride + channels[None, :]
    if EDGE and DIM < padded(DIM):
        x = tl.load(pointers, inside_matrix(rows, channels, n, DIM), 0.0)
    elif EDGE:
        x = tl.load(pointers, (rows < n)[:, None], 0.0)
    elif DIM < padded(DIM):
        x = tl.load(pointers, (channels < DIM)[None, :], 0.0)
    else:
        x = tl.load(pointers)
    return x


@triton.jit
def store_rows(X, x, rows, stride, n, DIM: tl.constexpr):
    """The inverse of load_rows, cast to the dtype of X."""
    channels = tl.arange(0, padded(DIM))
    inside = n - rows > 0  # not rows < n: the loads' predicates would stay in registers until here
    pointers = X + rows[:, None] * stride + channels[None, :]
    tl.store(pointers, x, inside[:, None] & (channels < DIM)[None, :])


@triton.jit
def key_range(
    FIRST_KEY, row, s_k, offset, key_start,
    CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Which keys the queries row .. row + BLOCK_M - 1 see: (begin, masked_begin, end).

    Every query sees all keys before masked_begin; the keys from there on need a mask.
    """
    begin = 0
    masked_begin = s_k // BLOCK_N * BLOCK_N
    end = s_k
    if CAUSAL:
        end = tl.minimum(s_k, tl.maximum(row + BLOCK_M + offset, 0))
        first_row_end = tl.maximum(row + offset + 1, 0)  # of all rows, this one sees the fewest keys
        masked_begin = tl.minimum(masked_begin, first_row_end // BLOCK_N * BLOCK_N)
    if BOUNDED:
        first_key = tl.load(FIRST_KEY + row) - key_start
        begin = tl.maximum(first_key, 0) // BLOCK_N * BLOCK_N
        masked_begin = begin
    return begin, masked_begin, end


@triton.jit
def query_range(
    QUERY_END, column, s_q, s_k, offset, query_start,
    CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Which queries see the keys column .. column + BLOCK_N - 1: (begin, masked_end, end).

    The queries before masked_end need a mask; every query from there on sees all these keys.
    """
    begin = 0
    masked_end = 0
    end = s_q
    if CAUSAL:
        begin = tl.maximum(column - offset, 0) // BLOCK_M * BLOCK_M
        sees_all = tl.maximum(column + BLOCK_N - 1 - offset, 0)
        masked_end = tl.cdiv(sees_all, BLOCK_M) * BLOCK_M
        masked_end = tl.minimum(masked_end, tl.cdiv(s_q, BLOCK_M) * BLOCK_M)
    if BOUNDED:
        last_key = tl.minimum(column + BLOCK_N, s_k) - 1
        query_end = tl.load(QUERY_END + last_key) - query_start
        end = tl.minimum(s_q, tl.maximum(query_end, 0))
        masked_end = end
    return begin, masked_end, end


@triton.jit
def load_first_keys(FIRST_KEY, rows, s_q, key_start, BOUNDED: tl.constexpr):
    """The first key that each of the queries `rows` sees; if not BOUNDED, numbers that is_visible ignores."""
    first_key = rows
    if BOUNDED:
        first_key = tl.load(FIRST_KEY + tl.minimum(rows, s_q - 1)) - key_start
    return first_key


@triton.jit
def is_visible(rows, columns, first_key, s_k, offset, CAUSAL: tl.constexpr, BOUNDED: tl.constexpr):
    """Whether queries `rows` see keys `columns`. rows, columns and first_key broadcast against each other."""
    mask = columns < s_k
    if CAUSAL:
        mask = mask & (columns <= rows + offset)
    if BOUNDED:
        mask = mask & (columns >= first_key)
    return mask


@triton.jit
def accumulate_output(
    out, denominator, row_max, q, K, V, rows, first_key,
    begin, end, k_stride, v_stride, s_k, offset, scale,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Adds the keys begin .. end - 1 to the online softmax of a block of queries."""
    for start in range(begin, end, BLOCK_N):
        # scores
        columns = start + tl.arange(0, BLOCK_N)
        k = load_rows(K, columns, k_stride, s_k, EDGE=MASKED, DIM=HEAD_DIM)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [BLOCK_M, BLOCK_N]
        if MASKED:
            mask = is_visible(
                rows[:, None], columns[None, :], first_key[:, None], s_k, offset,
                CAUSAL=CAUSAL,
                BOUNDED=BOUNDED,
            )
            scores = tl.where(mask, scores, -float("inf"))

        # probabilities, relative to the largest score so far
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        base = new_max
        if MASKED:  # a query without a key so far: exp2(-inf - 0), not exp2(-inf + inf)
            base = tl.where(new_max == -float("inf"), 0.0, new_max)
        probs = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(row_max - base)
        denominator = denominator * shrink + tl.sum(probs, 1)

        # their values
        v = load_rows(V, columns, v_stride, s_k, EDGE=MASKED, DIM=VALUE_DIM)
        out = tl.dot(probs.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
        row_max = new_max
    return out, denominator, row_max


@triton.jit
def forward_kernel(
    Q, K, V, FIRST_KEY, OUT, LSE,
    q_strides, k_strides, v_strides, out_strides, first_key_stride,
    s_q, s_k, heads, heads_per_group, key_start, offset, scale,
    CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """One block of queries of one head: its output and logsumexp."""
    # the queries, and which keys they see
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # the blocks with most keys first
    batch, head = sequence_and_head(heads)
    rows = row + tl.arange(0, BLOCK_M)
    K = head_of(K, k_strides, batch, head // heads_per_group)
    V = head_of(V, v_strides, batch, head // heads_per_group)
    FIRST_KEY += batch * first_key_stride
    Q = head_of(Q, q_strides, batch, head)
    q = load_rows(Q, rows, q_strides[1], s_q, EDGE=True, DIM=HEAD_DIM)

    first_key = load_first_keys(FIRST_KEY, rows, s_q, key_start, BOUNDED)
    begin, masked_begin, end = key_range(
        FIRST_KEY, row, s_k, offset, key_start,
        CAUSAL=CAUSAL,
        BOUNDED=BOUNDED,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
    )

    # online softmax: first over the keys that all these queries see, if there are such, then over the others
    out = tl.zeros((BLOCK_M, padded(VALUE_DIM)), tl.float32)
    denominator = tl.zeros((BLOCK_M,), tl.float32)
    row_max = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    for MASKED in tl.static_range(2):
        if MASKED or not BOUNDED:
            out, denominator, row_max = accumulate_output(
                out, denominator, row_max, q, K, V, rows, first_key,
                begin=masked_begin if MASKED else begin,
                end=end if MASKED else masked_begin,
                k_stride=k_strides[1],
                v_stride=v_strides[1],
                s_k=s_k,
                offset=offset,
                scale=scale,
                MASKED=MASKED,
                CAUSAL=CAUSAL,
                BOUNDED=BOUNDED,
                BLOCK_N=BLOCK_N,
                HEAD_DIM=HEAD_DIM,
                VALUE_DIM=VALUE_DIM,
            )

    # output and logsumexp: 0 and -inf of a query that sees no key
    sees_a_key = denominator > 0.0
    denominator = tl.where(sees_a_key, denominator, 1.0)
    OUT = head_of(OUT, out_strides, batch, head)
    store_rows(OUT, out / denominator[:, None], rows, out_strides[1], s_q, DIM=VALUE_DIM)
    lse = (row_max + tl.log2(denominator)) / LOG2E
    lse = tl.where(sees_a_key, lse, -float("inf"))
    LSE = LSE + tl.program_id(1).to(tl.int64) * s_q
    tl.store(LSE + rows, lse, rows < s_q)


@triton.jit
def delta_kernel(
    OUT, DOUT, DELTA, out_strides, dout_strides, s_q, heads,
    BLOCK_M: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """delta = <dout, out> of one block of queries of one head."""
    batch, head = sequence_and_head(heads)
    rows = block_range(tl.program_id(0), BLOCK_M)
    OUT = head_of(OUT, out_strides, batch, head)
    out = load_rows(OUT, rows, out_strides[1], s_q, EDGE=True, DIM=VALUE_DIM)
    out = out.to(tl.float32)
    DOUT = head_of(DOUT, dout_strides, batch, head)
    dout = load_rows(DOUT, rows, dout_strides[1], s_q, EDGE=True, DIM=VALUE_DIM)
    dout = dout.to(tl.float32)
    DELTA = DELTA + tl.program_id(1).to(tl.int64) * s_q
    tl.store(DELTA + rows, tl.sum(out * dout, 1), rows < s_q)


@triton.jit
def accumulate_dq(
    dq, q, dout, lse, delta, K, V, rows, first_key,
    begin, end, k_stride, v_stride, s_k, offset, scale,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Adds what the keys begin .. end - 1 contribute to dq of a block of queries."""
    for start in range(begin, end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        k = load_rows(K, columns, k_stride, s_k, EDGE=MASKED, DIM=HEAD_DIM)
        v = load_rows(V, columns, v_stride, s_k, EDGE=MASKED, DIM=VALUE_DIM)

        # probabilities of the forward
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [BLOCK_M, BLOCK_N]
        probs = tl.exp2(scores - lse[:, None])
        if MASKED:
            mask = is_visible(
                rows[:, None], columns[None, :], first_key[:, None], s_k, offset,
                CAUSAL=CAUSAL,
                BOUNDED=BOUNDED,
            )
            probs = tl.where(mask, probs, 0.0)

        # gradients
        dprobs = tl.dot(dout, tl.trans(v), input_precision="ieee")
        dscores = probs * (dprobs - delta[:, None])
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def dq_kernel(
    Q, K, V, FIRST_KEY, DOUT, LSE, DELTA, DQ,
    q_strides, k_strides, v_strides, dout_strides, dq_strides, first_key_stride,
    s_q, s_k, heads, heads_per_group, key_start, offset, scale,
    CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """dq of one block of queries of one head."""
    # the queries, and what the forward and delta_kernel know of them
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # the blocks with most keys first
    batch, head = sequence_and_head(heads)
    rows = row + tl.arange(0, BLOCK_M)
    K = head_of(K, k_strides, batch, head // heads_per_group)
    V = head_of(V, v_strides, batch, head // heads_per_group)
    FIRST_KEY += batch * first_key_stride
    Q = head_of(Q, q_strides, batch, head)
    q = load_rows(Q, rows, q_strides[1], s_q, EDGE=True, DIM=HEAD_DIM)
    DOUT = head_of(DOUT, dout_strides, batch, head)
    dout = load_rows(DOUT, rows, dout_strides[1], s_q, EDGE=True, DIM=VALUE_DIM)

    row_index = tl.program_id(1).to(tl.int64) * s_q + rows
    lse = tl.load(LSE + row_index, rows < s_q, 0.0) * LOG2E
    lse = tl.where(lse == -float("inf"), float("inf"), lse)  # sees no key: every probability is 0
    delta = tl.load(DELTA + row_index, rows < s_q, 0.0)

    # which keys they see
    first_key = load_first_keys(FIRST_KEY, rows, s_q, key_start, BOUNDED)
    begin, masked_begin, end = key_range(
        FIRST_KEY, row, s_k, offset, key_start,
        CAUSAL=CAUSAL,
        BOUNDED=BOUNDED,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
    )

    # first the keys that all these queries see, if there are such, then the others
    dq = tl.zeros((BLOCK_M, padded(HEAD_DIM)), tl.float32)
    for MASKED in tl.static_range(2):
        if MASKED or not BOUNDED:
            dq = accumulate_dq(
                dq, q, dout, lse, delta, K, V, rows, first_key,
                begin=masked_begin if MASKED else begin,
                end=end if MASKED else masked_begin,
                k_stride=k_strides[1],
                v_stride=v_strides[1],
                s_k=s_k,
                offset=offset,
                scale=scale,
                MASKED=MASKED,
                CAUSAL=CAUSAL,
                BOUNDED=BOUNDED,
                BLOCK_N=BLOCK_N,
                HEAD_DIM=HEAD_DIM,
                VALUE_DIM=VALUE_DIM,
            )
    DQ = head_of(DQ, dq_strides, batch, head)
    store_rows(DQ, dq * (scale / LOG2E), rows, dq_strides[1], s_q, DIM=HEAD_DIM)


@triton.jit
def accumulate_dkv(
    dk, dv, k, v, Q, DOUT, LSE, DELTA, FIRST_KEY, columns,
    begin, end, q_stride, dout_stride, s_q, s_k, key_start, offset, scale,
    MASKED: tl.constexpr,
    BOUNDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Adds what the queries begin .. end - 1 of one head contribute to dk and dv of a block of keys."""
    for start in range(begin, end, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        q = load_rows(Q, rows, q_stride, s_q, EDGE=True, DIM=HEAD_DIM)
        dout = load_rows(DOUT, rows, dout_stride, s_q, EDGE=True, DIM=VALUE_DIM)

        # probabilities of the forward, transposed: keys are rows
        lse = tl.load(LSE + rows, rows < s_q, float("inf")) * LOG2E  # inf: every probability is 0
        lse = tl.where(lse == -float("inf"), float("inf"), lse)
        scores = tl.dot(k, tl.trans(q), input_precision="ieee") * scale  # [BLOCK_N, BLOCK_M]
        probs = tl.exp2(scores - lse[None, :])
        if MASKED:
            first_key = rows
            if BOUNDED:
                first_key = tl.load(FIRST_KEY + rows, rows < s_q, 0) - key_start
            mask = is_visible(
                rows[None, :], columns[:, None], first_key[None, :], s_k, offset,
                CAUSAL=True,
                BOUNDED=BOUNDED,
            )
            probs = tl.where(mask, probs, 0.0)

        # gradients
        dv = tl.dot(probs.to(dout.dtype), dout, dv, input_precision="ieee")
        dprobs = tl.dot(v, tl.trans(dout), input_precision="ieee")
        delta = tl.load(DELTA + rows, rows < s_q, 0.0)
        dscores = probs * (dprobs - delta[None, :])
        dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def dkv_kernel(
    Q, K, V, FIRST_KEY, QUERY_END, DOUT, LSE, DELTA, DK, DV,
    q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides,
    first_key_stride, query_end_stride,
    s_q, s_k, groups, heads_per_group, query_start, key_start, offset, scale,
    CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """dk and dv of one block of keys of one key head, from all query heads that share it."""
    # the keys, and which queries see them
    column = tl.program_id(0) * BLOCK_N
    columns = column + tl.arange(0, BLOCK_N)
    batch = tl.program_id(2).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    K = head_of(K, k_strides, batch, group)
    k = load_rows(K, columns, k_strides[1], s_k, EDGE=True, DIM=HEAD_DIM)
    V = head_of(V, v_strides, batch, group)
    v = load_rows(V, columns, v_strides[1], s_k, EDGE=True, DIM=VALUE_DIM)

    FIRST_KEY += batch * first_key_stride
    QUERY_END += batch * query_end_stride
    begin, masked_end, end = query_range(
        QUERY_END, column, s_q, s_k, offset, query_start,
        CAUSAL=CAUSAL,
        BOUNDED=BOUNDED,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
    )

    # of each query head: first the queries that need a mask, then those that see all these keys, if any are
    dk = tl.zeros((BLOCK_N, padded(HEAD_DIM)), tl.float32)
    dv = tl.zeros((BLOCK_N, padded(VALUE_DIM)), tl.float32)
    Q = head_of(Q, q_strides, batch, group * heads_per_group)
    DOUT = head_of(DOUT, dout_strides, batch, group * heads_per_group)
    row_index = (batch * groups + group) * heads_per_group * s_q
    for _ in range(0, heads_per_group):
        for MASKED in tl.static_range(1, -1, -1):
            if CAUSAL if MASKED else not BOUNDED:
                dk, dv = accumulate_dkv(
                    dk, dv, k, v, Q, DOUT, LSE + row_index, DELTA + row_index, FIRST_KEY, columns,
                    begin=begin if MASKED else masked_end,
                    end=masked_end if MASKED else end,
                    q_stride=q_strides[1],
                    dout_stride=dout_strides[1],
                    s_q=s_q,
                    s_k=s_k,
                    key_start=key_start,
                    offset=offset,
                    scale=scale,
                    MASKED=MASKED,
                    BOUNDED=BOUNDED,
                    BLOCK_M=BLOCK_M,
                    HEAD_DIM=HEAD_DIM,
                    VALUE_DIM=VALUE_DIM,
                )
        Q += q_strides[2]
        DOUT += dout_strides[2]
        row_index += s_q

    DK = head_of(DK, dk_strides, batch, group)
    store_rows(DK, dk * (scale / LOG2E), columns, dk_strides[1], s_k, DIM=HEAD_DIM)
    DV = head_of(DV, dv_strides, batch, group)
    store_rows(DV, dv, columns, dv_strides[1], s_k, DIM=VALUE_DIM)


def triton_supports_part(q: Tensor, k: Tensor, v: Tensor, mask: MaskLike) -> bool:
    """Whether the Triton kernels support the call; on a GPU, says once on stderr why not."""
    largest_dim = max(q.shape[-1], v.shape[-1])
    largest_offset = max(x.stride(1) * x.shape[1] for x in (q, k, v))
    why = None
    if largest_dim > MAX_HEAD_DIM:
        why = f"head dim {largest_dim} is above {MAX_HEAD_DIM}"
    elif isinstance(mask, Tensor):
        why = "a dense mask"
    elif largest_offset >= MAX_OFFSET:
        why = "offsets above 2^31"
    if q.numel() == 0 or k.numel() == 0:
        return False
    return kernel_is_available("attention", q, k, v, why=why)


def launch_meta(table: BlockTable, q: Tensor, v: Tensor, mask: AttentionMask | None) -> dict[str, int | bool]:
    """The constexpr arguments and launch options of the forward, dq and dkv kernels."""
    head_dim = q.shape[-1]
    value_dim = v.shape[-1]
    if q.dtype == torch.float32:
        block_m, block_n, warps, stages = FP32_BLOCKS
    else:
        by_dim = table[chip_name(q.device)]
        block_m, block_n, warps, stages = by_dim[padded(max(64, head_dim, value_dim))]
    return {
        "CAUSAL": mask is not None,
        "BOUNDED": mask is not None and mask.first_key is not None,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "num_warps": warps,
        "num_stages": stages,
    }


class MaskBounds(NamedTuple):
    """What the kernels read of a mask. The strides are over the batch."""
    first_key: Tensor
    query_end: Tensor
    first_key_stride: int
    query_end_stride: int
    query_start: int
    key_start: int

    @property
    def offset(self) -> int:
        """The position of query row 0 among the keys."""
        return self.query_start - self.key_start


def mask_bounds(mask: AttentionMask | None, q: Tensor) -> MaskBounds:
    """The bounds of a mask. q stands for tensors that no kernel reads."""
    bounds = MaskBounds(
        first_key=q,
        query_end=q,
        first_key_stride=0,
        query_end_stride=0,
        query_start=0,
        key_start=0,
    )
    if mask is None:
        return bounds
    bounds = bounds._replace(query_start=mask.query_start, key_start=mask.key_start)
    if mask.first_key is None or mask.query_end is None:
        return bounds
    return bounds._replace(
        first_key=mask.first_key,
        query_end=mask.query_end,
        first_key_stride=mask.first_key.stride(0) if len(mask.first_key) > 1 else 0,
        query_end_stride=mask.query_end.stride(0) if len(mask.query_end) > 1 else 0,
    )


def call_numbers(q: Tensor, k: Tensor, bounds: MaskBounds) -> dict[str, int | float]:
    """The numbers of one call that the forward, dq and dkv kernels share."""
    return {
        "s_q": q.shape[1],
        "s_k": k.shape[1],
        "heads_per_group": q.shape[2] // k.shape[2],
        "key_start": bounds.key_start,
        "offset": bounds.offset,
        "scale": math.log2(math.e) / math.sqrt(q.shape[-1]),  # of scores in base 2
    }


def by_channel(x: Tensor) -> Tensor:
    """x with adjacent channels, a copy where they are not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """attention_part as a Triton kernel."""
    q, k, v = (by_channel(x) for x in (q, k, v))
    b, s_q, h, _ = q.shape
    out = q.new_empty(b, s_q, h, v.shape[-1], dtype=dtype)
    lse = q.new_empty(b, h, s_q, dtype=torch.float32)

    bounds = mask_bounds(mask, q)
    strides = [x.stride()[:3] for x in (q, k, v, out)]
    meta = launch_meta(FORWARD_BLOCKS, q, v, mask)
    grid = ceil_div(s_q, meta["BLOCK_M"]), b * h
    forward_kernel[grid](
        q, k, v, bounds.first_key, out, lse, *strides, bounds.first_key_stride,
        heads=h,
        **call_numbers(q, k, bounds),
        **meta,
    )
    return out, lse.transpose(1, 2)


def output_dot_grad(out: Tensor, dout: Tensor) -> Tensor:
    """delta = <out, dout> over the channels. out, dout [b, s, h, e] -> [b, s, h], in memory head by head."""
    out, dout = by_channel(out), by_channel(dout)
    b, s, h, e = out.shape
    delta = out.new_empty(b, h, s, dtype=torch.float32)
    grid = ceil_div(s, DELTA_ROWS), b * h
    delta_kernel[grid](
        out, dout, delta, out.stride()[:3], dout.stride()[:3], s, h,
        BLOCK_M=DELTA_ROWS,
        VALUE_DIM=e,
        num_warps=4,
    )
    return delta.transpose(1, 2)


def launch_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | None,
    lse: Tensor,
    delta: Tensor,
    into: tuple[Tensor, Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """partial_backward as two Triton kernels."""
    dout, q, k, v = (by_channel(x) for x in (dout.to(q.dtype), q, k, v))
    lse = lse.transpose(1, 2).contiguous()  # [b, h, s_q]
    delta = delta.transpose(1, 2).contiguous()  # [b, h, s_q]
    b, s_q, h, _ = q.shape
    _, s_k, g, _ = k.shape
    dq, dk, dv = into or (x.new_empty(x.shape, dtype=torch.float32) for x in (q, k, v))

    bounds = mask_bounds(mask, q)
    strides = [x.stride()[:3] for x in (q, k, v, dout)]
    numbers = call_numbers(q, k, bounds)
    meta = launch_meta(DQ_BLOCKS, q, v, mask)
    grid = ceil_div(s_q, meta["BLOCK_M"]), b * h
    dq_kernel[grid](
        q, k, v, bounds.first_key, dout, lse, delta, dq,
        *strides, dq.stride()[:3], bounds.first_key_stride,
        heads=h,
        **numbers,
        **meta,
    )

    meta = launch_meta(DKV_BLOCKS, q, v, mask)
    grid = ceil_div(s_k, meta["BLOCK_N"]), g, b
    dkv_kernel[grid](
        q, k, v, bounds.first_key, bounds.query_end, dout, lse, delta, dk, dv,
        *strides, dk.stride()[:3], dv.stride()[:3],
        bounds.first_key_stride, bounds.query_end_stride,
        groups=g,
        query_start=bounds.query_start,
        **numbers,
        **meta,
    )
    return dq, dk, dv
