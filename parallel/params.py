"""The weights of a rank as a few flat buckets, and what of them stays sharded: ZeRO (arXiv 1910.02054) as one table.

    zero   optimizer state   gradients   weights      on the wire a step (full fp32 gradients g, compute weights w)
    0      whole             whole       whole        all-reduce g
    1      sharded           whole       whole        reduce-scatter g, all-gather w
    2      sharded           sharded     whole        as 1, the reduce-scatter once a microbatch
    3      sharded           sharded     sharded      as 2, the all-gather twice a microbatch (forward and backward)

Every parameter is a view into a bucket's flat buffer. "Sharded" is over mesh.shard (dp x cp); mesh.dp_rep replicates the
shards (HSDP). The optimizer, clipping and checkpoints see only the owned range [lo, hi) of each bucket.
"""
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from kernels.grad import wide
from parallel import comm
from parallel.boxes import Box
from parallel.mesh import Mesh
from parallel.ranges import range_boxes
from parallel.spec import fill

ALIGN = 64  # elements: a slot, and a shard, starts on a cache line in every dtype


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies in its bucket: elements offset .. offset + numel. once: this rank counts it in the clip norm
    (a parameter that several ranks hold whole is counted by one of them)."""
    param: nn.Parameter
    offset: int
    once: bool

    @property
    def numel(self) -> int:
        return prod(self.param.spec.shape)

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.offset:self.offset + self.numel].view(self.param.spec.shape)


def counted(p: nn.Parameter, mesh: Mesh) -> bool:
    """Is this rank the one that counts p in the norm? p is replicated over tp where it holds its tensors whole, and over
    the pipeline's ends where it is tied."""
    whole = all(b.size == b.shape for b in p.spec.boxes)
    first_tp = mesh.tp.index == 0 or not whole
    return first_tp and ("tied" not in p.spec.partial or mesh.pp.index == 0)


def lay_out(params: list[nn.Parameter], mesh: Mesh, shards: int) -> tuple[list[Slot], int]:
    """Slots, those with the same treatment (decay, counted) side by side -> (slots, bucket size in elements)."""
    slots, at = [], 0
    for p in sorted(params, key=lambda p: (not p.spec.decay, not counted(p, mesh))):  # sorted() keeps the order of equals
        slots.append(Slot(p, at, counted(p, mesh)))
        at += -(-prod(p.spec.shape) // ALIGN) * ALIGN
    return slots, -(-at // (ALIGN * shards)) * ALIGN * shards


class Bucket:
    """Parameters that are reduced, gathered and updated together.

    size: elements with padding; lo, hi: the range this rank owns. weights [size], compute dtype; grad [size], fp32 or fp64:
    None while sharded away. own [hi - lo]: the owned weights; master [hi - lo]: fp32 or fp64, the same tensor as own where
    the dtypes agree; shard [hi - lo]: the owned gradients, reduced.
    """

    def __init__(self, params: list[nn.Parameter], mesh: Mesh, zero: int, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.mesh, self.zero, self.dtype = mesh, zero, dtype
        parts = mesh.shard.size if zero else 1
        slots, self.size = lay_out(params, mesh, parts)
        self.slots = tuple(slots)
        share = self.size // parts
        self.lo = share * mesh.shard.index if zero else 0
        self.hi = self.lo + share
        initial = torch.zeros(self.size, dtype=wide(dtype), device=device)
        for slot in self.slots:
            fill(slot.param.spec, slot.of(initial), seed)
        whole = initial if dtype == initial.dtype else initial.to(dtype)
        self.weights: Tensor | None = whole
        self.own = whole[self.lo:self.hi] if zero < 3 else whole[self.lo:self.hi].clone()
        self.master = self.own if self.own.dtype == initial.dtype else initial[self.lo:self.hi].clone()
        self.grad: Tensor | None = None
        self.users = self.finals = 0  # parts that use this bucket; those that ended their last backward of the step
        self.shard = torch.zeros(share, dtype=wide(dtype), device=device)
        self.point()
        if zero < 2:
            self.hold_grad()
        if zero == 3:
            self.release()

    def point(self) -> None:
        for slot in self.slots:
            slot.param.data = slot.of(self.weights)

    # ---- weights -----------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Make the weights whole (ZeRO-3, before they are used)."""
        if self.weights is None:
            self.weights = self.own.new_empty(self.size)
            comm.gather(self.own, self.mesh.shard, out=self.weights)
            self.point()

    def release(self) -> None:
        """Keep the owned range alone (ZeRO-3, after use)."""
        self.weights = None
        for slot in self.slots:
            slot.param.data = slot.param.data.new_empty(0)

    def round(self) -> None:
        """The masters into the compute dtype, where the optimizer has not done it in passing (after loading)."""
        if self.own is not self.master:
            self.own.copy_(self.master)

    def publish(self) -> None:
        """After the owned weights changed: every rank gets the others' shares."""
        if self.zero in (1, 2) and self.mesh.shard.size > 1:
            comm.gather(self.own.clone(), self.mesh.shard, out=self.weights)
        if self.zero == 3:
            self.release()  # whole weights that were kept from before are old now

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def hold_grad(self) -> None:
        """Room for whole gradients, zeroed; every parameter's main_grad points into it. ZeRO-2 and 3 have it only from a
        backward's first use of the bucket to its reduction."""
        if self.grad is None:
            self.grad = self.shard if self.zero == 0 else self.shard.new_zeros(self.size)
            for slot in self.slots:
                slot.param.main_grad = slot.of(self.grad)

    def zero_grad(self) -> None:
        self.shard.zero_()
        if self.zero == 1:
            self.grad.zero_()

    def reduce(self) -> None:
        """Sum what is partial, then sum over the ranks that saw other tokens; the owned range of it lands in `shard`."""
        self.sum_partial()
        if self.zero == 0:
            comm.sum_(self.grad, self.mesh.loss)
            return
        part = comm.scatter_sum(self.grad, self.mesh.shard)
        comm.sum_(part, self.mesh.dp_rep)
        self.shard.add_(part)
        if self.zero >= 2:
            self.grad = None
            for slot in self.slots:
                slot.param.main_grad = None

    def sum_partial(self) -> None:
        """Over tp: norms under sequence parallelism, per-head norms; in one exchange a bucket."""
        slots = [s for s in self.slots if "tp" in s.param.spec.partial]
        if slots and self.mesh.tp.size > 1:
            flat = comm.sum_(torch.cat([s.of(self.grad).reshape(-1) for s in slots]), self.mesh.tp)
            for slot, part in zip(slots, flat.split([s.numel for s in slots])):
                slot.of(self.grad).copy_(part.view(slot.param.spec.shape))

    def sum_tied(self) -> None:
        """Over the pipeline's ends: a tied embedding, alone in its bucket on both."""
        if self.mesh.tied is not None and any("tied" in s.param.spec.partial for s in self.slots):
            comm.sum_(self.shard, self.mesh.tied)

    # ---- what the optimizer, clipping and checkpoints read -----------------------------------------------------------

    def runs(self) -> list[tuple[slice, bool, bool]]:
        """[(range within the owned share, weight decay, counted in the norm)]: as few as the order of slots allows."""
        out: list[tuple[int, int, bool, bool]] = []
        for slot in self.slots:
            a, b = max(slot.offset, self.lo), min(slot.offset + slot.numel, self.hi)
            if a < b:
                same = out and out[-1][2:] == (slot.param.spec.decay, slot.once)
                if same:
                    out[-1] = (out[-1][0], b - self.lo, *out[-1][2:])  # padding between them is zero and stays zero
                else:
                    out.append((a - self.lo, b - self.lo, slot.param.spec.decay, slot.once))
        return [(slice(a, b), decay, once) for a, b, decay, once in out]

    def boxes(self, flat: Tensor, alone: bool = False) -> list[tuple[Box, Tensor]]:
        """[(box, its elements)] of a flat tensor over the owned range: at most 2 ndim - 1 boxes a stored tensor.
        alone: leave out what another rank brings too, so that all ranks together have every element once."""
        out = []
        copies = self.mesh.dp_rep if self.zero else self.mesh.loss  # ranks that own the same range
        for slot in self.slots:
            if alone and not (slot.once and copies.index == 0):
                continue
            at = slot.offset
            for box in slot.param.spec.boxes:
                n = prod(box.size)
                a, b = max(at, self.lo) - at, min(at + n, self.hi) - at
                done = max(at, self.lo) - self.lo
                for start, size in range_boxes(box.size, a, b) if a < b else []:
                    where = tuple(x + y for x, y in zip(box.start, start))
                    out.append((Box(box.key, box.shape, where, size), flat[done:done + prod(size)].view(size)))
                    done += prod(size)
                at += n
        return out
