"""Which rank writes and reads what several ranks hold alike, so that a checkpoint has every element once, and
no rank writes or reads far more than the others. Every rank works it out by itself; all come to the same.

- Data-parallel replicas own the same flat shard: each writes an equal range of it, and of each moment. The
  ranges of a bucket are turned by its number, so that small buckets do not all fall to one rank.
- A parameter that all tp ranks hold whole is written by one of them, with its moments: one after the other
  goes to the rank that has least.
- A tied table is written by the first end of the pipeline.
- At a resume up to MAX_READERS of the replicas read an equal range each, and pass it on to all of them.

What a few numbers make up (the states of routers) is written by the first rank of those that have it, and
read by all.
"""
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parallel.sharding.bucket import Bucket
from parallel.sharding.packing import equal_part, least_loaded
from parallel.sharding.slots import Slot
from parallel.topology.mesh import Mesh
from parallel.wire import comm
from parallel.wire.comm import Group

LEAST_SHARE = 1 << 20  # elements that a replica writes or reads, if it does any
GRAIN = 256  # elements: ranges begin at its multiples, so that small tensors are seldom cut
MAX_READERS = 8  # of the replicas of a shard: more would send many small messages
STAGED_BYTES = 64 << 20  # of a tensor in host memory that pass through the device at once


@dataclass(frozen=True)
class Share:
    """What this rank writes or reads of a bucket: these elements of its shard, of these parameters."""
    elements: range
    slots: tuple[Slot, ...]


def write_shares(buckets: list[Bucket], mesh: Mesh) -> list[Share]:
    """The share of this rank in each bucket."""
    replicated: list[Slot] = []
    for bucket in buckets:
        replicated += [slot for slot in bucket.slots if is_whole_on_tp_ranks(slot)]
    tp_ranks = least_loaded([slot.numel for slot in replicated], mesh.tp.size)
    others = {id(slot) for slot, rank in zip(replicated, tp_ranks) if rank != mesh.tp.index}

    shares: list[Share] = []
    for number, bucket in enumerate(buckets):
        own = [slot for slot in bucket.slots if id(slot) not in others]
        slots = [slot for slot in own if slot.param.spec.is_first_end(mesh.pp.index)]
        shares.append(Share(replica_range(bucket, number), tuple(slots)))
    return shares


def read_shares(buckets: list[Bucket]) -> list[Share]:
    """What this rank reads of each bucket; pass_on brings it the rest."""
    shares: list[Share] = []
    for number, bucket in enumerate(buckets):
        shares.append(Share(read_range(bucket, number, bucket.owners.index), bucket.slots))
    return shares


def pass_on(bucket: Bucket, number: int, flats: Iterable[Tensor]) -> None:
    """Brings every replica of a shard what each of them has read of it. Collective in bucket.owners.

    number: of the bucket. flats: masters and moments over the owned shard, on the device or in host memory.
    """
    # A ledger of its own: what a step sends is compared with closed forms.
    group = replace(bucket.owners, ledger=Counter())
    if group.size == 1:
        return
    device = bucket.weights.local.device
    for flat in flats:
        for reader in range(group.size):
            part = read_range(bucket, number, reader)
            if part:
                broadcast_through(flat[part.start:part.stop], group, reader, device)


def broadcast_through(x: Tensor, group: Group, source: int, device: torch.device) -> None:
    """comm.broadcast of a flat tensor, through the device where the group's connections are."""
    for part in x.view(torch.uint8).split(STAGED_BYTES):
        if x.device == device:
            comm.broadcast(part, group, source)
        else:
            part.copy_(comm.broadcast(part.to(device), group, source))


def replica_range(bucket: Bucket, number: int) -> range:
    """The elements of the owned shard that this replica of it writes. number: of the bucket."""
    return part_of_replica(bucket, number, bucket.owners.index, bucket.owners.size)


def read_range(bucket: Bucket, number: int, replica: int) -> range:
    """The elements of the owned shard that a replica of it reads for all; none, if others do."""
    return part_of_replica(bucket, number, replica, MAX_READERS)


def part_of_replica(bucket: Bucket, number: int, replica: int, most: int) -> range:
    """The part of the owned shard that one of its replicas writes or reads. most: replicas that have a part.

    So many have one as there are LEAST_SHARE elements for each: a part that is written is a row of the index.
    Which ones they are is turned by the number of the bucket.
    """
    replicas = bucket.owners.size
    size = bucket.shard_end - bucket.shard_start
    num_parts = min(replicas, most, max(1, size // LEAST_SHARE))
    turn = (replica + number) % replicas
    return equal_part(size, turn, num_parts, GRAIN) if turn < num_parts else range(0)


def is_whole_on_tp_ranks(slot: Slot) -> bool:
    """Whether every tp rank holds the parameter. That of an expert is held by one rank."""
    return slot.param.spec.is_replicated_over_tp and not slot.param.spec.is_expert
