"""How parameters lie in flat buckets: pure arithmetic, read by the real buckets (parallel/params.py) and by the planner.

    part      what a stage runs at once: the embedding, a block, the head
    bucket    parameters of one part that are reduced, gathered and updated together: at most `cap` elements, unless a single
              parameter is larger (a parameter is never cut)
    slot      a parameter's place in its bucket, from a multiple of ALIGN
    share     what one rank owns of a bucket under ZeRO: an equal part of it, from a multiple of ALIGN
"""
from collections.abc import Sequence

ALIGN = 64  # elements: a slot, and a share, starts on a cache line in every dtype; where blocks of it have scales, at a block


def aligned(n: int, to: int = ALIGN) -> int:
    """n rounded up to a multiple of `to`."""
    return -(-n // to) * to


def pack(sizes: Sequence[int], cap: int, align: int = ALIGN) -> list[list[int]]:
    """Indexes of parameters of these sizes, in order -> those of each bucket."""
    out: list[list[int]] = []
    filled = 0
    for i, n in enumerate(sizes):
        if not out or filled + aligned(n, align) > cap:
            out.append([])
            filled = 0
        out[-1].append(i)
        filled += aligned(n, align)
    return out


def shares(zero: int, collective: bool, shards: int, replicas: int) -> int:
    """How many equal shares a bucket must fall into: one for each of the `shards` ranks that share it. Their
    replicas divide each share once more, unless they sum it by a `collective` of the backend."""
    return shards if zero and collective else shards * replicas


def place(sizes: Sequence[int], shards: int, align: int = ALIGN) -> tuple[list[int], int]:
    """(offset of each slot, size of the bucket with padding: `shards` equal shares)."""
    offsets, at = [], 0
    for n in sizes:
        offsets.append(at)
        at += aligned(n, align)
    return offsets, aligned(at, align * shards)
