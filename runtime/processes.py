"""Processes and the kernel: death with a parent, signals, age; and a last line on stderr. Needs no torch.
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
PARENT_FIELD = 1  # of /proc/PID/stat, counted behind the name: ppid
START_TIME_FIELD = 19  # starttime, in clock ticks since boot
PARENT_POLL_SECONDS = 0.5  # between two looks at whether the parent lives, where there is no prctl


# ---- to die with a parent ----------------------------------------------------------------------------------


def dying_with(parent: int) -> Callable[[], None] | None:
    """The function with which a child has the kernel kill it when its parent dies, whenever that is.

    Also between fork and exec, so it only calls what is loaded. None where the kernel cannot do it (macOS).
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:
        return None

    def ask_for_death() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call
            os.kill(os.getpid(), signal.SIGKILL)

    return ask_for_death


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent dies; where it cannot (macOS), a thread looks.

    Else a worker of a killed torchrun would keep its GPU and locks.
    """
    parent = os.getppid()
    ask_for_death = dying_with(parent)
    if ask_for_death is None:
        threading.Thread(target=end_with_parent, args=(parent,), daemon=True, name="parent").start()
    else:
        ask_for_death()


def end_with_parent(parent: int) -> None:
    """Waits until the parent is another process than `parent`, which has died then; kills this one."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


# ---- what /proc tells --------------------------------------------------------------------------------------


def catches(pid: int, number: signal.Signals) -> bool | None:
    """Whether a process has a handler for the signal; None if it has ended, or without a /proc to tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (number - 1) & 1)


def stat_fields(pid: int | str) -> list[str]:
    """The fields of /proc/PID/stat behind the name of the program. Raises OSError."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def parent_of(pid: int) -> int:
    """Raises OSError, and IndexError or ValueError for a process that is just ending."""
    return int(stat_fields(pid)[PARENT_FIELD])


def process_seconds() -> float:
    """Seconds since the kernel started this process; 0.0 where there is no /proc to read it from."""
    try:
        started = int(stat_fields("self")[START_TIME_FIELD]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


# ---- streams whose readers may be gone ---------------------------------------------------------------------


def print_error(line: str) -> None:
    """Prints a line on stderr. Never raises: what has to be done after it is done, whoever reads."""
    try:
        print(line, file=sys.stderr, flush=True)
    except BrokenPipeError:  # as of `2>&1 | tee log`, which the same Ctrl-C ends
        redirect_to_null(sys.stderr)
    except (OSError, ValueError):  # a full disk, a terminal that is gone; a closed file
        pass


def redirect_to_null(stream: IO[str]) -> None:
    """Points a standard stream to /dev/null, where all further writes succeed, Python's last flush too."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # it has no file descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
