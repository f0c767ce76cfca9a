"""The parts of ranks, put together to a checkpoint that any layout reads.

A checkpoint in memory (checkpoint/memory.py) is in parts: each has what one rank reads at a resume under the
same layout. Some of it several parts have, whole or cut at other places: the bias of a router, a norm of
tensor parallel ranks, an embedding that two stages share. A checkpoint on the disk has each element once.
"""
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from checkpoint import store
from checkpoint.files import TORCH
from parallel.sharding.boxes import Box, uncovered_boxes

Boxes = Mapping[int, Sequence[Box]]  # {part: what it has}


def elements_once(parts: Boxes) -> dict[int, list[Box]]:
    """{part: what of its boxes is taken from it}: of what several parts have, the first of them."""
    taken: dict[str, list[Box]] = defaultdict(list)
    found: dict[int, list[Box]] = {}
    for part in sorted(parts):
        found[part] = []
        for box in parts[part]:
            found[part] += uncovered_boxes(box, taken[box.key])
            taken[box.key].append(box)
    return found


def boxes_of(index: store.StoredIndex) -> list[Box]:
    """What a part has."""
    return [piece.box for piece in index.pieces]


def bytes_of(index: store.StoredIndex, boxes: Sequence[Box]) -> int:
    """Of the values of these boxes of a part."""
    dtypes = dtypes_of(index)
    return sum(box.volume * dtypes[box.key].itemsize for box in boxes)


def read_boxes(index: store.StoredIndex, boxes: Sequence[Box]) -> list[store.Piece]:
    """[(box, its values)] of a part, each byte of them verified. Raises IntegrityError."""
    dtypes = dtypes_of(index)
    pieces = [(box, torch.empty(box.size, dtype=dtypes[box.key])) for box in boxes]
    store.load(index, pieces, strict=False)
    return pieces


def dtypes_of(index: store.StoredIndex) -> dict[str, torch.dtype]:
    """{key: the type of its values}."""
    return {piece.box.key: TORCH[piece.dtype] for piece in index.pieces}
