"""What the optimizers share: flat moments for each bucket, and an update of the elements that this rank owns.

An optimizer updates flat ranges of elements, so its code is the same for every ZeRO stage and every layout.
What it reads, keeps and supports is declared in config/optimizers.py.
Optimizers that need more than single elements say how they get it: norms of whole tensors in optim/lamb.py,
whole matrices in optim/muon.py.
"""
from dataclasses import dataclass

import torch
from torch import Tensor

from config import OptimConfig
from parallel.sharding.bucket import Bucket
from parallel.sharding.views import Moments, update_ranges
from parallel.topology.mesh import Mesh


@dataclass(frozen=True)
class Rates:
    """Of elements that are updated alike. A step shrinks a weight by lr * weight_decay."""
    lr: float
    weight_decay: float


def decoupled_rates(cfg: OptimConfig, lr: float, has_decay: bool, lr_factor: float) -> Rates:
    """The learning rate and the decoupled weight decay (arXiv 1711.05101) of a range of elements.

    has_decay: whether the elements have weight decay. lr_factor: of their learning rate (muP).

    A step shrinks a weight by lr * cfg.weight_decay, whatever its factor: so the averaging time of a weight
    under muP, 1 / (lr * weight_decay), is the same at every width (arXiv 2405.13698).
    """
    weight_decay = cfg.weight_decay / lr_factor if has_decay else 0.0
    return Rates(lr * lr_factor, weight_decay)


class Optimizer:
    """Base of all optimizers. An elementwise one defines MOMENTS and update_elements, and nothing else.

    MOMENTS: names of the moments. Each is one flat tensor for each bucket, in the dtype of the master
    weights. A checkpoint stores them as KEY@NAME. The constructor may be collective (muon.py, lamb.py).
    """
    MOMENTS: tuple[str, ...] = ()

    def __init__(self, cfg: OptimConfig, buckets: list[Bucket], mesh: Mesh) -> None:
        self.cfg = cfg
        self.buckets = buckets
        self.mesh = mesh
        self.moments: dict[str, list[Tensor]] = {}
        for name in self.MOMENTS:
            self.moments[name] = [zeros_like_master(bucket) for bucket in buckets]

    def state(self) -> Moments:
        """What a checkpoint stores beside the master weights."""
        return self.moments

    @torch.no_grad()
    def step(self, step: int, lr: float, grad_scale: Tensor, is_good: Tensor) -> None:
        """Update number `step` (from 1), with the gradients multiplied by `grad_scale`.

        is_good: a bool scalar. Where it is False the step is skipped, and nothing changes.
        """
        if is_good.device.type == "cpu" and not is_good:
            return
        self.update(step, lr, grad_scale, is_good)
        for bucket in self.buckets:
            bucket.weights.copy_master_to_local()

    def update(self, step: int, lr: float, grad_scale: Tensor, is_good: Tensor) -> None:
        """Updates masters and moments: here by update_elements, range by range of the same rates.

        Arguments: as of `step`. An optimizer that needs more than single elements has its own.
        """
        for index, bucket in enumerate(self.buckets):
            for run, has_decay, lr_factor, _ in update_ranges(bucket):
                weight = bucket.weights.master[run]
                moments = [flats[index][run] for flats in self.moments.values()]
                grad = bucket.grads.local[run] * grad_scale
                rates = decoupled_rates(self.cfg, lr, has_decay, lr_factor)
                updated = self.update_elements(
                    grad,
                    weight,
                    *moments,
                    lr=rates.lr,
                    weight_decay=rates.weight_decay,
                    step=step,
                )
                copy_where([weight, *moments], updated, is_good)

    def update_elements(
        self,
        grad: Tensor,
        weight: Tensor,
        *moments: Tensor,
        lr: float,
        weight_decay: float,
        step: int,
    ) -> tuple[Tensor, ...]:
        """Returns the new weight and the new moments, in the order of MOMENTS. All tensors are flat [n].

        grad: times grad_scale (clipping, 1 / loss scale). step: the number of the run's step, from 1; skipped
        steps count, so ask the moments where no earlier update may have been. Moments start at 0, and must be
        finite after each step.
        """
        raise NotImplementedError


def zeros_like_master(bucket: Bucket) -> Tensor:
    """A moment of a bucket before the first step, in the memory (of device or host) where its master is."""
    return torch.zeros_like(bucket.weights.master, pin_memory=bucket.weights.master.is_pinned())


def copy_where(old: list[Tensor], new: tuple[Tensor, ...], is_good: Tensor) -> None:
    """Copies new to old if is_good, without a host sync. If not, old stays, whatever NaN `new` holds."""
    for old_values, new_values in zip(old, new):
        old_values.copy_(torch.where(is_good, new_values, old_values))
