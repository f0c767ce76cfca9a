"""LAMB (arXiv 1904.00962, algorithm 2) and LARS (arXiv 1708.03888): each tensor moves by a share of its own norm.

The norms are those of the whole stored tensors, wherever their elements lie: every rank adds up the elements that only it
brings, and one all-reduce of two numbers a tensor completes them. Norms and biases, which have no weight decay, move
without the ratio.
"""
import torch
from torch import Tensor

from optim.base import Optimizer, put
from parallel import comm

TRUST = 0.001  # LARS: eta of the paper


class Trust(Optimizer):
    """What both share: the ratio |w| / |direction| of each stored tensor."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        decays = {box.key: slot.param.spec.decay for b in self.buckets for slot in b.slots for box in slot.param.spec.boxes}
        every = sorted(set().union(*comm.all_objects({key for key, decay in decays.items() if decay}, self.mesh.world)))
        self.place = {key: i for i, key in enumerate(every)}  # of the tensors that move by a ratio

    def direction(self, i: int, step: int, factor: Tensor) -> Tensor:
        """Where bucket i's owned elements go, before the ratio; weight decay included."""
        raise NotImplementedError

    def ratios(self, step: int, factor: Tensor) -> Tensor:
        """[tensors]: |w| / |direction|; 1 where either is zero."""
        squares = self.buckets[0].master.new_zeros(len(self.place), 2)
        for i, b in enumerate(self.buckets):
            for at, flat in enumerate((b.master, self.direction(i, step, factor))):
                for box, part in b.boxes(flat, alone=True):
                    if box.key in self.place:
                        squares[self.place[box.key], at] += part.square().sum()
        w, r = comm.sum_(squares, self.mesh.world).sqrt().unbind(1)
        return torch.where((w > 0) & (r > 0), w / r, 1.0)

    def scaled(self, i: int, step: int, factor: Tensor, ratios: Tensor, share: float) -> Tensor:
        direction = self.direction(i, step, factor)
        for box, part in self.buckets[i].boxes(direction):
            if box.key in self.place:
                part.mul_(share * ratios[self.place[box.key]])
        return direction

    def decayed(self, i: int) -> Tensor:
        """weight_decay times the masters of bucket i that decay."""
        b = self.buckets[i]
        out = torch.zeros_like(b.master)
        for run, decay, *_ in b.runs():
            if decay:
                out[run] = self.cfg.weight_decay * b.master[run]
        return out


class LAMB(Trust):
    MOMENTS = ("adam_m", "adam_v")

    def update(self, step: int, lr: float, factor: Tensor, ok: Tensor) -> None:
        c = self.cfg
        for b, m, v in zip(self.buckets, *self.moments.values()):
            grad = b.shard * factor
            put([m, v], (m.lerp(grad, 1 - c.beta1), v.lerp(grad.square(), 1 - c.beta2)), ok)
        ratios = self.ratios(step, factor)
        for i, b in enumerate(self.buckets):
            put([b.master], (b.master - lr * self.scaled(i, step, factor, ratios, 1.0),), ok)

    def direction(self, i: int, step: int, factor: Tensor) -> Tensor:
        c, (m, v) = self.cfg, (flats[i] for flats in self.moments.values())
        root = (v / (1 - c.beta2**step)).sqrt_().add_(c.eps)
        return m / (1 - c.beta1**step) / root + self.decayed(i)


class LARS(Trust):
    MOMENTS = ("momentum",)

    def update(self, step: int, lr: float, factor: Tensor, ok: Tensor) -> None:
        ratios = self.ratios(step, factor)
        for i, (b, m) in enumerate(zip(self.buckets, self.moments["momentum"])):
            moved = m * self.cfg.momentum + lr * self.scaled(i, step, factor, ratios, TRUST)
            put([m, b.master], (moved, b.master - moved), ok)

    def direction(self, i: int, step: int, factor: Tensor) -> Tensor:
        return self.buckets[i].shard * factor + self.decayed(i)
