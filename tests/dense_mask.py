"""Which query sees which key, as a dense mask by the definition."""

import torch
from torch import Tensor


def visible_keys(
    queries: Tensor,
    keys: Tensor,
    window: int | None = None,
    query_docs: Tensor | None = None,
    key_docs: Tensor | None = None,
) -> Tensor | None:
    """Which query sees which key: bool [b or 1, 1, s_q, s_k]. None: plain causal over equal lengths.

    queries [s_q], keys [s_k]: positions in the sequence.
    query_docs [b, s_q], key_docs [b, s_k]: the document of each token; both or neither.
    """
    has_window = window is not None and window < keys.shape[0]
    if queries.shape == keys.shape and not has_window and query_docs is None:
        return None

    distance = queries[:, None] - keys[None, :]  # [s_q, s_k]
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    mask = mask[None, None]
    if query_docs is None:
        return mask

    assert key_docs is not None, "documents of the queries, but none of the keys"
    same_document = query_docs[:, None, :, None] == key_docs[:, None, None, :]
    return mask & same_document


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention by the definition, with exponentials and no softmax.

    q [b, s_q, h, d], k [b, s_k, g, d], v [b, s_k, g, e], visible bool [b or 1, 1, s_q, s_k], sinks [h].
    """
    per_group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(per_group, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.exp() * visible
    total = weights.sum(-1)  # [b, h, s_q]
    if sinks is not None:
        total = total + sinks.exp()[:, None]
    return torch.einsum("bhqk,bkhe->bqhe", weights / total[..., None], v)
