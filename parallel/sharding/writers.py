"""Which rank writes what several ranks hold alike, so that a checkpoint has every element once and no rank
writes far more than the others. Every rank works it out by itself, and all come to the same.

- Data-parallel replicas own the same flat shard: each writes an equal range of it, and of each moment. The
  ranges of a bucket are turned by its number, so that small buckets do not all fall to one rank.
- A parameter that all tp ranks hold whole is written by one of them, with its moments: one after the other
  goes to the rank that has least.
- A tied table is written by the first end of the pipeline.

What a few numbers make up (the states of routers) is written by the first rank of those that have it.
"""
from dataclasses import dataclass

from parallel.sharding.bucket import Bucket
from parallel.sharding.packing import equal_part, least_loaded
from parallel.sharding.slots import Slot
from parallel.topology.mesh import Mesh
from parallel.wire.comm import Group

GRAIN = 256  # elements: ranges begin at its multiples, so that small tensors are seldom cut


@dataclass(frozen=True)
class WriteShare:
    """What this rank writes of a bucket.

    elements: of the owned shard. slots: the parameters; of the others, another tp rank or the other end of
    the pipeline writes them.
    """
    elements: range
    slots: tuple[Slot, ...]


def write_shares(buckets: list[Bucket], mesh: Mesh) -> list[WriteShare]:
    """The share of this rank in each bucket."""
    replicated: list[Slot] = []
    for bucket in buckets:
        replicated += [slot for slot in bucket.slots if is_whole_on_tp_ranks(slot)]
    tp_ranks = least_loaded([slot.numel for slot in replicated], mesh.tp.size)
    others = {id(slot) for slot, rank in zip(replicated, tp_ranks) if rank != mesh.tp.index}

    shares: list[WriteShare] = []
    for number, bucket in enumerate(buckets):
        slots = [slot for slot in bucket.slots if id(slot) not in others and is_first_end(slot, mesh)]
        shares.append(WriteShare(replica_range(bucket, number), tuple(slots)))
    return shares


def replica_range(bucket: Bucket, number: int, of_rank: int | None = None) -> range:
    """The elements of the owned shard that one of its replicas writes, and reads for all of them.

    number: of the bucket. of_rank: the replica's index in copies_of(bucket); None: this rank.
    """
    group = copies_of(bucket)
    index = group.index if of_rank is None else of_rank
    part = (index + number) % group.size
    return equal_part(bucket.shard_end - bucket.shard_start, part, group.size, GRAIN)


def copies_of(bucket: Bucket) -> Group:
    """The ranks that own the same shard of the bucket."""
    return bucket.groups.replica if bucket.zero else bucket.groups.reduce


def is_whole_on_tp_ranks(slot: Slot) -> bool:
    """Whether every tp rank holds the parameter. That of an expert is held by one rank."""
    return slot.param.spec.is_replicated_over_tp and not slot.param.spec.is_expert


def is_first_end(slot: Slot, mesh: Mesh) -> bool:
    """False for a table that the first stage of the pipeline holds too, and writes."""
    return "embedding_ends" not in slot.param.spec.partial_over or mesh.pp.index == 0
