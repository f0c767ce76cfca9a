"""Named points of a run where a fault is injected (durable/faults.py) or a proof looks on."""
from typing import Protocol


class FaultHook(Protocol):
    """The hook called at each fault point: a FaultInjector, an observer, or no_fault."""

    def __call__(self, point: str, step: int | None = None, /, **seen: object) -> str | None:
        """Return None or the action; "nan", "spike" and "bitflip" ask the caller to corrupt its data.

        seen: named objects for observers.
        """


def no_fault(point: str, step: int | None = None, /, **seen: object) -> str | None:
    """Do nothing: the fault hook of a run without faults."""
