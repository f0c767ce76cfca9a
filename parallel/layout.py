"""Who is where: pure arithmetic from parallel degrees to rank groups. No torch, no processes.

Axes run outermost first, so that tp neighbours share a node. `dp` is what is left of the world.
"""
from dataclasses import dataclass

DENSE = ("pp", "dp_rep", "dp", "cp", "tp")  # attention, norms, dense MLPs, embeddings, routers
EXPERT = ("pp", "dp_rep", "edp", "ep", "etp")  # a mixture's experts: the same ranks, dp x cp x tp folded anew (arXiv 2504.14960)
SPANS = {"tp": ("tp",), "cp": ("cp",), "pp": ("pp",), "dp_rep": ("dp_rep",),
         "data": ("dp_rep", "dp"),  # ranks that read different samples
         "shard": ("dp", "cp"),  # ranks that share one copy of the sharded state under ZeRO
         "loss": ("dp_rep", "dp", "cp"),  # ranks that see different tokens: counts and gradients are summed here
         "model": ("pp", "tp"),  # ranks that hold different parameters
         "stage": ("dp_rep", "dp", "cp", "tp"),  # ranks that hold the same layers
         "world": DENSE,
         "tokens": ("cp", "tp"),  # ranks that share a sequence, where tp has cut it too: a router's counts are summed here
         "experts": ("ep", "etp"),  # ranks that hold all experts together: tokens are exchanged here
         "eshard": ("edp",),  # what shard, loss and model are to the rest, for experts
         "eloss": ("dp_rep", "edp"),
         "emodel": ("pp", "ep", "etp")}


@dataclass(frozen=True)
class Layout:
    """Raises ValueError where the degrees do not multiply to a divisor of the world, or ep x etp not to one of dp x cp x tp."""
    world: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp_rep: int = 1  # HSDP: replicas of the ZeRO shard group
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        if self.world % self.model:
            raise ValueError(f"world {self.world} is not a multiple of tp*cp*pp*dp_rep = {self.model}")
        if self.dp * self.cp * self.tp % (self.ep * self.etp):
            raise ValueError(f"ep*etp = {self.ep * self.etp} does not divide dp*cp*tp = {self.dp * self.cp * self.tp}")

    @property
    def model(self) -> int:
        return self.tp * self.cp * self.pp * self.dp_rep

    @property
    def dp(self) -> int:
        return self.world // self.model

    @property
    def edp(self) -> int:
        """Ranks that hold the same piece of the same experts, in one replica."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)

    def size(self, axis: str) -> int:
        return getattr(self, axis)

    def coords(self, rank: int, axes: tuple[str, ...] = DENSE) -> dict[str, int]:
        """{axis: index} of one rank, in one of the two factorizations."""
        out = {}
        for axis in reversed(axes):
            rank, out[axis] = divmod(rank, self.size(axis))
        return out

    def group(self, rank: int, *axes: str) -> list[int]:
        """The group of `groups(*axes)` that holds this rank, without the others."""
        every = DENSE if set(axes) <= set(DENSE) else EXPERT
        here, stride, out = self.coords(rank, every), 1, [0]
        for axis in reversed(every):
            out = [r + stride * k for k in (range(self.size(axis)) if axis in axes else (here[axis],)) for r in out]
            stride *= self.size(axis)
        return out

    def groups(self, *axes: str) -> list[list[int]]:
        """Every group of ranks that spans `axes` and agrees on the others, e.g. groups('tp'), groups('dp', 'cp'),
        groups('ep', 'etp'). Raises ValueError where they do not lie in one factorization."""
        every = DENSE if set(axes) <= set(DENSE) else EXPERT
        if not set(axes) <= set(every):
            raise ValueError(f"{axes} do not lie in one factorization: {DENSE} or {EXPERT}")
        table: dict[tuple, list[int]] = {}
        for rank in range(self.world):
            c = self.coords(rank, every)
            table.setdefault(tuple(c[a] for a in every if a not in axes), []).append(rank)
        return list(table.values())

    def ends(self) -> list[list[int]]:
        """Pairs of ranks at the two ends of each pipeline (one rank where there is no pipeline): where tied weights live."""
        return [sorted({pipe[0], pipe[-1]}) for pipe in self.groups("pp")]
