"""What a program asks of the machine before it has torch: whether its system will do, and its cores."""
import os
import sys


def refuse_windows() -> None:
    """Ends the process there with one line and exit code 2: run folders and checkpoints are locked with
    flock, and ranks are stopped with Unix signals."""
    if sys.platform == "win32":
        sys.stderr.write("error: Windows has neither flock nor Unix signals; start this inside WSL 2\n")
        sys.exit(2)


def usable_cores() -> int:
    """Cores that this process may use; all of the machine where the system does not say (macOS)."""
    affinity = getattr(os, "sched_getaffinity", None)
    return (os.cpu_count() or 1) if affinity is None else len(affinity(0))


refuse_windows()  # when it is imported: before a module asks for what Windows does not have
