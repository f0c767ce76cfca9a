"""What identifies a process group. No torch: the planner counts the process groups of a job by it."""
from collections.abc import Iterable

Connection = tuple[str, tuple[int, ...]]  # its channel and its ranks


def connection_of(ranks: Iterable[int], channel: str = "") -> Connection | None:
    """Of a group of these ranks; None: it has one rank, or none, and needs no process group."""
    members = tuple(ranks)
    return (channel, members) if len(members) > 1 else None
