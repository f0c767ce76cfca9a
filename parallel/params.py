"""The weights of a rank as a few flat buckets, and what of them stays sharded: ZeRO (arXiv 1910.02054) as one table.

    zero   optimizer state   gradients   weights      on the wire a step (full fp32 gradients g, compute weights w)
    0      whole             whole       whole        all-reduce g
    1      sharded           whole       whole        reduce-scatter g, all-gather w: never more than 0
    2      sharded           sharded     whole        as 1, the reduce-scatter once a microbatch
    3      sharded           sharded     sharded      as 2, the all-gather twice a microbatch (forward and backward): 1.5 of 0

Every parameter is a view into a bucket's flat buffer. "Sharded" is over mesh.shard (dp x cp); mesh.dp_rep replicates the
shards (HSDP): each step, the shards' gradients are summed over it once more. Experts are shared by other ranks than the rest
(mesh.eshard, eloss): each bucket knows its groups. The optimizer, clipping and checkpoints see
only the owned range [lo, hi) of each bucket. plan/bytes.py and plan/memory.py have all of this as closed forms.

Every exchange is started where its data is ready and awaited where its result is needed (parallel/zero.py says when):
weights by fetch() .. need(), gradients by reduce() .. land() .. finish().
"""
import itertools
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from kernels.grad import wide
from kernels.rounding import Place
from parallel import comm, compress, packing
from parallel.boxes import Box
from parallel.comm import Work
from parallel.mesh import Mesh
from parallel.offload import to_host
from parallel.powersgd import PowerSGD, is_matrix
from parallel.ranges import range_boxes
from parallel.reduce import start_gather, start_scatter_sum, start_sum
from parallel.spec import fill


@dataclass(frozen=True)
class Sharing:
    """How data-parallel ranks share. zero: 0 to 3; reduce, node: parallel/reduce.py; cap: elements of a bucket; apart:
    hidden matrices have buckets of their own (Muon); offload: masters are in host memory; weights: none, int8 or fp8, as they
    are gathered; align: of slots and shares, where blocks of it have scales; rank: of PowerSGD, none: off; noise: optim/noise.py
    wants the first microbatch's gradients; bf16: masters are, and AdamW's moments, rounded stochastically."""
    zero: int = 0
    reduce: str = "collective"
    node: int | None = None
    cap: int = 1 << 24
    apart: bool = False
    offload: bool = False
    weights: str = "none"
    align: int = packing.ALIGN
    rank: int | None = None
    noise: bool = False
    bf16: bool = False


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


def whole(p: nn.Parameter) -> bool:
    """Does every tp rank hold all of p? (At tp 1 that is true of every parameter.)"""
    return all(b.size == b.shape for b in p.spec.boxes)


def counted(p: nn.Parameter, mesh: Mesh) -> bool:
    """Is this rank the one that counts p in the norm? p is replicated over tp where it holds its tensors whole, and over
    the pipeline's ends where it is tied. An expert's piece is nobody else's."""
    if p.spec.expert:
        return True
    return (mesh.tp.index == 0 or not whole(p)) and ("tied" not in p.spec.partial or mesh.pp.index == 0)


def cut(params: list[nn.Parameter], sharing: Sharing) -> list[list[nn.Parameter]]:
    """The parameters of a part -> those of each of its buckets. Those with the same treatment (decay, rate, counted) lie side by
    side, in an order that is the same on all tp ranks: what is partial over tp lies at the same place in each. Experts, which
    other ranks share, have buckets of their own."""
    kinds = [sorted([p for p in params if (p.spec.expert, sharing.apart and p.spec.hidden) == kind],
                    key=lambda p: (not p.spec.decay, p.spec.rate, whole(p)))
             for kind in itertools.product((False, True), repeat=2)]
    return [[kind[i] for i in group] for kind in kinds for group in packing.pack([prod(p.spec.shape) for p in kind], sharing.cap, sharing.align)]


class Bucket:
    """Parameters that are reduced, gathered and updated together. group: the ranks that shard it; everyone: those whose gradients
    are summed, group x replicas.

    size: elements with padding; lo, hi: the range this rank owns. weights [size], compute dtype; grad [size], fp32 or fp64:
    None while sharded away. own [hi - lo]: the owned weights; master [hi - lo]: fp32 or fp64 (bf16 on request), the same tensor
    as own where the dtypes agree and it is not offloaded; shard [hi - lo]: the owned gradients, reduced.
    """

    def __init__(self, params: list[nn.Parameter], mesh: Mesh, sharing: Sharing, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        zero = sharing.zero
        self.sharing, self.zero, self.dtype, self.expert = sharing, zero, dtype, params[0].spec.expert
        self.group, self.everyone = (mesh.eshard, mesh.eloss) if self.expert else (mesh.shard, mesh.loss)
        self.replicas, self.hidden = mesh.dp_rep, sharing.apart and params[0].spec.hidden
        shares = packing.shares(zero, sharing.reduce == "collective", self.group.size, self.replicas.size)
        offsets, self.size = packing.place([prod(p.spec.shape) for p in params], shares, sharing.align)
        self.slots = tuple(Slot(p, at, counted(p, mesh)) for p, at in zip(params, offsets))
        share = self.size // self.group.size if zero else self.size
        self.lo = share * self.group.index if zero else 0
        self.hi = self.lo + share
        initial = torch.zeros(self.size, dtype=wide(dtype), device=device)
        for slot in self.slots:
            fill(slot.param.spec, slot.of(initial), seed)
        initial, self.seed = initial.bfloat16() if sharing.bf16 else initial, seed
        self.quantized = sharing.weights != "none" and zero > 0 and self.group.size > 1
        self.weights: Tensor | None = initial if dtype == initial.dtype and not self.quantized else initial.to(dtype, copy=True)
        if self.quantized and zero < 3:  # as the others see them, from the first step on
            self.weights.copy_(compress.seen(self.weights, self.group.size, sharing.weights, sharing.align))
        self.own = self.weights[self.lo:self.hi] if zero < 3 else self.weights[self.lo:self.hi].clone()
        if sharing.offload:
            self.master = to_host(initial[self.lo:self.hi])
        else:
            self.master = self.own if self.own.dtype == initial.dtype and (zero == 3 or not self.quantized) else initial[self.lo:self.hi].clone()
        self.grad: Tensor | None = None
        self.users = self.finals = 0  # parts that use this bucket; those that ended their last backward of the step
        self.arriving: Work | None = None  # weights
        self.scattering: Work | None = None  # a microbatch's gradients, or the step's
        self.summing: Work | None = None  # the step's
        self.first: Tensor | None = None  # squares of the step's first microbatch
        self.last = False  # what is scattering is the step's last
        flat = None if zero >= 2 else torch.zeros(self.size, dtype=wide(dtype), device=device)
        self.shard = torch.zeros(share, dtype=wide(dtype), device=device) if flat is None else flat[self.lo:self.hi]
        several = sharing.rank is not None and self.everyone.size > 1
        self.power = (PowerSGD(self.slots, self.size, self.everyone, sharing.rank, seed, flat)
                      if several and any(is_matrix(p.spec) for p in params) else None)
        self.point()
        if flat is not None:
            self.hold_grad(flat)
        if zero == 3:
            self.release()

    def point(self) -> None:
        for slot in self.slots:
            slot.param.data = slot.of(self.weights)

    # ---- weights -----------------------------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Start making the weights whole (ZeRO-3), ahead of their use."""
        if self.weights is None:
            self.weights = self.own.new_empty(self.size)
            self.arriving = start_gather(self.own, self.group, self.weights, self.sharing.weights, self.sharing.align)

    def need(self) -> None:
        """The weights are whole: fetched, or published by the last step, and here."""
        self.fetch()
        if self.arriving is not None:
            self.arriving.wait()
            self.arriving = None
            self.point()

    def release(self) -> None:
        """Keep the owned range alone (ZeRO-3, after use)."""
        if self.arriving is not None:
            self.arriving.wait()
        self.weights = self.arriving = None
        for slot in self.slots:
            slot.param.data = slot.param.data.new_empty(0)

    def round(self) -> None:
        """The masters into the compute dtype, where the optimizer has not done it in passing (after loading)."""
        if self.own is not self.master:
            self.own.copy_(self.master)

    def publish(self) -> None:
        """After the owned weights changed: every rank gets the others' shares, by the time it needs them."""
        if self.zero == 3:
            self.release()  # whole weights that were kept from before are old now
        elif self.zero and self.group.size > 1:
            if self.arriving is not None:
                self.arriving.wait()
            if self.quantized:
                self.round()  # a skipped step left what the others saw
            self.arriving = start_gather(self.own.clone(), self.group, self.weights, self.sharing.weights, self.sharing.align)

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def hold_grad(self, flat: Tensor | None = None) -> None:
        """Room for whole gradients, zeroed; every parameter's main_grad points into it. ZeRO-2 and 3 have it only from a
        backward's first use of the bucket to its reduction."""
        if self.grad is None:
            self.grad = self.shard.new_zeros(self.size) if flat is None else flat
            for slot in self.slots:
                slot.param.main_grad = slot.of(self.grad)

    def zero_grad(self) -> None:
        self.first = None
        (self.shard if self.zero >= 2 else self.grad).zero_()

    def squares(self, flat: Tensor, lo: int, hi: int) -> Tensor:
        """The sum of squares of `flat`, elements lo .. hi of the bucket, over the matrices between hidden features outside experts
        that this rank counts."""
        spans = [(max(s.offset, lo), min(s.offset + s.numel, hi)) for s in self.slots if s.once and s.param.spec.hidden and not self.expert]
        parts = [torch.linalg.vector_norm(flat[a - lo:b - lo]) for a, b in spans if a < b]
        return torch.stack(parts).square().sum() if parts else flat.new_zeros(())

    def sample(self) -> None:
        """A microbatch of this bucket has ended and nothing is summed yet: the step's first is looked at."""
        if self.sharing.noise and self.first is None and self.grad is not None:
            self.first = self.squares(self.grad, 0, self.size)

    def reduce(self, last: bool) -> None:
        """Start the sum over the ranks that saw other tokens; the one before has landed. last: nothing of this
        step comes after it."""
        how = self.sharing
        if self.zero == 0:
            self.summing = self.power.start(self.grad) if self.power else start_sum(self.grad, self.everyone, how.reduce, how.node, how.align)
            return
        self.scattering, self.last = start_scatter_sum(self.grad, self.group, how.reduce, how.align), last
        if self.zero >= 2:
            self.grad = None
            for slot in self.slots:
                slot.param.main_grad = None

    def land(self) -> None:
        """Wait for a scattered sum: the owned range of it goes to `shard`, and the step's on to the replicas. A sum of two hops
        begins the second."""
        if self.summing is not None:
            self.summing.turn()
        if self.scattering is None:
            return
        part, self.scattering = self.scattering.wait(), None
        if self.zero == 1 and self.group.size > 1:
            self.shard.copy_(part)
        elif self.zero >= 2:
            self.shard.add_(part)
        if self.last:
            how = self.sharing
            self.summing = start_sum(self.shard, self.replicas, how.reduce, how.node, how.align)

    def finish(self) -> None:
        """`shard` is the sum over all ranks that saw other tokens."""
        self.land()
        if self.summing is not None:
            self.summing.wait()
            self.summing = None

    def settle(self, ok: Tensor) -> None:
        """The step was judged: what a compressed sum left behind is kept, or forgotten with the step."""
        if self.power is not None:
            self.power.settle(ok)

    def partial(self, axis: str) -> list[Tensor]:
        """Views of the owned gradients that are still partial over `axis`: "tp" (norms under sequence parallelism, per-head
        norms), "tied" (a table at the pipeline's ends, alone in its bucket on both)."""
        ranges = [(max(s.offset, self.lo) - self.lo, min(s.offset + s.numel, self.hi) - self.lo)
                  for s in self.slots if axis in s.param.spec.partial]
        return [self.shard[a:b] for a, b in ranges if a < b]

    # ---- what the optimizer, clipping and checkpoints read -----------------------------------------------------------

    def runs(self) -> list[tuple[slice, bool, float, bool]]:
        """[(range within the owned share, weight decay, factor of the rate, counted in the norm)]: as few as the order of slots allows."""
        out: list[tuple[int, int, bool, float, bool]] = []
        for slot in self.slots:
            a, b = max(slot.offset, self.lo), min(slot.offset + slot.numel, self.hi)
            if a < b:
                how = slot.param.spec.decay, slot.param.spec.rate, slot.once
                if out and out[-1][2:] == how:
                    out[-1] = (out[-1][0], b - self.lo, *out[-1][2:])  # padding between them is zero and stays zero
                else:
                    out.append((a - self.lo, b - self.lo, *how))
        return [(slice(a, b), decay, rate, once) for a, b, decay, rate, once in out]

    def boxes(self, flat: Tensor, alone: bool = False) -> list[tuple[Box, Tensor]]:
        """[(box, its elements)] of a flat tensor over the owned range: at most 2 ndim - 1 boxes a stored tensor.
        alone: leave out what another rank brings too, so that all ranks together have every element once."""
        out = []
        copies = self.replicas if self.zero else self.everyone  # ranks that own the same range
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

    def places(self) -> list[tuple[int, int, str, Place]]:
        """[(a, b, key, where elements a .. b - 1 of the owned share lie in that tensor)], in order."""
        out = []
        for box, part in self.boxes(self.master):
            if box.size[2:] != box.shape[2:]:
                raise ValueError(f"{box}: is cut along more than two dims, and its elements are rounded by rows and columns")
            row, a = prod(box.shape[1:]), part.storage_offset() - self.master.storage_offset()
            base = box.start[0] * row + (box.start[1] * prod(box.shape[2:]) if box.shape[1:] else 0)
            out.append((a, a + box.volume, box.key, Place(0, base, row if box.size[0] == 1 else prod(box.size[1:]), row)))
        return out


def finish(buckets: list[Bucket], mesh: Mesh) -> None:
    """The step's gradients are whole: every reduction has ended, and what was partial over tp is summed, in one exchange;
    then a tied table, over the ends of the pipeline."""
    for b in buckets:  # second hops start before the first is waited for
        b.land()
    for b in buckets:
        b.finish()
    for axis, group in (("tp", mesh.tp), ("tied", mesh.tied)):
        parts = [part for b in buckets for part in b.partial(axis)] if group is not None and group.size > 1 else []
        if parts:
            flat = comm.sum_(torch.cat(parts), group)
            for part, value in zip(parts, flat.split([len(p) for p in parts])):
                part.copy_(value)
