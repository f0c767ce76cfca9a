"""Which blocks the attention kernels visit, against the dense mask: nothing visible is left out, what needs
no mask is seen in full, and no smaller range and no larger middle would do.
"""

import pytest
import torch

from kernels.attention_blocks import block_start, blocks_to_visit, key_range, query_range
from kernels.attention_launch import mask_bounds
from kernels.attention_mask import make_attention_mask
from kernels.triton_ import TRITON_AVAILABLE, tl, triton

pytestmark = pytest.mark.skipif(not TRITON_AVAILABLE, reason="no Triton for this platform")


@triton.jit
def ranges_kernel(
    FIRST_KEY, QUERY_END, KEYS, QUERIES, s_q, s_k, query_start, key_start, offset,
    BOUNDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Row i of KEYS: key_range of block i of queries; row i of QUERIES: query_range of block i of keys."""
    block = tl.program_id(0)
    if block * BLOCK_M < s_q:
        begin, full_begin, full_end, end = key_range(
            FIRST_KEY, block * BLOCK_M, s_q, s_k, offset, key_start, True, BOUNDED, BLOCK_M, BLOCK_N
        )
        tl.store(KEYS + 4 * block, begin)
        tl.store(KEYS + 4 * block + 1, full_begin)
        tl.store(KEYS + 4 * block + 2, full_end)
        tl.store(KEYS + 4 * block + 3, end)
    if block * BLOCK_N < s_k:
        begin, full_begin, full_end, end = query_range(
            QUERY_END, block * BLOCK_N, s_q, s_k, offset, query_start, True, BOUNDED, BLOCK_M, BLOCK_N
        )
        tl.store(QUERIES + 4 * block, begin)
        tl.store(QUERIES + 4 * block + 1, full_begin)
        tl.store(QUERIES + 4 * block + 2, full_end)
        tl.store(QUERIES + 4 * block + 3, end)


@triton.jit
def visits_kernel(VISITS, begin, full_begin, full_end, end, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    first, number, before, gap = blocks_to_visit(begin, full_begin, full_end, end, MASKED, BLOCK)
    for i in range(0, number):
        start = block_start(i, first, before, gap, MASKED, BLOCK)
        tl.store(VISITS + start // BLOCK, 2 if MASKED else 1)


def ranges_of(mask, block_m, block_n, device):
    blocks = max(-(-mask.s_q // block_m), -(-mask.s_k // block_n))
    keys = torch.full((blocks, 4), -1, dtype=torch.int32, device=device)
    queries = torch.full((blocks, 4), -1, dtype=torch.int32, device=device)
    bounds = mask_bounds(mask, keys)
    ranges_kernel[(blocks,)](
        bounds.first_key, bounds.query_end, keys, queries, mask.s_q, mask.s_k, bounds.query_start,
        bounds.key_start, bounds.offset, BOUNDED=mask.first_key is not None, BLOCK_M=block_m, BLOCK_N=block_n
    )  # fmt: skip
    return keys[: -(-mask.s_q // block_m)].tolist(), queries[: -(-mask.s_k // block_n)].tolist()


def check(found, visible, block, can_hang_over):
    """found: (begin, full_begin, full_end, end). visible bool [own, others]: which of the others, who come in
    blocks, this block's own see. can_hang_over: a last block that is not whole may be in the middle.
    """
    begin, full_begin, full_end, end = found
    count = visible.shape[1]
    blocks = -(-count // block)
    some = [bool(visible[:, i * block : (i + 1) * block].any()) for i in range(blocks)]
    full = [
        bool(visible[:, i * block : (i + 1) * block].all()) and (can_hang_over or (i + 1) * block <= count)
        for i in range(blocks)
    ]
    inside = [begin <= i * block < end for i in range(blocks)]
    middle = [full_begin <= i * block < full_end for i in range(blocks)]
    assert inside == some, (found, some)
    assert middle == full, (found, full)
    assert all(x % block == 0 for x in (begin, full_begin, full_end))


def draw_mask(number, device):
    """A whole sequence, new tokens after a cache, or two chunks of a ring in the zigzag order."""
    stream = torch.Generator().manual_seed(number)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (), generator=stream))

    kind = ("whole", "cache", "ring")[number % 3]
    s = draw(1, 200)
    place = (0, s, 0, s)
    if kind == "cache":
        new = draw(1, s)
        place = (s - new, new, 0, s)
    if kind == "ring":
        chunk = draw(1, 70)
        s = 6 * chunk
        later, earlier = sorted((draw(0, 5), draw(0, 5)), reverse=True)
        place = (later * chunk, chunk, earlier * chunk, chunk)
    window = draw(1, s) if draw(0, 1) else None
    docs = None
    if draw(0, 2):
        how_often = (0.5, 0.05, 0.01)[draw(0, 2)]
        docs = (torch.rand(1, s, generator=stream) < how_often).cumsum(1).to(device)
    query_start, s_q, key_start, s_k = place
    return make_attention_mask(query_start, s_q, key_start, s_k, window, docs, device)


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("part", range(6))
def test_the_ranges_are_those_of_the_dense_mask(interpreted, part):
    middles = 0
    for number in range(part, 150, 6):
        mask = draw_mask(number, interpreted)
        visible = mask.dense_mask[0, 0]
        block_m, block_n = ((16, 32), (32, 16), (16, 16))[number // 6 % 3]
        keys, queries = ranges_of(mask, block_m, block_n, interpreted)
        for i, found in enumerate(keys):
            check(found, visible[i * block_m : (i + 1) * block_m], block_n, can_hang_over=False)
            middles += found[1] < found[2]
        for i, found in enumerate(queries):
            own = visible.T[i * block_n : (i + 1) * block_n]
            if len(own) < block_n:  # keys that do not exist need a mask everywhere
                assert found[1] == found[2] == found[0]
                own = torch.cat((own, own.new_zeros(1, own.shape[1])))
            check(found, own, block_m, can_hang_over=True) if own.any() else None
    assert middles > 10  # the draws have such blocks


def test_edges_and_middle_are_visited_once(interpreted):
    for begin, full_begin, full_end, end in [
        (0, 16, 48, 60), (16, 16, 16, 40), (0, 0, 64, 64), (32, 32, 32, 10), (0, 0, 32, 33), (16, 32, 48, 48),
    ]:  # fmt: skip
        visits = torch.zeros(8, dtype=torch.int32, device=interpreted)
        for masked in (True, False):
            visits_kernel[(1,)](visits, begin, full_begin, full_end, end, MASKED=masked, BLOCK=16)
        want = [
            1 if full_begin <= 16 * i < full_end else 2 if begin <= 16 * i < end else 0 for i in range(8)
        ]
        assert visits.tolist() == want
