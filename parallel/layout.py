"""Who is where: pure arithmetic from parallel degrees to rank groups. No torch, no processes.

Axes run outermost first, so that tp neighbours share a node. `dp` is what is left of the world.
"""
from dataclasses import dataclass

DENSE = ("pp", "dp_rep", "dp", "cp", "tp")  # attention, norms, dense MLPs, embeddings


@dataclass(frozen=True)
class Layout:
    """Raises ValueError where the degrees do not multiply to a divisor of the world."""
    world: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp_rep: int = 1  # HSDP: replicas of the ZeRO shard group

    def __post_init__(self) -> None:
        if self.world % self.model:
            raise ValueError(f"world {self.world} is not a multiple of tp*cp*pp*dp_rep = {self.model}")

    @property
    def model(self) -> int:
        return self.tp * self.cp * self.pp * self.dp_rep

    @property
    def dp(self) -> int:
        return self.world // self.model

    def size(self, axis: str) -> int:
        return getattr(self, axis)

    def coords(self, rank: int) -> dict[str, int]:
        """{axis: index} of one rank."""
        out = {}
        for axis in reversed(DENSE):
            rank, out[axis] = divmod(rank, self.size(axis))
        return out

    def groups(self, *axes: str) -> list[list[int]]:
        """Every group of ranks that spans `axes` and agrees on the others, e.g. groups('tp'), groups('dp', 'cp')."""
        table: dict[tuple, list[int]] = {}
        for rank in range(self.world):
            c = self.coords(rank)
            table.setdefault(tuple(c[a] for a in DENSE if a not in axes), []).append(rank)
        return list(table.values())

    def ends(self) -> list[list[int]]:
        """Pairs of ranks at the two ends of each pipeline (one rank where there is no pipeline): where tied weights live."""
        return [sorted({pipe[0], pipe[-1]}) for pipe in self.groups("pp")]
