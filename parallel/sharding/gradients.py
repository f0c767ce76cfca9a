"""BucketGrads: the gradients of a bucket, and their reduction over ranks that saw different tokens.

A reduction starts when its input is ready and is waited for when its result is needed: start_reduce() ..
continue_reduce() .. finish_reduce(). zero.py decides when.

Gradients are not zeroed before a step: each parameter's first gradient overwrites that of the previous step
(kernels/grad.py). Unwritten gradients are zeroed before they are read or reduced: zero_unwritten().
"""
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.grad import accumulation_dtype, write_or_add
from parallel.sharding.packing import BucketLayout
from parallel.sharding.powersgd import PowerSGD, is_matrix
from parallel.sharding.slots import ShardingConfig, ShardingGroups, Slot
from parallel.wire import comm, compress
from parallel.wire.algorithms import start_scatter_sum, start_sum
from parallel.wire.comm import PendingExchange


class BucketGrads:
    """The gradients of one bucket.

    full [size], in fp32 or fp64, holds the gradients of this rank's tokens; None while ZeRO-2 or 3 keeps only
    its shard.

    local [shard size] is this rank's shard of the sum. Without ZeRO-2 or 3 it is a view of `full`.
    """

    def __init__(
        self,
        slots: tuple[Slot, ...],
        layout: BucketLayout,
        groups: ShardingGroups,
        sharding: ShardingConfig,
        *,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.slots = slots
        self.layout = layout
        self.groups = groups
        self.sharding = sharding
        self.zero = sharding.zero
        self.full: Tensor | None = None
        self.padding = find_padding(slots, layout.size)
        self.first_microbatch_squares: Tensor | None = None  # set by record_first_microbatch
        self.local_is_written = False  # whether `local` holds gradients of this step (ZeRO-2 and 3)
        self.powersgd: PowerSGD | None = None
        # called before each reduction, with this rank's own gradients [size]
        self.before_sum: list[Callable[[Tensor], object]] = []

        # exchanges in flight: a reduce-scatter of a microbatch or of the step, and an all-reduce of the step
        self.pending_scatter: PendingExchange | compress.CompressedReduceScatter | None = None
        self.pending_scatter_is_last = False  # the scatter in flight is the step's last
        self.pending_sum: PendingExchange | compress.CompressedAllReduce | PowerSGD | None = None

        grad_dtype = accumulation_dtype(dtype)
        if self.zero >= 2:
            self.local = torch.zeros(layout.shard_size, dtype=grad_dtype, device=device)
        else:
            full = torch.zeros(layout.size, dtype=grad_dtype, device=device)
            self.local = full[layout.shard_start:layout.shard_end]
            self.allocate(full)

        has_matrices = any(is_matrix(slot.param.spec) for slot in slots)
        if sharding.powersgd_rank is not None and groups.reduce.size > 1 and has_matrices:
            self.powersgd = PowerSGD(
                slots,
                layout.size,
                groups.reduce,
                rank=sharding.powersgd_rank,
                seed=seed,
                like=self.local,
            )

    def allocate(self, full: Tensor | None = None) -> None:
        """Allocate the full gradients, unwritten, as views in every parameter's main_grad, unless allocated.

        Under ZeRO-2 and 3 they live from the first backward that uses the bucket to its reduction.
        """
        if self.full is not None:
            return
        self.full = self.local.new_empty(self.layout.size) if full is None else full
        for slot in self.slots:
            slot.param.main_grad = slot.view_in(self.full)
            slot.param.grad_is_written = False

    def start_step(self) -> None:
        """Mark all gradients as stale before a step."""
        self.first_microbatch_squares = None
        self.local_is_written = False
        for slot in self.slots:
            slot.param.grad_is_written = False

    def zero_unwritten(self, full: Tensor) -> None:
        """Zero the padding, and the gradients that no kernel has written since start_step or allocate.

        Under ZeRO-2 and 3 padding is fresh memory, and an 8-bit reduction may leave NaN there.
        """
        for slot in self.slots:
            if not slot.param.grad_is_written:
                slot.view_in(full).zero_()
                slot.param.grad_is_written = True
        for part in self.padding:
            full[part].zero_()

    def record_first_microbatch(self) -> None:
        """Measure a step's first microbatch for the noise scale, before its gradients are reduced."""
        is_first = self.first_microbatch_squares is None
        if is_first and self.full is not None:
            self.zero_unwritten(self.full)
            self.first_microbatch_squares = self.squared_norm_of_hidden(self.full, 0, self.layout.size)

    def squared_norm_of_hidden(self, flat: Tensor, start: int, end: int) -> Tensor:
        """Return the sum of squares over the non-expert hidden matrices that this rank counts in the norm.

        flat [end - start] holds elements start .. end - 1 of the bucket. The result is a scalar.
        """
        norms: list[Tensor] = []
        for slot in self.slots:
            spec = slot.param.spec
            if spec.is_expert or not spec.is_hidden_matrix or not slot.counted_in_norm:
                continue
            first = max(slot.offset, start)
            last = min(slot.offset + slot.numel, end)
            if first < last:
                norms.append(torch.linalg.vector_norm(flat[first - start:last - start]))
        return torch.stack(norms).square().sum() if norms else flat.new_zeros(())

    def complete(self) -> None:
        """Zero what no kernel has written: `full` then holds the gradients of this rank's tokens."""
        if self.full is None:
            raise RuntimeError("the gradients of a bucket are reduced before they were allocated")
        self.zero_unwritten(self.full)
        for look in tuple(self.before_sum):
            look(self.full)

    # ---- reduction over ranks ------------------------------------------------------------------------------

    def start_reduce(self, is_last: bool) -> None:
        """Start reducing the full gradients over the ranks. The previous reduction must have finished.

        ZeRO-0 all-reduces the bucket; otherwise it is reduce-scattered, after which ZeRO-2 and 3 free the
        full gradients. is_last: no more gradients of this step follow.
        """
        self.complete()
        if self.zero == 0:
            if self.powersgd is not None:
                self.pending_sum = self.powersgd.start(self.full)
            else:
                self.pending_sum = self.start_all_reduce(self.full, over_replicas=False)
            return

        algorithm = self.sharding.reduce_algorithm
        block = self.sharding.alignment
        # ZeRO-1 gets its shard in place: nothing is added to a step's memory until the last wait
        out = self.local if self.zero == 1 else None
        self.pending_scatter = start_scatter_sum(self.full, self.groups.shard, algorithm, block, out)
        self.pending_scatter_is_last = is_last
        if self.zero >= 2:
            self.full = None
            for slot in self.slots:
                slot.param.main_grad = None

    def start_all_reduce(self, flat: Tensor,
                         over_replicas: bool) -> PendingExchange | compress.CompressedAllReduce:
        """Start all-reducing `flat` in place over a shard's replicas, or over all ranks of the bucket."""
        group = self.groups.replica if over_replicas else self.groups.reduce
        if self.sharding.reduce_algorithm == "collective":
            return comm.start_all_reduce(flat, group)
        return start_sum(
            flat,
            group,
            self.sharding.reduce_algorithm,
            ranks_per_node=self.sharding.ranks_per_node,
            block=self.sharding.alignment,
        )

    def continue_reduce(self) -> None:
        """Continue the exchange in flight, after the backward of another part has overlapped with it.

        A two-phase all-reduce starts its second phase. A reduce-scatter is waited for if its result is
        decoded, accumulated, or sent to replicas. ZeRO-1's alone is in place, and finish_reduce waits for it.
        """
        if self.pending_sum is not None:
            self.pending_sum.start_next_phase()
        is_coded = self.sharding.reduce_algorithm in compress.CODECS
        if self.zero >= 2 or self.groups.replica.size > 1 or is_coded:
            self.wait_reduce_scatter()

    def wait_reduce_scatter(self) -> None:
        """Wait for the reduce-scatter in flight, if any, and write its result to `local`.

        After the step's last one, start the all-reduce of the shard over the replicas.
        """
        if self.pending_scatter is None:
            return
        part = self.pending_scatter.wait()
        self.pending_scatter = None
        if self.zero >= 2:
            write_or_add(self.local, part, add=self.local_is_written)
            self.local_is_written = True
        elif self.groups.shard.size > 1 and part is not self.local:
            self.local.copy_(part)
        if self.pending_scatter_is_last:
            self.pending_sum = self.start_all_reduce(self.local, over_replicas=True)

    def finish_reduce(self) -> None:
        """Wait until `local` is the sum over all ranks of the bucket."""
        if self.pending_scatter is not None:
            self.wait_reduce_scatter()
        if self.pending_sum is not None:
            self.pending_sum.wait()
            self.pending_sum = None

    def partial_over(self, group_name: str) -> list[Tensor]:
        """Return views of the elements of `local` that are still to be summed over a group.

        group_name is tp (e.g. norms under sequence parallelism, per-head norms, routers, keys and values that
        tp ranks share; ParameterSpec.partial_over) or embedding_ends (a table at both ends of the pipeline).
        """
        parts: list[Tensor] = []
        for slot in self.slots:
            if group_name not in slot.param.spec.partial_over:
                continue
            first = max(slot.offset, self.layout.shard_start) - self.layout.shard_start
            end = min(slot.offset + slot.numel, self.layout.shard_end) - self.layout.shard_start
            if first < end:
                parts.append(self.local[first:end])
        return parts


def find_padding(slots: tuple[Slot, ...], size: int) -> list[slice]:
    """Return the elements of a bucket that belong to no parameter. slots are sorted by offset."""
    parts: list[slice] = []
    ends = [0, *(slot.offset + slot.numel for slot in slots)]
    starts = [*(slot.offset for slot in slots), size]
    for end, start in zip(ends, starts):
        if end < start:
            parts.append(slice(end, start))
    return parts
