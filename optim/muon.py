"""Muon (Keller Jordan 2024; at scale: arXiv 2502.16982): hidden matrices move by their orthogonalised momentum, whole.

Embeddings, the head, routers, norms and biases go by AdamW. The update of a matrix is scaled by 0.2 sqrt(max(m, n)), so that
both share one learning rate (2502.16982, section 2.2). muP wants the update's spectral norm the same at every width (arXiv
2310.17813), and this scale grows as the width's root: so hidden matrices then go m^-1/2 times as fast.

Whole matrices, whatever shards them: the ranks of a pipeline stage share its matrices out, balanced by FLOPs. One all-to-all
brings each its matrices' momentum, another takes the results to everyone that owns a piece. What an owner holds itself does
not travel; so a matrix of n elements costs at most n on the way there and n a copy on the way back.
"""
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from config import Optim
from kernels.newton_schulz import newton_schulz
from optim.adamw import AdamW
from optim.base import put
from parallel import comm
from parallel.boxes import Box
from parallel.mesh import Mesh
from parallel.params import Bucket

SCALE = 0.2  # times sqrt(max(m, n)): about the RMS of AdamW's updates


@dataclass(frozen=True)
class Plan:
    """shapes: {key: (m, n)} of the matrices that this rank orthogonalises. send, back: what goes to each rank of the group,
    there and back; came, home: what comes from each: lists of boxes, both ends in the same order. own: what stays here."""
    shapes: dict[str, tuple[int, int]]
    own: list[Box]
    send: list[list[Box]]
    came: list[list[Box]]
    back: list[list[Box]]
    home: list[list[Box]]


def share_out(shapes: dict[str, tuple[int, int]], ranks: int) -> dict[str, int]:
    """{key: rank}: the most expensive first, each to the rank that has least."""
    load = [0] * ranks
    owner = {}
    for key in sorted(shapes, key=lambda k: (-prod(shapes[k]) * min(shapes[k]), k)):
        owner[key] = load.index(min(load))
        load[owner[key]] += prod(shapes[key]) * min(shapes[key])
    return owner


def make_plan(owned: list[list[Box]], alone: list[list[Box]], me: int) -> Plan:
    """owned, alone: of every rank, the pieces it holds, and those of them that no other rank brings."""
    shapes = {b.key: b.shape for boxes in owned for b in boxes}
    owner = share_out(shapes, len(owned))

    def travels(r: int, o: int) -> list[Box]:
        """From r to the owner o: what only r brings, less what o holds itself."""
        parts = [b for b in alone[r] if owner[b.key] == o] if r != o else []
        for mine in owned[o]:
            parts = [rest for part in parts for rest in (part.minus(mine) if part.key == mine.key else [part])]
        return parts

    ranks = range(len(owned))
    return Plan({k: s for k, s in shapes.items() if owner[k] == me}, [b for b in owned[me] if owner[b.key] == me],
                [travels(me, o) for o in ranks], [travels(r, me) for r in ranks],
                [[b for b in owned[r] if owner[b.key] == me] if r != me else [] for r in ranks],
                [[b for b in owned[me] if owner[b.key] == o] if o != me else [] for o in ranks])


def exchange(parts: list[list[Tensor]], coming: list[list[Box]], group: comm.Group, like: Tensor) -> list[tuple[Box, Tensor]]:
    """parts[r] goes to rank r -> [(box, its values)] of what comes."""
    sent, came = [sum(p.numel() for p in to) for to in parts], [sum(b.volume for b in boxes) for boxes in coming]
    flat = torch.cat([p.reshape(-1) for to in parts for p in to]) if sum(sent) else like.new_empty(0)
    flat = comm.start_all_to_all(flat, sent, came, group).wait()
    boxes = [b for some in coming for b in some]
    return [(b, x.view(b.size)) for b, x in zip(boxes, flat.split([b.volume for b in boxes]))] if boxes else []


class Muon:
    def __init__(self, cfg: Optim, buckets: list[Bucket], mesh: Mesh) -> None:
        self.cfg, self.buckets, self.group = cfg, buckets, mesh.stage
        self.hidden = [i for i, b in enumerate(buckets) if b.hidden]
        self.rest = AdamW(cfg, [b for b in buckets if not b.hidden], mesh)
        self.m = [torch.zeros_like(b.master) if b.hidden else None for b in buckets]
        owned, alone = ([box for i in self.hidden for box, _ in buckets[i].boxes(buckets[i].master, once)] for once in (False, True))
        every = comm.all_objects((owned, alone), self.group)
        self.plan = make_plan([o for o, _ in every], [a for _, a in every], self.group.index)

    def state(self) -> dict[str, list[Tensor | None]]:
        rest = {name: iter(flats) for name, flats in self.rest.state().items()}
        return {"muon_m": self.m} | {name: [None if b.hidden else next(flats) for b in self.buckets] for name, flats in rest.items()}

    @torch.no_grad()
    def step(self, step: int, lr: float, factor: Tensor, ok: Tensor) -> None:
        """Update number `step` (from 1) with the gradients times `factor`. ok False: a skipped step, nothing changes."""
        if ok.device.type == "cpu" and not ok:  # the same on every rank, so that none waits in the exchange
            return
        self.rest.step(step, lr, factor, ok)
        updates, mu = {}, self.cfg.momentum
        for i in self.hidden:
            grad = self.buckets[i].shard * factor
            put([self.m[i]], (self.m[i] * mu + grad,), ok)
            updates[i] = grad + mu * self.m[i]  # Nesterov's look ahead
        views = [pair for i in self.hidden for pair in self.buckets[i].boxes(updates[i])]
        self.orthogonalise(views)
        for i in self.hidden:
            b = self.buckets[i]
            for run, _, rate, _ in b.runs():
                put([b.master[run]], (b.master[run] * (1 - lr * self.cfg.weight_decay) - lr * rate * updates[i][run],), ok)
            b.round()

    def orthogonalise(self, views: list[tuple[Box, Tensor]]) -> None:
        """In place: the pieces of the stage's matrices that this rank owns become those of the orthogonal matrices."""
        p, like = self.plan, self.buckets[0].master
        whole = {key: like.new_empty(shape) for key, shape in p.shapes.items()}
        arrived = exchange([[cut_out(views, b) for b in to] for to in p.send], p.came, self.group, like)
        for box, x in [*((b, cut_out(views, b)) for b in p.own), *arrived]:
            whole[box.key][box.within(Box.whole(box.key, box.shape))] = x
        for x in whole.values():
            x.copy_(newton_schulz(x) * (SCALE * max(x.shape)**0.5))
        results = [(Box.whole(key, x.shape), x) for key, x in whole.items()]
        home = exchange([[cut_out(results, b) for b in to] for to in p.back], p.home, self.group, like)
        for box, x in [*((b, cut_out(results, b)) for b in p.own), *home]:
            cut_out(views, box).copy_(x)


def cut_out(views: list[tuple[Box, Tensor]], want: Box) -> Tensor:
    """The part of one of the views that `want` names."""
    box, x = next((b, x) for b, x in views if b.key == want.key and b.meet(want) == want)
    return x[want.within(box)]
