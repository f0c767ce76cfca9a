"""Box: the rectangle of a global tensor that a rank holds. Saving and resharding are arithmetic on boxes.

Keys are global names and shapes are global shapes, so a stored box means the same under every parallel
layout. Resharding from any layout to any other is `plan_read`. No torch, no communication.
"""
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

Slices = tuple[slice, ...]  # one for each dim
ReadPlan = list[tuple[int, Slices, Slices]]  # (index of a stored piece, its slices, slices of the target)


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of a global tensor; start and size are in elements, one number for each dim."""
    key: str  # global name, the same under every layout
    shape: tuple[int, ...]  # of the whole tensor
    start: tuple[int, ...]
    size: tuple[int, ...]

    @staticmethod
    def whole(key: str, shape: Sequence[int]) -> "Box":
        """Return the box that covers a whole tensor."""
        return Box(key, tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return prod(self.size)

    def rows(self, first: int, end: int) -> "Box":
        """Return its own rows first .. end - 1, with its full extent in the other dims."""
        start = (self.start[0] + first, *self.start[1:])
        return Box(self.key, self.shape, start, (end - first, *self.size[1:]))

    def intersection(self, other: "Box") -> "Box | None":
        """Return the overlap of two boxes of one tensor; None if they are disjoint or one is empty."""
        starts: list[int] = []
        sizes: list[int] = []
        for own, others in zip(self.ranges(), other.ranges()):
            start = max(own.start, others.start)
            end = min(own.stop, others.stop)
            if start >= end:
                return None
            starts.append(start)
            sizes.append(end - start)
        return Box(self.key, self.shape, tuple(starts), tuple(sizes))

    def ranges(self) -> list[range]:
        """Return the indices that the box covers along each dim."""
        return [range(start, start + size) for start, size in zip(self.start, self.size)]

    def slices_in(self, other: "Box") -> Slices:
        """Return the slices of `other`'s local tensor that this box, which lies inside `other`, covers."""
        slices: list[slice] = []
        for own, others in zip(self.ranges(), other.ranges()):
            slices.append(slice(own.start - others.start, own.stop - others.start))
        return tuple(slices)

    def difference(self, other: "Box") -> list["Box"]:
        """Return disjoint boxes, at most 2 * ndim, that this box covers and `other` does not."""
        common = self.intersection(other)
        if common is None:
            return [self]

        # for each dim, split off the parts before and after the overlap, then continue with the slab between
        rest: list[Box] = []
        start = list(self.start)
        size = list(self.size)
        for dim, covered in enumerate(common.ranges()):
            before = (start[dim], covered.start)
            after = (covered.stop, start[dim] + size[dim])
            for first, end in (before, after):
                if first < end:
                    piece_start = (*start[:dim], first, *start[dim + 1:])
                    piece_size = (*size[:dim], end - first, *size[dim + 1:])
                    rest.append(Box(self.key, self.shape, piece_start, piece_size))
            start[dim] = covered.start
            size[dim] = len(covered)
        return rest

    def __str__(self) -> str:
        """layers.0.mlp.up.weight[0:64, 32:64]"""
        ranges = [f"{covered.start}:{covered.stop}" for covered in self.ranges()]
        return f"{self.key}[{', '.join(ranges)}]"


def uncovered_boxes(want: Box, have: Sequence[Box]) -> list[Box]:
    """Return the parts of `want` that no box of `have` covers. All boxes must be of one tensor."""
    rest = [want] if want.volume else []
    # in sorted order the uncovered rest stays a few boxes, so the time is linear in `have`
    for piece in sorted(have, key=lambda box: box.start):
        rest = [part for box in rest for part in box.difference(piece)]
    return rest


def to_rows(boxes: Iterable[Box]) -> list[tuple[Any, ...]]:
    """Convert boxes to plain data for another rank."""
    return [(box.key, box.shape, box.start, box.size) for box in boxes]


def from_rows(rows: Iterable[Sequence[Any]]) -> list[Box]:
    """Invert to_rows; JSON may have replaced tuples by lists."""
    return [Box(key, tuple(shape), tuple(start), tuple(size)) for key, shape, start, size in rows]


def check_tiling(boxes: Sequence[Box]) -> None:
    """Raise ValueError unless `boxes` cover each of their tensors exactly once.

    The error names the key and a region.
    """
    tensors: dict[str, list[Box]] = {}
    for box in boxes:
        tensors.setdefault(box.key, []).append(box)

    for key, pieces in tensors.items():
        shape = pieces[0].shape
        for piece in pieces:
            check_inside(piece, shape)
        missing = uncovered_boxes(Box.whole(key, shape), pieces)
        if missing:
            raise ValueError(f"{missing[0]} of shape {shape}: no piece covers this region")
        held = sum(piece.volume for piece in pieces)
        if held != prod(shape):
            raise ValueError(
                f"{key}: pieces overlap; they hold {held} elements of a tensor of {prod(shape)}"
            )


def check_inside(piece: Box, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the piece is of a tensor of this shape and lies inside it."""
    if piece.shape != shape:
        raise ValueError(f"{piece.key}: pieces disagree on the global shape: {shape} and {piece.shape}")
    if not len(piece.start) == len(piece.size) == len(shape):
        raise ValueError(f"{piece} does not lie inside its tensor of shape {shape}")
    for start, size, extent in zip(piece.start, piece.size, shape):
        if start < 0 or size < 0 or start + size > extent:
            raise ValueError(f"{piece} does not lie inside its tensor of shape {shape}")


def plan_read(want: Box, have: Sequence[Box]) -> ReadPlan:
    """Plan how to fill `want`: [(index of a stored piece, slices of that piece, slices of `want`)].

    Raises ValueError if the stored pieces leave a part of `want` uncovered, or have another global shape.
    """
    overlaps: list[tuple[int, Box, Box]] = []  # (index, piece, its overlap with `want`)
    for index, piece in enumerate(have):
        if piece.key != want.key:
            continue
        if piece.shape != want.shape:
            raise ValueError(f"{want.key}: stored with shape {piece.shape}, wanted with {want.shape}")
        common = want.intersection(piece)
        if common is not None:
            overlaps.append((index, piece, common))

    missing = uncovered_boxes(want, [piece for _, piece, _ in overlaps])
    if missing:
        raise ValueError(f"{missing[0]} of shape {want.shape}: no stored piece covers this region")

    plan: ReadPlan = []
    for index, piece, common in overlaps:
        plan.append((index, common.slices_in(piece), common.slices_in(want)))
    return plan
