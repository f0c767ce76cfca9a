"""Split checkpoint I/O over replicas, so that every element is saved once and no rank writes or reads far
more than the others. Every rank computes the same split locally.

- Data-parallel replicas own the same flat shard: each writes an equal range of it, and of each moment. The
  ranges of a bucket are rotated by its index, so that small buckets do not all fall to one rank.
- A parameter that all tp ranks hold in full is written by one of them, with its moments: each goes in turn to
  the least loaded rank.
- A tied table is written by the first end of the pipeline.
- On resume, up to MAX_READERS of the replicas read an equal range each and broadcast it to all of them.

Small state (of routers) is written by the first rank of those that hold it, and read by all.
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

MIN_SHARE = 1 << 20  # minimum elements that a replica writes or reads, if any
SHARE_ALIGNMENT = 256  # elements: ranges start at multiples of it, so that small tensors are rarely split
MAX_READERS = 8  # of the replicas of a shard: more would send many small messages
STAGED_BYTES = 64 << 20  # bytes of a tensor in host memory that are staged through the device at once


@dataclass(frozen=True)
class Share:
    """This rank's share of a bucket to write or read: elements of its shard, and parameters."""
    elements: range
    slots: tuple[Slot, ...]


def write_shares(buckets: list[Bucket], mesh: Mesh) -> list[Share]:
    """Return the share that this rank writes of each bucket."""
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
    """Return the share that this rank reads of each bucket; broadcast_to_replicas delivers the rest."""
    shares: list[Share] = []
    for number, bucket in enumerate(buckets):
        shares.append(Share(read_range(bucket, number, bucket.owners.index), bucket.slots))
    return shares


def broadcast_to_replicas(bucket: Bucket, number: int, flats: Iterable[Tensor]) -> None:
    """Broadcast what each replica has read of a shard to all of them. Collective in bucket.owners.

    number is the bucket's index. flats are masters and moments over the owned shard, on the device or host.
    """
    # A separate ledger: the one of a step is compared with closed forms.
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
    """Broadcast a flat tensor, staged through the device if the group communicates there."""
    for part in x.view(torch.uint8).split(STAGED_BYTES):
        if x.device == device:
            comm.broadcast(part, group, source)
        else:
            part.copy_(comm.broadcast(part.to(device), group, source))


def replica_range(bucket: Bucket, number: int) -> range:
    """Return the elements of the owned shard that this replica writes, for bucket number `number`."""
    return part_of_replica(bucket, number, bucket.owners.index, bucket.owners.size)


def read_range(bucket: Bucket, number: int, replica: int) -> range:
    """Return the elements of the owned shard that a replica reads for all; empty if it reads none."""
    return part_of_replica(bucket, number, replica, MAX_READERS)


def part_of_replica(bucket: Bucket, number: int, replica: int, most: int) -> range:
    """Return the part of the owned shard that one of at most `most` replicas writes or reads.

    Each part has at least MIN_SHARE elements, since a part that is written is a row of the index.
    Which replicas have one is rotated by bucket index.
    """
    replicas = bucket.owners.size
    size = bucket.shard_end - bucket.shard_start
    num_parts = min(replicas, most, max(1, size // MIN_SHARE))
    turn = (replica + number) % replicas
    return equal_part(size, turn, num_parts, SHARE_ALIGNMENT) if turn < num_parts else range(0)


def is_whole_on_tp_ranks(slot: Slot) -> bool:
    """Whether every tp rank holds the parameter in full. An expert's is held by one rank."""
    return slot.param.spec.is_replicated_over_tp and not slot.param.spec.is_expert
