"""The one mouth to torch.distributed: every collective and transfer of Bevatron goes through here, by name and counted.

A Group of one rank is the identity: nothing is called, nothing counted, so one process runs the same code as many.
The ledger counts calls and payload bytes of each (group, verb): the bytes of the larger side of the exchange, so that a
reduce-scatter and the all-gather that undoes it count the same, and the two together twice an all-reduce's share of work
(a ring all-reduce is exactly these two, Patarasuk and Yuan 2009). Tests hold the ledger against closed forms.
"""
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Group:
    """Ranks that talk to each other. name: its axes ("tp"); ranks: global; index: this rank's place among them."""
    name: str
    ranks: tuple[int, ...] = (0,)
    index: int = 0
    handle: object = None  # torch.distributed process group; None where the group has one rank
    ledger: Counter = field(default_factory=Counter, compare=False, repr=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def count(self, verb: str, x: Tensor) -> None:
        self.ledger[self.name, verb, "calls"] += 1
        self.ledger[self.name, verb, "bytes"] += x.numel() * x.element_size()


@dataclass(frozen=True)
class World:
    """The job as this rank joined it. handles: process groups by their ranks, made once and shared by equal groups."""
    rank: int = 0
    size: int = 1
    handles: dict = field(default_factory=dict)

    def groups(self, name: str, every: list[list[int]], ledger: Counter) -> Group:
        """The group among `every` that holds this rank. All ranks call this with the same lists, in the same order."""
        mine = None
        for ranks in map(tuple, every):
            if len(ranks) > 1 and ranks not in self.handles:
                self.handles[ranks] = dist.new_group(list(ranks))
            if self.rank in ranks:
                mine = Group(name, ranks, ranks.index(self.rank), self.handles.get(ranks), ledger)
        return mine


def join(device: str, rank: int, size: int, timeout_s: float, init: str = "env://") -> World:
    """Join the job: gloo for the host, nccl beside it on GPUs. The rendezvous comes from the launcher's variables, or from
    `init` (a file:// or tcp:// address)."""
    if size > 1:
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=init, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
    return World(rank, size)


def leave() -> None:
    """Always leave by this door: a rank that exits with a live group can abort its peers."""
    if dist.is_initialized():
        dist.destroy_process_group()


# ---- collectives -----------------------------------------------------------------------------------------------------

def sum_(x: Tensor, group: Group) -> Tensor:
    """In place: the sum over the group, on every rank."""
    if group.size > 1:
        group.count("all_reduce", x)
        dist.all_reduce(x, group=group.handle)
    return x


def max_(x: Tensor, group: Group) -> Tensor:
    """In place: the maximum of integers over the group (gloo's float maximum drops a NaN that is not on rank 0)."""
    if group.size > 1:
        assert not x.is_floating_point(), "reduce a flag as an int: a float maximum loses NaNs"
        group.count("all_reduce", x)
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group.handle)
    return x


def gather(x: Tensor, group: Group, out: Tensor | None = None) -> Tensor:
    """[n, ...] of each rank -> [size * n, ...] in the group's order, into `out` where given."""
    if group.size == 1:
        return x if out is None else out.copy_(x)
    out = x.new_empty(group.size * x.shape[0], *x.shape[1:]) if out is None else out
    group.count("all_gather", out)
    verb = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renames it
    verb(out, x.contiguous(), group=group.handle)
    return out


def scatter_sum(x: Tensor, group: Group, out: Tensor | None = None) -> Tensor:
    """[size * n, ...] of each rank -> this rank's [n, ...] of the sum, into `out` where given."""
    if group.size == 1:
        return x if out is None else out.copy_(x)
    out = x.new_empty(x.shape[0] // group.size, *x.shape[1:]) if out is None else out
    group.count("reduce_scatter", x)
    verb = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    verb(out, x.contiguous(), group=group.handle)
    return out


class Work:
    """An exchange under way. wait() -> its result, to be read from then on; in a group of one it is there at once."""

    def __init__(self, result: Tensor, handle=None, source: Tensor | None = None) -> None:
        self.result, self.handle, self.source = result, handle, source  # source: what is sent must live until it has arrived

    def wait(self) -> Tensor:
        if self.handle is not None:
            self.handle.wait()
        self.handle = self.source = None
        return self.result


def start_sum(x: Tensor, group: Group) -> Work:
    """sum_, started: x is neither read nor written by others until wait()."""
    if group.size == 1:
        return Work(x)
    group.count("all_reduce", x)
    return Work(x, dist.all_reduce(x, group=group.handle, async_op=True))


def start_gather(x: Tensor, group: Group, out: Tensor) -> Work:
    """gather, started."""
    if group.size == 1:
        return Work(out.copy_(x))
    group.count("all_gather", out)
    verb = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return Work(out, verb(out, x, group=group.handle, async_op=True), x)


def start_scatter_sum(x: Tensor, group: Group) -> Work:
    """scatter_sum, started."""
    if group.size == 1:
        return Work(x)
    group.count("reduce_scatter", x)
    out = x.new_empty(x.shape[0] // group.size, *x.shape[1:])
    verb = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return Work(out, verb(out, x, group=group.handle, async_op=True), x)


def broadcast(x: Tensor, group: Group, source: int = 0) -> Tensor:
    """In place: the tensor of the group's rank number `source`."""
    if group.size > 1:
        group.count("broadcast", x)
        dist.broadcast(x, src=group.ranks[source], group=group.handle)
    return x


def all_objects(x, group: Group) -> list:
    """[x of each rank]: small plain data, for start-up and checkpoints, never in a step."""
    if group.size == 1:
        return [x]
    out = [None] * group.size
    dist.all_gather_object(out, x, group=group.handle)
    return out


def exchange(sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]], group: Group) -> list:
    """Start transfers with group ranks: (tensor, to), (buffer, from). Returns works to wait for, sends first."""
    ops = [dist.P2POp(dist.isend, x.contiguous(), group=group.handle, group_peer=to) for x, to in sends]
    ops += [dist.P2POp(dist.irecv, x, group=group.handle, group_peer=source) for x, source in receives]
    for x, _ in sends:
        group.count("send", x)
    return dist.batch_isend_irecv(ops) if ops else []


def synchronize(device: torch.device) -> None:
    """Wait for the device, for clocks."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
