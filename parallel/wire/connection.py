"""Identity of a process group. No torch: the planner uses it to count the process groups of a job."""
from collections.abc import Iterable

Connection = tuple[str, tuple[int, ...]]  # (channel, ranks)


def find_connection(ranks: Iterable[int], channel: str = "") -> Connection | None:
    """Identify the process group of these ranks; None for fewer than two ranks, which need none."""
    members = tuple(ranks)
    return (channel, members) if len(members) > 1 else None
