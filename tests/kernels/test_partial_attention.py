"""Parts of an attention, put together, are the whole: outputs and gradients, with queries that see nothing of a part."""
import pytest
import torch

from kernels.attention import reference
from kernels.partial_attention import TILE, merge, partial, partial_backward


def draw(s: int, d: int = 8, dtype=torch.float64):
    stream = torch.Generator().manual_seed(s)
    q, dy = (torch.randn(2, s, 6, d, generator=stream, dtype=dtype) for _ in "qd")
    k, v = (torch.randn(2, s, 3, d, generator=stream, dtype=dtype) for _ in "kv")
    see = (torch.rand(2, 1, s, s, generator=stream) < 0.3) | torch.eye(s, dtype=torch.bool)
    return q, k, v, dy, see


@pytest.mark.parametrize("s,cuts", [(7, (0, 7)), (12, (0, 5, 12)), (9, (0, 1, 2, 9)), (TILE + 3, (0, 100, TILE + 3))])
def test_parts_make_the_whole(s, cuts):
    q, k, v, dy, see = draw(s)
    see[..., 0] = True  # the first part shows every query a key (in a ring: a token itself)
    see[:, :, 0, 1:] = False  # a query that sees nothing of later parts
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    true = reference(*whole, see)
    true.backward(dy)
    parts = [slice(a, b) for a, b in zip(cuts, cuts[1:])]
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], float("-inf"))
    for p in parts:
        merge(out, lse, *partial(q, k[:, p], v[:, p], see[..., p]))
    assert torch.allclose(out, true, atol=1e-13, rtol=0)
    delta, dq = (dy * out).sum(-1), torch.zeros_like(q)
    for p in parts:
        share, dk, dv = partial_backward(dy, q, k[:, p], v[:, p], see[..., p], lse, delta)
        dq += share
        assert torch.allclose(dk, whole[1].grad[:, p], atol=1e-12, rtol=0) and torch.allclose(dv, whole[2].grad[:, p], atol=1e-12, rtol=0)
    assert torch.allclose(dq, whole[0].grad, atol=1e-12, rtol=0)


def test_a_query_that_sees_nothing():
    q, k, v, _, see = draw(5)
    see[0, 0, 2] = False
    out, lse = partial(q, k, v, see)
    assert torch.isneginf(lse[0, 2]).all() and (out[0, 2] == 0).all() and out.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_are_fp32(dtype):
    q, k, v, dy, _ = (x.to(dtype) for x in draw(6))
    out, lse = partial(q, k, v, None)
    assert out.dtype == lse.dtype == torch.float32
    assert {x.dtype for x in partial_backward(dy, q, k, v, None, lse, lse)} == {torch.float32}
