"""ParallelDims: degrees of parallelism -> groups of ranks. Pure arithmetic: no torch, no processes.

Mesh axes are ordered outermost first, so that tp neighbours are on one node.
"""
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from math import lcm, prod
from typing import Any, Generic, NamedTuple, TypeVar

from parallel.wire.connection import Connection, find_connection

# attention, norms, dense MLPs, embeddings, routers
DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# a mixture's experts: the same ranks, with dp_shard x cp x tp factorized differently (arXiv 2504.14960)
EXPERT_AXES = ("pp", "dp_replicate", "expert_dp_shard", "ep", "etp")
FACTORIZATIONS = (DENSE_AXES, EXPERT_AXES)  # of the world

AnyOne = TypeVar("AnyOne")


class GroupRequest(NamedTuple):
    """A group of the mesh: its name in the ledger, the axes that it spans, and its channel. Groups of the
    same ranks share a process group unless their channels differ (parallel/wire/world.py).

    meets_neighbours: in every layout its ranks send to their neighbours. NCCL connects these at start-up,
    with dedicated buffers, which cost too much in groups that never send.
    """
    name: str
    axes: tuple[str, ...]
    channel: str = ""
    meets_neighbours: bool = False


def spans(*axes: str, name: str = "", channel: str = "", meets_neighbours: bool = False) -> Any:
    """Declare a field of Groups. `name` is the name in the ledger; it defaults to that of the field."""
    return field(metadata={"request": GroupRequest(name, axes, channel, meets_neighbours)})


@dataclass(frozen=True, kw_only=True)
class Groups(Generic[AnyOne]):
    """One entry for each group of ranks, in the order in which all ranks connect them (Mesh, in mesh.py).

    pp carries what goes to higher ranks of the pipeline, pp_up what goes to lower ones. On a GPU, a pending
    receive blocks whatever follows it in its communicator (goes_down in parallel/pipeline/schedule.py).
    """
    tp: AnyOne = spans("tp")
    cp: AnyOne = spans("cp", meets_neighbours=True)
    pp: AnyOne = spans("pp", meets_neighbours=True)
    dp_replicate: AnyOne = spans("dp_replicate")
    # ranks that read different samples
    dp: AnyOne = spans("dp_replicate", "dp_shard")
    # ranks that share one copy of the sharded state under ZeRO
    fsdp: AnyOne = spans("dp_shard", "cp")
    # ranks with different tokens: gradients are summed
    dp_cp: AnyOne = spans("dp_replicate", "dp_shard", "cp")
    # ranks that hold different parameters
    model_parallel: AnyOne = spans("pp", "tp")
    # ranks that hold the same layers
    pipeline_stage: AnyOne = spans("dp_replicate", "dp_shard", "cp", "tp")
    world: AnyOne = spans(*DENSE_AXES)
    # ranks that share a sequence, under sp too: a router's counts are summed here
    tp_cp: AnyOne = spans("cp", "tp")
    # ranks that together hold all experts: tokens are exchanged here
    ep_etp: AnyOne = spans("ep", "etp")
    # counterparts of fsdp, dp_cp and model_parallel for experts
    expert_fsdp: AnyOne = spans("expert_dp_shard")
    expert_dp: AnyOne = spans("dp_replicate", "expert_dp_shard")
    expert_model_parallel: AnyOne = spans("pp", "ep", "etp")
    pp_up: AnyOne = spans("pp", name="pp", channel="up", meets_neighbours=True)


def requested_groups() -> dict[str, GroupRequest]:
    """Return {field of Groups: its request} in the order in which all ranks connect (embedding_ends last)."""
    requests: dict[str, GroupRequest] = {}
    for each in fields(Groups):
        request: GroupRequest = each.metadata["request"]
        requests[each.name] = request._replace(name=request.name or each.name)
    return requests


# The groups by their names in the ledger: {name: axes}.
GROUP_AXES = {request.name: request.axes for request in requested_groups().values()}


@dataclass(frozen=True)
class ParallelDims:
    """The degrees of parallelism of a job. dp_shard is the rest of the world.

    Raises ValueError if the degrees do not divide the world, in either factorization.
    """
    world: int
    _: KW_ONLY
    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp_replicate: int = 1  # HSDP: replicas of the ranks that shard state
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        for axes in FACTORIZATIONS:
            if self.group_size(*axes) != self.world:
                degrees = " x ".join(f"{axis} {self.size(axis)}" for axis in axes)
                raise ValueError(f"{self.world} ranks cannot be {degrees}")

    def degrees(self) -> dict[str, int]:
        """Return {field: degree}, without the world."""
        return {name: degree for name, degree in vars(self).items() if name != "world"}

    def to_text(self) -> str:
        """Format like "4 ranks (dp2 tp2)" or "1 rank"."""
        named = {"dp": self.group_size("dp_replicate", "dp_shard")} | self.degrees()
        words = [f"{name}{n}" for name, n in named.items() if n > 1 and name != "dp_replicate"]
        plural = "s" if self.world > 1 else ""
        return f"{self.world} rank{plural}" + (f" ({' '.join(words)})" if words else "")

    @property
    def dp_shard(self) -> int:
        return self.remaining_ranks(DENSE_AXES)

    @property
    def expert_dp_shard(self) -> int:
        """Return the number of ranks, in one replica, that hold the same part of the same experts."""
        return self.remaining_ranks(EXPERT_AXES)

    def remaining_ranks(self, axes: tuple[str, ...]) -> int:
        """Divide the world by the degrees among the axes."""
        degrees = self.degrees()
        return self.world // prod(degrees.get(axis, 1) for axis in axes)

    def size(self, axis: str) -> int:
        return getattr(self, axis)

    def group_size(self, *axes: str) -> int:
        """Return the size of a group that spans these axes."""
        return prod(map(self.size, axes))

    def coordinates(self, rank: int, axes: tuple[str, ...] = DENSE_AXES) -> dict[str, int]:
        """Return {axis: index} of a rank, in one of the two factorizations."""
        result: dict[str, int] = {}
        for axis in reversed(axes):
            rank, result[axis] = divmod(rank, self.size(axis))
        return result

    def group(self, rank: int, *axes: str) -> list[int]:
        """Return the member of groups(*axes) that holds this rank, without computing the others."""
        factorization = find_factorization(axes)
        index = self.coordinates(rank, factorization)
        ranks = [0]
        stride = 1
        for axis in reversed(factorization):
            indices = range(self.size(axis)) if axis in axes else (index[axis],)
            ranks = [start + stride * i for i in indices for start in ranks]
            stride *= self.size(axis)
        return ranks

    def place(self, rank: int, *axes: str) -> int:
        """Return the rank's index in group(rank, *axes)."""
        place = 0
        for axis, index in reversed(self.coordinates(rank, find_factorization(axes)).items()):
            if axis in axes:
                place = place * self.size(axis) + index
        return place

    def groups(self, *axes: str) -> list[list[int]]:
        """Return all groups of ranks that span `axes` and agree on the others, e.g. groups("dp_shard", "cp").

        Raises ValueError if the axes do not lie in one factorization.
        """
        factorization = find_factorization(axes)
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            index = self.coordinates(rank, factorization)
            others = tuple(index[axis] for axis in factorization if axis not in axes)
            groups.setdefault(others, []).append(rank)
        return list(groups.values())

    def pipeline_ends(self) -> list[list[int]]:
        """Return the first and last rank of each pipeline (both hold a tied table); one rank if pp is 1."""
        return [get_ends(ranks) for ranks in self.groups("pp")]

    def ends_with(self, rank: int) -> list[int] | None:
        """Return the ends of a rank's pipeline if it is one of them, else None."""
        ends = get_ends(self.group(rank, "pp"))
        return ends if rank in ends else None


def get_ends(pipeline: list[int]) -> list[int]:
    """Return the first and last rank of a pipeline; one rank if there is a single stage."""
    return sorted({pipeline[0], pipeline[-1]})


def find_factorization(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the member of FACTORIZATIONS that contains the axes. Raises ValueError if none does."""
    for factorization in FACTORIZATIONS:
        if set(axes) <= set(factorization):
            return factorization
    raise ValueError(f"{axes} do not lie in one of the factorizations {FACTORIZATIONS}")


def min_world_size(degrees: Mapping[str, int]) -> int:
    """Return the smallest world with these degrees of ParallelDims."""
    return lcm(*(prod(degrees.get(axis, 1) for axis in axes) for axes in FACTORIZATIONS))


def connections_of_rank(dims: ParallelDims, rank: int) -> dict[Connection, list[str]]:
    """Return the process groups that Mesh.bind and join_job create for a rank: {connection: names of the
    groups that share it}. On GPUs each has a separate communicator."""
    everyone = find_connection(range(dims.world))
    found: dict[Connection, list[str]] = {} if everyone is None else {everyone: []}
    for request in requested_groups().values():
        connection = find_connection(dims.group(rank, *request.axes), request.channel)
        if connection is not None:
            found.setdefault(connection, []).append(request.name)
    ends = find_connection(dims.ends_with(rank) or ())
    if ends is not None:
        found.setdefault(ends, []).append("embedding_ends")
    return found
