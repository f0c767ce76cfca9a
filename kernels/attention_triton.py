"""The Triton twin of kernels/partial_attention.py: FlashAttention-2 (arXiv 2307.08691), forward and backward.

With scores S, probabilities P = exp(S - lse) and delta = <dout, out>:

    dV = P^T dout       dP = dout V^T       dS = P (dP - delta)       dQ = dS K       dK = dS^T Q

With a soft cap, dS is also multiplied by the slope of the cap. A program owns what it writes: dq_kernel a
block of queries, dkv_kernel a block of keys. So there are no atomics, and gradients repeat bit for bit.

A query sees the keys of one interval, whose ends are nondecreasing along the sequence
(kernels/attention_mask.py). So a block of queries reads only the blocks of keys from key_range, and the other
way round. Every block is masked, even one that all see: simpler, and slower than the libraries of
kernels/attention_libraries.py, which run where they support a call.

Arguments of the kernels:
    x_strides             batch, token and head strides of X, in elements; channels are adjacent
    HEAD_DIM, VALUE_DIM   channels of a head of Q and K, and of V. A tile has more, see `padded`
    FIRST_KEY, QUERY_END  positions, as in kernels/attention_mask.py; the strides are over the batch
    offset                position of query 0 among the keys: query_start - key_start
    CAUSAL                there is a mask. BOUNDED: it has FIRST_KEY and QUERY_END
    scale                 scores are in base 2, since exp2 is one instruction: log2(e) / sqrt(d), or another
    SOFTCAP               as in kernels/attention_scores.py, or None
"""
import math
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.attention_mask import AttentionMask, MaskLike
from kernels.attention_scores import ScoreForm
from kernels.tiles import block_range, inside_matrix, tile_offsets
from kernels.triton_ import by_channel, ceil_div, kernel_is_available, tl, triton

LOG2E = tl.constexpr(math.log2(math.e))
MAX_HEAD_DIM = 256


class Blocks(NamedTuple):
    """Queries and keys of a tile, and launch options."""
    queries: int
    keys: int
    warps: int
    stages: int


# {kernel: {padded head dim: blocks}} in 16 bits. tests/kernels/aot.py compiles them without spills, for the
# 99 KiB of shared memory that the smallest chips have
BLOCKS = {
    "forward": {64: Blocks(128, 64, 8, 2), 128: Blocks(64, 64, 4, 2), 256: Blocks(64, 32, 8, 1)},
    "dq": {64: Blocks(128, 64, 8, 2), 128: Blocks(128, 32, 8, 1), 256: Blocks(64, 32, 4, 1)},
    "dkv": {64: Blocks(32, 128, 8, 2), 128: Blocks(32, 64, 8, 2), 256: Blocks(16, 64, 8, 2)},
}
FP32_BLOCKS = Blocks(32, 32, 4, 1)  # four bytes per element, and no tensor cores: for parity, not for speed


@triton.constexpr_function
def padded(dim):
    """Pad channels to a tile's size: a power of two, and at least 16, for the tensor cores."""
    return max(16, 1 << (dim - 1).bit_length())


# ---- tiles -------------------------------------------------------------------------------------------------

@triton.jit
def head_pointer(X, strides, batch, head):
    """Return the start of one head of one sequence of X."""
    return X + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[2]


@triton.jit
def load_rows(X, rows, stride, n, DIM: tl.constexpr):
    """Load rows of X [n, DIM] -> [rows, padded(DIM)], 0 outside X."""
    channels = tl.arange(0, padded(DIM))
    return tl.load(X + tile_offsets(rows, channels, stride), inside_matrix(rows, channels, n, DIM), 0.0)


@triton.jit
def store_rows(X, x, rows, stride, n, DIM: tl.constexpr):
    """Invert load_rows, casting to the dtype of X."""
    channels = tl.arange(0, padded(DIM))
    tl.store(X + tile_offsets(rows, channels, stride), x, inside_matrix(rows, channels, n, DIM))


@triton.jit
def key_range(
    FIRST_KEY, row, s_q, s_k, offset, key_start,
    CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the first block of keys that queries row .. row + BLOCK_M - 1 see, and where these keys end."""
    begin = 0
    end = s_k
    if CAUSAL:
        end = tl.minimum(s_k, tl.minimum(row + BLOCK_M, s_q) + offset)
    if BOUNDED:
        first_key = tl.load(FIRST_KEY + row) - key_start
        begin = tl.maximum(first_key, 0) // BLOCK_N * BLOCK_N
    return begin, end


@triton.jit
def query_range(
    QUERY_END, column, s_q, s_k, offset, query_start,
    CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the first block of queries that see keys column .. column + BLOCK_N - 1, and where they end."""
    begin = 0
    end = s_q
    if CAUSAL:
        begin = tl.maximum(column - offset, 0) // BLOCK_M * BLOCK_M
    if BOUNDED:
        last_key = tl.minimum(column + BLOCK_N, s_k) - 1
        end = tl.minimum(s_q, tl.load(QUERY_END + last_key) - query_start)
    return begin, end


@triton.jit
def first_keys(FIRST_KEY, rows, s_q, key_start, BOUNDED: tl.constexpr):
    """Return the first key that each query in `rows` sees; if not BOUNDED, values that sees_keys ignores."""
    first_key = rows
    if BOUNDED:
        first_key = tl.load(FIRST_KEY + tl.minimum(rows, s_q - 1)) - key_start
    return first_key


@triton.jit
def sees_keys(rows, columns, first_key, s_k, offset, CAUSAL: tl.constexpr, BOUNDED: tl.constexpr):
    """Whether queries `rows` see keys `columns`, which broadcast to a tile, as first_key of the rows does."""
    mask = columns < s_k
    if CAUSAL:
        mask = mask & (columns <= rows + offset)
    if BOUNDED:
        mask = mask & (columns >= first_key)
    return mask


@triton.jit
def block_scores(x, y, scale, SOFTCAP: tl.constexpr):
    """Return the scores of a block in base 2, [rows of x, rows of y]; x and y are queries and keys."""
    scores = tl.dot(x, tl.trans(y), input_precision="ieee") * scale
    if SOFTCAP is not None:  # SOFTCAP tanh(score / SOFTCAP)
        tanh = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 / SOFTCAP)))
        scores = tanh * (SOFTCAP * LOG2E)
    return scores


# ---- forward -----------------------------------------------------------------------------------------------

@triton.jit
def forward_kernel(
    Q, K, V, FIRST_KEY, OUT, LSE,
    q_strides, k_strides, v_strides, out_strides, first_key_stride,
    s_q, s_k, heads, heads_per_group, key_start, offset, scale,
    CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Compute OUT and LSE [b, h, s_q] of one block of queries of one head."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # longest blocks first
    batch = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    group = head // heads_per_group
    K = head_pointer(K, k_strides, batch, group)
    V = head_pointer(V, v_strides, batch, group)
    FIRST_KEY += batch.to(tl.int64) * first_key_stride

    # the queries, and the keys that they see
    rows = block_range(block, BLOCK_M)
    q = load_rows(head_pointer(Q, q_strides, batch, head), rows, q_strides[1], s_q, DIM=HEAD_DIM)
    first_key = first_keys(FIRST_KEY, rows, s_q, key_start, BOUNDED)
    begin, end = key_range(
        FIRST_KEY, block * BLOCK_M, s_q, s_k, offset, key_start,
        CAUSAL=CAUSAL, BOUNDED=BOUNDED, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
    )

    # online softmax
    out = tl.zeros((BLOCK_M, padded(VALUE_DIM)), tl.float32)
    denominator = tl.zeros((BLOCK_M,), tl.float32)
    row_max = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    for start in range(begin, end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        k = load_rows(K, columns, k_strides[1], s_k, DIM=HEAD_DIM)
        scores = block_scores(q, k, scale, SOFTCAP=SOFTCAP)
        mask = sees_keys(
            rows[:, None], columns[None, :], first_key[:, None], s_k, offset, CAUSAL=CAUSAL, BOUNDED=BOUNDED)
        scores = tl.where(mask, scores, -float("inf"))

        new_max = tl.maximum(row_max, tl.max(scores, 1))
        base = tl.where(new_max == -float("inf"), 0.0, new_max)  # of a query without a key so far
        probs = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(row_max - base)
        denominator = denominator * shrink + tl.sum(probs, 1)
        row_max = new_max
        v = load_rows(V, columns, v_strides[1], s_k, DIM=VALUE_DIM)
        out = tl.dot(probs.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")

    # 0 and -inf for a query that sees no key
    sees_a_key = denominator > 0.0
    denominator = tl.where(sees_a_key, denominator, 1.0)
    OUT = head_pointer(OUT, out_strides, batch, head)
    store_rows(OUT, out / denominator[:, None], rows, out_strides[1], s_q, DIM=VALUE_DIM)
    lse = tl.where(sees_a_key, (row_max + tl.log2(denominator)) / LOG2E, -float("inf"))
    tl.store(LSE + tl.program_id(1).to(tl.int64) * s_q + rows, lse, rows < s_q)


# ---- backward ----------------------------------------------------------------------------------------------

@triton.jit
def block_gradients(
    x, y, dout_or_v, v_or_dout, lse, delta, mask, scale, SOFTCAP: tl.constexpr
) -> "tuple[tl.tensor, tl.tensor]":
    """Return P and dS of a block, [rows of x, rows of y].

    x and dout_or_v belong to its rows, y and v_or_dout to its columns: queries with dout, and keys with v, or
    the other way round. lse, delta and mask broadcast to the block.
    """
    scores = block_scores(x, y, scale, SOFTCAP=SOFTCAP)
    probs = tl.where(mask, tl.exp2(scores - lse * LOG2E), 0.0)
    dprobs = tl.dot(dout_or_v, tl.trans(v_or_dout), input_precision="ieee")
    dscores = probs * (dprobs - delta)
    if SOFTCAP is not None:
        tanh = scores * (1.0 / (SOFTCAP * LOG2E))
        dscores *= 1.0 - tanh * tanh
    return probs, dscores


@triton.jit
def dq_kernel(
    Q, K, V, FIRST_KEY, DOUT, LSE, DELTA, DQ,
    q_strides, k_strides, v_strides, dout_strides, dq_strides, first_key_stride,
    s_q, s_k, heads, heads_per_group, key_start, offset, scale,
    CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Compute DQ of one block of queries of one head. LSE and DELTA are [b, h, s_q]."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # longest blocks first
    batch = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    group = head // heads_per_group
    K = head_pointer(K, k_strides, batch, group)
    V = head_pointer(V, v_strides, batch, group)
    FIRST_KEY += batch.to(tl.int64) * first_key_stride

    # the queries, and the keys that they see
    rows = block_range(block, BLOCK_M)
    q = load_rows(head_pointer(Q, q_strides, batch, head), rows, q_strides[1], s_q, DIM=HEAD_DIM)
    dout = load_rows(head_pointer(DOUT, dout_strides, batch, head), rows, dout_strides[1], s_q, DIM=VALUE_DIM)
    of_head = tl.program_id(1).to(tl.int64) * s_q
    lse = tl.load(LSE + of_head + rows, rows < s_q, float("inf"))[:, None]
    delta = tl.load(DELTA + of_head + rows, rows < s_q, 0.0)[:, None]
    first_key = first_keys(FIRST_KEY, rows, s_q, key_start, BOUNDED)
    begin, end = key_range(
        FIRST_KEY, block * BLOCK_M, s_q, s_k, offset, key_start,
        CAUSAL=CAUSAL, BOUNDED=BOUNDED, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
    )

    dq = tl.zeros((BLOCK_M, padded(HEAD_DIM)), tl.float32)
    for start in range(begin, end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        k = load_rows(K, columns, k_strides[1], s_k, DIM=HEAD_DIM)
        v = load_rows(V, columns, v_strides[1], s_k, DIM=VALUE_DIM)
        mask = sees_keys(
            rows[:, None], columns[None, :], first_key[:, None], s_k, offset, CAUSAL=CAUSAL, BOUNDED=BOUNDED)
        _, dscores = block_gradients(q, k, dout, v, lse, delta, mask, scale, SOFTCAP=SOFTCAP)
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision="ieee")
    DQ = head_pointer(DQ, dq_strides, batch, head)
    store_rows(DQ, dq * (scale / LOG2E), rows, dq_strides[1], s_q, DIM=HEAD_DIM)


@triton.jit
def dkv_kernel(
    Q, K, V, FIRST_KEY, QUERY_END, DOUT, LSE, DELTA, DK, DV,
    q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides, first_key_stride, query_end_stride,
    s_q, s_k, heads, heads_per_group, query_start, key_start, offset, scale,
    CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Compute DK and DV of one block of keys of one key head, from all query heads that share it.

    Its tiles are transposed: keys are rows, queries are columns.
    """
    block = tl.program_id(0)
    group = tl.program_id(1)
    batch = tl.program_id(2)
    FIRST_KEY += batch.to(tl.int64) * first_key_stride
    QUERY_END += batch.to(tl.int64) * query_end_stride

    # the keys, and the queries that see them
    columns = block_range(block, BLOCK_N)
    k = load_rows(head_pointer(K, k_strides, batch, group), columns, k_strides[1], s_k, DIM=HEAD_DIM)
    v = load_rows(head_pointer(V, v_strides, batch, group), columns, v_strides[1], s_k, DIM=VALUE_DIM)
    begin, end = query_range(
        QUERY_END, block * BLOCK_N, s_q, s_k, offset, query_start,
        CAUSAL=CAUSAL, BOUNDED=BOUNDED, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
    )

    dk = tl.zeros((BLOCK_N, padded(HEAD_DIM)), tl.float32)
    dv = tl.zeros((BLOCK_N, padded(VALUE_DIM)), tl.float32)
    for i in range(0, heads_per_group):
        head = group * heads_per_group + i
        HEAD_Q = head_pointer(Q, q_strides, batch, head)
        HEAD_DOUT = head_pointer(DOUT, dout_strides, batch, head)
        of_head = (batch * heads + head).to(tl.int64) * s_q
        for start in range(begin, end, BLOCK_M):
            rows = start + tl.arange(0, BLOCK_M)
            q = load_rows(HEAD_Q, rows, q_strides[1], s_q, DIM=HEAD_DIM)
            dout = load_rows(HEAD_DOUT, rows, dout_strides[1], s_q, DIM=VALUE_DIM)
            lse = tl.load(LSE + of_head + rows, rows < s_q, float("inf"))[None, :]
            delta = tl.load(DELTA + of_head + rows, rows < s_q, 0.0)[None, :]
            first_key = first_keys(FIRST_KEY, rows, s_q, key_start, BOUNDED)
            mask = sees_keys(
                rows[None, :], columns[:, None], first_key[None, :], s_k, offset,
                CAUSAL=CAUSAL, BOUNDED=BOUNDED,
            )
            probs, dscores = block_gradients(k, q, v, dout, lse, delta, mask, scale, SOFTCAP=SOFTCAP)
            dv = tl.dot(probs.to(dout.dtype), dout, dv, input_precision="ieee")
            dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision="ieee")

    DK = head_pointer(DK, dk_strides, batch, group)
    store_rows(DK, dk * (scale / LOG2E), columns, dk_strides[1], s_k, DIM=HEAD_DIM)
    DV = head_pointer(DV, dv_strides, batch, group)
    store_rows(DV, dv, columns, dv_strides[1], s_k, DIM=VALUE_DIM)


# ---- launches ----------------------------------------------------------------------------------------------

def triton_supports(q: Tensor, k: Tensor, v: Tensor, mask: MaskLike) -> bool:
    """Whether the kernels support the call; on a GPU, report once on stderr why not."""
    largest_dim = max(q.shape[-1], v.shape[-1])
    why = "a dense mask" if isinstance(mask, Tensor) else None
    if largest_dim > MAX_HEAD_DIM:
        why = f"head dim {largest_dim} is above {MAX_HEAD_DIM}"
    return q.numel() > 0 and k.numel() > 0 and kernel_is_available("attention", q, k, v, why=why)


def find_blocks(kernel: str, q: Tensor, v: Tensor) -> Blocks:
    """Return the blocks of a kernel of BLOCKS for these tensors."""
    if q.dtype == torch.float32:
        return FP32_BLOCKS
    return BLOCKS[kernel][padded(max(64, q.shape[-1], v.shape[-1]))]


def shared_arguments(
    blocks: Blocks, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, form: ScoreForm
) -> dict[str, int | float | bool | None]:
    """Return the arguments and launch options that all kernels share."""
    return {
        "s_q": q.shape[1],
        "s_k": k.shape[1],
        "heads": q.shape[2],
        "heads_per_group": q.shape[2] // k.shape[2],
        "key_start": 0 if mask is None else mask.key_start,
        "offset": 0 if mask is None else mask.query_start - mask.key_start,
        "scale": math.log2(math.e) / form.divisor(q.shape[-1]),
        "CAUSAL": mask is not None,
        "BOUNDED": mask is not None and mask.first_key is not None,
        "SOFTCAP": form.softcap,
        "BLOCK_M": blocks.queries,
        "BLOCK_N": blocks.keys,
        "HEAD_DIM": q.shape[-1],
        "VALUE_DIM": v.shape[-1],
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
    }


def iter_bounds(mask: AttentionMask | None, unread: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Return FIRST_KEY, QUERY_END and their strides over the batch. `unread` stands in for missing ones."""
    if mask is None or mask.first_key is None or mask.query_end is None:
        return unread, unread, 0, 0
    stride = mask.first_key.stride(0) if len(mask.first_key) > 1 else 0
    end_stride = mask.query_end.stride(0) if len(mask.query_end) > 1 else 0
    return mask.first_key, mask.query_end, stride, end_stride


def get_strides(*tensors: Tensor) -> list[tuple[int, ...]]:
    """Return batch, token and head strides of each tensor."""
    return [x.stride()[:3] for x in tensors]


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, dtype: torch.dtype, form: ScoreForm
) -> tuple[Tensor, Tensor]:
    """Run attention_part (kernels/partial_attention.py) as a kernel."""
    q, k, v = (by_channel(x) for x in (q, k, v))
    b, s_q, h, _ = q.shape
    out = q.new_empty(b, s_q, h, v.shape[-1], dtype=dtype)
    lse = q.new_empty(b, h, s_q, dtype=torch.float32)
    first_key, _, first_key_stride, _ = iter_bounds(mask, q)
    blocks = find_blocks("forward", q, v)
    forward_kernel[ceil_div(s_q, blocks.queries), b * h](
        q, k, v, first_key, out, lse, *get_strides(q, k, v, out), first_key_stride,
        **shared_arguments(blocks, q, k, v, mask, form),
    )
    return out, lse.transpose(1, 2)


def launch_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | None,
    lse: Tensor,
    delta: Tensor,
    dtype: torch.dtype,
    form: ScoreForm,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run partial_backward (kernels/partial_attention.py) as two kernels. Return dq, dk, dv in dtype."""
    dout, q, k, v = (by_channel(x) for x in (dout.to(q.dtype), q, k, v))
    lse, delta = (x.float().transpose(1, 2).contiguous() for x in (lse, delta))  # [b, h, s_q]
    b, s_q, h, _ = q.shape
    _, s_k, g, _ = k.shape
    dq, dk, dv = (x.new_empty(x.shape, dtype=dtype) for x in (q, k, v))
    first_key, query_end, first_key_stride, query_end_stride = iter_bounds(mask, q)

    blocks = find_blocks("dq", q, v)
    dq_kernel[ceil_div(s_q, blocks.queries), b * h](
        q, k, v, first_key, dout, lse, delta, dq, *get_strides(q, k, v, dout, dq), first_key_stride,
        **shared_arguments(blocks, q, k, v, mask, form),
    )
    blocks = find_blocks("dkv", q, v)
    dkv_kernel[ceil_div(s_k, blocks.keys), g, b](
        q, k, v, first_key, query_end, dout, lse, delta, dk, dv,
        *get_strides(q, k, v, dout, dk, dv), first_key_stride, query_end_stride,
        query_start=0 if mask is None else mask.query_start,
        **shared_arguments(blocks, q, k, v, mask, form),
    )
    return dq, dk, dv
