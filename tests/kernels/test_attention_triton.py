"""The Triton attention: which blocks it visits, against the dense mask, and what it computes, against the
definition: heads in groups, head dims of all kinds, no mask. tests/kernels/test_partial_attention.py has the
masks.
"""

import pytest
import torch

from kernels import attention_triton as twin
from kernels import partial_attention as kernel
from kernels.attention_mask import make_attention_mask
from kernels.partial_attention import attention_part, partial_backward
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
        begin, end = twin.key_range(
            FIRST_KEY, block * BLOCK_M, s_q, s_k, offset, key_start, True, BOUNDED, BLOCK_M, BLOCK_N
        )
        tl.store(KEYS + 2 * block, begin)
        tl.store(KEYS + 2 * block + 1, end)
    if block * BLOCK_N < s_k:
        begin, end = twin.query_range(
            QUERY_END, block * BLOCK_N, s_q, s_k, offset, query_start, True, BOUNDED, BLOCK_M, BLOCK_N
        )
        tl.store(QUERIES + 2 * block, begin)
        tl.store(QUERIES + 2 * block + 1, end)


def get_ranges(mask, block_m, block_n, device):
    blocks = max(-(-mask.s_q // block_m), -(-mask.s_k // block_n))
    keys = torch.full((blocks, 2), -1, dtype=torch.int32, device=device)
    queries = torch.full((blocks, 2), -1, dtype=torch.int32, device=device)
    first_key, query_end, *_ = twin.iter_bounds(mask, keys)
    ranges_kernel[(blocks,)](
        first_key, query_end, keys, queries, mask.s_q, mask.s_k, mask.query_start,
        mask.key_start, mask.query_start - mask.key_start,
        BOUNDED=mask.first_key is not None, BLOCK_M=block_m, BLOCK_N=block_n,
    )
    return keys[: -(-mask.s_q // block_m)].tolist(), queries[: -(-mask.s_k // block_n)].tolist()


def check_range(found, visible, block):
    """found: (begin, end). visible bool [own, others]: which of the others, who come in blocks, are seen."""
    begin, end = found
    some = [bool(part.any()) for part in visible.split(block, 1)]
    inside = [begin <= i * block < end for i in range(len(some))]
    assert begin % block == 0
    assert inside == some or (not any(some) and sum(inside) <= 1), (found, some)


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
    """Every block that holds a visible pair is visited, and no other."""
    left_out = 0
    for number in range(part, 150, 6):
        mask = draw_mask(number, interpreted)
        visible = mask.dense_mask[0, 0]
        block_m, block_n = ((16, 32), (32, 16), (16, 16))[number // 6 % 3]
        keys, queries = get_ranges(mask, block_m, block_n, interpreted)
        for found, own in zip(keys, visible.split(block_m)):
            check_range(found, own, block_n)
            left_out += found[0] > 0
        for found, own in zip(queries, visible.T.split(block_n)):
            check_range(found, own, block_m)
    assert left_out > 10  # the draws have such blocks


LAYOUTS = {  # b, heads, key heads, head dims of keys and of values
    "groups": (2, 6, 2, 16, 16),
    "latent": (1, 2, 2, 24, 16),
    "wide": (1, 2, 1, 72, 40),
}


@pytest.mark.slow(core=["96-latent"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("s", [47, 96])
def test_layouts(small_blocks, name, s):
    """Heads in groups, head dims that are no powers of two and differ; the same bits twice."""
    b, h, g, d, e = LAYOUTS[name]
    q, dy = (torch.randn(b, s, h, n, device=small_blocks).bfloat16() for n in (d, e))
    k, v = (torch.randn(b, s, g, n, device=small_blocks).bfloat16() for n in (d, e))
    docs = (torch.rand(b, s) < 0.05).cumsum(1).to(small_blocks)
    mask = make_attention_mask(0, s, 0, s, 60, docs, small_blocks)
    exact = [x.double() for x in (q, k, v)]
    out, lse = kernel.partial_reference(*exact, mask.dense_mask)
    delta = (dy * out).sum(-1)
    want = kernel.partial_backward_reference(dy.double(), *exact, mask.dense_mask, lse, delta)
    got, got_lse = attention_part(q, k, v, mask)
    grads = partial_backward(dy, q, k, v, mask, got_lse, delta.float())
    for a, c in zip((got, got_lse, *grads), (out, lse, *want)):
        assert (a.double() - c).norm() <= 0.01 * c.norm()
    again = partial_backward(dy, q, k, v, mask, got_lse, delta.float())
    assert all(torch.equal(a, c) for a, c in zip(grads, again))


def test_where_everyone_sees_all(small_blocks):
    q, dy = (torch.randn(2, 37, 6, 8, device=small_blocks) for _ in "qd")
    k, v = (torch.randn(2, 37, 3, 8, device=small_blocks) for _ in "kv")
    out, lse = attention_part(q, k, v, None)
    want = kernel.partial_reference(q, k, v, None)
    torch.testing.assert_close((out, lse), want)
    delta = (out * dy).sum(-1)
    torch.testing.assert_close(
        partial_backward(dy, q, k, v, None, lse, delta),
        kernel.partial_backward_reference(dy, q, k, v, None, lse, delta),
    )


def test_gradients_have_the_dtype_that_is_asked_for(small_blocks):
    """Of one part that has all keys, they go on as they are; of a ring's parts, into sums in fp32."""
    q, k, v = (torch.randn(1, 20, 2, 16, device=small_blocks).bfloat16() for _ in "qkv")
    mask = make_attention_mask(0, 20, 0, 20, None, None, small_blocks)
    out, lse = attention_part(q, k, v, mask, torch.bfloat16)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    wide = partial_backward(out, q, k, v, mask, lse, lse)
    narrow = partial_backward(out, q, k, v, mask, lse, lse, dtype=torch.bfloat16)
    for a, c in zip(narrow, wide):
        assert a.dtype == torch.bfloat16 and c.dtype == torch.float32 and torch.equal(a, c.bfloat16())
