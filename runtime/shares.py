"""The types that runtime/metrics.py and durable/slow.py exchange: a step's time breakdown, and slow ranks."""
from collections.abc import Mapping
from dataclasses import dataclass

COMPUTE, DATA, LINK, STOPPED = "compute", "data", "link", "stopped"
Place = tuple[str, tuple[int, ...]]  # (reason or group name, ranks)


@dataclass(frozen=True)
class StepShares:
    """Time breakdown of one step on this rank, in ms. waits: {group: ms}."""
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

    ranks: the slow rank, or for a link the ranks of its group, named `group`. ms: time per step, or per
    window for STOPPED. usual_ms: that of the others, or of earlier windows.
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
        """Key that identifies it across windows."""
        return self.why, self.ranks
