"""Triton kernels of attention's forward (FlashAttention-2, arXiv 2307.08691), and of merging two parts. Their
arguments are explained in kernels/attention_blocks.py."""
from kernels.attention_blocks import (
    LOG2E,
    block_start,
    blocks_to_visit,
    first_edge,
    head_of,
    key_range,
    last_block,
    load_block,
    load_first_keys,
    load_rows,
    padded,
    sees_keys,
    sequence_and_head,
    softcapped,
    store_rows,
)
from kernels.tiles import block_range
from kernels.triton_ import tl, triton


@triton.jit
def block_scores(
    q, K, k_strides, batch, group, start, s_k,
    EDGE: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Unscaled Q K^T of a block of queries and the keys from `start` on: fp32 [BLOCK_M, BLOCK_N]."""
    k = load_block(
        K, k_strides, batch, group, start, s_k,
        EDGE=EDGE,
        TMA=TMA,
        BLOCK=BLOCK_N,
        DIM=HEAD_DIM,
    )
    return tl.dot(q, tl.trans(k), input_precision="ieee")


@triton.jit
def online_softmax(
    scores, denominator, row_max, rows, start, first_key, s_k, offset, scale,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the probabilities of one block relative to the largest score so far, and the factor by which to
    rescale earlier sums: (probs, shrink, denominator, row_max)."""
    scores = scores * scale
    if SOFTCAP is not None:
        scores = softcapped(scores, SOFTCAP)
    if MASKED:
        columns = start + tl.arange(0, BLOCK_N)
        mask = sees_keys(rows, columns, first_key, s_k, offset, CAUSAL=CAUSAL, BOUNDED=BOUNDED)
        scores = tl.where(mask, scores, -float("inf"))

    new_max = tl.maximum(row_max, tl.max(scores, 1))
    base = new_max
    if MASKED:  # a query without a key so far: exp2(-inf - 0), not exp2(-inf + inf)
        base = tl.where(new_max == -float("inf"), 0.0, new_max)
    probs = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(row_max - base)
    denominator = denominator * shrink + tl.sum(probs, 1)
    return probs, shrink, denominator, new_max


@triton.jit
def add_values(
    out, probs, shrink, V, v_strides, batch, group, start, s_k,
    EDGE: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_N: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Rescale out and add the values from `start` on, weighted by their probabilities."""
    v = load_block(
        V, v_strides, batch, group, start, s_k,
        EDGE=EDGE,
        TMA=TMA,
        BLOCK=BLOCK_N,
        DIM=VALUE_DIM,
    )
    return tl.dot(probs.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")


@triton.jit
def accumulate_output(
    out, denominator, row_max, next_scores, q, K, V, k_strides, v_strides, batch, group, rows, first_key,
    begin, full_begin, full_end, end, s_k, offset, scale,
    MASKED: tl.constexpr,
    AHEAD: tl.constexpr,
    CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Add the edges (MASKED) or the middle of a range of keys to the online softmax of a block of queries.

    AHEAD: next_scores belong to the first of these blocks, and are replaced by those of the block after them.
    So a softmax does not wait for its scores, and overlaps with the multiplication of the previous block's
    values (FlashAttention-3, arXiv 2407.08608, section 3.2). The very last block is skipped.
    """
    first, number, before, gap = blocks_to_visit(begin, full_begin, full_end, end, MASKED, BLOCK_N)
    edge = first_edge(begin, full_begin, full_end)  # the block after the middle
    turns = number
    if AHEAD and MASKED:
        turns = number - 1
    elif AHEAD:
        turns = tl.where(end - begin > gap, number, number - 1)
    for i in range(0, turns):
        start = block_start(i, first, before, gap, MASKED, BLOCK_N)
        if AHEAD:
            scores = next_scores
        else:
            scores = block_scores(
                q, K, k_strides, batch, group, start, s_k,
                EDGE=MASKED,
                TMA=TMA,
                BLOCK_N=BLOCK_N,
                HEAD_DIM=HEAD_DIM,
            )
        probs, shrink, denominator, row_max = online_softmax(  # pyright: ignore[reportGeneralTypeIssues]
            scores, denominator, row_max, rows, start, first_key, s_k, offset, scale,
            MASKED=MASKED,
            CAUSAL=CAUSAL,
            BOUNDED=BOUNDED,
            SOFTCAP=SOFTCAP,
            BLOCK_N=BLOCK_N,
        )
        if AHEAD:
            next_start = block_start(i + 1, first, before, gap, MASKED, BLOCK_N)
            if not MASKED:
                next_start = tl.where(i + 1 < number, next_start, edge)
            next_scores = block_scores(
                q, K, k_strides, batch, group, next_start, s_k,
                EDGE=True,
                TMA=TMA,
                BLOCK_N=BLOCK_N,
                HEAD_DIM=HEAD_DIM,
            )
        out = add_values(
            out, probs, shrink, V, v_strides, batch, group, start, s_k,
            EDGE=MASKED,
            TMA=TMA,
            BLOCK_N=BLOCK_N,
            VALUE_DIM=VALUE_DIM,
        )
    return out, denominator, row_max, next_scores


@triton.jit
def forward_kernel(
    Q, K, V, FIRST_KEY, OUT, LSE,
    q_strides, k_strides, v_strides, out_strides, first_key_stride,
    s_q, s_k, heads, heads_per_group, key_start, offset, scale,
    AHEAD: tl.constexpr,
    CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Compute output and logsumexp of one block of queries of one head. AHEAD: see accumulate_output."""
    # the queries, and the keys that they see
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # longest blocks first
    batch, head = sequence_and_head(heads)
    group = head // heads_per_group
    rows = row + tl.arange(0, BLOCK_M)
    FIRST_KEY += batch.to(tl.int64) * first_key_stride
    q = load_block(Q, q_strides, batch, head, row, s_q, EDGE=True, TMA=TMA, BLOCK=BLOCK_M, DIM=HEAD_DIM)

    first_key = load_first_keys(FIRST_KEY, rows, s_q, key_start, BOUNDED)
    begin, full_begin, full_end, end = key_range(
        FIRST_KEY, row, s_q, s_k, offset, key_start,
        CAUSAL=CAUSAL,
        BOUNDED=BOUNDED,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
    )

    # online softmax: first over the blocks that all these queries see in full, then over the others
    out = tl.zeros((BLOCK_M, padded(VALUE_DIM)), tl.float32)
    denominator = tl.zeros((BLOCK_M,), tl.float32)
    row_max = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if AHEAD:
        edge = first_edge(begin, full_begin, full_end)
        start = tl.where(full_begin < full_end, full_begin, edge)
        scores = block_scores(
            q, K, k_strides, batch, group, start, s_k,
            EDGE=True,
            TMA=TMA,
            BLOCK_N=BLOCK_N,
            HEAD_DIM=HEAD_DIM,
        )
    for MASKED in tl.static_range(2):
        out, denominator, row_max, scores = accumulate_output(
            out, denominator, row_max, scores, q, K, V, k_strides, v_strides, batch, group, rows, first_key,
            begin, full_begin, full_end, end,
            s_k=s_k,
            offset=offset,
            scale=scale,
            MASKED=MASKED,
            AHEAD=AHEAD,
            CAUSAL=CAUSAL,
            BOUNDED=BOUNDED,
            SOFTCAP=SOFTCAP,
            TMA=TMA,
            BLOCK_N=BLOCK_N,
            HEAD_DIM=HEAD_DIM,
            VALUE_DIM=VALUE_DIM,
        )
    if AHEAD:
        start = last_block(begin, full_begin, full_end, end, BLOCK_N)
        probs, shrink, denominator, row_max = online_softmax(  # pyright: ignore[reportGeneralTypeIssues]
            scores, denominator, row_max, rows, start, first_key, s_k, offset, scale,
            MASKED=True,
            CAUSAL=CAUSAL,
            BOUNDED=BOUNDED,
            SOFTCAP=SOFTCAP,
            BLOCK_N=BLOCK_N,
        )
        out = add_values(
            out, probs, shrink, V, v_strides, batch, group, start, s_k,
            EDGE=True,
            TMA=TMA,
            BLOCK_N=BLOCK_N,
            VALUE_DIM=VALUE_DIM,
        )

    # output and logsumexp: 0 and -inf for a query that sees no key
    sees_a_key = denominator > 0.0
    denominator = tl.where(sees_a_key, denominator, 1.0)
    OUT = head_of(OUT, out_strides, batch, head)
    store_rows(OUT, out / denominator[:, None], rows, out_strides[1], s_q, ADD=False, DIM=VALUE_DIM)
    lse = (row_max + tl.log2(denominator)) / LOG2E
    lse = tl.where(sees_a_key, lse, -float("inf"))
    LSE = LSE + tl.program_id(1).to(tl.int64) * s_q
    tl.store(LSE + rows, lse, rows < s_q)


@triton.jit
def merge_kernel(
    OUT, LSE, OTHER, OTHER_LSE, out_strides, lse_strides, other_strides, other_lse_strides, s_q, heads,
    BLOCK_M: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Run merge_partial (kernels/partial_attention.py) on one block of queries of one head."""
    batch, head = sequence_and_head(heads)
    rows = block_range(tl.program_id(0), BLOCK_M)
    inside = rows < s_q
    LSE = head_of(LSE, lse_strides, batch, head) + rows * lse_strides[1]
    lse = tl.load(LSE, inside, 0.0) * LOG2E
    OTHER_LSE = head_of(OTHER_LSE, other_lse_strides, batch, head) + rows * other_lse_strides[1]
    other_lse = tl.load(OTHER_LSE, inside, 0.0) * LOG2E

    # both sums of exponentials, relative to the larger one
    largest = tl.maximum(lse, other_lse)
    share = tl.exp2(lse - largest)
    other_share = tl.exp2(other_lse - largest)
    total = share + other_share
    tl.debug_barrier()  # all threads have read the logsumexp before one of them overwrites it
    tl.store(LSE, (largest + tl.log2(total)) / LOG2E, inside)

    OUT = head_of(OUT, out_strides, batch, head)
    OTHER = head_of(OTHER, other_strides, batch, head)
    out = load_rows(OUT, rows, out_strides[1], s_q, EDGE=True, DIM=VALUE_DIM) * (share / total)[:, None]
    other = load_rows(OTHER, rows, other_strides[1], s_q, EDGE=True, DIM=VALUE_DIM)
    out += other * (other_share / total)[:, None]
    store_rows(OUT, out, rows, out_strides[1], s_q, ADD=False, DIM=VALUE_DIM)
