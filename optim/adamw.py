"""AdamW over the owned ranges of the flat buckets (parallel/params.py): the same code whatever ZeRO shards, and where
its state is kept (parallel/offload.py)."""
import torch
from torch import Tensor

from config import Optim
from kernels.adam import adamw
from optim.base import pace
from parallel.mesh import Mesh
from parallel.offload import Side, staged
from parallel.params import Bucket


class AdamW:
    """m, v: first and second moments, flat and in the master's dtype, a pair a bucket."""

    def __init__(self, cfg: Optim, buckets: list[Bucket], mesh: Mesh) -> None:
        self.cfg, self.buckets = cfg, buckets
        self.m, self.v = ([torch.zeros_like(b.master, pin_memory=b.master.is_pinned()) for b in buckets] for _ in "mv")
        self.side = Side(buckets[0].own.device) if buckets and buckets[0].sharing.offload else None

    def state(self) -> dict[str, list[Tensor]]:
        """What a checkpoint keeps beside the master weights: {name: a flat tensor a bucket}."""
        return {"adam_m": self.m, "adam_v": self.v}

    @torch.no_grad()
    def step(self, step: int, lr: float, factor: Tensor, ok: Tensor) -> None:
        """Update number `step` (from 1) with the gradients times `factor`. ok False: a skipped step, nothing changes."""
        if ok.device.type == "cpu" and not ok:
            return
        c = self.cfg
        for b, m, v in zip(self.buckets, self.m, self.v):
            for run, decay, rate, _ in b.runs():
                grad, low = b.shard[run], None if b.own is b.master else b.own[run]
                for cut, (p, m1, v1) in self.chunks([b.master[run], m[run], v[run]], grad.device):
                    adamw(p, grad[cut], m1, v1, **pace(c, lr, decay, rate), beta1=c.beta1, beta2=c.beta2, eps=c.eps,
                          step=step, factor=factor, ok=ok, low=None if low is None else low[cut])

    def chunks(self, state: list[Tensor], device: torch.device):
        """(range, the state there on the device): all at once where it is kept there."""
        return [(slice(None), state)] if self.side is None else staged(state, device, self.side)
