"""What the optimizers share: flat moments beside each bucket's masters, and the walk over what this rank owns.

Every optimizer is written over flat ranges of elements, so that it is the same under every ZeRO stage and layout. What is
more than elementwise says how it gets whole tensors: their norms (optim/lamb.py) or the tensors themselves (optim/muon.py).
"""
import torch
from torch import Tensor

from config import Optim
from parallel.mesh import Mesh
from parallel.params import Bucket


def pace(cfg: Optim, lr: float, decay: bool, rate: float) -> dict[str, float]:
    """{lr, decay} of a run of elements. Decoupled weight decay shrinks by lr * weight_decay a step whatever the rate's factor: under
    muP the averaging time of a weight, 1 / (lr * weight_decay), is the same at every width (arXiv 2405.13698)."""
    return {"lr": lr * rate, "decay": cfg.weight_decay / rate if decay else 0.0}


class Optimizer:
    """MOMENTS: names of the flat moments, in the master's dtype, one a bucket each; a checkpoint keeps them as KEY@NAME."""
    MOMENTS: tuple[str, ...] = ()

    def __init__(self, cfg: Optim, buckets: list[Bucket], mesh: Mesh) -> None:
        self.cfg, self.buckets, self.mesh = cfg, buckets, mesh
        self.moments = {name: [torch.zeros_like(b.master) for b in buckets] for name in self.MOMENTS}

    def state(self) -> dict[str, list[Tensor | None]]:
        """What a checkpoint keeps beside the master weights: {name: a flat tensor a bucket, None where it has none}."""
        return self.moments

    @torch.no_grad()
    def step(self, step: int, lr: float, factor: Tensor, ok: Tensor) -> None:
        """Update number `step` (from 1) with the gradients times `factor`. ok False: a skipped step, nothing changes."""
        if ok.device.type == "cpu" and not ok:
            return
        self.update(step, lr, factor, ok)
        for b in self.buckets:
            b.round()

    def update(self, step: int, lr: float, factor: Tensor, ok: Tensor) -> None:
        """Elementwise optimizers: each run of elements with the same weight decay and rate through `change`."""
        for i, b in enumerate(self.buckets):
            for run, decay, rate, _ in b.runs():
                old = [b.master[run], *(flats[i][run] for flats in self.moments.values())]
                put(old, self.change(b.shard[run] * factor, *old, **pace(self.cfg, lr, decay, rate)), ok)

    def change(self, grad: Tensor, *old: Tensor, lr: float, decay: float) -> tuple[Tensor, ...]:
        """(grad, weights, moments ...) -> new weights, moments."""
        raise NotImplementedError


def put(old: list[Tensor], new: tuple[Tensor, ...], ok: Tensor) -> None:
    """old <- new where ok, without a host sync and whatever NaN `new` holds where not."""
    for x, y in zip(old, new):
        x.copy_(torch.where(ok, y, x))
