"""Views of the elements that this rank owns of a bucket, for the optimizer, clipping and checkpoints."""
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from operator import add
from typing import NamedTuple

from torch import Tensor

from kernels.rounding import ElementIndex
from parallel.sharding.boxes import Box
from parallel.sharding.bucket import Bucket
from parallel.sharding.ranges import range_boxes
from parallel.sharding.slots import Slot

Moments = Mapping[str, Sequence[Tensor | None]]  # {name: a flat tensor for each bucket that trains, or None}


class TensorRange(NamedTuple):
    """Elements start .. end - 1 of the owned shard, and where they lie in the global tensor `key`."""
    start: int
    end: int
    key: str
    index: ElementIndex


def state_flats(bucket: Bucket, position: int, moments: Moments) -> Iterator[tuple[str, Tensor]]:
    """Yield (suffix of its keys, flat tensor) for the master and each moment of a bucket.

    position: of the bucket in `moments`. A frozen bucket comes after all that are there.
    """
    yield "", bucket.weights.master
    if not bucket.trains:
        return
    for name, by_bucket in moments.items():
        flat = by_bucket[position]
        if flat is not None:
            yield f"@{name}", flat


def get_boxes(bucket: Bucket, flat: Tensor, each_once: bool = False) -> list[tuple[Box, Tensor]]:
    """Return [(box, its elements)] of a flat tensor over the owned shard: masters, gradients or moments.

    The elements are views. A tensor of n dims yields at most 2n - 1 boxes. each_once skips elements that
    another rank holds and counts, so that all ranks together return every element once.
    """
    results: list[tuple[Box, Tensor]] = []
    for slot in bucket.slots:
        if not each_once or (slot.counted_in_norm and bucket.owners.index == 0):
            results += get_slot_boxes(bucket, slot, flat)
    return results


def boxes_within(
    bucket: Bucket, flat: Tensor, slots: Sequence[Slot], within: range
) -> list[tuple[Box, Tensor]]:
    """Return get_boxes, restricted to these parameters and these elements of the owned shard."""
    results: list[tuple[Box, Tensor]] = []
    for slot in slots:
        results += get_slot_boxes(bucket, slot, flat, within)
    return results


def get_slot_boxes(
    bucket: Bucket, slot: Slot, flat: Tensor, within: range | None = None
) -> list[tuple[Box, Tensor]]:
    """Return [(box, its elements)] of one parameter in a flat tensor over the owned shard.

    `within` restricts the boxes to a range of the owned shard.
    """
    results: list[tuple[Box, Tensor]] = []
    offset = slot.offset  # offset of the spec's box in the bucket
    for whole in slot.param.spec.boxes:
        start, end = bucket.owned_part(offset, whole.volume)
        if within is not None:
            start, end = max(start, within.start), min(end, within.stop)
        if start < end:
            first = start + bucket.shard_start - offset  # first owned element, relative to the box
            last = first + end - start
            for inner_start, size in range_boxes(whole.size, first, last):
                global_start = tuple(map(add, whole.start, inner_start))
                box = Box(whole.key, whole.shape, global_start, size)
                elements = flat[start:start + box.volume].view(size)
                results.append((box, elements))
                start += box.volume
        offset += whole.volume
    return results


def tensor_ranges(bucket: Bucket) -> list[TensorRange]:
    """Map the owned shard to global tensors, in order (for stochastic rounding).

    Raises ValueError for a parameter that is sharded along more than two dims.
    """
    ranges: list[TensorRange] = []
    master = bucket.weights.master
    for box, part in get_boxes(bucket, master):
        start = int(part.storage_offset()) - int(master.storage_offset())
        end = start + box.volume
        ranges.append(TensorRange(start, end, box.key, element_index(box)))
    return ranges


def element_index(box: Box) -> ElementIndex:
    """Return the elements of its tensor that a box covers, by row and column.

    Raises ValueError for a box that is sharded along more than two dims.
    """
    if box.size[2:] != box.shape[2:]:
        raise ValueError(
            f"{box}: is divided along more than two dims, and its elements are rounded by row and column"
        )
    row_size = prod(box.shape[1:])
    base = box.start[0] * row_size
    if len(box.shape) > 1:
        base += box.start[1] * prod(box.shape[2:])
    width = row_size if box.size[0] == 1 else prod(box.size[1:])
    return ElementIndex(salt=0, base=base, width=width, stride=row_size)
