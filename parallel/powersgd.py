"""PowerSGD (arXiv 1905.13727): data-parallel ranks sum two thin factors of each matrix's gradient instead of the matrix.

    D = gradient + error      P = sum of D Q, orthonormalised      Q = sum of D' P      sum of gradients ~ P Q'      error = D - P (own D' P)'

for a matrix [m, n] of rank r: r (m + n) elements travel, in two all-reduces a bucket, and start one step of a subspace
iteration from the Q of the step before. What is not sent stays behind: sent + the ranks' errors = gradients + the errors
before, to rounding. r of at least min(m, n) loses nothing. All else (vectors; matrices whose gradient is summed over other
ranks afterwards: routers, keys that tp ranks share, tables at a pipeline's ends) travels whole in the first all-reduce.
Under tp, each rank's piece is a matrix of its own, as is each expert.

The sums are linear in the errors, so that only the errors' sum matters: a checkpoint holds that (KEY@powersgd_error), and ranks
share it evenly whenever one is written or read; so any number of ranks goes on where others stopped. The bases (KEY@powersgd_basis)
belong to pieces, and those that a new layout has no use for are drawn anew. A skipped step leaves no error behind.
"""
import hashlib
from dataclasses import replace

import torch
from torch import Tensor

from parallel import comm
from parallel.boxes import Box
from parallel.comm import Group
from parallel.spec import Spec

ERROR, BASIS = "@powersgd_error", "@powersgd_basis"


def shape_of(spec: Spec) -> tuple[int, int, int]:
    """[many, m, n] of a parameter with two dims: one matrix, or one of each expert."""
    rows, n = spec.shape
    many = len({b.key.rsplit(".", 2)[0] for b in spec.boxes}) if spec.expert else 1
    return many, rows // many, n


def is_matrix(spec: Spec) -> bool:
    return len(spec.shape) == 2 and min(shape_of(spec)[1:]) > 1 and not spec.partial


def orthonormal(x: Tensor) -> Tensor:
    """A basis of the columns of x [many, m, r], and of more where these depend on each other; r is at most m."""
    return torch.linalg.qr(x).Q


def draw(spec: Spec, rank: int, seed: int) -> Tensor:
    """The first bases [many, n, r] of a parameter: a function of its name and place."""
    box, (many, m, n) = spec.boxes[0], shape_of(spec)
    digest = hashlib.sha256(f"{seed}/{box.key}/{box.start}/powersgd".encode()).digest()
    stream = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return orthonormal(torch.randn(many, n, min(rank, m, n), generator=stream, dtype=torch.float64))


class PowerSGD:
    """Of one bucket. slots: its parameters' (parallel/params.py); error [size]: what this rank has yet to send; bases: a Q a matrix."""

    def __init__(self, slots: tuple, size: int, group: Group, rank: int, seed: int, like: Tensor) -> None:
        self.group, self.matrices, self.rest = group, [s for s in slots if is_matrix(s.param.spec)], [s for s in slots if not is_matrix(s.param.spec)]
        self.error = like.new_zeros(size)
        self.bases = [draw(s.param.spec, rank, seed).to(like) for s in self.matrices]
        self.before, self.left = self.bases, None  # the bases a step ago; the P of a sum whose second hop is under way

    def views(self, flat: Tensor) -> list[Tensor]:
        """[many, m, n] of each matrix, in a flat tensor [size]."""
        return [slot.of(flat).view(shape_of(slot.param.spec)) for slot in self.matrices]

    def start(self, grad: Tensor) -> "PowerSGD":
        """Begin to sum grad [size] over the group, in place; turn() waits for the first hop and starts the second, wait() ends it."""
        self.grad, self.left = grad, None
        for x, error in zip(self.views(grad), self.views(self.error)):
            x.add_(error)
        first = [x @ q for x, q in zip(self.views(grad), self.bases)] + [slot.of(grad) for slot in self.rest]
        self.shapes = [x.shape for x in first]
        self.work = comm.start_sum(flat(first), self.group)
        return self

    def turn(self) -> None:
        if self.left is not None:
            return
        came = apart(self.work.wait(), self.shapes)
        for slot, x in zip(self.rest, came[len(self.matrices):]):
            slot.of(self.grad).copy_(x)
        self.left, own = [orthonormal(x) for x in came[:len(self.matrices)]], []
        for x, p, error in zip(self.views(self.grad), self.left, self.views(self.error)):
            own.append(x.mT @ p)
            torch.sub(x, p @ own[-1].mT, out=error)
        self.work = comm.start_sum(flat(own), self.group)

    def wait(self) -> Tensor:
        self.turn()
        factors = apart(self.work.wait(), [q.shape for q in self.bases])
        for x, p, q in zip(self.views(self.grad), self.left, factors):
            x.copy_(p @ q.mT)
        self.before, self.bases = self.bases, [orthonormal(q) for q in factors]
        return self.grad

    def settle(self, ok: Tensor) -> None:
        """After the step was judged. A step that is skipped, of which errors and bases may be NaN, is forgotten."""
        self.error.copy_(torch.where(ok, self.error, 0))
        self.bases = [torch.where(ok, new, old) for new, old in zip(self.bases, self.before)]

    def share(self) -> Tensor:
        """[size]: the sum of the ranks' errors, of which each keeps an equal part. Collective."""
        total = comm.sum_(self.error.clone(), self.group)
        self.take(total)
        return total

    def take(self, total: Tensor) -> None:
        torch.div(total, self.group.size, out=self.error)

    def boxes(self, total: Tensor, alone: bool = False) -> list[tuple[Box, Tensor]]:
        """What a checkpoint holds; total: as of share(). alone: leave out what another rank brings too."""
        out = []
        for slot, q in zip(self.matrices, self.bases):
            if alone and not (slot.once and self.group.index == 0):
                continue
            first = slot.param.spec.boxes[0]
            out += [(replace(box, key=box.key + ERROR), x) for box, x in slot.param.spec.split(slot.of(total))]
            out.append((Box.whole(f"{first.key}{BASIS}.{'x'.join(map(str, first.start))}", q.shape), q))
        return out


def flat(parts: list[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in parts])


def apart(x: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    return [part.view(shape) for part, shape in zip(x.split([s.numel() for s in shapes]), shapes)]
