"""Joining and leaving a job, and the process groups of its ranks.

On GPUs, device tensors travel over NCCL and host tensors over gloo:

- One process group spans the whole job and has both. Every other group has only NCCL: gloo would connect each
  pair of its ranks with a socket.
- A group's communicator is created with the group and immediately runs a first exchange. So no step pays for
  it, and a group that cannot connect is reported at start-up. Where ranks send to their neighbours in every
  layout (the pipeline, the ring of context parallelism), these connect at start-up as well; elsewhere NCCL
  connects two ranks when they first send. Such connections have dedicated buffers: 384 MiB per neighbour in
  a node of H100s (plan/communicators.py).
- NCCL gets a longer timeout than gloo: its watchdog kills the process with SIGABRT and no exit code. A hang
  is reported before that, by durable/peers.py.
"""
import dataclasses
import pickle
import socket
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace  # pyright: ignore[reportAttributeAccessIssue]
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  public all the same
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, Store
from torch.distributed.rendezvous import rendezvous

from parallel.wire import comm
from parallel.wire.comm import Activity, Group, Ledger
from parallel.wire.connection import Connection, find_connection

NCCL_MARGIN_S = 120.0  # by which the timeout of NCCL's watchdog exceeds ours
LAUNCHER_SECONDS = 10.0  # for a launcher to reach the store of another node after its ranks have exited
CPU = torch.device("cpu")


@dataclass(frozen=True)
class World:
    """The job as this rank joined it.

    handles maps (channel, ranks) to process groups, created once and shared by equal groups; the value is
    None if this rank is not a member.
    """
    rank: int = 0
    size: int = 1
    device: torch.device = CPU  # holds this rank's tensors
    handles: dict[Connection, ProcessGroup | None] = field(default_factory=dict)
    separate_handles: list[ProcessGroup] = field(default_factory=list)  # created by separate_group
    activity: Activity = field(default_factory=Activity, compare=False, repr=False)

    def group_of_rank(
        self,
        name: str,
        groups: list[list[int]],
        ledger: Ledger,
        axes: str = "",
        channel: str = "",
        meets_neighbours: bool = False,
    ) -> Group:
        """Return the member of `groups` that holds this rank. Raises ValueError if none does.

        Groups of the same ranks share a process group, in which exchanges are serialized on a GPU, unless
        their channels differ. meets_neighbours connects neighbours now, on GPUs. Collective: all ranks call
        it with the same lists, in the same order.
        """
        found = self.find_group(name, groups, ledger, axes, channel)
        if found is None:
            raise ValueError(f"group {name}: rank {self.rank} is in none of {groups}")
        if meets_neighbours and self.device.type == "cuda":
            exchange_with_neighbours(found, self.device)
        return found

    def find_group(
        self, name: str, groups: list[list[int]], ledger: Ledger, axes: str = "", channel: str = ""
    ) -> Group | None:
        """Like group_of_rank, but return None if no group holds this rank."""
        found = None
        joined = find_connection(range(self.size))
        for ranks in map(tuple, groups):
            connection = find_connection(ranks, channel)
            if connection is not None and connection != joined and connection not in self.handles:
                self.handles[connection] = self.connect(name, ranks, axes)
            if self.rank in ranks:
                found = Group(
                    name,
                    ranks,
                    index=ranks.index(self.rank),
                    handle=None if connection is None else self.handles.get(connection),
                    ledger=ledger,
                    axes=axes,
                    channel=channel,
                    activity=self.activity,
                )
        return found

    def connect(self, name: str, ranks: tuple[int, ...], axes: str) -> ProcessGroup | None:
        """Create a process group of these ranks; None if this rank is not a member. Collective."""
        group = Group(name, ranks, axes=axes, activity=self.activity)
        is_on_gpu = self.device.type == "cuda"
        timeout_s = self.activity.timeout_s + (NCCL_MARGIN_S if is_on_gpu else 0.0)
        new_group = partial(
            dist.new_group,
            list(ranks),
            timeout=timedelta(seconds=timeout_s),  # torch's default is 30 minutes
            backend="nccl" if is_on_gpu else "gloo",
        )
        made = group.run_exchange("meeting", new_group)
        if isinstance(made, int):  # an int: not a member
            return None
        if is_on_gpu:
            connected = dataclasses.replace(group, index=ranks.index(self.rank), handle=made)
            make_first_exchange(connected, self.device)
        return made

    def separate_group(self, name: str) -> Group:
        """Connect all ranks once more on the host. Collective.

        For a thread, whose exchanges must not mix with those of a step.
        """
        activity = Activity(timeout_s=self.activity.timeout_s)
        group = Group(name, tuple(range(self.size)), self.rank, activity=activity)
        if self.size == 1:
            return group
        new_group = partial(
            dist.new_group,
            list(group.ranks),
            timeout=timedelta(seconds=activity.timeout_s),
            backend="gloo",
        )
        handle = group.run_exchange("meeting", new_group)
        assert isinstance(handle, ProcessGroup)  # an int on non-members; here all are members
        self.separate_handles.append(handle)
        return dataclasses.replace(group, handle=handle)

    def close_separate_groups(self) -> None:
        """Close the groups of separate_group; no rank may still use one.

        For a process that runs one job after another (durable/pool.py): an idle gloo group wakes up 100
        times a second, and 150 of them in each of 8 ranks took more than one and a half cores.
        """
        while self.separate_handles:
            dist.destroy_process_group(self.separate_handles.pop())

    def all_ranks(self) -> Group:
        """Return a group of all ranks, for use before there is a mesh."""
        return Group("job", tuple(range(self.size)), self.rank, activity=self.activity)


def open_store(
    rank: int,
    size: int,
    init: str = "env://",
    restart_count: str = "0",
    timeout_s: float = 300.0,
) -> Store:
    """Open the job's key-value store, where ranks exchange messages before and after process groups exist.

    init is "env://" (the launcher's variables) or a file:// or tcp:// address. restart_count separates the
    keys of each start by a launcher that restarts.
    """
    def meet() -> Store:
        store, _, _ = next(rendezvous(init, rank, size, timeout=timedelta(seconds=timeout_s)))
        return store
    job = Group("job", tuple(range(size)), rank)
    return PrefixStore(f"attempt_{restart_count}", job.run_exchange("meeting", meet))


def launcher_store(host: str, port: int, listener: socket.socket | None = None) -> Store:
    """Open the store that a launcher keeps for its ranks (scripts/launch.py), at host and port.

    listener is the socket that listens there, which the store takes over. None is for the launcher of another
    node, which connects to the store. Raises RuntimeError if that is gone.
    """
    if listener is None:
        timeout = timedelta(seconds=LAUNCHER_SECONDS)
        return TCPStore(host, port, wait_for_workers=False, timeout=timeout)
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def join_job(
    device: torch.device,
    rank: int,
    size: int,
    timeout_s: float,
    init: str = "env://",
    store: Store | None = None,
    activity: Activity | None = None,
) -> World:
    """Join the job: gloo for tensors on the host, NCCL for those on GPUs. Collective.

    device is this rank's; a GPU includes its index. store comes from open_store; by default it is opened
    here.
    """
    world = World(rank, size, device, activity=activity or Activity())
    world.activity.timeout_s = timeout_s
    if size == 1:
        return world

    is_on_gpu = device.type == "cuda"
    everyone = world.all_ranks()
    join = partial(
        dist.init_process_group,
        "cpu:gloo,cuda:nccl" if is_on_gpu else "gloo",
        store=store or open_store(rank, size, init),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if is_on_gpu else None,  # NCCL then creates its communicators at once
    )
    everyone.run_exchange("meeting", join)
    if is_on_gpu:
        whole_job = dist.group.WORLD
        assert whole_job is not None  # created by init_process_group
        set_nccl_timeout(whole_job, timeout_s + NCCL_MARGIN_S)
        world.activity.clock.device = device
        make_first_exchange(everyone, device)
    return world


def set_nccl_timeout(handle: ProcessGroup, timeout_s: float) -> None:
    """Set the timeout of NCCL alone, in a process group that also has gloo."""
    backend = handle._get_backend(torch.device("cuda"))
    backend._set_default_timeout(timedelta(seconds=timeout_s))


def make_first_exchange(group: Group, device: torch.device) -> None:
    """Sum one number. Collective. Not counted in the ledger."""
    comm.all_reduce_sum(torch.zeros(1, device=device), dataclasses.replace(group, ledger=Counter()))


def exchange_with_neighbours(group: Group, device: torch.device) -> None:
    """Exchange one number with each neighbour in the ring of the group's ranks.

    NCCL connects two ranks when they first send. Collective. Not counted in the ledger.
    """
    group = dataclasses.replace(group, ledger=Counter())
    if group.size == 1:
        return
    for distance in (1, -1):
        target = (group.index + distance) % group.size
        source = (group.index - distance) % group.size
        message = torch.zeros(1, device=device)
        received = torch.empty(1, device=device)
        for transfer in comm.start_transfers([(message, target)], [(received, source)], group):
            transfer.wait()


def join_alone(device: str) -> None:
    """Create a process group of one rank, for libraries that need one (benchmarks)."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  # public, not exported
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)


def leave_job() -> None:
    """Leave the job. Call it before a rank exits: exiting with a live process group can abort its peers."""
    if dist.is_initialized():
        dist.destroy_process_group()


def flight_record() -> bytes | None:
    """Return torch's flight record of this rank's last collectives, a pickle for torchfrtrace.

    None if it has recorded nothing. Without stacks: making them readable may wait for a thread that hangs.
    """
    record = _dump_fr_trace(includeCollectives=True, includeStackTraces=False, onlyActive=False)
    return record if pickle.loads(record).get("entries") else None
