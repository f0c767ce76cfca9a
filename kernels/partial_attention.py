"""Attention over a part of the keys, and how parts are put together: what ring attention is made of.

    out_i, lse_i = partial(q, k_i, v_i, see_i)        softmax over these keys alone, with the logarithm of its denominator
    out, lse     = merge(out_1, lse_1, out_2, lse_2)  exactly what one softmax over both sets of keys gives
    dq, dk, dv   = partial_backward(...)              one part's share, from the merged lse and delta = <dout, out>

The algebra is that of online softmax (arXiv 1805.02867) and FlashAttention's backward (arXiv 2307.08691): with the merged
lse the true probabilities of a part are exp(scores - lse), whatever the other parts hold. Everything is in fp32 or better
(`wide`), since what is summed over parts must not be rounded in between. A tile of queries at a time bounds the memory.
"""
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.grad import wide

TILE = 512  # queries whose scores exist together


def partial(q: Tensor, k: Tensor, v: Tensor, see: Tensor | None) -> tuple[Tensor, Tensor]:
    """q [b, s_q, h, d], k [b, s_k, g, d], v [b, s_k, g, dv], h a multiple of g; see: bool [b or 1, 1, s_q, s_k], None: everyone
    sees all. Returns out [b, s_q, h, dv] and lse [b, s_q, h]; a query that sees no key has out 0 and lse -inf."""
    out = q.new_empty(*q.shape[:3], v.shape[-1], dtype=wide(q.dtype))
    lse = out.new_empty(q.shape[:3])
    values = by_group(v)  # [b, g, 1, s_k, d]
    for rows, scores in tiles(q, k, see):
        total = scores.logsumexp(-1, keepdim=True)  # [b, g, r, t, 1]
        p = torch.exp(scores - total.clamp_min(torch.finfo(total.dtype).min))  # no NaN where all scores are -inf
        out[:, rows] = by_token(p @ values)
        lse[:, rows] = by_token(total)[..., 0]
    return out, lse


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """In place: (out, lse) become those of both sets of keys. lse must not be -inf in both."""
    both = torch.logaddexp(lse, other_lse)
    out.mul_(torch.exp(lse - both)[..., None]).addcmul_(other, torch.exp(other_lse - both)[..., None])
    lse.copy_(both)


def partial_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, see: Tensor | None, lse: Tensor,
                     delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dout [b, s_q, h, dv]; lse, delta [b, s_q, h]: merged over all parts. Returns this part's share of dq, and dk, dv of its keys."""
    dq = q.new_empty(q.shape, dtype=wide(q.dtype))
    keys, values = by_group(k), by_group(v)  # [b, g, 1, s_k, d]
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    for rows, scores in tiles(q, k, see):
        here = [by_group(t[:, rows], k.shape[2]) for t in (q, dout, lse[..., None], delta[..., None])]
        queries, dy, total, inner = here  # [b, g, r, t, d or 1]
        p = torch.exp(scores - total)
        dv += (p.transpose(-1, -2) @ dy).sum(2, keepdim=True)
        ds = p * (dy @ values.transpose(-1, -2) - inner) / math.sqrt(q.shape[-1])
        dq[:, rows] = by_token(ds @ keys)
        dk += (ds.transpose(-1, -2) @ queries).sum(2, keepdim=True)
    return dq, by_token(dk), by_token(dv)


def tiles(q: Tensor, k: Tensor, see: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """(queries, their scores [b, g, r, t, s_k]; -inf where they do not see)."""
    keys = by_group(k).transpose(-1, -2)  # [b, g, 1, d, s_k]
    for lo in range(0, q.shape[1], TILE):
        rows = slice(lo, min(lo + TILE, q.shape[1]))
        scores = by_group(q[:, rows], k.shape[2]) / math.sqrt(q.shape[-1]) @ keys
        yield rows, scores if see is None else scores.masked_fill(~see[:, :, None, rows], -math.inf)


def by_group(x: Tensor, groups: int | None = None) -> Tensor:
    """[b, s, h, d] -> [b, groups, h / groups, s, d], wide; groups: the key heads (none: h)."""
    return x.to(wide(x.dtype)).transpose(1, 2).unflatten(1, (groups or x.shape[2], -1))


def by_token(x: Tensor) -> Tensor:
    """[b, g, r, s, d] -> [b, s, g r, d]."""
    return x.flatten(1, 2).transpose(1, 2)
