"""Parts of an attention, put together, are the whole: outputs and gradients, with queries that see nothing of
a part.
"""

import pytest
import torch
from training import FP32, bound

from kernels import partial_attention as kernel
from kernels.attention import attention_reference
from kernels.attention_mask import make_attention_mask
from kernels.partial_attention import TILE, attention_part, merge_partial, partial_backward


def draw(s: int, d: int = 8, dtype=torch.float64):
    stream = torch.Generator().manual_seed(s)
    q, dy = (torch.randn(2, s, 6, d, generator=stream, dtype=dtype) for _ in "qd")
    k, v = (torch.randn(2, s, 3, d, generator=stream, dtype=dtype) for _ in "kv")
    mask = (torch.rand(2, 1, s, s, generator=stream) < 0.3) | torch.eye(s, dtype=torch.bool)
    return q, k, v, dy, mask


@pytest.mark.parametrize(
    "s,cuts", [(7, (0, 7)), (12, (0, 5, 12)), (9, (0, 1, 2, 9)), (TILE + 3, (0, 100, TILE + 3))]
)
def test_parts_make_the_whole(s, cuts):
    q, k, v, dy, mask = draw(s)
    mask[..., 0] = True  # the first part shows every query a key (in a ring: a token itself)
    mask[:, :, 0, 1:] = False  # a query that sees nothing of later parts
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    true = attention_reference(*whole, mask)
    true.backward(dy)
    parts = [slice(a, b) for a, b in zip(cuts, cuts[1:])]
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], float("-inf"))
    for p in parts:
        merge_partial(out, lse, *attention_part(q, k[:, p], v[:, p], mask[..., p]))
    assert torch.allclose(out, true, atol=1e-13, rtol=0)
    delta, dq = (dy * out).sum(-1), torch.zeros_like(q)
    for p in parts:
        share, dk, dv = partial_backward(dy, q, k[:, p], v[:, p], mask[..., p], lse, delta)
        dq += share
        assert torch.allclose(dk, whole[1].grad[:, p], atol=1e-12, rtol=0) and torch.allclose(
            dv, whole[2].grad[:, p], atol=1e-12, rtol=0
        )
    assert torch.allclose(dq, whole[0].grad, atol=1e-12, rtol=0)


def test_a_query_that_sees_nothing():
    q, k, v, _, mask = draw(5)
    mask[0, 0, 2] = False
    out, lse = attention_part(q, k, v, mask)
    assert torch.isneginf(lse[0, 2]).all() and (out[0, 2] == 0).all() and out.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_are_fp32(dtype):
    q, k, v, dy, _ = (x.to(dtype) for x in draw(6))
    out, lse = attention_part(q, k, v, None)
    assert out.dtype == lse.dtype == torch.float32
    assert {x.dtype for x in partial_backward(dy, q, k, v, None, lse, lse)} == {torch.float32}


# ---- Triton: blocks of 16, so that small sequences have empty, whole and cut ones ----

MASKS = {  # place of the first query, queries, place of the first key, keys, window, documents
    "causal": (0, 67, 0, 67, None, False),
    "window": (0, 67, 0, 67, 20, False),
    "documents": (0, 67, 0, 67, None, True),
    "both": (0, 50, 0, 50, 30, True),
    "cache": (40, 9, 0, 49, None, False),
    "ring": (50, 25, 25, 25, 30, True),
    "ring without documents": (64, 32, 0, 32, None, False),
    "ring, the window ends inside": (96, 48, 0, 48, 80, False),
    "long documents": (0, 150, 0, 150, None, True),
    "one token": (0, 1, 0, 1, None, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    "dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 0.01), (torch.float16, 2e-3)]
)
def test_triton(small_blocks, name, dtype, bound):
    query, s_q, key, s_k, window, documents = MASKS[name]
    b, h, g, d, e = (2, 4, 2, 24, 16) if dtype == torch.float32 else (1, 3, 1, 16, 16)
    qkv = torch.randn(b, s_q, h + 1, d, device=small_blocks).to(dtype)
    q, dy = (
        qkv[:, :, :h],
        torch.randn(b, h, s_q, e, device=small_blocks).to(dtype).transpose(1, 2),
    )  # strided, as models have them
    k, v = (torch.randn(b, s_k, g, n, device=small_blocks).to(dtype) for n in (d, e))
    docs = (torch.rand(b, 150) < 0.03).cumsum(1).to(small_blocks) if documents else None
    mask = make_attention_mask(query, s_q, key, s_k, window, docs, small_blocks)
    exact = [t.double() for t in (q, k, v)]
    out, lse = kernel.partial_reference(*exact, mask.dense_mask)
    got, got_lse = attention_part(q, k, v, mask)
    delta = (dy * out).sum(-1)
    seen = torch.isfinite(lse)
    assert torch.equal(torch.isfinite(got_lse), seen)
    want = kernel.partial_backward_reference(
        dy.double(), *exact, mask.dense_mask, lse.masked_fill(~seen, torch.inf), delta
    )
    grads = partial_backward(dy, q, k, v, mask, got_lse, delta.float())
    for a, c in zip((got, got_lse[seen], *grads), (out, lse[seen], *want)):
        assert a.dtype == torch.float32, name
        # of one token, the gradients of q and k are 0, and what is left are roundings of numbers of size 1
        assert (a.double() - c).norm() <= bound * c.norm().clamp_min(1.0), name
    again = partial_backward(dy, q, k, v, mask, got_lse, delta.float())
    assert all(torch.equal(a, c) for a, c in zip(grads, again))


def test_what_triton_refuses(small_blocks, capfd):
    q, k, v, _, mask = (t.to(small_blocks) for t in draw(6))
    attention_part(q.float(), k.float(), v.float(), mask)
    wide = torch.randn(1, 2, 1, 300, device=small_blocks)
    attention_part(wide, wide, wide, None)
    assert capfd.readouterr().err.splitlines() == [
        f"attention: {why}; the slower torch reference runs instead"
        for why in ("a dense mask", "head dim 300 is above 256")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("dtype, e", [(torch.float32, 16), (torch.bfloat16, 24), (torch.bfloat16, 16)])
def test_triton_adds_to_what_is_there(small_blocks, dtype, e):
    """Into slices of longer tensors, as a ring does: what lies outside of them stays as it is."""
    b, s, h, g, d = 2, 45, 4, 2, 16
    q, dy = (torch.randn(b, s, h, n, device=small_blocks).to(dtype) for n in (d, e))
    k, v = (torch.randn(b, s, g, n, device=small_blocks).to(dtype) for n in (d, e))
    mask = make_attention_mask(0, s, 0, s, 30, None, small_blocks)
    out, lse = attention_part(q, k, v, mask)
    delta = (dy.float() * out).sum(-1)
    share = partial_backward(dy, q, k, v, mask, lse, delta)
    longer = [torch.randn(b, s + 7, x.shape[2], x.shape[3], device=small_blocks) for x in share]
    want = [x.clone() for x in longer]
    for total, part in zip(want, share):
        total[:, 3 : 3 + s] += part
    partial_backward(dy, q, k, v, mask, lse, delta, tuple(x[:, 3 : 3 + s] for x in longer), add=True)
    torch.testing.assert_close(longer, want, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="add needs `into`"):
        partial_backward(dy, q, k, v, mask, lse, delta, add=True)


@pytest.mark.gpu(
    "attention_triton.forward_kernel", "attention_triton.dq_kernel", "attention_triton.dkv_kernel"
)
def test_parts_at_training_sizes(training):
    """The second half of the queries over two halves of the keys, as a ring does it: the outputs merged, the
    gradients added to what is there.
    """
    s, half = training.seq, training.seq // 2
    parts = [slice(0, half), slice(half, s)]
    whole = make_attention_mask(half, half, 0, s, None, None, training.device)
    masks = [make_attention_mask(half, half, p.start, half, None, None, training.device) for p in parts]
    q, dy = (training.randn(training.batch, half, training.heads, training.head_dim) for _ in "qd")
    k, v = (training.randn(training.batch, s, training.kv, training.head_dim) for _ in "kv")

    def ours():
        (out, lse), (other, other_lse) = (
            attention_part(q, k[:, p], v[:, p], mask) for p, mask in zip(parts, masks)
        )
        lse = lse.contiguous()
        merge_partial(out, lse, other, other_lse)
        delta = (dy.float() * out).sum(-1)
        grads = [torch.ones_like(x, dtype=FP32) for x in (q, k, v)]
        for p, mask in zip(parts, masks):
            into = grads[0], *(grad[:, p] for grad in grads[1:])
            partial_backward(dy, q, k[:, p], v[:, p], mask, lse, delta, into, add=True)
        return {"y": out, "lse": lse} | {f"d{name}": grad - 1 for name, grad in zip("qkv", grads)}

    def definition():
        exact = [x.float() for x in (q, k, v)]
        out, lse = kernel.partial_reference(*exact, whole.dense_mask)
        delta = (dy * out).sum(-1)
        grads = kernel.partial_backward_reference(dy.float(), *exact, whole.dense_mask, lse, delta)
        return {"y": out, "lse": lse} | {f"d{name}": grad for name, grad in zip("qkv", grads)}

    training.check(ours, definition, {
        "y": bound(1, s),
        "lse": bound(4, s, FP32),
        **dict.fromkeys(("dq", "dk", "dv"), bound(3, s)),
    })
