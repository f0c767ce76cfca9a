"""The zigzag order: a sequence is split into 2n chunks; rank r of n holds chunks r and 2n - 1 - r.

A causal query at position i sees i + 1 keys, so contiguous parts would give the last rank most of the work.
An early chunk and its mirror image together cost the average (arXiv 2407.21783, section 3.3.2):

    n = 4     chunk  0 1 2 3 4 5 6 7
              rank   0 1 2 3 3 2 1 0

Every rank of a cp group reads full sequences from its own mapped file, so sharding is a selection without
communication. On a rank, the tokens stay in sequence order. A group of one holds both chunks: the identity.
"""
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.attention_mask import AttentionMask, make_attention_mask
from parallel.microbatch import Microbatch
from parallel.wire.comm import Group


def chunks_of_rank(index: int, n: int) -> tuple[int, int]:
    """Return the two chunks of rank `index` of n."""
    return index, 2 * n - 1 - index


def token_positions(s: int, index: int, n: int, device: torch.device | None = None) -> Tensor:
    """Return the position in its sequence of each token of rank `index`: int64 [s/n].

    s is the sequence length in tokens, a multiple of 2n.
    """
    chunk_size = s // (2 * n)
    inside = torch.arange(chunk_size, device=device)
    positions = [inside + chunk * chunk_size for chunk in chunks_of_rank(index, n)]
    return torch.cat(positions)


def shard_batch(batch: Microbatch, group: Group) -> Microbatch:
    """Select this rank's tokens [b, s/n] of a microbatch of full sequences [b, s], without communication.

    Call it once, before anything is counted.

    batch.documents stays [b, s]: attention compares a rank's own tokens with those of all ranks.
    """
    if group.size == 1:
        return batch
    tokens = batch.tokens
    mine = token_positions(tokens.shape[1], group.index, group.size, tokens.device)
    sharded = replace(
        batch,
        tokens=batch.tokens[:, mine],
        targets=batch.targets[:, mine],
        positions=batch.positions[:, mine],
        sequence_positions=mine,
    )
    if batch.tokens_ahead is None or batch.targets_ahead is None:
        return sharded
    return replace(
        sharded,
        tokens_ahead=batch.tokens_ahead[:, :, mine],
        targets_ahead=batch.targets_ahead[:, :, mine],
    )


def unshard_sequence(parts: Tensor) -> Tensor:
    """Merge the parts of all ranks [n, b, s/n, ...] into [b, s, ...] in sequence order. Purely local."""
    b = parts.shape[1]
    features = parts.shape[3:]
    early, late = parts.chunk(2, 2)  # [n, b, chunk, ...]
    chunks = torch.cat((early, late.flip(0)))  # [2n, b, chunk, ...]
    return chunks.transpose(0, 1).reshape(b, -1, *features)


def shard_sequence(x: Tensor, n: int) -> Tensor:
    """Split [b, s, ...] into the parts of all ranks [n, b, s/n, ...]. Purely local."""
    chunks = x.unflatten(1, (2 * n, -1)).transpose(0, 1)  # [2n, b, chunk, ...]
    early, late = chunks.chunk(2)
    return torch.cat((early, late.flip(0)), 2)


# ---- visibility between chunks -----------------------------------------------------------------------------


class ChunkPair(NamedTuple):
    """Queries of one chunk that see keys of another."""
    query_half: int  # which half of its rank's tokens the query chunk is: 0 or 1
    key_half: int
    query_chunk: int  # index of the chunk in the sequence
    key_chunk: int

    @property
    def distance(self) -> int:
        """Distance in chunks."""
        return self.query_chunk - self.key_chunk


def visible_chunk_pairs(
    index: int,
    source: int,
    n: int,
    chunk_size: int,
    window: int | None,
) -> list[ChunkPair]:
    """Return the pairs of chunks in which tokens of rank `index` see tokens of rank `source`.

    Pairs entirely in the future or outside the window are skipped. window is in tokens; for chunked attention
    it is the chunk size, since no query sees farther. The diagonal pair comes first: after it, every query
    has seen a key.
    """
    pairs: list[ChunkPair] = []
    for query_half, query_chunk in enumerate(chunks_of_rank(index, n)):
        for key_half, key_chunk in enumerate(chunks_of_rank(source, n)):
            pair = ChunkPair(query_half, key_half, query_chunk, key_chunk)
            nearest = (pair.distance - 1) * chunk_size + 1  # tokens between the nearest query and key
            if pair.distance >= 0 and (window is None or nearest < window):
                pairs.append(pair)
    return sorted(pairs, key=lambda pair: pair.distance)


def chunk_mask(
    pair: ChunkPair,
    chunk_size: int,
    window: int | None,
    documents: Tensor | None,
    device: torch.device,
    mask: AttentionMask | None = None,
    attention_chunk: int | None = None,
) -> Tensor | AttentionMask | None:
    """Return which queries of the pair see which keys: bool [b or 1, 1, chunk, chunk], or None if all do.

    documents [b, s] is the document of each token of the full sequence. attention_chunk is the `chunk` of
    make_attention_mask. mask, if given, is the mask of the full sequence built from all of these; the result
    is a part of it, whose empty blocks the GPU kernels skip.
    """
    place = (pair.query_chunk * chunk_size, chunk_size, pair.key_chunk * chunk_size, chunk_size)
    if mask is not None:
        return mask.part(*place)
    visible = make_attention_mask(*place, window, documents, device, chunk=attention_chunk)
    sees_all = pair.distance > 0 and visible.first_key is None
    return None if sees_all else visible.dense_mask
