"""The mask of causal attention, as one interval of visible keys for each query.

A sliding window and the start of a document or chunk only raise the first key that a query sees, and these
first keys are nondecreasing along the sequence. So attention needs no [s, s] mask: the first and the last row
of a block determine whether the block is empty, full or partly masked. Kernels that skip blocks
(kernels/partial_attention.py) read these intervals.
"""
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

NO_LIMIT = 2**31 - 1  # in int32: a position after every token


class DocumentCounts(NamedTuple):
    """Document statistics of a microbatch known to the host: the number over all sequences, and the tokens of
    the longest. A document that continues in the next sequence counts in both."""
    number: int
    longest: int


class PackedDocuments(NamedTuple):
    """The documents of all sequences, concatenated, in the form of variable-length functions.

    ends int32 [number + 1] holds 0, and the token after each document, counted over all sequences
    (`cu_seqlens` of flash-attn). longest bounds the tokens of the longest. window is as in AttentionMask, but
    combined with documents.
    """
    ends: Tensor
    number: int
    longest: int
    window: int | None


@dataclass(frozen=True)
class AttentionMask:
    """Queries query_start .. query_start + s_q - 1 over keys key_start .. key_start + s_k - 1.

    A query sees the keys from its first_key up to its own position. If first_key and query_end are None,
    causality is the only limit. Both tensors hold int32 positions that are nondecreasing along the sequence.
    """
    query_start: int
    key_start: int
    s_q: int
    s_k: int
    window: int | None  # set if it is the only limit besides causality, and the last query is the last key
    first_key: Tensor | None  # [b or 1, s_q]: the first key that a query sees
    query_end: Tensor | None  # [b or 1, s_k]: the position after the last query that sees a key
    device: torch.device
    packed: PackedDocuments | None = None  # the same, if full sequences see themselves and the host can count
    chunk: int | None = None  # set if it is the only limit besides causality, in sequences of whole chunks

    @property
    def is_causal(self) -> bool:
        """Whether causality is the only limit, and queries and keys have the same positions."""
        return self.first_key is None and self.query_start == self.key_start and self.s_q == self.s_k

    @cached_property
    def dense_mask(self) -> Tensor:
        """Return a dense mask for kernels that need one: bool [b or 1, 1, s_q, s_k], True if visible."""
        queries = torch.arange(self.query_start, self.query_start + self.s_q, device=self.device)[:, None]
        keys = torch.arange(self.key_start, self.key_start + self.s_k, device=self.device)
        mask = (keys <= queries)[None, None]
        if self.first_key is None:
            return mask
        return mask & (keys >= self.first_key[:, None, :, None])


    def part(self, query_start: int, s_q: int, key_start: int, s_k: int) -> "AttentionMask":
        """Return the mask of some queries over some keys, both by position. Runs no kernel."""
        first_key = query_end = None
        if self.first_key is not None and self.query_end is not None:
            queries = query_start - self.query_start
            keys = key_start - self.key_start
            first_key = self.first_key[:, queries:queries + s_q]
            query_end = self.query_end[:, keys:keys + s_k]
        is_last = query_start + s_q == key_start + s_k
        return AttentionMask(
            query_start, key_start, s_q, s_k,
            window=self.window if is_last else None,
            first_key=first_key,
            query_end=query_end,
            device=self.device,
        )


MaskLike = AttentionMask | Tensor | None  # a Tensor has the form of dense_mask


def make_attention_mask(query_start: int, s_q: int, key_start: int, s_k: int, window: int | None,
                        docs: Tensor | None, device: torch.device,
                        counts: DocumentCounts | None = None, chunk: int | None = None) -> AttentionMask:
    """Make the mask of s_q queries from position query_start over s_k keys from position key_start.

    window is how many tokens a query sees, including itself; None for all earlier ones.
    docs [b, s] is the document of each token of the whole sequence; documents are contiguous, and None means
    one. counts describes docs; with None the host does not know them, so libraries cannot take the documents.
    chunk: a query only sees keys of its chunk, `chunk` tokens each (Llama 4's chunked attention). Chunks
    count from the start of the sequence, and of each document, whose positions restart there: so a document
    attends as if it were alone. transformers counts the same way.
    """
    end_of_queries = query_start + s_q
    end_of_keys = key_start + s_k
    farthest = end_of_queries - key_start  # tokens that a query could see without a window
    farthest = farthest if chunk is None else min(farthest, chunk)
    has_window = window is not None and window < farthest
    has_chunks = chunk is not None and key_start // chunk < (end_of_queries - 1) // chunk
    if docs is None and not has_window and not has_chunks:
        return AttentionMask(query_start, key_start, s_q, s_k, None, None, None, device)

    s = max(end_of_queries, end_of_keys)
    positions = torch.arange(s, dtype=torch.int32, device=device)[None]  # [1, s]
    first_key = torch.zeros_like(positions)
    query_end = torch.full_like(positions, NO_LIMIT)
    if docs is not None:
        positions = positions.expand(len(docs), -1)  # [b, s]
        first_key, query_end = document_limits(docs, positions)
    if chunk is not None:  # counted from the first token of the document
        first_key = first_key + (positions - first_key) // chunk * chunk
        query_end = torch.minimum(query_end, first_key + chunk)
    if window is not None:
        first_key = torch.maximum(first_key, positions - window + 1)
        query_end = torch.minimum(query_end, positions + window)

    packed = None
    is_divided = counts is not None and chunk is not None and chunk < counts.longest  # into an unknown number
    if counts is not None and docs is not None and docs.shape[1] == s_q == s_k and not is_divided:
        narrow = window is not None and window < counts.longest
        ends = document_ends(docs, counts.number)
        packed = PackedDocuments(ends, *counts, window=window if narrow else None)

    is_whole = query_start == key_start == 0 and s_q == s_k
    only_chunks = chunk is not None and docs is None and not has_window and is_whole and s_k % chunk == 0
    return AttentionMask(
        query_start, key_start, s_q, s_k,
        window=window if docs is None and not has_chunks and end_of_queries == end_of_keys else None,
        first_key=first_key[:, query_start:end_of_queries].contiguous(),
        query_end=query_end[:, key_start:end_of_keys].contiguous(),
        device=device,
        packed=packed,
        chunk=chunk if only_chunks else None,
    )


def document_ends(docs: Tensor, number: int) -> Tensor:
    """docs [b, s] with `number` documents in total -> int32 [number + 1], see PackedDocuments. No sync."""
    begins = torch.ones_like(docs, dtype=torch.bool)
    begins[:, 1:] = docs[:, 1:] != docs[:, :-1]
    index = begins.flatten().cumsum(0, dtype=torch.int32) - 1  # document index of each token: 0 .. number - 1
    documents = torch.arange(number + 1, dtype=torch.int32, device=docs.device)
    return torch.searchsorted(index, documents, out_int32=True)  # the first token of each


def document_limits(docs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return where each token's document starts, and where the next one does (NO_LIMIT if there is none).

    docs [b, s or longer], positions int32 [b, s] -> two int32 [b, s].
    """
    first = positions[:, :1]
    others = positions[:, 1:]
    length = positions.shape[1]
    starts_document = docs[:, 1:length] != docs[:, :length - 1]  # [b, s - 1], for tokens 1 .. s - 1

    start = torch.where(starts_document, others, 0).cummax(1).values
    next_start = torch.where(starts_document, others, NO_LIMIT).flip(1).cummin(1).values.flip(1)
    start = torch.cat((first, start), 1)
    next_start = torch.cat((next_start, torch.full_like(first, NO_LIMIT)), 1)
    return start, next_start
