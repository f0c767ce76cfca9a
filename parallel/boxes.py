"""A tensor's place in the world: which box of which global tensor a rank holds. Reads and writes are box arithmetic.

A Box is a rectangle of a global tensor: `start` and `size` in elements, one number a dim. Keys are global names and
shapes are global shapes, so a stored box means the same under every parallel layout, and resharding from any layout to
any other is `plan_read`. Pure integers: no torch, no communication.
"""
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Box:
    key: str  # global name, independent of every parallel degree
    shape: tuple[int, ...]  # of the whole tensor
    start: tuple[int, ...]  # where this piece begins
    size: tuple[int, ...]  # and how large it is

    @staticmethod
    def whole(key: str, shape: Sequence[int]) -> "Box":
        return Box(key, tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def volume(self) -> int:
        """Elements in this box."""
        return prod(self.size)

    def meet(self, other: "Box") -> "Box | None":
        """What both cover; None where they are disjoint or one is empty. Both must be of one tensor."""
        lo = tuple(map(max, self.start, other.start))
        hi = tuple(min(a + n, b + k) for a, n, b, k in zip(self.start, self.size, other.start, other.size))
        if any(a >= b for a, b in zip(lo, hi)):
            return None
        return Box(self.key, self.shape, lo, tuple(b - a for a, b in zip(lo, hi)))

    def within(self, other: "Box") -> tuple[slice, ...]:
        """The slices of `other`'s local tensor that this box covers."""
        return tuple(slice(a - b, a - b + n) for a, b, n in zip(self.start, other.start, self.size))

    def minus(self, other: "Box") -> list["Box"]:
        """What this box covers and `other` does not: at most 2 * ndim disjoint boxes."""
        hit = self.meet(other)
        if hit is None:
            return [self]
        rest, lo, size = [], list(self.start), list(self.size)
        for dim, (a, n) in enumerate(zip(hit.start, hit.size)):  # cut the slabs below and above the hit off, dim by dim
            for x, y in ((lo[dim], a), (a + n, lo[dim] + size[dim])):
                if x < y:
                    start, extent = (*lo[:dim], x, *lo[dim + 1:]), (*size[:dim], y - x, *size[dim + 1:])
                    rest.append(Box(self.key, self.shape, start, extent))
            lo[dim], size[dim] = a, n
        return rest

    def __str__(self) -> str:
        cut = ", ".join(f"{a}:{a + n}" for a, n in zip(self.start, self.size))
        return f"{self.key}[{cut}]"


def holes(want: Box, have: Sequence[Box]) -> list[Box]:
    """The parts of `want` that no box of `have` covers (all of one tensor). Empty: it is covered completely."""
    rest = [want] if want.volume else []
    for piece in sorted(have, key=lambda b: b.start):  # in order, the uncovered rest stays a few boxes: linear in have
        rest = [part for box in rest for part in box.minus(piece)]
    return rest


def check_tiling(boxes: Sequence[Box]) -> None:
    """Every tensor named in `boxes` is covered, each element exactly once. Raises ValueError naming key and region."""
    tensors: dict[str, list[Box]] = {}
    for box in boxes:
        tensors.setdefault(box.key, []).append(box)
    for key, pieces in tensors.items():
        shape = pieces[0].shape
        for b in pieces:
            if b.shape != shape:
                raise ValueError(f"{key}: pieces disagree on the global shape: {shape} and {b.shape}")
            inside = all(0 <= a and 0 <= n and a + n <= s for a, n, s in zip(b.start, b.size, shape))
            if not len(b.start) == len(b.size) == len(shape) or not inside:
                raise ValueError(f"{b} does not lie inside its tensor of shape {shape}")
        if missing := holes(Box.whole(key, shape), pieces):
            raise ValueError(f"{missing[0]} of shape {shape}: no piece covers this region")
        given = sum(b.volume for b in pieces)
        if given != prod(shape):
            raise ValueError(f"{key}: pieces overlap; they hold {given} elements of a tensor of {prod(shape)}")


def plan_read(want: Box, have: Sequence[Box]) -> list[tuple[int, tuple[slice, ...], tuple[slice, ...]]]:
    """[(which stored piece, slices of it, slices of mine)]: the whole of resharding.

    Raises ValueError where the stored pieces leave a hole in `want`, or have it at another global shape.
    """
    mine = [(j, h) for j, h in enumerate(have) if h.key == want.key]
    for _, h in mine:
        if h.shape != want.shape:
            raise ValueError(f"{want.key}: stored with shape {h.shape}, wanted with {want.shape}")
    plan = [(j, h, m) for j, h in mine if (m := want.meet(h))]
    if missing := holes(want, [h for _, h, _ in plan]):
        raise ValueError(f"{missing[0]} of shape {want.shape}: no stored piece covers this region")
    return [(j, m.within(h), m.within(want)) for j, h, m in plan]
