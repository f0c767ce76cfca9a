"""Bucket: parameters that are reduced, gathered and updated together. ZeRO (arXiv 1910.02054) as one table:

    zero   optimizer state   gradients   weights    sent per step (full gradients g, compute weights w)
    0      full              full        full       all-reduce g
    1      sharded           full        full       reduce-scatter g, all-gather w: at most the bytes of 0
    2      sharded           sharded     full       as 1, but the reduce-scatter in every microbatch
    3      sharded           sharded     sharded    as 2, and two all-gathers of w per microbatch: 1.5 times
                                                          the bytes of 0, with one microbatch

Frozen parameters are in separate buckets, which have weights alone: those in the compute dtype, sharded
under ZeRO-3.

Every parameter is a view of its bucket's flat tensor. "Sharded" is over mesh.fsdp (dp_shard x cp);
mesh.dp_replicate replicates the shards (HSDP): once a step their gradients are all-reduced over it too.
Experts are sharded over different ranks than the rest, so they have separate buckets. Optimizer, clipping and
checkpoints see only the elements that this rank owns (views.py).
"""
import itertools

import torch
from torch import Tensor

from kernels.grad import accumulation_dtype
from parallel.sharding.gradients import BucketGrads
from parallel.sharding.packing import NOTHING, bucket_layout, pack_into_buckets
from parallel.sharding.powersgd import CompressionState
from parallel.sharding.slots import ShardingConfig, ShardingGroups, Slot, UpdateRange
from parallel.sharding.spec import ShardedParameter, initialize
from parallel.sharding.weights import BucketWeights
from parallel.topology.mesh import Mesh
from parallel.wire import comm
from parallel.wire.comm import Group


class Bucket:
    """Parameters with the same groups, in one flat tensor.

    size is in elements, including padding. This rank owns elements shard_start .. shard_end - 1: all of them
    without ZeRO.
    update_ranges split the owned elements into as few ranges of equal treatment as the order of the slots
    allows. A range may span the padding between two slots, which is zero and stays zero.
    trains: its parameters have gradients, masters and moments. Otherwise they are frozen: no range of them is
    updated, and `grads` is empty.
    is_scheduled: its weights or gradients are exchanged, or measured, while the model runs (zero.py).
    num_users counts the parts of the model that use the bucket: a tied table has two.
    num_finished_users counts those that have finished their last backward of the step.
    """

    def __init__(
        self,
        params: list[ShardedParameter],
        mesh: Mesh,
        sharding: ShardingConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
    ) -> None:
        self.sharding = sharding
        self.zero = sharding.zero
        self.dtype = dtype
        self.seed = seed
        self.is_expert = params[0].spec.is_expert
        self.trains = not params[0].spec.is_frozen
        self.is_hidden = sharding.separate_hidden and params[0].spec.is_hidden_matrix
        self.groups = sharding_groups(mesh, self.is_expert)
        self.num_users = 0
        self.num_finished_users = 0

        # layout of the parameters, and this rank's shard
        layout = bucket_layout(
            [param.spec.numel for param in params],
            zero=sharding.zero,
            num_shards=self.groups.shard.size,
            shard_index=self.groups.shard.index,
            num_replicas=self.groups.replica.size,
            is_collective=sharding.reduce_algorithm == "collective",
            alignment=sharding.alignment,
        )
        self.size = layout.size
        self.shard_start = layout.shard_start
        self.shard_end = layout.shard_end
        slots: list[Slot] = []
        for param, offset in zip(params, layout.offsets):
            slots.append(Slot(param, offset, is_counted_in_norm(param, mesh)))
        self.slots = tuple(slots)
        self.update_ranges = self.ranges_of_equal_treatment() if self.trains else []
        has_exchanged_grads = self.groups.reduce.size > 1 or sharding.track_noise_scale
        self.is_scheduled = self.zero > 0 or (self.trains and has_exchanged_grads)

        # weights and gradients
        initial = torch.zeros(self.size, dtype=accumulation_dtype(dtype), device=device)
        # under ZeRO-3 other ranks' elements are freed right away: skip drawing them
        kept = range(self.shard_start, self.shard_end) if self.zero == 3 else range(self.size)
        for slot in self.slots:
            needed = range(kept.start - slot.offset, kept.stop - slot.offset)
            initialize(slot.param.spec, slot.view_in(initial), seed, needed)
        self.weights = BucketWeights(
            self.slots,
            layout,
            self.groups,
            sharding,
            initial=initial,
            dtype=dtype,
            trains=self.trains,
        )
        self.grads = BucketGrads(
            self.slots if self.trains else (),
            layout if self.trains else NOTHING,
            self.groups,
            sharding,
            seed=seed,
            dtype=dtype,
            device=device,
        )

    @property
    def owners(self) -> Group:
        """The ranks that own the same elements, with the same summed gradients."""
        return self.groups.replica if self.zero else self.groups.reduce

    def ranges_of_equal_treatment(self) -> list[UpdateRange]:
        ranges: list[UpdateRange] = []
        for slot in self.slots:
            start, end = self.owned_part(slot.offset, slot.numel)
            if start >= end:
                continue
            spec = slot.param.spec
            found = UpdateRange(
                slice(start, end),
                has_decay=spec.has_decay,
                lr_factor=spec.lr_factor,
                group_lr_factor=spec.group_lr_factor,
                group_weight_decay=spec.group_weight_decay,
                counted_in_norm=slot.counted_in_norm,
            )
            if ranges and ranges[-1][1:] == found[1:]:
                merged_start = ranges.pop().elements.start
                found = found._replace(elements=slice(merged_start, end))
            ranges.append(found)
        return ranges

    def owned_part(self, offset: int, size: int) -> tuple[int, int]:
        """Return (start, end) in the owned shard of elements offset .. offset + size - 1 of the bucket.

        start >= end if this rank owns none of them.
        """
        first = max(offset, self.shard_start)
        end = min(offset + size, self.shard_end)
        return first - self.shard_start, end - self.shard_start


def sharding_groups(mesh: Mesh, is_expert: bool) -> ShardingGroups:
    """Return the groups for expert parameters, or for all others."""
    if is_expert:
        return ShardingGroups(mesh.expert_fsdp, mesh.dp_replicate, mesh.expert_dp)
    return ShardingGroups(mesh.fsdp, mesh.dp_replicate, mesh.dp_cp)


def is_counted_in_norm(param: ShardedParameter, mesh: Mesh) -> bool:
    """Whether this rank counts the parameter in the gradient norm.

    A parameter that every tp rank holds is counted by the first of them; a table at both ends of the
    pipeline, by its first rank. An expert's shard is held by one rank only.
    """
    if param.spec.is_expert:
        return True
    if param.spec.is_replicated_over_tp and mesh.tp.index > 0:
        return False
    return param.spec.is_first_end(mesh.pp.index)


def split_into_buckets(
    params: list[ShardedParameter], sharding: ShardingConfig
) -> list[list[ShardedParameter]]:
    """Split the parameters of one part of the model into buckets.

    Experts have separate buckets, and so do frozen parameters, and hidden matrices with separate_hidden.
    Within a bucket, parameters with equal treatment (weight decay, learning rate, counted in the norm) are
    adjacent. The order is the same on all tp ranks, so elements that are partial over tp have the same
    positions on each.
    """
    kinds: dict[tuple[bool, bool, bool], list[ShardedParameter]] = {}
    for kind in itertools.product((False, True), repeat=3):
        kinds[kind] = []
    for param in params:
        is_hidden = sharding.separate_hidden and param.spec.is_hidden_matrix
        kinds[param.spec.is_frozen, param.spec.is_expert, is_hidden].append(param)

    buckets: list[list[ShardedParameter]] = []
    for kind in kinds.values():
        kind.sort(key=treatment)
        sizes = [param.spec.numel for param in kind]
        for indices in pack_into_buckets(sizes, sharding.max_elements, sharding.alignment):
            buckets.append([kind[index] for index in indices])
    return buckets


def treatment(param: ShardedParameter) -> tuple[bool, float, bool]:
    """Return a key that is equal for parameters that can share an update range (views.py)."""
    spec = param.spec
    return (not spec.has_decay, spec.lr_factor, spec.is_replicated_over_tp)


def finish_grad_reductions(buckets: list[Bucket], mesh: Mesh) -> None:
    """Wait until the step's gradients, whose reductions the backward started, are summed over all ranks.

    After the data-parallel sums, gradients that are partial over tp are summed in one all-reduce, then a tied
    table over the ends of the pipeline in another.
    """
    buckets = [bucket for bucket in buckets if bucket.trains]
    for bucket in buckets:  # sums over replicas start before the first is waited for
        if bucket.is_scheduled:
            bucket.grads.continue_reduce()
        else:
            bucket.grads.complete()
    for bucket in buckets:
        bucket.grads.finish_reduce()

    for axis, group in (("tp", mesh.tp), ("embedding_ends", mesh.embedding_ends)):
        if group is None or group.size == 1:
            continue
        parts: list[Tensor] = []
        for bucket in buckets:
            parts += bucket.grads.partial_over(axis)
        sum_parts(parts, group)


def sum_parts(parts: list[Tensor], group: Group) -> None:
    """Sum flat tensors over the group, in place: one all-reduce for all of them; none for an empty list."""
    if not parts:
        return
    total = comm.all_reduce_sum(torch.cat(parts), group)
    sizes = [len(part) for part in parts]
    for part, value in zip(parts, total.split(sizes)):
        part.copy_(value)


def start_param_gathers(buckets: list[Bucket], is_good: Tensor) -> None:
    """Start the all-gathers of updated weights (ZeRO-1 and 2); the next forward waits for them.

    ZeRO-3 drops the full weights, which are stale; PowerSGD's error is kept or dropped. is_good is a bool
    scalar, False if the step was skipped. Frozen weights stay as they are; ZeRO-3 drops what is kept of them.
    """
    for bucket in buckets:
        if not bucket.trains:
            if bucket.zero == 3:
                bucket.weights.reshard()
            continue
        if bucket.grads.powersgd is not None:
            bucket.grads.powersgd.resolve_error_feedback(is_good)
        if bucket.zero > 0 or bucket.sharding.has_fp8_copies:
            bucket.weights.start_gather_updated()


def wait_param_gathers(buckets: list[Bucket]) -> None:
    """Wait for the transfers of start_param_gathers, before weights are read outside of a forward."""
    for bucket in buckets:
        bucket.weights.wait_gather()


def get_compression(buckets: list[Bucket]) -> list[CompressionState | None]:
    """Return each bucket's PowerSGD state before a step, to compute the step again from it."""
    compressions = [bucket.grads.powersgd for bucket in buckets]
    return [None if one is None else one.state() for one in compressions]


def restore_compression(buckets: list[Bucket], states: list[CompressionState | None]) -> None:
    """Undo the exchanges of PowerSGD since get_compression."""
    for bucket, state in zip(buckets, states):
        if bucket.grads.powersgd is not None and state is not None:
            bucket.grads.powersgd.restore(state)
