"""Mesh: one rank's view of the parallel dimensions, a Group for each over which anything is exchanged."""
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

from parallel.topology.dims import Groups, ParallelDims, requested_groups
from parallel.wire.comm import Activity, Group, Ledger
from parallel.wire.world import World


@dataclass(frozen=True, kw_only=True)
class Mesh(Groups[Group]):
    """The groups of this rank; Groups says what each spans and is for.

    embedding_ends: the two ends of the pipeline; None on the ranks between them.
    """
    dims: ParallelDims
    rank: int
    embedding_ends: Group | None

    @staticmethod
    def single() -> "Mesh":
        """One process: every group has one rank, and every exchange is the identity."""
        return Mesh.bind(ParallelDims(1), World())

    @staticmethod
    def bind(dims: ParallelDims, world: World) -> "Mesh":
        """Connects the groups. Collective: every rank of the world calls it with the same dims."""
        ledger: Ledger = Counter()  # one for all groups
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
        """The groups of a rank without a job.

        activity: with a wire that carries what they exchange. Without it they can only be described.
        """
        make = partial(made_up_group, rank=rank, ledger=Counter(), activity=activity or Activity())
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
        """Calls and bytes of all exchanges so far."""
        return self.world.ledger

    @property
    def is_strict(self) -> bool:
        """Whether a proof looks for what is used before it has arrived (parallel/wire/strict.py)."""
        return self.world.activity.strict is not None


def made_up_group(name: str, ranks: list[int], *, rank: int, **fields: Any) -> Group:
    """The ranks of a group, and the place of `rank` among them, without a process group."""
    return Group(name, tuple(ranks), ranks.index(rank), **fields)
