"""AdamW (arXiv 1711.05101) over the owned ranges of the flat buckets (parallel/sharding/bucket.py).

The code is the same for every ZeRO stage, and wherever the state is stored (parallel/offload.py). State in
bf16 is updated one tensor at a time, because stochastic rounding depends on the position of an element in its
tensor (kernels/rounding.py).
"""
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from config import OptimConfig
from kernels.adam import AdamWStep, adamw
from kernels.rounding import ElementIndex, salt
from optim.base import Optimizer, decoupled_rates
from parallel.offload import CopyStream, copy_stream, staged_chunks
from parallel.sharding.bucket import Bucket
from parallel.sharding.views import TensorRange, tensor_ranges
from parallel.topology.mesh import Mesh


class AdamW(Optimizer):
    """AdamW for all buckets, with a first moment (exp_avg) and a second moment (exp_avg_sq)."""
    MOMENTS = ("adam_m", "adam_v")

    def __init__(self, cfg: OptimConfig, buckets: list[Bucket], mesh: Mesh) -> None:
        super().__init__(cfg, buckets, mesh)
        self.element_indices = [tensor_indices(bucket) for bucket in self.buckets]
        self.copy_stream: CopyStream | None = None  # set if masters and moments are in host memory
        if buckets and buckets[0].sharding.offload_master:
            self.copy_stream = copy_stream(buckets[0].weights.local.device, mesh.is_strict)

    def update(self, step: int, lr: float, grad_scale: Tensor, is_good: Tensor) -> None:
        for index, bucket in enumerate(self.buckets):
            for part in bucket.update_ranges:
                rates = decoupled_rates(self.cfg, lr, part)
                numbers = AdamWStep(
                    lr=rates.lr,
                    beta1=self.cfg.beta1,
                    beta2=self.cfg.beta2,
                    eps=self.cfg.eps,
                    weight_decay=rates.weight_decay,
                    step=step,
                    grad_scale=grad_scale,
                    is_good=is_good,
                )
                self.update_range(index, part.elements, numbers)

    def update_range(self, index: int, elements: slice, numbers: AdamWStep) -> None:
        """Update a range of the owned shard of bucket `index`: masters, moments and compute weights."""
        weights = self.buckets[index].weights
        grad = self.buckets[index].grads.local[elements]
        state = [weights.master[elements], *(flats[index][elements] for flats in self.moments.values())]
        weight_copy = None if weights.local is weights.master else weights.local[elements]
        if self.copy_stream is None and self.element_indices[index] is None:
            adamw(state[0], grad, *state[1:], numbers, weight_copy=weight_copy)
        else:
            self.update_in_parts(index, elements.start, grad, state, numbers, weight_copy=weight_copy)

    def update_in_parts(
        self,
        index: int,
        first: int,
        grad: Tensor,
        state: list[Tensor],
        numbers: AdamWStep,
        *,
        weight_copy: Tensor | None,
    ) -> None:
        """Update elements `first` and on: by chunks if they are in host memory, by tensors if in bf16."""
        for chunk, (param, exp_avg, exp_avg_sq) in self.chunks(state, grad.device):
            chunk_grad = grad[chunk]
            chunk_copy = part_of(weight_copy, chunk)
            start = first + (chunk.start or 0)
            end = start + len(param)
            for part, element_index in self.tensor_parts(index, start, end, numbers.step):
                adamw(
                    param[part],
                    chunk_grad[part],
                    exp_avg[part],
                    exp_avg_sq[part],
                    numbers,
                    weight_copy=part_of(chunk_copy, part),
                    element_index=element_index,
                )

    def chunks(self, state: list[Tensor], device: torch.device) -> Iterable[tuple[slice, list[Tensor]]]:
        """Return [(range, its state on the device)], a single range unless the state is in host memory."""
        if self.copy_stream is None:
            return [(slice(None), state)]
        return staged_chunks(state, device, self.copy_stream)

    def tensor_parts(
        self, index: int, start: int, end: int, step: int
    ) -> Sequence[tuple[slice, ElementIndex | None]]:
        """Split elements start .. end - 1 of the owned shard of bucket `index` into ranges updated together.

        Return [(everything, None)], or [(range, its elements)] with one entry per tensor if the state is in
        bf16.
        """
        indices = self.element_indices[index]
        if indices is None:
            return [(slice(None), None)]
        seed = self.buckets[index].seed
        return element_ranges(indices, start, end, seed=seed, step=step)


def part_of(values: Tensor | None, part: slice) -> Tensor | None:
    """Return values[part], or None if `values` is None."""
    return None if values is None else values[part]


def tensor_indices(bucket: Bucket) -> list[TensorRange] | None:
    """Return the tensor ranges in the owned shard if the state is in bf16, else None."""
    return tensor_ranges(bucket) if bucket.sharding.bf16_master else None


def element_ranges(
    indices: list[TensorRange], start: int, end: int, *, seed: int, step: int
) -> list[tuple[slice, ElementIndex]]:
    """Split elements start .. end - 1 of an owned shard by tensor, leaving out padding.

    `indices` comes from tensor_ranges. Return [(range, its elements)]: ranges are relative to `start`, and
    the elements are salted for this step.
    """
    ranges: list[tuple[slice, ElementIndex]] = []
    for tensor_start, tensor_end, key, element_index in indices:
        if tensor_start >= end or tensor_end <= start:
            continue
        inside = slice(max(tensor_start, start) - start, min(tensor_end, end) - start)
        skip = max(start - tensor_start, 0)  # elements of this tensor that precede `start`
        salted = replace(element_index, salt=salt(seed, step, key), skip=skip)
        ranges.append((inside, salted))
    return ranges
