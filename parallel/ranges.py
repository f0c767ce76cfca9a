"""A flat ZeRO shard is a run of elements, and a run is at most 2 * ndim - 1 boxes: so flat buffers reshard too."""
from math import prod


def range_boxes(shape: tuple[int, ...], a: int, b: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """[(start, size)] of the boxes that make up elements a..b (b excluded) of a row-major tensor, in element order.

    Raises ValueError where a..b does not lie inside the tensor.
    """
    if not 0 <= a <= b <= prod(shape):
        raise ValueError(f"elements {a}..{b} do not lie inside a tensor of shape {shape}")
    if a == b:
        return []
    if len(shape) < 2:
        return [((a,), (b - a,))] if shape else [((), ())]
    row = prod(shape[1:])
    (r0, c0), (r1, c1) = divmod(a, row), divmod(b, row)
    if r0 == r1:
        return part_of_row(shape, r0, c0, c1)
    first = r0 + (c0 > 0)  # the first full row
    head = part_of_row(shape, r0, c0, row) if c0 else []
    body = [((first,) + (0,) * (len(shape) - 1), (r1 - first, *shape[1:]))] if r1 > first else []
    return head + body + part_of_row(shape, r1, 0, c1)


def part_of_row(shape: tuple[int, ...], r: int, a: int, b: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The boxes of elements a..b of row r: those of one dim less, with r in front."""
    return [((r, *start), (1, *size)) for start, size in range_boxes(shape[1:], a, b)]
