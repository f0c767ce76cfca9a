"""Building blocks of the Triton attention kernels: loads, ranges of blocks to visit, masks within a block.

A query sees the keys of one interval, and both its ends are nondecreasing along the sequence
(kernels/attention_mask.py). So a block of queries meets the blocks of keys `begin` .. `end`, and all its
queries see all keys of the blocks `full_begin` .. `full_end` in the middle. Only the edges need a mask:

    begin .. full_begin        some queries do not see so far back: a window or a document begins
    full_begin .. full_end     every query sees every key
    full_end .. end            the diagonal, or the end of the sequence

The same holds for a block of keys and the blocks of queries that see it.

Conventions of all kernels:
    rows, columns         a block of queries and a block of keys; BLOCK_M and BLOCK_N are their sizes
    x_strides             batch, token and head strides of X, in elements; channels are adjacent
    HEAD_DIM, VALUE_DIM   channels of a head of Q and K, and of V. A tile has more, see `padded`
    FIRST_KEY, QUERY_END  as in kernels/attention_mask.py
    offset                the position of query row 0 among the keys
    CAUSAL                there is a mask. BOUNDED: it has FIRST_KEY and QUERY_END
    TMA                   X is a descriptor of [b, heads, s, channels], for the copy engine (Hopper's TMA)
    scale                 log2(e) / sqrt(d), or another: scores are in base 2, since exp2 is one instruction
    SOFTCAP               as in kernels/attention_scores.py, or None
"""
import math

from kernels.tiles import inside_matrix
from kernels.triton_ import tl, triton

LOG2E = tl.constexpr(math.log2(math.e))


@triton.constexpr_function
def padded(dim):
    """Pad channels to a tile's size: a power of two, and at least 16, for the tensor cores."""
    return max(16, 1 << (dim - 1).bit_length())


# ---- memory ------------------------------------------------------------------------------------------------

@triton.jit
def sequence_and_head(heads):
    """Return this program's sequence and head, if dim 1 of the grid enumerates both."""
    return tl.program_id(1) // heads, tl.program_id(1) % heads


@triton.jit
def head_of(X, strides, batch, head):
    """Return the start of one head of one sequence of X."""
    return X + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[2]


@triton.jit
def load_rows(X, rows, stride, n, EDGE: tl.constexpr, DIM: tl.constexpr):
    """Load rows `rows` of X [n, DIM] -> [rows, padded(DIM)], 0 outside X. EDGE: some rows may be >= n."""
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
def load_block(
    X, strides, batch, head, row, n,
    EDGE: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
):
    """Load rows row .. row + BLOCK - 1 of one head of X -> [BLOCK, padded(DIM)], 0 outside X.

    EDGE: as for load_rows; the copy engine does not need it.
    """
    if TMA:
        x = X.load([batch, head, row, 0]).reshape(BLOCK, padded(DIM))
    else:
        rows = row + tl.arange(0, BLOCK)
        x = load_rows(head_of(X, strides, batch, head), rows, strides[1], n, EDGE=EDGE, DIM=DIM)
    return x


@triton.jit
def store_rows(X, x, rows, stride, n, ADD: tl.constexpr, DIM: tl.constexpr):
    """Store rows, inverting load_rows, cast to the dtype of X. ADD: as for store_block, one half of the
    channels at a time: with dk and dv both in registers, a whole tile of X would not fit."""
    inside = n - rows > 0  # not rows < n, which would keep the loads' predicates in registers until here
    if ADD:
        half: tl.constexpr = padded(DIM) // 2
        left, right = tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, half)), (0, 2, 1)))
        store_channels(X, left, rows, inside, stride, 0, ADD=True, DIM=DIM)
        store_channels(X, right, rows, inside, stride, half, ADD=True, DIM=DIM)
    else:
        store_channels(X, x, rows, inside, stride, 0, ADD=False, DIM=DIM)


@triton.jit
def store_channels(X, x, rows, inside, stride, first, ADD: tl.constexpr, DIM: tl.constexpr):
    """store_rows for channels first .. first + x.shape[1] - 1. `inside` marks the rows that exist."""
    channels = first + tl.arange(0, x.shape[1])
    pointers = X + rows[:, None] * stride + channels[None, :]
    mask = inside[:, None] & (channels < DIM)[None, :]
    if ADD:
        x += tl.load(pointers, mask, 0.0)
    tl.store(pointers, x, mask)


@triton.jit
def store_block(
    X, x, strides, batch, head, row, n,
    ADD: tl.constexpr,
    TMA: tl.constexpr,
    DIM: tl.constexpr,
):
    """Store a block, inverting load_block, cast to the dtype of X. ADD: accumulate onto X, in fp32."""
    if TMA:
        if ADD:
            x += X.load([batch, head, row, 0]).reshape(x.shape[0], x.shape[1])
        X.store([batch, head, row, 0], x.to(X.dtype).reshape(1, 1, x.shape[0], x.shape[1]))
    else:
        rows = row + tl.arange(0, x.shape[0])
        store_rows(head_of(X, strides, batch, head), x, rows, strides[1], n, ADD=ADD, DIM=DIM)


# ---- ranges of blocks --------------------------------------------------------------------------------------

@triton.jit
def key_range(
    FIRST_KEY, row, s_q, s_k, offset, key_start,
    CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the keys that queries row .. row + BLOCK_M - 1 see: (begin, full_begin, full_end, end).

    All but the end are multiples of BLOCK_N. If no block is seen in full, full_begin and full_end equal
    begin. If nothing is seen, end <= begin.
    """
    end_of_rows = tl.minimum(row + BLOCK_M, s_q)
    begin = 0
    full_begin = 0
    full_end = s_k // BLOCK_N * BLOCK_N
    end = s_k
    if CAUSAL:
        end = tl.minimum(s_k, tl.maximum(end_of_rows + offset, 0))
        first_row_end = tl.maximum(row + offset + 1, 0)  # of all rows, this one sees the fewest late keys
        full_end = tl.minimum(full_end, first_row_end // BLOCK_N * BLOCK_N)
    if BOUNDED:
        first_key = tl.load(FIRST_KEY + row) - key_start
        begin = tl.maximum(first_key, 0) // BLOCK_N * BLOCK_N
        end = tl.where(first_key < end, end, begin)
        last_first_key = tl.load(FIRST_KEY + end_of_rows - 1) - key_start
        full_begin = tl.cdiv(tl.maximum(last_first_key, 0), BLOCK_N) * BLOCK_N
    full_end = tl.where(full_end > full_begin, full_end, begin)
    full_begin = tl.minimum(full_begin, full_end)
    return begin, full_begin, full_end, end


@triton.jit
def query_range(
    QUERY_END, column, s_q, s_k, offset, query_start,
    CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> "tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]":
    """Return the queries that see keys column .. column + BLOCK_N - 1: (begin, full_begin, full_end, end).

    All but the end are multiples of BLOCK_M. Queries from s_q on do not count: they are loaded such that
    their probabilities are 0. If no block sees all keys, or the keys end before the block does, full_begin
    and full_end equal begin. If no query sees a key, end <= begin.
    """
    end_of_columns = tl.minimum(column + BLOCK_N, s_k)
    begin = 0
    full_begin = 0
    full_end = tl.cdiv(s_q, BLOCK_M) * BLOCK_M
    end = s_q
    first_query = 0
    if CAUSAL:
        first_query = tl.maximum(column - offset, 0)
        begin = first_query // BLOCK_M * BLOCK_M
        sees_all = tl.maximum(end_of_columns - 1 - offset, 0)
        full_begin = tl.cdiv(sees_all, BLOCK_M) * BLOCK_M
    if BOUNDED:
        query_end = tl.load(QUERY_END + end_of_columns - 1) - query_start
        end = tl.minimum(s_q, tl.maximum(query_end, 0))
        first_query_end = tl.load(QUERY_END + column) - query_start  # this key is the first to leave the view
        ends_inside = first_query_end < s_q
        full_end = tl.where(ends_inside, tl.maximum(first_query_end, 0) // BLOCK_M * BLOCK_M, full_end)
    end = tl.where(first_query < end, end, begin)
    is_whole = column + BLOCK_N <= s_k
    full_end = tl.where(is_whole & (full_end > full_begin), full_end, begin)
    full_begin = tl.minimum(full_begin, full_end)
    return begin, full_begin, full_end, end


@triton.jit
def blocks_to_visit(begin, full_begin, full_end, end, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Return how to visit the edges (MASKED) or the middle of a range: (first, number, number before, gap).

    Block i starts at first + i BLOCK, plus `gap` from i = number before on.
    """
    gap = full_end - full_begin
    if MASKED:
        first = begin
        number = tl.cdiv(tl.maximum(end - begin - gap, 0), BLOCK)
        before = (full_begin - begin) // BLOCK
    else:
        first = full_begin
        number = gap // BLOCK
        before = number
    return first, number, before, gap


@triton.jit
def block_start(i, first, before, gap, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Return the start of block i of blocks_to_visit."""
    start = first + i * BLOCK
    if MASKED:
        start = tl.where(i < before, start, start + gap)
    return start


@triton.jit
def first_edge(begin, full_begin, full_end):
    """Return the start of a range's edges."""
    return tl.where(begin < full_begin, begin, full_end)


@triton.jit
def last_block(begin, full_begin, full_end, end, BLOCK: tl.constexpr):
    """Return the start of a range's last block, if its middle is visited before its edges; for an empty
    range, its begin."""
    last = begin + (tl.maximum(end - begin, 1) - 1) // BLOCK * BLOCK
    # without an edge after the middle, the last one before it, if any
    return tl.where((full_end >= end) & (begin < full_begin), full_begin - BLOCK, last)


# ---- scores ------------------------------------------------------------------------------------------------

@triton.jit
def softcapped(scores, SOFTCAP: tl.constexpr):
    """SOFTCAP tanh(scores / SOFTCAP), with scores in base 2 before and after."""
    tanh = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 / SOFTCAP)))
    return tanh * (SOFTCAP * LOG2E)


@triton.jit
def softcap_slope(scores, SOFTCAP: tl.constexpr):
    """Return the derivative of softcapped, given its result."""
    tanh = scores * (1.0 / (SOFTCAP * LOG2E))
    return 1.0 - tanh * tanh


# ---- masks within a block ----------------------------------------------------------------------------------

@triton.jit
def load_first_keys(FIRST_KEY, rows, s_q, key_start, BOUNDED: tl.constexpr):
    """Load the first visible key of each query in `rows`; if not BOUNDED, values that sees_keys ignores."""
    first_key = rows
    if BOUNDED:
        first_key = tl.load(FIRST_KEY + tl.minimum(rows, s_q - 1)) - key_start
    return first_key


@triton.jit
def load_query_ends(QUERY_END, columns, s_k, query_start, BOUNDED: tl.constexpr):
    """Load, for each key in `columns`, the query after the last one that sees it; if not BOUNDED, values that
    seen_by_queries ignores."""
    query_end = columns
    if BOUNDED:
        query_end = tl.load(QUERY_END + tl.minimum(columns, s_k - 1)) - query_start
    return query_end


@triton.jit
def sees_keys(rows, columns, first_key, s_k, offset, CAUSAL: tl.constexpr, BOUNDED: tl.constexpr):
    """Whether queries `rows` see keys `columns`: bool [rows, columns]. first_key: from load_first_keys."""
    mask = (columns < s_k)[None, :]
    if CAUSAL:
        mask = mask & (columns[None, :] <= rows[:, None] + offset)
    if BOUNDED:
        mask = mask & (columns[None, :] >= first_key[:, None])
    return mask


@triton.jit
def seen_by_queries(rows, columns, query_end, s_k, offset, CAUSAL: tl.constexpr, BOUNDED: tl.constexpr):
    """Whether `rows` see the keys `columns`: bool [columns, rows]. query_end: from load_query_ends."""
    mask = (columns < s_k)[:, None]
    if CAUSAL:
        mask = mask & (columns[:, None] <= rows[None, :] + offset)
    if BOUNDED:
        mask = mask & (rows[None, :] < query_end[:, None])
    return mask
