"""Triton kernels of attention's backward (FlashAttention-2, arXiv 2307.08691). Their arguments are explained
in kernels/attention_blocks.py. With scores S, probabilities P = exp(S - lse) and delta = <dout, out>:

    dV = P^T dout       dP = dout V^T       dS = P (dP - delta)       dQ = dS K       dK = dS^T Q

With a soft cap, dS is also multiplied by the slope of the cap.

Two variants, both without atomics, so that gradients are bitwise reproducible:

    backward_kernel           five products for each pair of blocks: S, dP, dV, dK, dQ. A program keeps dk and
                              dv of a block of keys, and adds its share of dq to a private buffer in memory
    dq_kernel, dkv_kernel     seven products, since each computes S and dP. A program keeps its accumulators,
                              and each gradient is written once
"""
from kernels.attention_blocks import (
    LOG2E,
    block_start,
    blocks_to_visit,
    head_of,
    key_range,
    load_block,
    load_first_keys,
    load_query_ends,
    load_rows,
    padded,
    query_range,
    seen_by_queries,
    sees_keys,
    sequence_and_head,
    softcap_slope,
    softcapped,
    store_block,
    store_rows,
)
from kernels.tiles import block_range
from kernels.triton_ import tl, triton


@triton.jit
def delta_kernel(
    OUT, DOUT, DELTA, out_strides, dout_strides, s_q, heads,
    BLOCK_M: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Compute delta = <dout, out> for one block of queries of one head."""
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
def starts_kernel(
    LSE, DELTA, STARTS, lse_strides, delta_strides, s_q, padded_s_q, heads, numbers, root,
    BLOCK_M: tl.constexpr,
):
    """Prepare initial values of the accumulators of Q K^T and dout V^T for one block of queries of one head,
    so that nothing has to be subtracted later: STARTS [2, b, h, padded_s_q].

    [0] is -lse root, and -inf for queries that see no key or do not exist, whose probabilities become 0;
    [1] is -delta. root is 1 / scale, which is sqrt(d) for plain scores; with a soft cap it is log2(e), since
    scores are not sums there. numbers counts elements of STARTS[0]. padded_s_q is a multiple of BLOCK_M.
    """
    batch, head = sequence_and_head(heads)
    rows = block_range(tl.program_id(0), BLOCK_M)
    lse = tl.load(head_of(LSE, lse_strides, batch, head) + rows * lse_strides[1], rows < s_q, -float("inf"))
    delta = tl.load(head_of(DELTA, delta_strides, batch, head) + rows * delta_strides[1], rows < s_q, 0.0)
    STARTS += tl.program_id(1).to(tl.int64) * padded_s_q
    tl.store(STARTS + rows, tl.where(lse == -float("inf"), lse, -lse * root))
    tl.store(STARTS + numbers + rows, -delta)


@triton.jit
def transposed_scores(
    k, q, v, dout, SCORE_START, DPROB_START, rows, columns, query_end, s_k, offset, scale,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Compute P^T and (dP - delta)^T of a block of keys and a block of queries, both [keys, queries] in fp32;
    the latter times the slope of a soft cap."""
    start = tl.broadcast_to(tl.load(SCORE_START + rows)[None, :], (k.shape[0], q.shape[0]))
    if SOFTCAP is None:
        scores = tl.dot(k, tl.trans(q), start, input_precision="ieee")
        probs = tl.exp2(scores * scale)
    else:
        scores = softcapped(tl.dot(k, tl.trans(q), input_precision="ieee") * scale, SOFTCAP)
        probs = tl.exp2(scores + start)
    if MASKED:
        mask = seen_by_queries(rows, columns, query_end, s_k, offset, CAUSAL=CAUSAL, BOUNDED=BOUNDED)
        probs = tl.where(mask, probs, 0.0)
    start = tl.broadcast_to(tl.load(DPROB_START + rows)[None, :], (k.shape[0], q.shape[0]))
    dprobs = tl.dot(v, tl.trans(dout), start, input_precision="ieee")
    if SOFTCAP is not None:
        dprobs *= softcap_slope(scores, SOFTCAP)
    return probs, dprobs


# ---- one block of keys -------------------------------------------------------------------------------------

@triton.jit
def accumulate_gradients(
    dk, dv, k, v, Q, DOUT, SCORE_START, DPROB_START, DQ, q_strides, dout_strides,
    batch, head, columns, query_end, begin, full_begin, full_end, end,
    s_q, s_k, offset, scale,
    MASKED: tl.constexpr,
    HAS_DQ: tl.constexpr,
    CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Accumulate into dk and dv of a block of keys the share of the edges (MASKED) or the middle of a range
    of queries of one head; with HAS_DQ, also add these keys' share of that head's dq in memory."""
    channels = tl.arange(0, padded(HEAD_DIM))
    tile_offsets = channels[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    first, number, before, gap = blocks_to_visit(begin, full_begin, full_end, end, MASKED, BLOCK_M)
    for i in range(0, number):
        start = block_start(i, first, before, gap, MASKED, BLOCK_M)
        rows = start + tl.arange(0, BLOCK_M)
        q = load_block(
            Q, q_strides, batch, head, start, s_q,
            EDGE=True,
            TMA=TMA,
            BLOCK=BLOCK_M,
            DIM=HEAD_DIM,
        )
        dout = load_block(
            DOUT, dout_strides, batch, head, start, s_q,
            EDGE=True,
            TMA=TMA,
            BLOCK=BLOCK_M,
            DIM=VALUE_DIM,
        )

        # gradients of keys and values, which are the rows here
        probs, dprobs = transposed_scores(
            k, q, v, dout, SCORE_START, DPROB_START, rows, columns, query_end, s_k, offset, scale,
            MASKED=MASKED,
            CAUSAL=CAUSAL,
            BOUNDED=BOUNDED,
            SOFTCAP=SOFTCAP,
        )
        dv = tl.dot(probs.to(dout.dtype), dout, dv, input_precision="ieee")
        dscores = (probs * dprobs).to(q.dtype)
        dk = tl.dot(dscores, q, dk, input_precision="ieee")

        # dq in memory, transposed: its rows are channels
        if HAS_DQ:
            pointers = DQ + start * padded(HEAD_DIM) + tile_offsets
            dq = tl.load(pointers)  # [channels, BLOCK_M]
            tl.store(pointers, tl.dot(tl.trans(k), dscores, dq, input_precision="ieee"))
    return dk, dv


@triton.jit
def key_block_gradients(
    Q, K, V, QUERY_END, DOUT, SCORE_START, DPROB_START, DQ, DK, DV,
    q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides,
    query_end_stride, column, batch, group,
    s_q, s_k, padded_s_q, groups, heads_per_group, query_start, offset, scale,
    HAS_DQ: tl.constexpr,
    ADD: tl.constexpr,
    CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Compute dk and dv of keys column .. column + BLOCK_N - 1 of one key head, from all query heads that
    share it; with HAS_DQ, also add these keys' share of those heads' dq, unscaled.

    DQ belongs to this program and sequence: [h, blocks of queries, padded(HEAD_DIM), BLOCK_M]. DK and DV are
    descriptors if HAS_DQ. ADD: as for store_block.
    """
    # the keys, and the queries that see them
    columns = column + tl.arange(0, BLOCK_N)
    k = load_block(K, k_strides, batch, group, column, s_k, EDGE=True, TMA=TMA, BLOCK=BLOCK_N, DIM=HEAD_DIM)
    v = load_block(V, v_strides, batch, group, column, s_k, EDGE=True, TMA=TMA, BLOCK=BLOCK_N, DIM=VALUE_DIM)
    QUERY_END += batch.to(tl.int64) * query_end_stride
    query_end = load_query_ends(QUERY_END, columns, s_k, query_start, BOUNDED)
    begin, full_begin, full_end, end = query_range(
        QUERY_END, column, s_q, s_k, offset, query_start,
        CAUSAL=CAUSAL,
        BOUNDED=BOUNDED,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
    )

    # for each query head, first the queries that need a mask, then those that see all these keys
    dk = tl.zeros((BLOCK_N, padded(HEAD_DIM)), tl.float32)
    dv = tl.zeros((BLOCK_N, padded(VALUE_DIM)), tl.float32)
    head_elements = tl.cdiv(s_q, BLOCK_M) * BLOCK_M * padded(HEAD_DIM)
    for i in range(0, heads_per_group):
        head = group * heads_per_group + i
        row_index = (batch * groups * heads_per_group + head).to(tl.int64) * padded_s_q
        HEAD_DQ = DQ
        if HAS_DQ:
            HEAD_DQ += head.to(tl.int64) * head_elements
        for MASKED in tl.static_range(1, -1, -1):
            if HAS_DQ:
                tl.debug_barrier()  # other threads may have added to the same rows of dq
            dk, dv = accumulate_gradients(
                dk, dv, k, v, Q, DOUT, SCORE_START + row_index, DPROB_START + row_index, HEAD_DQ,
                q_strides, dout_strides, batch, head, columns, query_end,
                begin, full_begin, full_end, end,
                s_q=s_q,
                s_k=s_k,
                offset=offset,
                scale=scale,
                MASKED=MASKED,
                HAS_DQ=HAS_DQ,
                CAUSAL=CAUSAL,
                BOUNDED=BOUNDED,
                SOFTCAP=SOFTCAP,
                TMA=TMA,
                BLOCK_M=BLOCK_M,
                HEAD_DIM=HEAD_DIM,
                VALUE_DIM=VALUE_DIM,
            )

    dk = dk * (scale / LOG2E)
    store_block(DK, dk, dk_strides, batch, group, column, s_k, ADD=ADD, TMA=HAS_DQ, DIM=HEAD_DIM)
    store_block(DV, dv, dv_strides, batch, group, column, s_k, ADD=ADD, TMA=HAS_DQ, DIM=VALUE_DIM)


# ---- five products -----------------------------------------------------------------------------------------

@triton.jit
def backward_kernel(
    Q, K, V, QUERY_END, DOUT, SCORE_START, DPROB_START, DQ, DK, DV,
    q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides,
    query_end_stride,
    s_q, s_k, padded_s_q, groups, heads_per_group, query_start, offset, scale,
    ADD: tl.constexpr,
    CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Run key_block_gradients on every n-th block of keys of one key head. Program p of n uses part p of DQ.

    DQ has the layout of PARTS in add_parts_kernel, and is zero-initialized.
    """
    part = tl.program_id(0)
    parts = tl.num_programs(0)
    group = tl.program_id(1)
    batch = tl.program_id(2)
    head_elements = tl.cdiv(s_q, BLOCK_M) * BLOCK_M * padded(HEAD_DIM)
    first_head = (part * tl.num_programs(2) + batch) * (groups * heads_per_group)
    DQ += first_head.to(tl.int64) * head_elements
    for column in range(part * BLOCK_N, s_k, parts * BLOCK_N):
        key_block_gradients(
            Q, K, V, QUERY_END, DOUT, SCORE_START, DPROB_START, DQ, DK, DV,
            q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides,
            query_end_stride, column, batch, group,
            s_q, s_k, padded_s_q, groups, heads_per_group, query_start, offset, scale,
            HAS_DQ=True,
            ADD=ADD,
            CAUSAL=CAUSAL,
            BOUNDED=BOUNDED,
            SOFTCAP=SOFTCAP,
            TMA=TMA,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            HEAD_DIM=HEAD_DIM,
            VALUE_DIM=VALUE_DIM,
        )


@triton.jit
def add_parts_kernel(
    PARTS, DQ, dq_strides, parts, part_elements, s_q, heads, factor,
    ADD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Sum the parts of dq of one block of queries of one head, in order, and multiply by factor.
    ADD: as for store_block.

    PARTS [parts, b, h, blocks of queries, padded(HEAD_DIM), BLOCK_M].
    """
    batch, head = sequence_and_head(heads)
    block = tl.program_id(0)
    tile = (tl.program_id(1) * tl.num_programs(0) + block).to(tl.int64) * (padded(HEAD_DIM) * BLOCK_M)
    channels = tl.arange(0, padded(HEAD_DIM))
    PARTS += tile + channels[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    total = tl.zeros((padded(HEAD_DIM), BLOCK_M), tl.float32)
    for _ in range(0, parts):
        total += tl.load(PARTS)
        PARTS += part_elements
    rows = block_range(block, BLOCK_M)
    DQ = head_of(DQ, dq_strides, batch, head)
    store_rows(DQ, tl.trans(total) * factor, rows, dq_strides[1], s_q, ADD=ADD, DIM=HEAD_DIM)


# ---- seven products ----------------------------------------------------------------------------------------

@triton.jit
def accumulate_dq(
    dq, q, dout, score_start, dprob_start, K, V, k_strides, v_strides, batch, group, rows, first_key,
    begin, full_begin, full_end, end, s_k, offset, scale,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Accumulate into dq of a query block the share of the edges (MASKED) or the middle of a range of keys.
    """
    first, number, before, gap = blocks_to_visit(begin, full_begin, full_end, end, MASKED, BLOCK_N)
    for i in range(0, number):
        start = block_start(i, first, before, gap, MASKED, BLOCK_N)
        k = load_block(
            K, k_strides, batch, group, start, s_k,
            EDGE=MASKED,
            TMA=TMA,
            BLOCK=BLOCK_N,
            DIM=HEAD_DIM,
        )
        v = load_block(
            V, v_strides, batch, group, start, s_k,
            EDGE=MASKED,
            TMA=TMA,
            BLOCK=BLOCK_N,
            DIM=VALUE_DIM,
        )

        # probabilities of the forward, times the slope of a soft cap
        start_scores = tl.broadcast_to(score_start[:, None], (q.shape[0], BLOCK_N))
        if SOFTCAP is None:
            scores = tl.dot(q, tl.trans(k), start_scores, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
            probs = tl.exp2(scores * scale)
        else:
            scores = softcapped(tl.dot(q, tl.trans(k), input_precision="ieee") * scale, SOFTCAP)
            probs = tl.exp2(scores + start_scores) * softcap_slope(scores, SOFTCAP)
        if MASKED:
            columns = start + tl.arange(0, BLOCK_N)
            mask = sees_keys(rows, columns, first_key, s_k, offset, CAUSAL=CAUSAL, BOUNDED=BOUNDED)
            probs = tl.where(mask, probs, 0.0)

        # gradients
        start_dprobs = tl.broadcast_to(dprob_start[:, None], (q.shape[0], BLOCK_N))
        dscores = probs * tl.dot(dout, tl.trans(v), start_dprobs, input_precision="ieee")
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def dq_kernel(
    Q, K, V, FIRST_KEY, DOUT, SCORE_START, DPROB_START, DQ,
    q_strides, k_strides, v_strides, dout_strides, dq_strides, first_key_stride,
    s_q, s_k, padded_s_q, heads, heads_per_group, key_start, offset, scale,
    ADD: tl.constexpr,
    CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Compute dq of one block of queries of one head. ADD: as for store_block."""
    # the queries, and their starts_kernel results
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # longest blocks first
    batch, head = sequence_and_head(heads)
    group = head // heads_per_group
    rows = row + tl.arange(0, BLOCK_M)
    FIRST_KEY += batch.to(tl.int64) * first_key_stride
    q = load_block(Q, q_strides, batch, head, row, s_q, EDGE=True, TMA=TMA, BLOCK=BLOCK_M, DIM=HEAD_DIM)
    dout = load_block(
        DOUT, dout_strides, batch, head, row, s_q,
        EDGE=True,
        TMA=TMA,
        BLOCK=BLOCK_M,
        DIM=VALUE_DIM,
    )
    row_index = tl.program_id(1).to(tl.int64) * padded_s_q
    score_start = tl.load(SCORE_START + row_index + rows)
    dprob_start = tl.load(DPROB_START + row_index + rows)

    # the keys that they see
    first_key = load_first_keys(FIRST_KEY, rows, s_q, key_start, BOUNDED)
    begin, full_begin, full_end, end = key_range(
        FIRST_KEY, row, s_q, s_k, offset, key_start,
        CAUSAL=CAUSAL,
        BOUNDED=BOUNDED,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
    )

    # first the blocks that all these queries see in full, then the others
    dq = tl.zeros((BLOCK_M, padded(HEAD_DIM)), tl.float32)
    for MASKED in tl.static_range(2):
        dq = accumulate_dq(
            dq, q, dout, score_start, dprob_start, K, V, k_strides, v_strides, batch, group, rows, first_key,
            begin, full_begin, full_end, end,
            s_k=s_k,
            offset=offset,
            scale=scale,
            MASKED=MASKED,
            CAUSAL=CAUSAL,
            BOUNDED=BOUNDED,
            SOFTCAP=SOFTCAP,
            TMA=TMA,
            BLOCK_N=BLOCK_N,
            HEAD_DIM=HEAD_DIM,
            VALUE_DIM=VALUE_DIM,
        )
    DQ = head_of(DQ, dq_strides, batch, head)
    store_rows(DQ, dq * (scale / LOG2E), rows, dq_strides[1], s_q, ADD=ADD, DIM=HEAD_DIM)


@triton.jit
def dkv_kernel(
    Q, K, V, QUERY_END, DOUT, SCORE_START, DPROB_START, DK, DV,
    q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides,
    query_end_stride,
    s_q, s_k, padded_s_q, groups, heads_per_group, query_start, offset, scale,
    ADD: tl.constexpr,
    CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Compute dk and dv of one block of keys of one key head, from all query heads that share it."""
    key_block_gradients(
        Q, K, V, QUERY_END, DOUT, SCORE_START, DPROB_START, None, DK, DV,
        q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides,
        query_end_stride, tl.program_id(0) * BLOCK_N, tl.program_id(2), tl.program_id(1),
        s_q, s_k, padded_s_q, groups, heads_per_group, query_start, offset, scale,
        HAS_DQ=False,
        ADD=ADD,
        CAUSAL=CAUSAL,
        BOUNDED=BOUNDED,
        SOFTCAP=SOFTCAP,
        TMA=TMA,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        HEAD_DIM=HEAD_DIM,
        VALUE_DIM=VALUE_DIM,
    )
