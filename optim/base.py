"""What the optimizers share: flat moments for each bucket, and an update of the elements that this rank owns.

An optimizer updates flat ranges of elements, so its code is the same for every ZeRO stage and every layout.
What it reads, keeps and supports is declared in config/optimizers.py.
Optimizers that need more than single elements say how they get it: norms of whole tensors in optim/lamb.py,
whole matrices in optim/muon.py.
"""
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from config import OptimConfig
from parallel.sharding.bucket import Bucket
from parallel.sharding.views import update_ranges
from parallel.topology.mesh import Mesh

State = Mapping[str, Sequence[Tensor | None]]  # {name: a flat tensor for each bucket, or None}


def decoupled_rates(cfg: OptimConfig, lr: float, decay: bool, rate: float) -> dict[str, float]:
    """The learning rate and the weight decay of a range of elements: {"lr": ..., "weight_decay": ...}.

    decay: whether the elements have weight decay. rate: their factor of the learning rate (muP).

    A step shrinks a weight by lr * cfg.weight_decay, whatever its factor: so the averaging time of a weight
    under muP, 1 / (lr * weight_decay), is the same at every width (arXiv 2405.13698).
    """
    weight_decay = cfg.weight_decay / rate if decay else 0.0
    return {"lr": lr * rate, "weight_decay": weight_decay}


class Optimizer:
    """Base of all optimizers. An elementwise one defines MOMENTS and update_elements, and nothing else.

    MOMENTS: names of the moments. Each is one flat tensor for each bucket, in the dtype of the master
    weights. A checkpoint stores them as KEY@NAME.
    """
    MOMENTS: tuple[str, ...] = ()

    def __init__(self, cfg: OptimConfig, buckets: list[Bucket], mesh: Mesh) -> None:
        self.cfg = cfg
        self.buckets = buckets
        self.mesh = mesh
        self.moments: dict[str, list[Tensor]] = {}
        for name in self.MOMENTS:
            self.moments[name] = [zeros_like_master(bucket) for bucket in buckets]

    def state(self) -> State:
        """What a checkpoint stores beside the master weights."""
        return self.moments

    @torch.no_grad()
    def step(self, step: int, lr: float, grad_scale: Tensor, is_finite: Tensor) -> None:
        """Update number `step` (from 1), with the gradients multiplied by `grad_scale`.

        is_finite: a bool scalar. Where it is False the step is skipped, and nothing changes.
        """
        if is_finite.device.type == "cpu" and not is_finite:
            return
        self.update(step, lr, grad_scale, is_finite)
        for bucket in self.buckets:
            bucket.weights.copy_master_to_local()

    def update(self, step: int, lr: float, grad_scale: Tensor, is_finite: Tensor) -> None:
        """Updates masters and moments: here by update_elements, in ranges with the same rates."""
        for index, bucket in enumerate(self.buckets):
            for run, has_decay, lr_factor, _ in update_ranges(bucket):
                weight = bucket.weights.master[run]
                moments = [flats[index][run] for flats in self.moments.values()]
                grad = bucket.grads.local[run] * grad_scale
                rates = decoupled_rates(self.cfg, lr, has_decay, lr_factor)
                updated = self.update_elements(grad, weight, *moments, **rates, step=step)
                copy_where([weight, *moments], updated, is_finite)

    def update_elements(
        self,
        grad: Tensor,
        weight: Tensor,
        *moments: Tensor,
        lr: float,
        weight_decay: float,
        step: int,
    ) -> tuple[Tensor, ...]:
        """The new weight and the new moments, in the order of MOMENTS. All tensors have one flat shape.

        step: the number of the update, from 1.
        """
        raise NotImplementedError


def zeros_like_master(bucket: Bucket) -> Tensor:
    """A moment of a bucket before the first step, in the memory (of device or host) where its master is."""
    return torch.zeros_like(bucket.weights.master, pin_memory=bucket.weights.master.is_pinned())


def copy_where(old: list[Tensor], new: tuple[Tensor, ...], is_finite: Tensor) -> None:
    """Copies new to old if is_finite, without a host sync. If not, old stays, whatever NaN `new` holds."""
    for old_values, new_values in zip(old, new):
        old_values.copy_(torch.where(is_finite, new_values, old_values))
