"""AdamW whose moments have 8 bits an element (arXiv 2110.02861; optim.states 8bit): codes, and a scale for
each block of at most 64 elements. Masters stay in fp32.

A step decodes the moments of a tensor, updates them and the weights in fp32, and encodes them again, so
weights see the moments of the step before rounding (as in the paper).

A block lies in one row of a tensor as all ranks together hold it, and no rank's part of it ends inside of a
block: so every rank scales alone, and all layouts round alike. The columns of a block are the largest
power of two, at most 64, that divides an eighth of the row (of a vector: of its length). tp, which divides
rows into equal parts, then cuts none up to 8 ranks, and a layout that would is refused; ZeRO cuts at
multiples of 64 elements (parallel/sharding/packing.py). The paper has blocks of 2048 elements and 32 bits for
embeddings, where tokens of very different frequency share a block. Here a block is of one token.
"""
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from config import ConfigError, OptimConfig
from kernels.adam import AdamWStep, adamw_reference
from kernels.dynamic_codes import code_book, decode, encode
from optim.adamw import AdamW
from parallel.sharding.boxes import Box
from parallel.sharding.bucket import Bucket
from parallel.sharding.packing import block_size
from parallel.sharding.views import get_slot_boxes
from parallel.topology.mesh import Mesh

MOMENTS = {"m": True, "v": False}  # {moment: whether it has a sign}


class BlockedPart(NamedTuple):
    """Elements of the owned shard of a bucket that are one box of a tensor.

    blocks: theirs among the bucket's scales. scale_box: these as a part of all scales of the tensor.
    is_counted: no other rank counts them.
    """
    elements: slice
    blocks: slice
    block: int
    scale_box: Box
    is_counted: bool


class AdamW8bit(AdamW):
    """AdamW for all buckets. codes, scales: {moment: a flat tensor for each bucket}."""
    MOMENTS = ()  # none of them is a flat tensor in the dtype of the masters

    def __init__(self, cfg: OptimConfig, buckets: list[Bucket], mesh: Mesh) -> None:
        super().__init__(cfg, buckets, mesh)
        self.parts = [blocked_parts(bucket) for bucket in self.buckets]
        self.codes: dict[str, list[Tensor]] = {}
        self.scales: dict[str, list[Tensor]] = {}
        for moment, signed in MOMENTS.items():
            self.codes[moment], self.scales[moment] = [], []
            for bucket, parts in zip(self.buckets, self.parts):
                master = bucket.weights.master
                zero = code_book(signed, master.dtype, master.device).zero
                self.codes[moment].append(torch.full_like(master, zero, dtype=torch.uint8))
                self.scales[moment].append(master.new_zeros(parts[-1].blocks.stop if parts else 0))

    def state(self) -> dict[str, list[Tensor]]:
        """Return the codes; `boxes` has the scales."""
        return {f"adam_{moment}": flats for moment, flats in self.codes.items()}

    def boxes(self, each_once: bool = False) -> list[tuple[Box, Tensor]]:
        """Return the scales. Checks of replicas compare codes and masters: a scale that differs shows in the
        masters of the next step."""
        results: list[tuple[Box, Tensor]] = []
        for moment, flats in self.scales.items():
            for flat, parts in zip(flats, self.parts):
                for part in parts:
                    if part.is_counted or not each_once:
                        box = part.scale_box
                        box = Box(f"{box.key}@adam_scale_{moment}", box.shape, box.start, box.size)
                        results.append((box, flat[part.blocks].view(box.size)))
        return results

    def update_range(self, index: int, elements: slice, numbers: AdamWStep) -> None:
        weights = self.buckets[index].weights
        for part in self.parts[index]:
            if elements.start <= part.elements.start < elements.stop:
                self.update_part(index, part, numbers)
        if weights.local is not weights.master:
            weights.local[elements].copy_(weights.master[elements])

    def update_part(self, index: int, part: BlockedPart, numbers: AdamWStep) -> None:
        """Update one box of a tensor: its masters and moments."""
        bucket = self.buckets[index]
        stored = [(self.codes[m][index][part.elements], self.scales[m][index][part.blocks]) for m in MOMENTS]
        first, second = (decode(*state, signed) for state, signed in zip(stored, MOMENTS.values()))
        grad = bucket.grads.local[part.elements]
        adamw_reference(bucket.weights.master[part.elements], grad, first, second, numbers)
        for state, wide, signed in zip(stored, (first, second), MOMENTS.values()):
            for old, new in zip(state, encode(wide, part.block, signed)):
                old.copy_(torch.where(numbers.is_good, new, old))


# ---- blocks ------------------------------------------------------------------------------------------------


def blocked_parts(bucket: Bucket) -> list[BlockedPart]:
    """Return the boxes of the tensors in the owned shard, in order. Raises ConfigError for a box that ends
    inside of a block."""
    parts: list[BlockedPart] = []
    first_block = 0
    master = bucket.weights.master
    for slot in bucket.slots:
        is_counted = slot.counted_in_norm and bucket.owners.index == 0
        for box, values in get_slot_boxes(bucket, slot, master):
            start = int(values.storage_offset()) - int(master.storage_offset())
            elements = slice(start, start + box.volume)
            scale_box = box_of_scales(box)
            blocks = slice(first_block, first_block + scale_box.volume)
            first_block = blocks.stop
            block = block_size(box.shape)
            parts.append(BlockedPart(elements, blocks, block, scale_box, is_counted))
    return parts


def box_of_scales(box: Box) -> Box:
    """Return the place of a box's scales among those of its tensor: [rows, blocks of a row], of a vector
    [blocks]. Raises ConfigError for a box that ends inside of a block."""
    block = block_size(box.shape)
    inner, rows = prod(box.shape[2:]), len(box.shape) > 1
    columns = [dims[1] * inner if rows else dims[0] for dims in (box.shape, box.start, box.size)]
    if any(number % block for number in columns) or box.size[2:] != box.shape[2:]:
        raise ConfigError(
            f"optim.states: 8bit has a scale for each {block} columns of a row, and a rank would hold {box}, "
            "which ends between two; use fewer ranks of parallel.tp or parallel.etp, or optim.states fp32"
        )
    blocks = [number // block for number in columns]
    shape, start, size = ((dims[0], n) if rows else (n,) for dims, n in zip(
        (box.shape, box.start, box.size), blocks
    ))
    return Box(box.key, shape, start, size)
