"""Check that replicas are still identical: checksums of the state, at an interval
(checkpoint.check_replicas) and before a checkpoint is saved.

Otherwise a flipped bit in one rank's memory, or a NaN in its reduced gradient only, goes unnoticed: the norm
uses the first replica's numbers, and a checkpoint stores a range of each. Megatron-LM also compares hashes of
weights (its --check-weight-hash-across-dp-replicas-interval). Compared bit by bit are:
- masters, moments and averages over the ranks that own the same shard;
- full weights in the compute dtype over the data-parallel ranks (ZeRO-0, 1 and 2);
- masters, moments and averages of parameters that every tp rank holds in full, over tp (norms, routers,
  biases);
- the same for a tied table, over the two ends of the pipeline;
- the states of routers over the ranks with the same layers.

Cost: each number is read once, and 8 bytes per flat tensor and rank are gathered. Only on a mismatch are the
parameters compared one by one, and the first differing element is found by bisection.

Not compared: PowerSGD's state. On GPUs, over tp: parameters whose gradient each tp rank computes redundantly
(norms without sequence parallelism). NCCL may add the gradients of two tp ranks in a different order, and a
healthy run then differs in the last bit.
"""
import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from parallel.sharding.bucket import Bucket
from parallel.sharding.slots import Slot
from parallel.sharding.views import Moments, state_flats
from parallel.topology.mesh import Mesh
from parallel.wire import comm
from parallel.wire.checksum import checksum
from parallel.wire.comm import Group

MAX_NAMED = 4  # maximum number of differences, and of ranks, in a message


class ReplicaMismatch(RuntimeError):
    """Ranks that must hold the same numbers differ. The message names ranks and parameters. Exit code 80."""

    exit_code = 80


class Copy(NamedTuple):
    """A tensor that is identical on all ranks of a group."""

    name: str  # for messages: norm.weight@m
    tensor: Tensor


class FlatCopy(NamedTuple):
    """Copies that are compared together first.

    whole is the flat tensor that contains the copies. With None, only the copies are compared.
    """

    whole: Tensor | None
    copies: list[Copy]


@torch.no_grad()
def check_replicas(
    buckets: list[Bucket], moments: Moments, mesh: Mesh, more: Sequence[tuple[str, Tensor]] = ()
) -> None:
    """Raise ReplicaMismatch on all ranks of every group whose ranks hold different numbers. Collective.

    The weight all-gathers must have finished. `more` lists (name, tensor) that are identical on all ranks
    with the same layers.
    """
    differences: list[str] = []
    device = buckets[0].weights.local.device
    for group, flats in shared_by_group(buckets, moments, mesh, more, device):
        if group.size > 1 and flats:
            # a separate ledger: the one of a step is compared with closed forms
            differences += compare(dataclasses.replace(group, ledger=Counter()), flats, device)
    if differences:
        named = "; ".join(differences[:MAX_NAMED])
        more_text = f"; and {len(differences) - MAX_NAMED} more" if len(differences) > MAX_NAMED else ""
        step = comm.at_step(mesh.world.activity.step)
        raise ReplicaMismatch(f"replicas differ{step}: {named}{more_text}")


def shared_by_group(
    buckets: list[Bucket],
    moments: Moments,
    mesh: Mesh,
    more: Sequence[tuple[str, Tensor]],
    device: torch.device,
) -> Iterator[tuple[Group, list[FlatCopy]]]:
    """Yield (group, tensors identical on its ranks), in the same order on all ranks of each group."""
    for is_expert in (False, True):
        kind = [(number, bucket) for number, bucket in enumerate(buckets) if bucket.is_expert == is_expert]
        if not kind:
            continue
        first = kind[0][1]
        owned: list[FlatCopy] = []
        full: list[FlatCopy] = []
        for number, bucket in kind:
            for suffix, flat in state_flats(bucket, number, moments):
                owned.append(FlatCopy(flat, owned_slices(bucket, bucket.slots, flat, suffix)))
            weights = bucket.weights.full
            if bucket.zero < 3 and weights is not None and not is_same_memory(weights, bucket.weights.master):
                copies = [Copy(get_name(slot), slot.view_in(weights)) for slot in bucket.slots]
                full.append(FlatCopy(weights, copies))
        yield first.owners, owned
        yield first.groups.reduce, full

    sums_alone = device.type != "cpu"
    whole = [slots_whole_on_tp_ranks(bucket, sums_alone) for bucket in buckets]
    yield mesh.tp, get_parts(buckets, moments, whole)
    if mesh.embedding_ends is not None:
        tied = [[slot for slot in bucket.slots if slot.param.spec.is_at_both_ends] for bucket in buckets]
        yield mesh.embedding_ends, get_parts(buckets, moments, tied)
    if more:
        yield mesh.pipeline_stage, [FlatCopy(None, [Copy(name, tensor)]) for name, tensor in more]


def is_same_memory(x: Tensor, y: Tensor) -> bool:
    return x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.dtype == y.dtype


def slots_whole_on_tp_ranks(bucket: Bucket, sums_alone: bool) -> list[Slot]:
    """Return a bucket's parameters that every tp rank holds in full. Experts are held by one rank each.

    sums_alone restricts them to those whose gradient is summed over tp, after which the bits are equal.
    """
    results: list[Slot] = []
    for slot in bucket.slots:
        spec = slot.param.spec
        is_summed = "tp" in spec.partial_over or not sums_alone
        if spec.is_replicated_over_tp and not spec.is_expert and is_summed:
            results.append(slot)
    return results


def get_parts(buckets: list[Bucket], moments: Moments, slots: list[list[Slot]]) -> list[FlatCopy]:
    """Return the owned elements of some parameters, as one FlatCopy for each bucket."""
    results: list[FlatCopy] = []
    for number, bucket in enumerate(buckets):
        copies: list[Copy] = []
        for suffix, flat in state_flats(bucket, number, moments):
            copies += owned_slices(bucket, slots[number], flat, suffix)
        if slots[number]:
            results.append(FlatCopy(None, copies))
    return results


def owned_slices(bucket: Bucket, slots: Sequence[Slot], flat: Tensor, suffix: str) -> list[Copy]:
    """Return this rank's part of each parameter: empty where it owns none, so all ranks list the same."""
    results: list[Copy] = []
    for slot in slots:
        start, end = bucket.owned_part(slot.offset, slot.numel)
        owned = flat[start:end] if start < end else flat[:0]
        results.append(Copy(get_name(slot) + suffix, owned))
    return results


def get_name(slot: Slot) -> str:
    """Join the keys of a parameter; for a merged one, those of its first parts."""
    keys = list(dict.fromkeys(box.key for box in slot.param.spec.boxes))
    more = "+..." if len(keys) > MAX_NAMED else ""
    return "+".join(keys[:MAX_NAMED]) + more


# ---- the comparison ----------------------------------------------------------------------------------------


def compare(group: Group, flats: list[FlatCopy], device: torch.device) -> list[str]:
    """Describe what differs over the group, identically on all its ranks. Collective."""
    sums = [compute_sum(flat) for flat in flats]
    by_rank = gather_sums(sums, group, device)
    different = [flat for position, flat in enumerate(flats) if len({row[position] for row in by_rank}) > 1]
    if not different:
        return []

    copies = [copy for flat in different for copy in flat.copies]
    by_rank = gather_sums([checksum(copy.tensor) for copy in copies], group, device)
    results: list[str] = []
    for position, copy in enumerate(copies):
        column = [row[position] for row in by_rank]
        if len(set(column)) > 1:
            values = first_difference(copy.tensor, group, device) if len(results) < MAX_NAMED else ""
            results.append(f"{copy.name} {who_differs(column, group)}{values}")
    return results  # empty if only the padding differs, which nobody reads


def gather_sums(sums: list[Tensor], group: Group, device: torch.device) -> list[list[int]]:
    """Gather the numbers of each rank of the group. Collective."""
    own = torch.stack([value.to(device) for value in sums])
    rows = comm.all_gather(own, group).view(group.size, len(sums))
    return rows.tolist()


def who_differs(column: list[int], group: Group) -> str:
    """Name the ranks that differ from the majority, or report the lack of a majority."""
    (usual, most), *_ = Counter(column).most_common(1)
    if 2 * most <= len(column):
        return f"is not the same on the ranks of {group}, and no majority tells which is right"
    odd = [group.ranks[index] for index, value in enumerate(column) if value != usual]
    more = f" and {len(odd) - MAX_NAMED} more" if len(odd) > MAX_NAMED else ""
    ranks = ", ".join(f"rank {rank}" for rank in odd[:MAX_NAMED])
    return f"of {ranks}{more} is not that of the others in {group}"


def first_difference(x: Tensor, group: Group, device: torch.device) -> str:
    """Describe where two equally long tensors first differ: (element 17: 0.5 on rank 0, 0.75 on rank 1).

    Collective. The element is found by bisection: only checksums travel, and one number for each rank.
    """
    x = x.detach().reshape(-1)
    start, end = 0, x.numel()
    while end - start > 1:
        middle = (start + end) // 2
        sums = gather_sums([checksum(x[start:middle])], group, device)
        if len({row[0] for row in sums}) > 1:
            end = middle
        else:
            start = middle
    own = x[start:end].double().to(device)
    values = comm.all_gather(own, group).tolist()
    named = [f"{value:.9g} on rank {rank}" for value, rank in zip(values[:MAX_NAMED], group.ranks)]
    return f" (element {start}: {', '.join(named)})"


def compute_sum(flat: FlatCopy) -> Tensor:
    if flat.whole is not None:
        return checksum(flat.whole)
    total: Tensor | None = None
    for position, copy in enumerate(flat.copies):
        weighted = (2 * position + 1) * checksum(copy.tensor)
        total = weighted if total is None else total + weighted
    assert total is not None  # there is always at least one copy
    return total
