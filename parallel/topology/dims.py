"""ParallelDims: degrees of parallelism -> groups of ranks. Arithmetic alone: no torch, no processes.

The axes of the mesh run outermost first, so that tp neighbours are on one node.
"""
from dataclasses import dataclass
from typing import NamedTuple

from parallel.wire.connection import Connection, connection_of

# attention, norms, dense MLPs, embeddings, routers
DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# a mixture's experts: the same ranks, their dp_shard x cp x tp factorized anew (arXiv 2504.14960)
EXPERT_AXES = ("pp", "dp_replicate", "expert_dp_shard", "ep", "etp")

# Mesh (mesh.py) has a Group for each: its name, and the axes that it spans.
GROUP_AXES: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "pp": ("pp",),
    "dp_replicate": ("dp_replicate",),
    "dp": ("dp_replicate", "dp_shard"),  # ranks that read different samples
    "fsdp": ("dp_shard", "cp"),  # ranks that share one copy of the sharded state under ZeRO
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),  # ranks with different tokens: gradients are summed
    "model_parallel": ("pp", "tp"),  # ranks that hold different parameters
    "pipeline_stage": ("dp_replicate", "dp_shard", "cp", "tp"),  # ranks that hold the same layers
    "world": DENSE_AXES,
    "tp_cp": ("cp", "tp"),  # ranks that share a sequence, under sp too: a router's counts are summed here
    "ep_etp": ("ep", "etp"),  # ranks that hold all experts together: tokens are exchanged here
    "expert_fsdp": ("expert_dp_shard",),  # what fsdp, dp_cp and model_parallel are to the rest, for experts
    "expert_dp": ("dp_replicate", "expert_dp_shard"),
    "expert_model_parallel": ("pp", "ep", "etp"),
}


class GroupRequest(NamedTuple):
    """A Group of Mesh: its name in the ledger, the axes that it spans, and its channel: groups of the same
    ranks share a process group, unless they are of different channels (parallel/wire/world.py).

    meets_neighbours: in every layout its ranks send to their neighbours. NCCL connects these at the start,
    in buffers of their own, which cost too much in groups that never send.
    """
    name: str
    axes: tuple[str, ...]
    channel: str = ""
    meets_neighbours: bool = False


def requested_groups() -> dict[str, GroupRequest]:
    """{field of Mesh: what it asks for}, in the order in which all ranks connect. embedding_ends comes last.
    """
    requests: dict[str, GroupRequest] = {}
    for name, axes in GROUP_AXES.items():
        requests[name] = GroupRequest(name, axes, meets_neighbours=name in ("cp", "pp"))
    requests["pp_backward"] = GroupRequest("pp", ("pp",), channel="backward", meets_neighbours=True)
    return requests


@dataclass(frozen=True)
class ParallelDims:
    """The degrees of parallelism of a job. dp_shard is what is left of the world.

    Raises ValueError if the degrees do not multiply to a divisor of the world, or if ep * etp does not divide
    dp_shard * cp * tp.
    """
    world: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp_replicate: int = 1  # HSDP: replicas of the ranks that shard state
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        if self.world % self.non_data_size:
            raise ValueError(f"world {self.world} is not a multiple of "
                             f"tp*cp*pp*dp_rep = {self.non_data_size}")
        foldable = self.dp_shard * self.cp * self.tp
        if foldable % (self.ep * self.etp):
            raise ValueError(f"ep*etp = {self.ep * self.etp} does not divide dp*cp*tp = {foldable}")

    def in_words(self) -> str:
        """For example "4 ranks (dp2 tp2)"; "1 rank"."""
        degrees = {
            "dp": self.dp_replicate * self.dp_shard,
            "tp": self.tp,
            "pp": self.pp,
            "cp": self.cp,
            "ep": self.ep,
            "etp": self.etp,
        }
        words = " ".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1)
        plural = "s" if self.world > 1 else ""
        return f"{self.world} rank{plural}" + (f" ({words})" if words else "")

    @property
    def non_data_size(self) -> int:
        """The product of all degrees but dp_shard."""
        return self.tp * self.cp * self.pp * self.dp_replicate

    @property
    def dp_shard(self) -> int:
        return self.world // self.non_data_size

    @property
    def expert_dp_shard(self) -> int:
        """Ranks that hold the same part of the same experts, in one replica."""
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)

    def size(self, axis: str) -> int:
        return getattr(self, axis)

    def coordinates(self, rank: int, axes: tuple[str, ...] = DENSE_AXES) -> dict[str, int]:
        """{axis: index} of a rank, in one of the two factorizations."""
        found: dict[str, int] = {}
        for axis in reversed(axes):
            rank, found[axis] = divmod(rank, self.size(axis))
        return found

    def group(self, rank: int, *axes: str) -> list[int]:
        """The group of groups(*axes) that holds this rank, without computing the others."""
        factorization = factorization_of(axes)
        index = self.coordinates(rank, factorization)
        ranks = [0]
        stride = 1
        for axis in reversed(factorization):
            indices = range(self.size(axis)) if axis in axes else (index[axis],)
            ranks = [start + stride * i for i in indices for start in ranks]
            stride *= self.size(axis)
        return ranks

    def groups(self, *axes: str) -> list[list[int]]:
        """All groups of ranks that span `axes` and agree on the others, such as groups("dp_shard", "cp").

        Raises ValueError if the axes do not lie in one factorization.
        """
        factorization = factorization_of(axes)
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            index = self.coordinates(rank, factorization)
            others = tuple(index[axis] for axis in factorization if axis not in axes)
            groups.setdefault(others, []).append(rank)
        return list(groups.values())

    def pipeline_ends(self) -> list[list[int]]:
        """The first and last rank of each pipeline (one rank without a pipeline): both hold a tied table."""
        return [ends_of(ranks) for ranks in self.groups("pp")]

    def ends_with(self, rank: int) -> list[int] | None:
        """The ends of a rank's pipeline, if it is one of them."""
        ends = ends_of(self.group(rank, "pp"))
        return ends if rank in ends else None


def ends_of(pipeline: list[int]) -> list[int]:
    """Its first and last rank; one without a pipeline."""
    return sorted({pipeline[0], pipeline[-1]})


def factorization_of(axes: tuple[str, ...]) -> tuple[str, ...]:
    """DENSE_AXES or EXPERT_AXES: the one that holds the axes. Raises ValueError if neither does."""
    for factorization in (DENSE_AXES, EXPERT_AXES):
        if set(axes) <= set(factorization):
            return factorization
    raise ValueError(f"{axes} do not lie in one factorization: {DENSE_AXES} or {EXPERT_AXES}")


def connections_of_rank(dims: ParallelDims, rank: int) -> dict[Connection, list[str]]:
    """The process groups that Mesh.bind and join_job make for a rank: {what identifies one: the names of the
    groups that it carries}. On GPUs each has a communicator of its own."""
    everyone = connection_of(range(dims.world))
    found: dict[Connection, list[str]] = {} if everyone is None else {everyone: []}
    for request in requested_groups().values():
        connection = connection_of(dims.group(rank, *request.axes), request.channel)
        if connection is not None:
            found.setdefault(connection, []).append(request.name)
    ends = connection_of(dims.ends_with(rank) or ())
    if ends is not None:
        found.setdefault(ends, []).append("embedding_ends")
    return found
