"""Run a script in one process, or on ranks launched by torchrun or srun, which join like those of train.py.

Only the first rank prints to stdout. A rank that fails ends all of them with its message (durable/peers.py).
"""
import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from config import ConfigError, ParallelConfig, code_hash
from durable.peers import PeerWatch
from parallel.wire import comm
from parallel.wire.world import World, join_job
from runtime import setup


@dataclass(frozen=True)
class ScriptJob:
    """The ranks of a script before they are connected. words: the command-line arguments."""
    peers: PeerWatch
    words: Sequence[str]

    @property
    def size(self) -> int:
        return self.peers.size

    @property
    def ranks_on_node(self) -> int:
        """Number of the job's ranks on this rank's node."""
        return setup.rank_and_world()[3]

    def join(self, threads: int | None = None, kind: str = "auto") -> World:
        """Connect the ranks. threads, kind: see script_device. Collective. Raises ConfigError."""
        device = script_device(threads, kind)
        world = join_job(
            device,
            self.peers.rank,
            self.peers.size,
            ParallelConfig().timeout_s,
            store=self.peers.store,
            activity=self.peers.activity,
        )
        if device.type == "cuda":
            self.peers.start_device_watch()
        check_same_start(world, self.words)
        return world


def script_device(threads: int | None, kind: str = "auto") -> torch.device:
    """Prepare a process of a script and return its device. kind: auto or cpu.

    threads: --threads. Without it, a single process keeps the number that torch took from OMP_NUM_THREADS;
    several ranks divide the cores of their node, as in train.py. Raises ConfigError.
    """
    _, world, local_rank, local_world = setup.rank_and_world()
    if threads is None and world > 1:
        threads = setup.spare_threads(local_world)
    if threads is not None and threads < 1:
        raise ConfigError(f"--threads: {threads}; at least 1")
    if threads is not None:
        torch.set_num_threads(threads)
    if world == 1:
        return torch.device("cuda" if kind == "auto" and torch.cuda.is_available() else "cpu")
    setup.die_with_launcher()
    return setup.pick_device(kind, local_rank)


def add_layout_options(parser: argparse.ArgumentParser) -> None:
    """Add the layout options of a script whose ranks shard one model."""
    for axis, what in (("tp", "tensor"), ("pp", "pipeline")):
        parser.add_argument(
            f"--parallel.{axis}", dest=axis, type=int, metavar="N",
            help=f"under torchrun: the {what}-parallel degree; none: what suits the ranks, tp before pp",
        )


def check_layout_options(args: argparse.Namespace) -> None:
    """Raise ConfigError if a degree is out of range."""
    for axis in ("tp", "pp"):
        degree = getattr(args, axis)
        if degree is not None and degree < 1:
            raise ConfigError(f"--parallel.{axis}: {degree} must be above 0")


@contextlib.contextmanager
def script_job(words: Sequence[str]) -> Iterator[ScriptJob]:
    """Set up the job of a script, around everything the script does."""
    rank, size = setup.rank_and_world()[:2]
    leaving: SystemExit | None = None  # raised by --help, which is not a failure
    with PeerWatch(rank, size, setup.restart_count(), setup.store_secret()) as peers:
        with silent_unless(rank == 0):
            try:
                yield ScriptJob(peers, words)
            except SystemExit as end:
                leaving = end
    if leaving is not None:
        raise leaving


@contextlib.contextmanager
def silent_unless(speaks: bool) -> Iterator[None]:
    """Silence stdout inside, unless `speaks`."""
    if speaks:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def check_same_start(world: World, words: Sequence[str]) -> None:
    """Raise ConfigError, naming the rank, if one differs from rank 0 in arguments, code or torch version.

    Collective: gathers a few hundred bytes from each rank.
    """
    own = {"command": list(words), "code": code_hash(), "torch": str(torch.__version__)}
    first, *others = comm.all_gather_objects(own, world.all_ranks())
    for rank, theirs in enumerate(others, 1):
        for what in own:
            if theirs[what] != first[what]:
                raise ConfigError(f"rank {rank} was started with a different {what} than rank 0; start every "
                                  "rank with the same command, from the same checkout")
