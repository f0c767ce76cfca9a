"""The one mouth to torch.distributed: every collective and transfer of Bevatron goes through here, by name and counted.

A Group of one rank is the identity: nothing is called, nothing counted, so one process runs the same code as many.
The ledger counts calls and payload bytes of each (group, verb): the bytes of the larger side of the exchange, so that a
reduce-scatter and the all-gather that undoes it count the same, and the two together twice an all-reduce's share of work
(a ring all-reduce is exactly these two, Patarasuk and Yuan 2009). Tests hold the ledger against closed forms.

A peer that dies or hangs is a PeerError that says which exchange of which group was waiting for it. torch's own errors do
not (gloo names a port), so every exchange notes in `Now` what it is about to do; runtime/peers.py reads it as well.
"""
import dataclasses
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.clock import Clock

LATE = re.compile(r"timed? ?out", re.IGNORECASE)  # what gloo, nccl and the store say of a peer that does not answer,
LOST = re.compile(r"connection|socket|broken pipe|reset by peer|remote (process|worker|server)", re.IGNORECASE)  # or is gone


class PeerError(RuntimeError):
    """A peer did not answer in time (exit_code 76) or is gone (1); the text says in which exchange."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass
class Now:
    """What this rank is doing: one for all groups of a job."""
    step: int = 0
    timeout_s: float = 0.0
    exchange: tuple | None = None  # (verb, group, bytes, peer) while inside one
    since: float = field(default_factory=time.monotonic)  # when it began, or when the last one ended
    clock: Clock = field(default_factory=Clock)

    def __str__(self) -> str:
        """all_reduce of 4,096 bytes in group data (dp_rep x dp: ranks 0, 2) at step 7"""
        step = f" at step {self.step}" if self.step else ""
        if self.exchange is None:
            return f"no exchange{step}"
        verb, group, size, peer = self.exchange
        return f"{verb}{'' if size is None else f' of {size:,} bytes'}{'' if peer is None else f' rank {peer}'} in {group}{step}"


@dataclass(frozen=True)
class Group:
    """Ranks that talk to each other. ranks: global; index: this rank's place among them; axes: what it spans ("dp x cp")."""
    name: str
    ranks: tuple[int, ...] = (0,)
    index: int = 0
    handle: object = None  # torch.distributed process group; None where the group has one rank, or is the whole job
    ledger: Counter = field(default_factory=Counter, compare=False, repr=False)
    axes: str = ""
    now: Now = field(default_factory=Now, compare=False, repr=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def __str__(self) -> str:
        few = self.ranks if self.size <= 8 else (*self.ranks[:3], "...", self.ranks[-1])
        axes = f"{self.axes}: " if self.axes not in ("", self.name) else ""
        return f"group {self.name} ({axes}ranks {', '.join(map(str, few))})"

    def run(self, verb: str, size: int | None, peer: int | None, work, *args, **how):
        """work(*args, **how), the one place where a rank waits for others. Raises PeerError; errors of other kinds pass."""
        self.now.exchange, self.now.since = (verb, self, size, peer), time.monotonic()
        begun = self.now.clock.stamp()
        try:
            result = work(*args, **how)
        except RuntimeError as error:
            raise named(error, self.now) from error
        self.now.exchange, self.now.since = None, time.monotonic()
        self.now.clock.wait(begun)
        return result

    def count(self, verb: str, x: Tensor) -> None:
        self.ledger[self.name, verb, "calls"] += 1
        self.ledger[self.name, verb, "bytes"] += x.numel() * x.element_size()


@dataclass(frozen=True)
class World:
    """The job as this rank joined it. handles: process groups by their ranks, made once and shared by equal groups; separate:
    those of `apart`."""
    rank: int = 0
    size: int = 1
    handles: dict = field(default_factory=dict)
    separate: list = field(default_factory=list)
    now: Now = field(default_factory=Now, compare=False, repr=False)

    def groups(self, name: str, every: list[list[int]], ledger: Counter, axes: str = "") -> Group:
        """The group among `every` that holds this rank. All ranks call this with the same lists, in the same order."""
        mine = None
        for ranks in map(tuple, every):
            if len(ranks) > 1 and ranks not in self.handles:
                whole = Group(name, ranks, axes=axes, now=self.now)  # torch gives a new group 30 minutes unless told otherwise
                self.handles[ranks] = whole.run("meeting", None, None, dist.new_group, list(ranks), timeout=timedelta(seconds=self.now.timeout_s))
            if self.rank in ranks:
                mine = Group(name, ranks, ranks.index(self.rank), self.handles.get(ranks), ledger, axes, self.now)
        return mine

    def apart(self, name: str) -> Group:
        """All ranks, connected once more on the host: for a thread, whose exchanges must never meet those of a step. Collective."""
        alone = Group(name, tuple(range(self.size)), self.rank, now=Now(timeout_s=self.now.timeout_s))
        if self.size == 1:
            return alone
        handle = alone.run("meeting", None, None, dist.new_group, list(alone.ranks), timeout=timedelta(seconds=self.now.timeout_s), backend="gloo")
        self.separate.append(handle)
        return dataclasses.replace(alone, handle=handle)

    def close_separate(self) -> None:
        """Close the groups of `apart`; no rank may still use one. For a process that runs one job after another
        (runtime/pool.py): an idle group of gloo wakes a hundred times a second, and 150 of them in each of 8 ranks took
        more than a core and a half."""
        while self.separate:
            dist.destroy_process_group(self.separate.pop())

    def everyone(self) -> Group:
        """All ranks, before there is a layout."""
        return Group("job", tuple(range(self.size)), self.rank, now=self.now)


def meet(rank: int, size: int, init: str = "env://", attempt: str = "0", timeout_s: float = 300.0):
    """The job's key-value store: where ranks leave words for each other before, and after, there are process groups. From the
    launcher's variables, or from `init` (a file:// or tcp:// address); each attempt of a launcher that restarts has its own."""
    def go():
        return next(dist.rendezvous(init, rank, size, timeout=timedelta(seconds=timeout_s)))[0]
    return dist.PrefixStore(f"attempt_{attempt}", Group("job", tuple(range(size)), rank).run("meeting", None, None, go))


def join(device: str, rank: int, size: int, timeout_s: float, init: str = "env://", store=None, now: Now | None = None) -> World:
    """Join the job: gloo for the host, nccl beside it on GPUs. store: what meet() gave; None: meet first."""
    world = World(rank, size, now=now or Now())
    world.now.timeout_s = timeout_s
    if size > 1:
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        world.everyone().run("meeting", None, None, dist.init_process_group, backend, store=store or meet(rank, size, init), rank=rank,
                             world_size=size, timeout=timedelta(seconds=timeout_s))
        world.now.clock.device = torch.device("cuda") if device == "cuda" else None
    return world


def alone(device: str) -> None:
    """A process group of one rank, for libraries that cannot do without one (scripts/bench)."""
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)


def named(error: RuntimeError, now: Now) -> RuntimeError:
    """torch's error as a PeerError where a peer is to blame; else the error itself."""
    if LATE.search(str(error)):
        return PeerError(f"no answer for {time.monotonic() - now.since:.1f} s in {now}", 76)
    return PeerError(f"lost the connection in {now}", 1) if LOST.search(str(error)) else error


def leave() -> None:
    """Always leave by this door: a rank that exits with a live group can abort its peers."""
    if dist.is_initialized():
        dist.destroy_process_group()


# ---- collectives -----------------------------------------------------------------------------------------------------

def sum_(x: Tensor, group: Group) -> Tensor:
    """In place: the sum over the group, on every rank."""
    if group.size > 1:
        group.count("all_reduce", x)
        group.run("all_reduce", x.nbytes, None, dist.all_reduce, x, group=group.handle)
    return x


def max_(x: Tensor, group: Group) -> Tensor:
    """In place: the maximum of integers over the group (gloo's float maximum drops a NaN that is not on rank 0)."""
    if group.size > 1:
        assert not x.is_floating_point(), "reduce a flag as an int: a float maximum loses NaNs"
        group.count("all_reduce", x)
        group.run("all_reduce", x.nbytes, None, dist.all_reduce, x, op=dist.ReduceOp.MAX, group=group.handle)
    return x


def largest_(x: Tensor, group: Group) -> Tensor:
    """In place: the maximum over the group of numbers that are not negative. Their bits stand in the same order, NaN above all."""
    max_(x.view({4: torch.int32, 8: torch.int64}[x.itemsize]), group)
    return x


def gather(x: Tensor, group: Group, out: Tensor | None = None) -> Tensor:
    """[n, ...] of each rank -> [size * n, ...] in the group's order, into `out` where given."""
    if group.size == 1:
        return x if out is None else out.copy_(x)
    out = x.new_empty(group.size * x.shape[0], *x.shape[1:]) if out is None else out
    group.count("all_gather", out)
    verb = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renames it
    group.run("all_gather", out.nbytes, None, verb, out, x.contiguous(), group=group.handle)
    return out


def scatter_sum(x: Tensor, group: Group, out: Tensor | None = None) -> Tensor:
    """[size * n, ...] of each rank -> this rank's [n, ...] of the sum, into `out` where given."""
    if group.size == 1:
        return x if out is None else out.copy_(x)
    out = x.new_empty(x.shape[0] // group.size, *x.shape[1:]) if out is None else out
    group.count("reduce_scatter", x)
    verb = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    group.run("reduce_scatter", x.nbytes, None, verb, out, x.contiguous(), group=group.handle)
    return out


def all_to_all(x: Tensor, group: Group) -> Tensor:
    """[size, ...]: part i goes to rank i -> [size, ...]: part i came from rank i."""
    if group.size == 1:
        return x
    x = x.contiguous()
    out = torch.empty_like(x)
    group.count("all_to_all", x)
    group.run("all_to_all", x.nbytes, None, dist.all_to_all_single, out, x, group=group.handle)
    return out


class Work:
    """An exchange under way. wait() -> its result, to be read from then on; in a group of one it is there at once.

    source: what is sent must live until it has arrived; of: (group, verb, bytes), for the error of a peer that is lost."""

    def __init__(self, result: Tensor, handle=None, source: Tensor | None = None, of: tuple | None = None) -> None:
        self.result, self.handle, self.source, self.of = result, handle, source, of
        self.flight = None if handle is None else of[0].now.clock.start(handle)

    def wait(self) -> Tensor:
        if self.handle is not None:
            group, verb, size = self.of
            group.now.clock.arrive(self.flight, self.handle)
            group.run(verb, size, None, self.handle.wait)
        self.handle = self.source = None
        return self.result

    def turn(self) -> None:
        """Nothing: the second hop is that of sums which have one (parallel/compress.py)."""


def start_sum(x: Tensor, group: Group) -> Work:
    """sum_, started: x is neither read nor written by others until wait()."""
    if group.size == 1:
        return Work(x)
    group.count("all_reduce", x)
    return Work(x, dist.all_reduce(x, group=group.handle, async_op=True), None, (group, "all_reduce", x.nbytes))


def start_gather(x: Tensor, group: Group, out: Tensor) -> Work:
    """gather, started."""
    if group.size == 1:
        return Work(out.copy_(x))
    group.count("all_gather", out)
    verb = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return Work(out, verb(out, x, group=group.handle, async_op=True), x, (group, "all_gather", out.nbytes))


def start_scatter_sum(x: Tensor, group: Group) -> Work:
    """scatter_sum, started."""
    if group.size == 1:
        return Work(x)
    group.count("reduce_scatter", x)
    out = x.new_empty(x.shape[0] // group.size, *x.shape[1:])
    verb = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return Work(out, verb(out, x, group=group.handle, async_op=True), x, (group, "reduce_scatter", x.nbytes))


def start_all_to_all(x: Tensor, sent: list[int], came: list[int], group: Group, count: bool = True) -> Work:
    """Started: sent[i] rows of x [sum(sent), ...] go to rank i -> [sum(came), ...]: came[i] rows from rank i, in the order of ranks.
    count: what is sent is counted; else what comes: so that the way there and the way back count the same."""
    if group.size == 1:
        return Work(x)
    x = x.contiguous()
    out = x.new_empty(sum(came), *x.shape[1:])
    group.count("all_to_all", x if count else out)
    return Work(out, dist.all_to_all_single(out, x, came, sent, group=group.handle, async_op=True), x,
                (group, "all_to_all", x.nbytes))


def broadcast(x: Tensor, group: Group, source: int = 0) -> Tensor:
    """In place: the tensor of the group's rank number `source`."""
    if group.size > 1:
        group.count("broadcast", x)
        group.run("broadcast", x.nbytes, None, dist.broadcast, x, src=group.ranks[source], group=group.handle)
    return x


def all_objects(x, group: Group) -> list:
    """[x of each rank]: small plain data, for start-up and checkpoints, never in a step."""
    if group.size == 1:
        return [x]
    out = [None] * group.size
    group.run("all_gather_object", None, None, dist.all_gather_object, out, x, group=group.handle)
    return out


@dataclass(frozen=True)
class Transfer:
    """A send or receive under way; peer: a global rank."""
    work: object
    verb: str
    size: int
    peer: int
    group: Group
    flight: object = None

    def wait(self) -> None:
        if self.flight is not None:
            self.group.now.clock.arrive(self.flight, self.work)
        self.group.run(self.verb, self.size, self.peer, self.work.wait)


def exchange(sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]], group: Group) -> list[Transfer]:
    """Start transfers with group ranks: (tensor, to), (buffer, from). Returns what to wait for, sends first."""
    ops = [dist.P2POp(dist.isend, x.contiguous(), group=group.handle, group_peer=to) for x, to in sends]
    ops += [dist.P2POp(dist.irecv, x, group=group.handle, group_peer=source) for x, source in receives]
    if not ops:
        return []
    for x, _ in sends:
        group.count("send", x)
    works = group.run("sends and receives", None, None, dist.batch_isend_irecv, ops)
    if len(works) < len(ops):  # nccl has one for all of them
        works = [works[-1]] * len(ops)
    verbs = ["send to"] * len(sends) + ["receive from"] * len(receives)
    flights = [group.now.clock.start(work) if group.now.clock.device else None for work in works]
    return [Transfer(work, verb, x.nbytes, group.ranks[peer], group, flight)
            for work, flight, verb, (x, peer) in zip(works, flights, verbs, sends + receives)]


def synchronize(device: torch.device) -> None:
    """Wait for the device, for clocks."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
