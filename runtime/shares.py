"""Where the time of a step went on a rank, and what was found slow: what runtime/metrics.py and
runtime/slow.py tell each other."""
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

COMPUTE, DATA, LINK, STOPPED = "compute", "data", "link", "stopped"
Place = tuple[str, tuple[int, ...]]  # why, or the name of a group; and ranks


@dataclass(frozen=True)
class StepShares:
    """Where the time of one step went on this rank, in ms. waits: by group."""
    step: int
    step_ms: float
    data_ms: float
    exposed_ms: float
    waits: Mapping[str, float]

    @property
    def compute_ms(self) -> float:
        return max(0.0, self.step_ms - self.data_ms - self.exposed_ms)


@dataclass(frozen=True)
class Slow:
    """A slow rank or link. why: COMPUTE, DATA, LINK or STOPPED.

    ranks: the slow one; of a link those of its group, whose name is `group`. ms: a step; of STOPPED in the
    whole window. usual_ms: of the others, or before.
    """
    why: str
    ranks: tuple[int, ...]
    ms: float
    usual_ms: float = 0.0
    group: str = ""

    @property
    def excess_ms(self) -> float:
        return self.ms - self.usual_ms

    @property
    def place(self) -> Place:
        """The key by which it is the same as in the window before."""
        return self.why, self.ranks


def slow_link(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """slow link of ranks 4, 5 on node2. hosts: of all ranks."""
    own_hosts = dict.fromkeys(hosts[rank] for rank in ranks)
    return f"slow link of ranks {', '.join(map(str, ranks))} on {', '.join(own_hosts)}"
