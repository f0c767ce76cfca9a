"""Attention's forward where there is no mask, and the merge of two of its parts."""

import pytest
import torch
from test_attention_blocks import draw_mask

from kernels import attention_launch as launch
from kernels import partial_attention as kernel
from kernels.partial_attention import attention_part, merge_partial, partial_backward


@pytest.mark.slow
def test_triton_where_everyone_sees_all(small):
    q, dy = (torch.randn(2, 37, 6, 8, device=small) for _ in "qd")
    k, v = (torch.randn(2, 37, 3, 8, device=small) for _ in "kv")
    out, lse = attention_part(q, k, v, None)
    want = kernel.partial_reference(q, k, v, None)
    torch.testing.assert_close((out, lse), want)
    delta = (out * dy).sum(-1)
    torch.testing.assert_close(
        partial_backward(dy, q, k, v, None, lse, delta),
        kernel.partial_backward_reference(dy, q, k, v, None, lse, delta),
    )


def test_triton_merges_parts(small_blocks):
    """Into slices of a longer tensor, as a ring does; where a part shows a query nothing."""
    out, other = (torch.randn(2, 50, 3, 24, device=small_blocks) for _ in range(2))
    lse, other_lse = (3 * torch.randn(2, 50, 3, device=small_blocks) for _ in range(2))
    other_lse[0, 30:] = -torch.inf
    whole, whole_lse = out.double(), lse.double()
    rows = slice(10, 45)
    merge_partial(whole[:, rows], whole_lse[:, rows], other[:, rows].double(), other_lse[:, rows].double())
    merge_partial(out[:, rows], lse[:, rows], other[:, rows], other_lse[:, rows])
    torch.testing.assert_close((out.double(), lse.double()), (whole, whole_lse), rtol=1e-5, atol=1e-5)


@pytest.mark.slow(every=6)
@pytest.mark.parametrize("part", range(6))
def test_scores_one_block_ahead_are_the_same_bits(small_blocks, monkeypatch, part):
    """Ranges of all kinds: without a middle, without edges, empty, with a window or documents."""
    for number in range(4 * part, 4 * part + 4):
        mask = draw_mask(number, small_blocks)
        q = torch.randn(1, mask.s_q, 2, 16, device=small_blocks).bfloat16()
        k, v = (torch.randn(1, mask.s_k, 1, 16, device=small_blocks).bfloat16() for _ in "kv")
        results = []
        for ahead in ((9, 10), ()):
            monkeypatch.setattr(launch, "SCORES_AHEAD", ahead)
            results.append(attention_part(q, k, v, mask))
        for a, c in zip(*results):
            assert torch.equal(a, c), number
        want = kernel.partial_reference(q.double(), k.double(), v.double(), mask.dense_mask)
        for a, c in zip(results[0], want):
            torch.testing.assert_close(a.double(), c, rtol=0.02, atol=0.02)
