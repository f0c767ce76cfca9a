"""Waiting for what other processes do."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> bool:
    """Whether the condition came to hold in time."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(condition())


def get_state(pid: int) -> str | None:
    """R, S, T (stopped) or Z (has ended, nobody has waited for it); None if there is no such process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return None


def has_ended(pid: int) -> bool:
    return get_state(pid) in ("Z", None)
