"""Decompose a range of a flat tensor into boxes, so that flat ZeRO shards can be saved and resharded."""
from math import prod

StartAndSize = tuple[tuple[int, ...], tuple[int, ...]]  # (start, size) of a box, one number for each dim


def range_boxes(shape: tuple[int, ...], start: int, end: int) -> list[StartAndSize]:
    """Return the boxes that make up elements start .. end - 1 of a row-major tensor, in element order.

    There are at most 2n - 1 for n dims. Raises ValueError if the range does not lie inside the tensor.
    """
    if not 0 <= start <= end <= prod(shape):
        raise ValueError(f"elements {start}..{end} do not lie inside a tensor of shape {shape}")
    if start == end:
        return []
    if not shape:
        return [((), ())]
    if len(shape) == 1:
        return [((start,), (end - start,))]

    row_size = prod(shape[1:])
    first_row, first_column = divmod(start, row_size)
    last_row, last_column = divmod(end, row_size)
    if first_row == last_row:
        return boxes_in_row(shape, first_row, first_column, last_column)

    # a part of the first row, all rows between, a part of the last row
    boxes: list[StartAndSize] = []
    if first_column:
        boxes += boxes_in_row(shape, first_row, first_column, row_size)
        first_row += 1
    if last_row > first_row:
        inner_start = (0,) * (len(shape) - 1)
        rows_start = (first_row, *inner_start)
        rows_size = (last_row - first_row, *shape[1:])
        boxes.append((rows_start, rows_size))
    boxes += boxes_in_row(shape, last_row, 0, last_column)
    return boxes


def boxes_in_row(shape: tuple[int, ...], row: int, start: int, end: int) -> list[StartAndSize]:
    """Return the boxes of elements start .. end - 1 of one row, a tensor with one dim less."""
    boxes: list[StartAndSize] = []
    for inner_start, inner_size in range_boxes(shape[1:], start, end):
        box_start = (row, *inner_start)
        box_size = (1, *inner_size)
        boxes.append((box_start, box_size))
    return boxes
