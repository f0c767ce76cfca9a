"""AdamW over the owned ranges of the flat buckets (parallel/params.py): the same code whatever ZeRO shards, and where
its state is kept (parallel/offload.py). State in bf16 is updated a tensor at a time: which elements of it they are decides
how they are rounded (kernels/rounding.py)."""
from dataclasses import replace

import torch
from torch import Tensor

from config import Optim
from kernels.adam import adamw
from kernels.rounding import Place, salt
from optim.base import pace
from parallel.mesh import Mesh
from parallel.offload import Side, staged
from parallel.params import Bucket


class AdamW:
    """m, v: first and second moments, flat and in the master's dtype, a pair a bucket."""

    def __init__(self, cfg: Optim, buckets: list[Bucket], mesh: Mesh) -> None:
        self.cfg, self.buckets = cfg, buckets
        self.m, self.v = ([torch.zeros_like(b.master, pin_memory=b.master.is_pinned()) for b in buckets] for _ in "mv")
        self.places = [b.places() if b.sharing.bf16 else None for b in buckets]
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
        for b, m, v, places in zip(self.buckets, self.m, self.v, self.places):
            for run, decay, rate, _ in b.runs():
                grad, low = b.shard[run], None if b.own is b.master else b.own[run]
                for cut, (p, m1, v1) in self.chunks([b.master[run], m[run], v[run]], grad.device):
                    at, g1, l1 = run.start + (cut.start or 0), grad[cut], None if low is None else low[cut]
                    for part, place in [(slice(None), None)] if places is None else within(places, at, at + len(p), b.seed, step):
                        adamw(p[part], g1[part], m1[part], v1[part], **pace(c, lr, decay, rate), beta1=c.beta1, beta2=c.beta2, eps=c.eps,
                              step=step, factor=factor, ok=ok, low=None if l1 is None else l1[part], place=place)

    def chunks(self, state: list[Tensor], device: torch.device):
        """(range, the state there on the device): all at once where it is kept there."""
        return [(slice(None), state)] if self.side is None else staged(state, device, self.side)


def within(places: list[tuple[int, int, str, Place]], lo: int, hi: int, seed: int, step: int) -> list[tuple[slice, Place]]:
    """[(range within elements lo .. hi - 1 of a share, where it lies in its tensor, and which bits round it)]; padding has no place."""
    return [(slice(max(a, lo) - lo, min(b, hi) - lo), replace(place, salt=salt(seed, step, key), skip=max(lo - a, 0)))
            for a, b, key, place in places if a < hi and lo < b]
