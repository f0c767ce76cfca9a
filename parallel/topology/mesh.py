"""Mesh: one rank's view of the parallel dimensions, with a Group for each kind of exchange."""
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

from parallel.topology.dims import Groups, ParallelDims, requested_groups
from parallel.wire.comm import Activity, Group, Ledger
from parallel.wire.world import World


@dataclass(frozen=True, kw_only=True)
class Mesh(Groups[Group]):
    """The groups of this rank; Groups documents what each spans and is for.

    embedding_ends holds the two ends of the pipeline; it is None on the ranks between them.
    """
    dims: ParallelDims
    rank: int
    embedding_ends: Group | None

    @staticmethod
    def single() -> "Mesh":
        """Return the mesh of one process: every group has one rank, and every exchange is the identity."""
        return Mesh.bind(ParallelDims(1), World())

    @staticmethod
    def bind(dims: ParallelDims, world: World) -> "Mesh":
        """Connect the groups. Collective: every rank of the world calls it with the same dims."""
        ledger: Ledger = Counter()  # shared by all groups
        groups: dict[str, Group] = {}
        for field, request in requested_groups().items():
            groups[field] = world.group_of_rank(
                request.name,
                dims.groups(*request.axes),
                ledger,
                axes=" x ".join(request.axes),
                channel=request.channel,
                meets_neighbours=request.meets_neighbours,
            )
        ends = world.find_group("embedding_ends", dims.pipeline_ends(), ledger)
        return Mesh(dims=dims, rank=world.rank, **groups, embedding_ends=ends)

    @staticmethod
    def without_processes(dims: ParallelDims, rank: int, activity: Activity | None = None) -> "Mesh":
        """Return the groups of a rank without a job.

        An `activity` with a wire carries their exchanges. Without it they can only be inspected.
        """
        make = partial(fake_group, rank=rank, ledger=Counter(), activity=activity or Activity())
        groups: dict[str, Group] = {}
        for field, request in requested_groups().items():
            ranks = dims.group(rank, *request.axes)
            groups[field] = make(
                request.name, ranks, axes=" x ".join(request.axes), channel=request.channel
            )
        ends = dims.ends_with(rank)
        ends_group = None if ends is None else make("embedding_ends", ends)
        return Mesh(dims=dims, rank=rank, **groups, embedding_ends=ends_group)

    @property
    def ledger(self) -> Ledger:
        """Return calls and bytes of all exchanges so far."""
        return self.world.ledger

    @property
    def is_strict(self) -> bool:
        """Whether a proof checks for data that is used before it has arrived (parallel/wire/strict.py)."""
        return self.world.activity.strict is not None


def fake_group(name: str, ranks: list[int], *, rank: int, **fields: Any) -> Group:
    """Return a group with the index of `rank` in it, without a process group."""
    return Group(name, tuple(ranks), ranks.index(rank), **fields)
