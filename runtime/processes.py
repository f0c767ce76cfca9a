"""Process utilities: die with the parent, signal handlers, process age, last words on stderr. Needs no torch.
"""
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

PR_SET_PDEATHSIG = 1  # prctl: send this signal when the parent dies
PARENT_FIELD = 1  # ppid in /proc/PID/stat, counted after the name
START_TIME_FIELD = 19  # starttime, in clock ticks since boot
PARENT_POLL_SECONDS = 0.5  # between checks of the parent on systems without prctl


# ---- die with the parent -----------------------------------------------------------------------------------


def death_signal_setter(parent: int) -> Callable[[], None] | None:
    """Return a function by which a child makes the kernel kill it when its parent dies.

    It may run between fork and exec, so it only calls what is already loaded. Returns None on systems without
    this (macOS).
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:
        return None

    def request_death_signal() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the call
            os.kill(os.getpid(), signal.SIGKILL)

    return request_death_signal


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent dies; without kernel support (macOS), a thread polls.

    Otherwise a worker of a killed torchrun would keep its GPU and locks.
    """
    parent = os.getppid()
    request_death_signal = death_signal_setter(parent)
    if request_death_signal is None:
        threading.Thread(target=end_with_parent, args=(parent,), daemon=True, name="parent").start()
    else:
        request_death_signal()


def end_with_parent(parent: int) -> None:
    """Wait until `parent` is no longer this process's parent, i.e. has died, then kill this process."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


# ---- /proc -------------------------------------------------------------------------------------------------


def handles_signal(pid: int, number: signal.Signals) -> bool | None:
    """Return whether a process has a handler for the signal, or None if it has exited or /proc is missing."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (number - 1) & 1)


def stat_fields(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat after the program name. Raises OSError."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def get_parent_pid(pid: int) -> int:
    """Return the parent's pid. Raises OSError, or IndexError or ValueError for a process that is exiting."""
    return int(stat_fields(pid)[PARENT_FIELD])


def process_seconds() -> float:
    """Return the seconds since the kernel started this process, or 0.0 without /proc."""
    try:
        started = int(stat_fields("self")[START_TIME_FIELD]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


# ---- streams whose readers may be gone ---------------------------------------------------------------------


def print_error(line: str) -> None:
    """Print a line on stderr. Never raises, so that clean-up after it always runs."""
    try:
        print(line, file=sys.stderr, flush=True)
    except BrokenPipeError:  # e.g. `2>&1 | tee log`, which the same Ctrl-C ends
        redirect_to_null(sys.stderr)
    except (OSError, ValueError):  # a full disk, a terminal that is gone; a closed file
        pass


def redirect_to_null(stream: IO[str]) -> None:
    """Redirect a standard stream to /dev/null, so that further writes and Python's final flush succeed."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no file descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
