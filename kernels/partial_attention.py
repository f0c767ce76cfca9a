"""Attention over a part of the keys, and the merge of such parts: the building blocks of ring attention.

    out_i, lse_i = attention_part(q, k_i, v_i, mask_i)    softmax over only these keys, with its logsumexp
    merge_partial(out, lse, out_i, lse_i)                 in place: exactly one softmax over both sets of keys
    dq, dk, dv = partial_backward(...)                    one part's share, from the merged lse and delta

The algebra is that of online softmax (arXiv 1805.02867) and of FlashAttention's backward (arXiv 2307.08691).
With the merged lse, the true probabilities of a part are exp(scores - lse), independently of the other parts;
delta is <dout, out>. Everything is in fp32 or better, because sums over parts must not be rounded in between.
Processing one tile of queries at a time bounds the memory.

On a GPU both halves are Triton kernels (kernels/attention_triton.py), whose gradients repeat bit for bit.
"""
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.attention_mask import AttentionMask, MaskLike
from kernels.attention_scores import PLAIN_SCORES, ScoreForm
from kernels.attention_triton import launch_backward, launch_forward, triton_supports
from kernels.grad import accumulation_dtype, write_or_add

TILE = 512  # queries whose scores exist together, without Triton


def attention_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike,
    dtype: torch.dtype | None = None,
    form: ScoreForm = PLAIN_SCORES,
) -> tuple[Tensor, Tensor]:
    """Attention over only these keys, and the logsumexp of its scores.

    q [b, s_q, h, d], k [b, s_k, g, d], v [b, s_k, g, e], where h is a multiple of g.
    mask is an AttentionMask, or bool [b or 1, 1, s_q, s_k]; with None every query sees every key.
    Returns out [b, s_q, h, e], in `dtype` (by default fp32 or better), and lse [b, s_q, h]. A query that sees
    no key has out 0 and lse -inf.
    """
    if triton_supports(q, k, v, mask):
        assert not isinstance(mask, Tensor)  # triton_supports rejects a dense mask
        return launch_forward(q, k, v, mask, dtype or torch.float32, form)
    out, lse = partial_reference(q, k, v, dense(mask), form)
    return out.to(dtype or out.dtype), lse


def merge_partial(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge in place: (out, lse) become those of both sets of keys. lse must not be -inf in both.

    out, other [b, s_q, h, e]; lse, other_lse [b, s_q, h].
    """
    both = torch.logaddexp(lse, other_lse)
    share = torch.exp(lse - both)[..., None]
    other_share = torch.exp(other_lse - both)[..., None]
    out.mul_(share).addcmul_(other, other_share)
    lse.copy_(both)


def partial_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike,
    lse: Tensor,
    delta: Tensor,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
    add: bool = False,
    form: ScoreForm = PLAIN_SCORES,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this part's share of dq, and dk and dv of its keys: in `dtype` (by default fp32 or better), or
    written to `into`.

    dout [b, s_q, h, e]; lse and delta [b, s_q, h], merged over all parts. With add, accumulate onto `into`,
    which is in fp32 or better. The rest is as for attention_part. Raises ValueError if `into` is missing.
    """
    if add and into is None:
        raise ValueError("partial_backward: add needs `into`, the tensors to add to")
    if triton_supports(q, k, v, mask):
        assert not isinstance(mask, Tensor)  # triton_supports rejects a dense mask
        grads = launch_backward(dout, q, k, v, mask, lse, delta, dtype or torch.float32, form)
    else:
        exact = partial_backward_reference(dout, q, k, v, dense(mask), lse, delta, form)
        dq, dk, dv = (grad.to(dtype or grad.dtype) for grad in exact)
        grads = dq, dk, dv
    if into is None:
        return grads
    for out, grad in zip(into, grads):
        write_or_add(out, grad, add)
    return into


# ---- reference ---------------------------------------------------------------------------------------------
# r = h / g: the query heads that share a key head; t: the queries of a tile

def partial_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, form: ScoreForm = PLAIN_SCORES
) -> tuple[Tensor, Tensor]:
    """attention_part in plain torch, with a dense mask."""
    b, s_q, h, _ = q.shape
    out = q.new_empty(b, s_q, h, v.shape[-1], dtype=accumulation_dtype(q.dtype))
    lse = out.new_empty(b, s_q, h)
    values = by_group(v)  # [b, g, 1, s_k, e]
    for rows, scores in visible_tiles(q, k, mask, form):
        row_lse = scores.logsumexp(-1, keepdim=True)  # [b, g, r, t, 1]
        finite_lse = row_lse.clamp_min(torch.finfo(row_lse.dtype).min)  # no NaN where all scores are -inf
        probs = torch.exp(scores - finite_lse)
        out[:, rows] = by_token(probs @ values)
        lse[:, rows] = by_token(row_lse)[..., 0]
    return out, lse


def partial_backward_reference(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    lse: Tensor,
    delta: Tensor,
    form: ScoreForm = PLAIN_SCORES,
) -> tuple[Tensor, Tensor, Tensor]:
    """partial_backward in plain torch, with a dense mask."""
    groups = k.shape[2]
    divisor = form.divisor(q.shape[-1])
    dq = q.new_empty(q.shape, dtype=accumulation_dtype(q.dtype))
    keys = by_group(k)  # [b, g, 1, s_k, d]
    values = by_group(v)  # [b, g, 1, s_k, e]
    dk = torch.zeros_like(keys)
    dv = torch.zeros_like(values)

    for rows, scores in visible_tiles(q, k, mask, form):
        row_q = by_group(q[:, rows], groups)  # [b, g, r, t, d]
        row_dout = by_group(dout[:, rows], groups)  # [b, g, r, t, e]
        row_lse = by_group(lse[:, rows, :, None], groups)  # [b, g, r, t, 1]
        row_delta = by_group(delta[:, rows, :, None], groups)  # [b, g, r, t, 1]

        probs = torch.exp(scores - row_lse)  # [b, g, r, t, s_k]
        dv += (probs.transpose(-1, -2) @ row_dout).sum(2, keepdim=True)
        dprobs = row_dout @ values.transpose(-1, -2)
        dscores = form.through_cap(probs * (dprobs - row_delta), scores) / divisor
        dq[:, rows] = by_token(dscores @ keys)
        dk += (dscores.transpose(-1, -2) @ row_q).sum(2, keepdim=True)
    return dq, by_token(dk), by_token(dv)


def visible_tiles(
    q: Tensor, k: Tensor, mask: Tensor | None, form: ScoreForm
) -> Iterator[tuple[slice, Tensor]]:
    """Yield tiles of queries: (which, their scores [b, g, r, t, s_k], -inf if a query does not see a key)."""
    divisor = form.divisor(q.shape[-1])
    keys = by_group(k).transpose(-1, -2)  # [b, g, 1, d, s_k]
    for start in range(0, q.shape[1], TILE):
        rows = slice(start, min(start + TILE, q.shape[1]))
        scores = form.capped(by_group(q[:, rows], k.shape[2]) / divisor @ keys)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, :, None, rows], -math.inf)
        yield rows, scores


def by_group(x: Tensor, groups: int | None = None) -> Tensor:
    """[b, s, h, d] -> [b, groups, h / groups, s, d], in fp32 or better. groups defaults to h."""
    x = x.to(accumulation_dtype(x.dtype)).transpose(1, 2)
    return x.unflatten(1, (groups or x.shape[1], -1))


def by_token(x: Tensor) -> Tensor:
    """[b, g, r, s, d] -> [b, s, g r, d]."""
    return x.flatten(1, 2).transpose(1, 2)


def dense(mask: MaskLike) -> Tensor | None:
    return mask.dense_mask if isinstance(mask, AttentionMask) else mask
