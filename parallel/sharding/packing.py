"""Layout of parameters in flat buckets. Pure arithmetic, used by the buckets (bucket.py) and the planner.

    part      a unit that a stage runs and gathers as a whole: the embedding, a block, the head
    bucket    parameters of one part that are reduced, gathered and updated together
    slot      a parameter's range in its bucket; it starts at a multiple of the alignment
    shard     the equal part of a bucket that one rank owns under ZeRO; aligned like a slot
"""
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod

# In elements. Slots and shards start on a cache line in every dtype. Where blocks of elements share a scale
# (parallel/wire/compress.py), the alignment is the size of a block.
ALIGNMENT = 64
TP_PARTS = 8  # equal parts of a row, or of a vector, that cut no block of it


@dataclass(frozen=True)
class BucketLayout:
    """This rank owns elements shard_start .. shard_end - 1: all of them without ZeRO."""
    offsets: tuple[int, ...]  # the first element of each slot
    size: int  # in elements, including padding
    shard_start: int
    shard_end: int

    @property
    def shard_size(self) -> int:
        return self.shard_end - self.shard_start


NOTHING = BucketLayout(offsets=(), size=0, shard_start=0, shard_end=0)


def bucket_layout(
    sizes: Sequence[int],
    *,
    zero: int,
    num_shards: int,
    shard_index: int,
    num_replicas: int,
    is_collective: bool,
    alignment: int = ALIGNMENT,
) -> BucketLayout:
    """Return the layout of a bucket of parameters of `sizes` elements.

    num_shards ranks share the bucket under ZeRO, and this rank is number shard_index. num_replicas ranks own
    the same shard. is_collective: the backend reduces gradients; otherwise the algorithms in
    parallel/wire/algorithms.py do, which split each shard again over its replicas.
    """
    divisor = num_shards if zero and is_collective else num_shards * num_replicas

    offsets: list[int] = []
    end = 0
    for size in sizes:
        offsets.append(end)
        end += round_up(size, alignment)
    bucket_size = round_up(end, alignment * divisor)

    if not zero:
        return BucketLayout(tuple(offsets), bucket_size, 0, bucket_size)
    shard_size = bucket_size // num_shards
    shard_start = shard_size * shard_index
    return BucketLayout(tuple(offsets), bucket_size, shard_start, shard_start + shard_size)


def pack_into_buckets(sizes: Sequence[int], max_elements: int, alignment: int = ALIGNMENT) -> list[list[int]]:
    """Pack parameters of `sizes` elements, in order, into buckets of at most `max_elements`.

    Return the indices of the parameters of each bucket. A parameter is never split: one that is larger gets
    a separate bucket.
    """
    buckets: list[list[int]] = []
    filled = 0
    for index, size in enumerate(sizes):
        padded_size = round_up(size, alignment)
        if not buckets or filled + padded_size > max_elements:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += padded_size
    return buckets


def round_up(n: int, multiple: int = ALIGNMENT) -> int:
    """Round n up to a multiple of `multiple`."""
    return -(-n // multiple) * multiple


def least_loaded(sizes: Sequence[int], num_parts: int) -> list[int]:
    """Assign each of these sizes, in order, to the least loaded part (the first on a tie)."""
    loads = [0] * num_parts
    results: list[int] = []
    for size in sizes:
        part = loads.index(min(loads))
        loads[part] += size
        results.append(part)
    return results


def equal_part(size: int, part: int, num_parts: int, grain: int) -> range:
    """Return part number `part` of range(size), split at multiples of `grain` into nearly equal parts."""
    num_grains = -(-size // grain)
    first, end = (num_grains * index // num_parts for index in (part, part + 1))
    return range(min(first * grain, size), min(end * grain, size))


def block_size(shape: Sequence[int]) -> int:
    """Return the elements of a row, or of a vector, that share a scale (optim/adamw_8bit.py), for the whole
    tensor: a power of two. ZeRO cuts none, since it divides ALIGNMENT and the rows of a rank."""
    row = prod(shape[1:]) if len(shape) > 1 else shape[0]
    return gcd(row // TP_PARTS, ALIGNMENT) if row % TP_PARTS == 0 else 1
