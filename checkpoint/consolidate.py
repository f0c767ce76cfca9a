"""Consolidates the shards of ranks into a checkpoint that any layout reads.

A checkpoint in memory (checkpoint/memory.py) is in shards: each has what one rank reads at a resume under the
same layout. Some of it is in several shards, whole or cut at other places: the bias of a router, a norm of
tensor parallel ranks, an embedding that two stages share. A checkpoint on the disk has each element once.
"""
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from checkpoint.disk import store
from checkpoint.disk.files import TORCH
from parallel.sharding.boxes import Box, uncovered_boxes


def each_element_once(shards: Mapping[int, Sequence[Box]]) -> dict[int, list[Box]]:
    """{saved rank: the boxes that are taken of its shard}; of what several have, the first of them gives it.

    shards: {saved rank: the boxes of its shard}.
    """
    taken: dict[str, list[Box]] = defaultdict(list)
    found: dict[int, list[Box]] = {}
    for saved in sorted(shards):
        found[saved] = []
        for box in shards[saved]:
            found[saved] += uncovered_boxes(box, taken[box.key])
            taken[box.key].append(box)
    return found


def boxes_of(index: store.StoredIndex) -> list[Box]:
    """The boxes of a shard."""
    return [piece.box for piece in index.pieces]


def bytes_of(index: store.StoredIndex, boxes: Sequence[Box]) -> int:
    """Of the values of these boxes of a shard."""
    dtypes = dtypes_of(index)
    return sum(box.volume * dtypes[box.key].itemsize for box in boxes)


def read_boxes(index: store.StoredIndex, boxes: Sequence[Box]) -> list[store.Piece]:
    """[(box, its values)] of a shard, each byte of them verified. Raises IntegrityError."""
    dtypes = dtypes_of(index)
    pieces = [(box, torch.empty(box.size, dtype=dtypes[box.key])) for box in boxes]
    store.load(index, pieces, strict=False)
    return pieces


def dtypes_of(index: store.StoredIndex) -> dict[str, torch.dtype]:
    """{key: the type of its values}."""
    return {piece.box.key: TORCH[piece.dtype] for piece in index.pieces}
