"""Who sees whom in causal attention, as one interval of keys a query: what kernels that skip blocks read.

A sliding window and document boundaries both only raise the first key that a query sees, and both bounds rise along the
sequence. So no s x s mask is needed, and which blocks are empty, full or cut is known from the first and last row of a block.
"""
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sight:
    """Queries at places query.., keys at places key.. of one sequence. A query sees the keys from `first` to its own place.

    first [b or 1, s_q], last [b or 1, s_k], int32 places: the first key that a query sees, and the place after the last query
    that sees a key; both rise along the sequence. None: causality alone.
    """
    query: int
    key: int
    s_q: int
    s_k: int
    window: int | None  # where that is all there is besides causality, and the last query meets the last key
    first: Tensor | None
    last: Tensor | None
    device: torch.device

    @property
    def plain(self) -> bool:
        """Causality alone, over equal lengths."""
        return self.first is None and self.query == self.key and self.s_q == self.s_k

    @cached_property
    def dense(self) -> Tensor:
        """bool [b or 1, 1, s_q, s_k], for kernels that know no better."""
        queries = torch.arange(self.query, self.query + self.s_q, device=self.device)[:, None]
        keys = torch.arange(self.key, self.key + self.s_k, device=self.device)
        see = (keys <= queries)[None, None]
        return see if self.first is None else see & (keys >= self.first[:, None, :, None])


def sight(query: int, s_q: int, key: int, s_k: int, window: int | None, docs: Tensor | None, device: torch.device) -> Sight:
    """docs [b, s]: the document of each token of the whole sequence; a document lies in one piece. window: in tokens."""
    if docs is None and (window is None or query + s_q - key <= window):
        return Sight(query, key, s_q, s_k, None, None, None, device)
    place = torch.arange(max(query + s_q, key + s_k), dtype=torch.int32, device=device)[None]
    start, end = torch.zeros_like(place), torch.full_like(place, 2**31 - 1)
    if docs is not None:
        place = place.expand(len(docs), -1)
        cut = docs[:, 1:place.shape[1]] != docs[:, :place.shape[1] - 1]
        start = torch.where(cut, place[:, 1:], 0).cummax(1).values
        end = torch.where(cut, place[:, 1:], 2**31 - 1).flip(1).cummin(1).values.flip(1)
        start, end = torch.cat((place[:, :1], start), 1), torch.cat((end, torch.full_like(place[:, :1], 2**31 - 1)), 1)
    if window is not None:
        start, end = torch.maximum(start, place - window + 1), torch.minimum(end, place + window)
    alone = window if docs is None and query + s_q == key + s_k else None
    return Sight(query, key, s_q, s_k, alone, start[:, query:query + s_q].contiguous(), end[:, key:key + s_k].contiguous(), device)
