"""The mask of causal attention, as one interval of visible keys for each query.

A sliding window and a document boundary both only raise the first key that a query sees, and these first
keys never fall along the sequence. So attention needs no [s, s] mask: the first and the last row of a block
tell whether the block is empty, full or partly masked. Kernels that skip blocks
(kernels/partial_attention.py) read these intervals.
"""
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

NO_LIMIT = 2**31 - 1  # in int32: a position after every token


@dataclass(frozen=True)
class AttentionMask:
    """Queries query_start .. query_start + s_q - 1 over keys key_start .. key_start + s_k - 1.

    A query sees the keys from its first_key up to its own position. Where first_key and query_end are None,
    causality is the only limit. Both tensors hold positions in int32, and never fall along the sequence.
    """
    query_start: int
    key_start: int
    s_q: int
    s_k: int
    window: int | None  # set if it is the only limit besides causality, and the last query is the last key
    first_key: Tensor | None  # [b or 1, s_q]: the first key that a query sees
    query_end: Tensor | None  # [b or 1, s_k]: the position after the last query that sees a key
    device: torch.device

    @property
    def is_causal(self) -> bool:
        """Whether causality is the only limit, and the queries are those of the keys."""
        return self.first_key is None and self.query_start == self.key_start and self.s_q == self.s_k

    @cached_property
    def dense_mask(self) -> Tensor:
        """bool [b or 1, 1, s_q, s_k], True where a query sees a key: for kernels that need a dense mask."""
        queries = torch.arange(self.query_start, self.query_start + self.s_q, device=self.device)[:, None]
        keys = torch.arange(self.key_start, self.key_start + self.s_k, device=self.device)
        mask = (keys <= queries)[None, None]
        if self.first_key is None:
            return mask
        return mask & (keys >= self.first_key[:, None, :, None])


MaskLike = AttentionMask | Tensor | None  # a Tensor: as dense_mask


def make_attention_mask(query_start: int, s_q: int, key_start: int, s_k: int, window: int | None,
                        docs: Tensor | None, device: torch.device) -> AttentionMask:
    """The mask of s_q queries from position query_start over s_k keys from position key_start.

    window: how many tokens a query sees, itself included; None: all before it.
    docs [b, s]: the document of each token of the whole sequence; the tokens of a document are contiguous.
    None: one document.
    """
    end_of_queries = query_start + s_q
    end_of_keys = key_start + s_k
    if docs is None and (window is None or end_of_queries - key_start <= window):
        return AttentionMask(query_start, key_start, s_q, s_k, None, None, None, device)

    s = max(end_of_queries, end_of_keys)
    positions = torch.arange(s, dtype=torch.int32, device=device)[None]  # [1, s]
    first_key = torch.zeros_like(positions)
    query_end = torch.full_like(positions, NO_LIMIT)
    if docs is not None:
        positions = positions.expand(len(docs), -1)  # [b, s]
        first_key, query_end = document_limits(docs, positions)
    if window is not None:
        first_key = torch.maximum(first_key, positions - window + 1)
        query_end = torch.minimum(query_end, positions + window)

    return AttentionMask(
        query_start, key_start, s_q, s_k,
        window=window if docs is None and end_of_queries == end_of_keys else None,
        first_key=first_key[:, query_start:end_of_queries].contiguous(),
        query_end=query_end[:, key_start:end_of_keys].contiguous(),
        device=device,
    )


def document_limits(docs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Where the document of each token starts, and where the next one does (NO_LIMIT: there is none).

    docs [b, s or longer], positions int32 [b, s] -> two int32 [b, s].
    """
    first = positions[:, :1]
    others = positions[:, 1:]
    length = positions.shape[1]
    starts_document = docs[:, 1:length] != docs[:, :length - 1]  # [b, s - 1], of tokens 1 .. s - 1

    start = torch.where(starts_document, others, 0).cummax(1).values
    next_start = torch.where(starts_document, others, NO_LIMIT).flip(1).cummin(1).values.flip(1)
    start = torch.cat((first, start), 1)
    next_start = torch.cat((next_start, torch.full_like(first, NO_LIMIT)), 1)
    return start, next_start
