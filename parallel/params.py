"""The weights of a rank as a few flat buffers: one in the compute dtype, one of fp32 masters, one of fp32 gradients.

Every parameter is a view. The optimizer, clipping, checkpoints and (later) collectives work on whole buckets, in one pass.
"""
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from kernels.grad import wide
from parallel.spec import fill

ALIGN = 64  # elements: a slot starts on a cache line in every dtype


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies in its bucket: elements offset .. offset + numel."""
    param: nn.Parameter
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.param.spec.shape)


@dataclass(frozen=True)
class Bucket:
    """slots in order of offset; elements from `decayed` on take no weight decay. weights: compute dtype; master: fp32
    (fp64), the same tensor where the dtypes agree; grad: fp32 (fp64). All flat [n], padding zero."""
    slots: tuple[Slot, ...]
    decayed: int
    weights: Tensor
    master: Tensor
    grad: Tensor

    def view(self, flat: Tensor, slot: Slot) -> Tensor:
        return flat[slot.offset:slot.offset + slot.numel].view(slot.param.spec.shape)


def lay_out(params: list[nn.Parameter]) -> tuple[list[Slot], int, int]:
    """Slots with the decayed parameters first -> (slots, where the undecayed begin, total), in elements."""
    slots, at, edge = [], 0, 0
    for decay in (True, False):
        for p in params:
            if p.spec.decay is decay:
                slots.append(Slot(p, at))
                at += -(-prod(p.spec.shape) // ALIGN) * ALIGN
        edge = at if decay else edge
    return slots, edge, at


@torch.no_grad()
def materialize(groups: list[list[nn.Parameter]], dtype: torch.dtype, device: torch.device, seed: int) -> list[Bucket]:
    """One bucket a group of parameters: storage, initial values, and `main_grad` views for kernels/grad.py."""
    buckets = []
    for params in groups:
        slots, edge, size = lay_out(params)
        master = torch.zeros(size, dtype=wide(dtype), device=device)
        weights = master if dtype == master.dtype else torch.zeros(size, dtype=dtype, device=device)
        bucket = Bucket(tuple(slots), edge, weights, master, torch.zeros_like(master))
        for slot in slots:
            fill(slot.param.spec, bucket.view(master, slot), seed)
            slot.param.data = bucket.view(weights, slot)
            slot.param.main_grad = bucket.view(bucket.grad, slot)
        buckets.append(bucket)
    publish(buckets)
    return buckets


def publish(buckets: list[Bucket]) -> None:
    """Round the masters into the compute weights (nothing to do where they are the same tensor)."""
    for b in buckets:
        if b.weights is not b.master:
            b.weights.copy_(b.master)


def zero_grads(buckets: list[Bucket]) -> None:
    for b in buckets:
        b.grad.zero_()
