"""Consolidate the shards of ranks into a checkpoint that any layout can read.

Each shard of an in-memory checkpoint (durable/memory.py) has what one rank reads when resuming with the
same layout. Shards overlap, in whole or in differently cut parts: router biases, norms of tensor-parallel
ranks, an embedding shared by two stages. A checkpoint on disk has each element exactly once.
"""
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from checkpoint.disk import store
from checkpoint.disk.files import TORCH
from parallel.sharding.boxes import Box, uncovered_boxes


def assign_boxes_once(shards: Mapping[int, Sequence[Box]]) -> dict[int, list[Box]]:
    """Return {saved rank: boxes to take from its shard}; the first shard that holds an element provides it.

    `shards` is {saved rank: the boxes of its shard}.
    """
    taken: dict[str, list[Box]] = defaultdict(list)
    result: dict[int, list[Box]] = {}
    for saved in sorted(shards):
        result[saved] = []
        for box in shards[saved]:
            result[saved] += uncovered_boxes(box, taken[box.key])
            taken[box.key].append(box)
    return result


def get_boxes(index: store.StoredIndex) -> list[Box]:
    """Return the boxes of a shard."""
    return [piece.box for piece in index.pieces]


def get_bytes(index: store.StoredIndex, boxes: Sequence[Box]) -> int:
    """Return the number of bytes in these boxes of a shard."""
    dtypes = get_dtypes(index)
    return sum(box.volume * dtypes[box.key].itemsize for box in boxes)


def read_boxes(index: store.StoredIndex, boxes: Sequence[Box]) -> list[store.Piece]:
    """Read and verify these boxes of a shard as [(box, values)]. Raises IntegrityError."""
    dtypes = get_dtypes(index)
    pieces = [(box, torch.empty(box.size, dtype=dtypes[box.key])) for box in boxes]
    store.load(index, pieces, strict=False)
    return pieces


def get_dtypes(index: store.StoredIndex) -> dict[str, torch.dtype]:
    """Return {key: dtype of its values}."""
    return {piece.box.key: TORCH[piece.dtype] for piece in index.pieces}
