"""Optimizer base: flat moments for each bucket, and updates of the elements that this rank owns.

An optimizer updates flat ranges of elements, so its code is the same for every ZeRO stage and every layout.
config/optimizers.py declares which keys it reads, which state it keeps and what it supports.
Optimizers that need more than single elements define how to get it: norms of whole tensors in optim/lamb.py,
whole matrices in optim/muon.py.
"""
from dataclasses import dataclass

import torch
from torch import Tensor

from config import OptimConfig
from parallel.sharding.boxes import Box
from parallel.sharding.bucket import Bucket
from parallel.sharding.slots import UpdateRange
from parallel.sharding.views import Moments
from parallel.topology.mesh import Mesh


@dataclass(frozen=True)
class Rates:
    """Rates of a range of elements. A step shrinks a weight by lr * weight_decay."""
    lr: float
    weight_decay: float


def decoupled_rates(cfg: OptimConfig, lr: float, part: UpdateRange) -> Rates:
    """Return the learning rate and decoupled weight decay (arXiv 1711.05101) of a range of elements.

    A step shrinks a weight by lr * weight_decay whatever its muP factor, so the averaging time of a weight
    under muP, 1 / (lr * weight_decay), is the same at every width (arXiv 2405.13698). A factor of
    optim.groups changes both, as the learning rate of a parameter group in torch.optim does.
    """
    weight_decay = 0.0
    if part.has_decay:
        weight_decay = cfg.weight_decay if part.group_weight_decay is None else part.group_weight_decay
    return Rates(lr * part.group_lr_factor * part.lr_factor, weight_decay / part.lr_factor)


class Optimizer:
    """Base of all optimizers. An elementwise optimizer only defines MOMENTS and update_elements.

    MOMENTS names the moments: each is one flat tensor per bucket, in the dtype of the master weights, stored
    in checkpoints as KEY@NAME. The constructor may be collective (muon.py, lamb.py).

    buckets: those of this rank that train, maybe none. empty [0]: on the device of the gradients, in their
    dtype.
    """
    MOMENTS: tuple[str, ...] = ()

    def __init__(self, cfg: OptimConfig, buckets: list[Bucket], mesh: Mesh) -> None:
        self.cfg = cfg
        self.buckets = [bucket for bucket in buckets if bucket.trains]
        self.empty = buckets[0].grads.local.new_empty(0) if buckets else torch.empty(0)
        self.mesh = mesh
        self.moments: dict[str, list[Tensor]] = {}
        for name in self.MOMENTS:
            self.moments[name] = [zeros_like_master(bucket) for bucket in self.buckets]

    def state(self) -> Moments:
        """Return the state that a checkpoint stores in addition to the master weights."""
        return self.moments

    def boxes(self, each_once: bool = False) -> list[tuple[Box, Tensor]]:
        """Return [(box, view)] of state whose shape is not that of the weights, for a checkpoint.

        each_once: omit what another rank returns.
        """
        return []

    @torch.no_grad()
    def step(self, step: int, lr: float, grad_scale: Tensor, is_good: Tensor) -> None:
        """Apply update number `step` (from 1) with the gradients scaled by `grad_scale`.

        `is_good` is a bool scalar. If it is False, skip the step and leave everything unchanged.
        """
        if is_good.device.type == "cpu" and not is_good:
            return
        self.update(step, lr, grad_scale, is_good)

    def update(self, step: int, lr: float, grad_scale: Tensor, is_good: Tensor) -> None:
        """Update masters, moments and the weights in the compute dtype, given the arguments of `step`.

        This one calls update_elements, one range of equal rates at a time. Override it in optimizers that
        need more than single elements. Nothing may change if `is_good` is False.
        """
        for index, bucket in enumerate(self.buckets):
            for part in bucket.update_ranges:
                weight = bucket.weights.master[part.elements]
                moments = [flats[index][part.elements] for flats in self.moments.values()]
                grad = bucket.grads.local[part.elements] * grad_scale
                rates = decoupled_rates(self.cfg, lr, part)
                updated = self.update_elements(
                    grad,
                    weight,
                    *moments,
                    lr=rates.lr,
                    weight_decay=rates.weight_decay,
                    step=step,
                )
                copy_where([weight, *moments], updated, is_good)
            bucket.weights.copy_master_to_local()

    def update_elements(
        self,
        grad: Tensor,
        weight: Tensor,
        *moments: Tensor,
        lr: float,
        weight_decay: float,
        step: int,
    ) -> tuple[Tensor, ...]:
        """Return the new weight and the new moments, in the order of MOMENTS. All tensors are flat [n].

        `grad` is already multiplied by grad_scale (clipping, 1 / loss scale). `step` counts the run's steps
        from 1, including skipped ones, so use the moments to detect a first update. Moments start at 0 and
        must be finite after each step.
        """
        raise NotImplementedError


def zeros_like_master(bucket: Bucket) -> Tensor:
    """Return a zeroed moment for a bucket, in the same memory (device or host) as its master."""
    return torch.zeros_like(bucket.weights.master, pin_memory=bucket.weights.master.is_pinned())


def copy_where(old: list[Tensor], new: tuple[Tensor, ...], is_good: Tensor) -> None:
    """Copy new to old if is_good, without a host sync. Otherwise keep old, whatever NaN `new` holds."""
    for old_values, new_values in zip(old, new):
        old_values.copy_(torch.where(is_good, new_values, old_values))
