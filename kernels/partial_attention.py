"""Attention over a part of the keys, and how parts are put together: what ring attention is made of.

    out_i, lse_i = partial(q, k_i, v_i, see_i)        softmax over these keys alone, with the logarithm of its denominator
    out, lse     = merge(out_1, lse_1, out_2, lse_2)  exactly what one softmax over both sets of keys gives
    dq, dk, dv   = partial_backward(...)              one part's share, from the merged lse and delta = <dout, out>

The algebra is that of online softmax (arXiv 1805.02867) and FlashAttention's backward (arXiv 2307.08691): with the merged
lse the true probabilities of a part are exp(scores - lse), whatever the other parts hold. Everything is in fp32 or better
(`wide`), since what is summed over parts must not be rounded in between. A tile of queries at a time bounds the memory.

On a GPU the same two functions are three Triton kernels: forward, dq, and dk with dv. Each program owns what it writes, so
there are no atomics and the gradients are the same bits every time; blocks that nobody sees are skipped, and only blocks
that a boundary cuts are masked (kernels/sight.py).
"""
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.grad import wide
from kernels.sight import Sight
from kernels.triton_ import ceil_div, chip, fits, power_of_2, tl, triton

TILE = 512  # queries whose scores exist together
LARGEST = 256  # head dim
# By chip (kernels/triton_.py) and padded head dim: queries and keys of a block, warps, stages of the pipeline. The largest
# that tests/kernels/aot.py compiles without a spill; Blackwell keeps accumulators in their own memory, and wants one stage.
FORWARD = {8: {64: (128, 128, 8, 3), 128: (128, 64, 8, 3), 256: (64, 32, 8, 2)},
           9: {64: (128, 128, 8, 3), 128: (128, 64, 8, 3), 256: (128, 32, 8, 2)},
           10: {64: (128, 128, 8, 3), 128: (128, 64, 8, 3), 256: (128, 32, 8, 2)}}
QUERIES = dict.fromkeys((8, 9, 10), {64: (128, 64, 8, 3), 128: (128, 32, 8, 3), 256: (64, 32, 8, 2)})
KEYS = {8: {64: (32, 128, 8, 2), 128: (32, 64, 8, 2), 256: (16, 64, 8, 1)},
        9: {64: (64, 128, 8, 2), 128: (32, 128, 8, 3), 256: (16, 64, 8, 2)},
        10: {64: (64, 128, 8, 1), 128: (64, 128, 8, 1), 256: (16, 64, 8, 1)}}
DELTA_ROWS = 64
FP32 = (32, 32, 4, 1)  # four bytes an element, and no tensor cores: for parity, not for speed


def partial(q: Tensor, k: Tensor, v: Tensor, see: Tensor | Sight | None, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """q [b, s_q, h, d], k [b, s_k, g, d], v [b, s_k, g, e], h a multiple of g; see: bool [b or 1, 1, s_q, s_k], None: everyone
    sees all. Returns out [b, s_q, h, e], in `dtype` or fp32 or better, and lse [b, s_q, h]; a query that sees no key has out 0
    and lse -inf."""
    if triton_fits(q, k, v, see):
        return launch_forward(q, k, v, see, dtype or torch.float32)
    out, lse = partial_reference(q, k, v, see.dense if isinstance(see, Sight) else see)
    return out.to(dtype or out.dtype), lse


def partial_reference(q: Tensor, k: Tensor, v: Tensor, see: Tensor | None) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:3], v.shape[-1], dtype=wide(q.dtype))
    lse = out.new_empty(q.shape[:3])
    values = by_group(v)  # [b, g, 1, s_k, d]
    for rows, scores in tiles(q, k, see):
        total = scores.logsumexp(-1, keepdim=True)  # [b, g, r, t, 1]
        p = torch.exp(scores - total.clamp_min(torch.finfo(total.dtype).min))  # no NaN where all scores are -inf
        out[:, rows] = by_token(p @ values)
        lse[:, rows] = by_token(total)[..., 0]
    return out, lse


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """In place: (out, lse) become those of both sets of keys. lse must not be -inf in both."""
    both = torch.logaddexp(lse, other_lse)
    out.mul_(torch.exp(lse - both)[..., None]).addcmul_(other, torch.exp(other_lse - both)[..., None])
    lse.copy_(both)


def partial_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, see: Tensor | Sight | None, lse: Tensor, delta: Tensor,
                     into: tuple[Tensor, Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """dout [b, s_q, h, e]; lse, delta [b, s_q, h]: merged over all parts. Returns this part's share of dq, and dk, dv of its
    keys: in fp32 or better, or written to `into`."""
    if triton_fits(q, k, v, see):
        return launch_backward(dout, q, k, v, see, lse, delta, into)
    parts = partial_backward_reference(dout, q, k, v, see.dense if isinstance(see, Sight) else see, lse, delta)
    return parts if into is None else tuple(a.copy_(b) for a, b in zip(into, parts))


def partial_backward_reference(dout, q, k, v, see, lse, delta) -> tuple[Tensor, Tensor, Tensor]:
    dq = q.new_empty(q.shape, dtype=wide(q.dtype))
    keys, values = by_group(k), by_group(v)  # [b, g, 1, s_k, d]
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    for rows, scores in tiles(q, k, see):
        here = [by_group(t[:, rows], k.shape[2]) for t in (q, dout, lse[..., None], delta[..., None])]
        queries, dy, total, inner = here  # [b, g, r, t, d or 1]
        p = torch.exp(scores - total)
        dv += (p.transpose(-1, -2) @ dy).sum(2, keepdim=True)
        ds = p * (dy @ values.transpose(-1, -2) - inner) / math.sqrt(q.shape[-1])
        dq[:, rows] = by_token(ds @ keys)
        dk += (ds.transpose(-1, -2) @ queries).sum(2, keepdim=True)
    return dq, by_token(dk), by_token(dv)


def tiles(q: Tensor, k: Tensor, see: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """(queries, their scores [b, g, r, t, s_k]; -inf where they do not see)."""
    keys = by_group(k).transpose(-1, -2)  # [b, g, 1, d, s_k]
    for lo in range(0, q.shape[1], TILE):
        rows = slice(lo, min(lo + TILE, q.shape[1]))
        scores = by_group(q[:, rows], k.shape[2]) / math.sqrt(q.shape[-1]) @ keys
        yield rows, scores if see is None else scores.masked_fill(~see[:, :, None, rows], -math.inf)


def by_group(x: Tensor, groups: int | None = None) -> Tensor:
    """[b, s, h, d] -> [b, groups, h / groups, s, d], wide; groups: the key heads (none: h)."""
    return x.to(wide(x.dtype)).transpose(1, 2).unflatten(1, (groups or x.shape[2], -1))


def by_token(x: Tensor) -> Tensor:
    """[b, g, r, s, d] -> [b, s, g r, d]."""
    return x.flatten(1, 2).transpose(1, 2)


# ---- Triton ------------------------------------------------------------------------------------------------------------------
# Scores are kept in base 2 (exp2 is one instruction): `scale` is log2(e) / sqrt(d). FIRST, LAST: kernels/sight.py, and
# `apart` turns a query's row into its place among the keys. x_at: strides of batch, token, head; channels are adjacent.

LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def load_rows(X, rows, stride, n, EDGE: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr):
    """[rows, PADDED]; rows from n on and channels from D on are 0. EDGE: there may be such rows."""
    channels = tl.arange(0, PADDED)
    at = X + rows[:, None] * stride + channels[None, :]
    if EDGE and D < PADDED:
        x = tl.load(at, (rows < n)[:, None] & (channels < D)[None, :], 0.0)
    elif EDGE:
        x = tl.load(at, (rows < n)[:, None], 0.0)
    elif D < PADDED:
        x = tl.load(at, (channels < D)[None, :], 0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def store_rows(X, x, rows, stride, n, D: tl.constexpr, PADDED: tl.constexpr):
    channels = tl.arange(0, PADDED)
    inside = n - rows > 0  # not written as for the loads, or these predicates would fill registers all along
    tl.store(X + rows[:, None] * stride + channels[None, :], x.to(X.dtype.element_ty), inside[:, None] & (channels < D)[None, :])


@triton.jit
def keys_of(FIRST, row, s_q, s_k, apart, key, CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Which keys the queries row .. row + QUERIES see: begin, cut, end; before `cut` all see all, after it a mask decides."""
    begin, cut, end = 0, s_k // KEYS * KEYS, s_k
    if CAUSAL:
        end = tl.minimum(s_k, tl.maximum(row + QUERIES + apart, 0))
        cut = tl.minimum(cut, tl.maximum(row + apart + 1, 0) // KEYS * KEYS)
    if BOUNDED:
        begin = tl.maximum(tl.load(FIRST + row) - key, 0) // KEYS * KEYS
        cut = begin
    return begin, cut, end


@triton.jit
def queries_of(LAST, column, s_q, s_k, apart, query, CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Which queries see the keys column .. column + KEYS: begin, cut, end; before `cut` a mask decides, after it all see all."""
    begin, cut, end = 0, 0, s_q
    if CAUSAL:
        begin = tl.maximum(column - apart, 0) // QUERIES * QUERIES
        cut = tl.minimum(tl.cdiv(tl.maximum(column + KEYS - 1 - apart, 0), QUERIES) * QUERIES, tl.cdiv(s_q, QUERIES) * QUERIES)
    if BOUNDED:
        end = tl.minimum(s_q, tl.maximum(tl.load(LAST + tl.minimum(column + KEYS, s_k) - 1) - query, 0))
        cut = end
    return begin, cut, end


@triton.jit
def visible(rows, columns, first, s_k, apart, CAUSAL: tl.constexpr, BOUNDED: tl.constexpr):
    """rows, columns, first: broadcastable against each other."""
    see = columns < s_k
    if CAUSAL:
        see = see & (columns <= rows + apart)
    if BOUNDED:
        see = see & (columns >= first)
    return see


@triton.jit
def fold(out, total, top, q, K, V, k_stride, v_stride, rows, first, begin, end, s_k, apart, scale, MASKED: tl.constexpr,
         CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr):
    """Keys begin..end join the online softmax of a block of queries."""
    for n in range(begin, end, N):
        columns = n + tl.arange(0, N)
        k = load_rows(K, columns, k_stride, s_k, MASKED, D, DP)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if MASKED:
            scores = tl.where(visible(rows[:, None], columns[None, :], first[:, None], s_k, apart, CAUSAL, BOUNDED), scores, -float("inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        base = new
        if MASKED:
            base = tl.where(new == -float("inf"), 0.0, new)  # no key yet: exp2(-inf - 0), not exp2(-inf + inf)
        p = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        v = load_rows(V, columns, v_stride, s_k, MASKED, E, EP)
        out = tl.dot(p.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
        top = new
    return out, total, top


@triton.jit
def forward_kernel(Q, K, V, FIRST, OUT, LSE, q_at, k_at, v_at, out_at, first_b, s_q, s_k, heads, share, key, apart, scale,
                   CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
                   D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr):
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * M  # the blocks with most keys first
    b, h = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    rows = row + tl.arange(0, M)
    K += b * k_at[0] + h // share * k_at[2]
    V += b * v_at[0] + h // share * v_at[2]
    FIRST += b * first_b
    q = load_rows(Q + b * q_at[0] + h * q_at[2], rows, q_at[1], s_q, True, D, DP)
    first = rows
    if BOUNDED:
        first = tl.load(FIRST + tl.minimum(rows, s_q - 1)) - key
    begin, cut, end = keys_of(FIRST, row, s_q, s_k, apart, key, CAUSAL, BOUNDED, M, N)
    out, total, top = tl.zeros((M, EP), tl.float32), tl.zeros((M,), tl.float32), tl.full((M,), -float("inf"), tl.float32)
    if not BOUNDED:
        out, total, top = fold(out, total, top, q, K, V, k_at[1], v_at[1], rows, first, begin, cut, s_k, apart, scale,
                               False, CAUSAL, BOUNDED, N, D, DP, E, EP)
    out, total, top = fold(out, total, top, q, K, V, k_at[1], v_at[1], rows, first, cut, end, s_k, apart, scale,
                           True, CAUSAL, BOUNDED, N, D, DP, E, EP)
    seen = total > 0.0
    store_rows(OUT + b * out_at[0] + h * out_at[2], out / tl.where(seen, total, 1.0)[:, None], rows, out_at[1], s_q, E, EP)
    lse = tl.where(seen, (top + tl.log2(tl.where(seen, total, 1.0))) / LOG2E, -float("inf"))
    tl.store(LSE + tl.program_id(1).to(tl.int64) * s_q + rows, lse, rows < s_q)


@triton.jit
def delta_kernel(OUT, DOUT, DELTA, out_at, dout_at, s_q, heads, M: tl.constexpr, E: tl.constexpr, EP: tl.constexpr):
    """delta = <dout, out>."""
    b, h = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    rows = tl.program_id(0) * M + tl.arange(0, M)
    out = load_rows(OUT + b * out_at[0] + h * out_at[2], rows, out_at[1], s_q, True, E, EP).to(tl.float32)
    dout = load_rows(DOUT + b * dout_at[0] + h * dout_at[2], rows, dout_at[1], s_q, True, E, EP).to(tl.float32)
    tl.store(DELTA + tl.program_id(1).to(tl.int64) * s_q + rows, tl.sum(out * dout, 1), rows < s_q)


@triton.jit
def add_dq(dq, q, dout, lse, delta, K, V, k_stride, v_stride, rows, first, begin, end, s_k, apart, scale, MASKED: tl.constexpr,
           CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr):
    for n in range(begin, end, N):
        columns = n + tl.arange(0, N)
        k = load_rows(K, columns, k_stride, s_k, MASKED, D, DP)
        v = load_rows(V, columns, v_stride, s_k, MASKED, E, EP)
        p = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * scale - lse[:, None])
        if MASKED:
            p = tl.where(visible(rows[:, None], columns[None, :], first[:, None], s_k, apart, CAUSAL, BOUNDED), p, 0.0)
        ds = p * (tl.dot(dout, tl.trans(v), input_precision="ieee") - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def dq_kernel(Q, K, V, FIRST, DOUT, LSE, DELTA, DQ, q_at, k_at, v_at, dout_at, dq_at, first_b, s_q, s_k, heads, share, key, apart, scale,
              CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
              D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr):
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    b, h = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    rows = row + tl.arange(0, M)
    K += b * k_at[0] + h // share * k_at[2]
    V += b * v_at[0] + h // share * v_at[2]
    FIRST += b * first_b
    q = load_rows(Q + b * q_at[0] + h * q_at[2], rows, q_at[1], s_q, True, D, DP)
    dout = load_rows(DOUT + b * dout_at[0] + h * dout_at[2], rows, dout_at[1], s_q, True, E, EP)
    at = tl.program_id(1).to(tl.int64) * s_q + rows
    lse = tl.load(LSE + at, rows < s_q, 0.0) * LOG2E
    lse = tl.where(lse == -float("inf"), float("inf"), lse)  # sees no key: every probability is 0
    delta = tl.load(DELTA + at, rows < s_q, 0.0)
    first = rows
    if BOUNDED:
        first = tl.load(FIRST + tl.minimum(rows, s_q - 1)) - key
    begin, cut, end = keys_of(FIRST, row, s_q, s_k, apart, key, CAUSAL, BOUNDED, M, N)
    dq = tl.zeros((M, DP), tl.float32)
    if not BOUNDED:
        dq = add_dq(dq, q, dout, lse, delta, K, V, k_at[1], v_at[1], rows, first, begin, cut, s_k, apart, scale,
                    False, CAUSAL, BOUNDED, N, D, DP, E, EP)
    dq = add_dq(dq, q, dout, lse, delta, K, V, k_at[1], v_at[1], rows, first, cut, end, s_k, apart, scale,
                True, CAUSAL, BOUNDED, N, D, DP, E, EP)
    store_rows(DQ + b * dq_at[0] + h * dq_at[2], dq * (scale / LOG2E), rows, dq_at[1], s_q, D, DP)


@triton.jit
def add_dkv(dk, dv, k, v, Q, DOUT, LSE, DELTA, FIRST, q_stride, dout_stride, columns, begin, end, s_q, s_k, key, apart, scale,
            MASKED: tl.constexpr, BOUNDED: tl.constexpr, M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr):
    for m in range(begin, end, M):
        rows = m + tl.arange(0, M)
        q = load_rows(Q, rows, q_stride, s_q, True, D, DP)
        dout = load_rows(DOUT, rows, dout_stride, s_q, True, E, EP)
        lse = tl.load(LSE + rows, rows < s_q, float("inf")) * LOG2E  # inf: every probability is 0
        lse = tl.where(lse == -float("inf"), float("inf"), lse)
        p = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") * scale - lse[None, :])  # transposed: keys are rows
        if MASKED:
            first = rows
            if BOUNDED:
                first = tl.load(FIRST + rows, rows < s_q, 0) - key
            p = tl.where(visible(rows[None, :], columns[:, None], first[None, :], s_k, apart, True, BOUNDED), p, 0.0)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
        ds = p * (tl.dot(v, tl.trans(dout), input_precision="ieee") - tl.load(DELTA + rows, rows < s_q, 0.0)[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def dkv_kernel(Q, K, V, FIRST, LAST, DOUT, LSE, DELTA, DK, DV, q_at, k_at, v_at, dout_at, dk_at, dv_at, first_b, last_b,
               s_q, s_k, groups, share, query, key, apart, scale, CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
               D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr):
    """One block of keys of one key head, and all query heads that share it."""
    column = tl.program_id(0) * N
    b, g = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    columns = column + tl.arange(0, N)
    k = load_rows(K + b * k_at[0] + g * k_at[2], columns, k_at[1], s_k, True, D, DP)
    v = load_rows(V + b * v_at[0] + g * v_at[2], columns, v_at[1], s_k, True, E, EP)
    FIRST += b * first_b
    begin, cut, end = queries_of(LAST + b * last_b, column, s_q, s_k, apart, query, CAUSAL, BOUNDED, M, N)
    dk, dv = tl.zeros((N, DP), tl.float32), tl.zeros((N, EP), tl.float32)
    Q += b * q_at[0] + g * share * q_at[2]
    DOUT += b * dout_at[0] + g * share * dout_at[2]
    at = (b * groups + g) * share * s_q
    for _ in range(0, share):
        if CAUSAL:
            dk, dv = add_dkv(dk, dv, k, v, Q, DOUT, LSE + at, DELTA + at, FIRST, q_at[1], dout_at[1], columns, begin, cut, s_q, s_k, key,
                             apart, scale, True, BOUNDED, M, D, DP, E, EP)
        if not BOUNDED:
            dk, dv = add_dkv(dk, dv, k, v, Q, DOUT, LSE + at, DELTA + at, FIRST, q_at[1], dout_at[1], columns, cut, end, s_q, s_k, key,
                             apart, scale, False, BOUNDED, M, D, DP, E, EP)
        Q += q_at[2]
        DOUT += dout_at[2]
        at += s_q
    store_rows(DK + b * dk_at[0] + g * dk_at[2], dk * (scale / LOG2E), columns, dk_at[1], s_k, D, DP)
    store_rows(DV + b * dv_at[0] + g * dv_at[2], dv, columns, dv_at[1], s_k, E, EP)


def triton_fits(q: Tensor, k: Tensor, v: Tensor, see: Tensor | Sight | None) -> bool:
    d = max(q.shape[-1], v.shape[-1])
    far = max(t.stride(1) * t.shape[1] for t in (q, k, v))
    why = f"head dim {d} is above {LARGEST}" if d > LARGEST else "a mask given as bits" if isinstance(see, Tensor) else \
        "offsets above 2^31" if far >= 2**31 else None
    return q.numel() > 0 and k.numel() > 0 and fits("attention", q, k, v, why=why)


def launch_meta(table: dict, q: Tensor, v: Tensor, see: Sight | None) -> dict:
    d, e = q.shape[-1], v.shape[-1]
    dp, ep = (max(16, power_of_2(x)) for x in (d, e))
    m, n, warps, stages = FP32 if q.dtype == torch.float32 else table[chip(q.device)][max(64, dp, ep)]
    return {"CAUSAL": see is not None, "BOUNDED": see is not None and see.first is not None, "M": m, "N": n,
            "D": d, "DP": dp, "E": e, "EP": ep, "num_warps": warps, "num_stages": stages}


def by_channel(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def bounds(see: Sight | None, q: Tensor) -> tuple[Tensor, Tensor, int, int, int, int]:
    """first, last, their strides over the batch, the places of the first query and key."""
    if see is None or see.first is None:
        return q, q, 0, 0, *((0, 0) if see is None else (see.query, see.key))  # no pointer is read
    return see.first, see.last, *(x.stride(0) if len(x) > 1 else 0 for x in (see.first, see.last)), see.query, see.key


def launch_forward(q, k, v, see: Sight | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    q, k, v = (by_channel(t) for t in (q, k, v))
    (b, s_q, h, d), (_, s_k, g, e) = q.shape, v.shape
    out, lse = q.new_empty(b, s_q, h, e, dtype=dtype), q.new_empty(b, h, s_q, dtype=torch.float32)
    first, _, first_b, _, query, key = bounds(see, q)
    meta = launch_meta(FORWARD, q, v, see)
    forward_kernel[(ceil_div(s_q, meta["M"]), b * h)](
        q, k, v, first, out, lse, *(t.stride()[:3] for t in (q, k, v, out)), first_b, s_q, s_k, h, h // g, key, query - key,
        math.log2(math.e) / math.sqrt(d), **meta)
    return out, lse.transpose(1, 2)


def inner(out: Tensor, dout: Tensor) -> Tensor:
    """<out, dout> over the channels [b, s, h, e] -> [b, s, h], which lies head by head."""
    out, dout = by_channel(out), by_channel(dout)
    b, s, h, e = out.shape
    delta = out.new_empty(b, h, s, dtype=torch.float32)
    delta_kernel[(ceil_div(s, DELTA_ROWS), b * h)](out, dout, delta, out.stride()[:3], dout.stride()[:3], s, h,
                                                   M=DELTA_ROWS, E=e, EP=power_of_2(e), num_warps=4)
    return delta.transpose(1, 2)


def launch_backward(dout, q, k, v, see: Sight | None, lse, delta, into) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v = (by_channel(t) for t in (dout.to(q.dtype), q, k, v))
    lse, delta = (t.transpose(1, 2).contiguous() for t in (lse, delta))  # [b, h, s_q]
    (b, s_q, h, d), (_, s_k, g, _) = q.shape, v.shape
    dq, dk, dv = into or (t.new_empty(t.shape, dtype=torch.float32) for t in (q, k, v))
    first, last, first_b, last_b, query, key = bounds(see, q)
    scale, strides = math.log2(math.e) / math.sqrt(d), [t.stride()[:3] for t in (q, k, v, dout)]
    meta = launch_meta(QUERIES, q, v, see)
    dq_kernel[(ceil_div(s_q, meta["M"]), b * h)](
        q, k, v, first, dout, lse, delta, dq, *strides, dq.stride()[:3], first_b, s_q, s_k, h, h // g, key, query - key, scale, **meta)
    meta = launch_meta(KEYS, q, v, see)
    dkv_kernel[(ceil_div(s_k, meta["N"]), g, b)](
        q, k, v, first, last, dout, lse, delta, dk, dv, *strides, dk.stride()[:3], dv.stride()[:3], first_b, last_b, s_q, s_k, g, h // g,
        query, key, query - key, scale, **meta)
    return dq, dk, dv
