"""Causal attention with grouped queries, a sliding window and document boundaries.

One public function, `attention`, and its reference beside it. A mask is built only where causality alone does not say it
all: `mask` returns None for the plain causal case, and the fused kernel then skips the upper triangle by itself.
"""
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.grad import wide


def mask(queries: Tensor, keys: Tensor, window: int | None = None, docs_q: Tensor | None = None,
         docs_k: Tensor | None = None) -> Tensor | None:
    """Who sees whom, bool [b or 1, 1, s_q, s_k]; None: plain causal over equal lengths.

    queries [s_q], keys [s_k]: places in the sequence; docs [b, s]: the document of each token.
    """
    plain = queries.shape == keys.shape and (window is None or window >= keys.shape[0]) and docs_q is None
    if plain:
        return None
    apart = queries[:, None] - keys[None, :]
    see = apart >= 0
    if window is not None:
        see &= apart < window
    see = see[None, None]
    return see if docs_q is None else see & (docs_q[:, None, :, None] == docs_k[:, None, None, :])


def attention(q: Tensor, k: Tensor, v: Tensor, see: Tensor | None, kind: str = "auto") -> Tensor:
    """softmax(q k^T / sqrt(d)) v. q [b, s_q, h, d], k and v [b, s_k, g, d] with h a multiple of g -> [b, s_q, h, d]."""
    if kind == "reference":
        return reference(q, k, v, see)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=see, is_causal=see is None, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def reference(q: Tensor, k: Tensor, v: Tensor, see: Tensor | None) -> Tensor:
    """The definition, term by term, in fp32 or better."""
    dtype, share = q.dtype, q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2).to(wide(q.dtype)) for t in (q, k.repeat_interleave(share, 2), v.repeat_interleave(share, 2)))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if see is None:
        see = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return (scores.masked_fill(~see, float("-inf")).softmax(-1) @ v).transpose(1, 2).to(dtype)
