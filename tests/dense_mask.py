"""Which query sees which key, as a dense mask by the definition."""

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
