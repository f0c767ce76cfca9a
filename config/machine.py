"""Machine checks that must run before torch is imported: the platform, and the number of cores."""
import os
import sys


def refuse_windows() -> None:
    """Exit with one line and code 2 on Windows: run folders and checkpoints are locked with flock, and
    ranks are stopped with Unix signals."""
    if sys.platform == "win32":
        sys.stderr.write("error: Windows has neither flock nor Unix signals; start this inside WSL 2\n")
        sys.exit(2)


def usable_cores() -> int:
    """Return the cores that this process may use, or all cores if the system cannot tell (macOS)."""
    affinity = getattr(os, "sched_getaffinity", None)
    return (os.cpu_count() or 1) if affinity is None else len(affinity(0))


refuse_windows()  # on import, before any module uses something that Windows lacks
