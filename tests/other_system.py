"""Another system as far as a program sees it, for processes of the tests.

`python tests/other_system.py macos PROGRAM ARGS`: without /proc and /sys, and without what Python has on
Linux alone. `... windows PROGRAM ARGS`: without Unix's modules.
"""

import builtins
import ctypes
import errno
import io
import os
import pathlib  # noqa: F401  part of it is another on Windows: not to be imported there any more
import runpy
import signal
import socket
import sys
import sysconfig
import time

UNIX_MODULES = ("fcntl", "pwd", "grp", "resource", "termios")

# What the documentation of Python has under "Availability: Linux", and what macOS has not of Unix's.
LINUX_ONLY = {
    os: """sched_getaffinity sched_setaffinity sched_setscheduler sched_getscheduler sched_param SCHED_BATCH
        SCHED_IDLE fdatasync posix_fadvise posix_fallocate copy_file_range splice eventfd eventfd_read
        memfd_create pidfd_open O_DIRECT O_TMPFILE O_PATH O_NOATIME O_LARGEFILE getxattr setxattr listxattr
        getrandom getresuid getresgid pipe2 prlimit""",
    signal: "SIGPWR SIGPOLL SIGRTMIN SIGRTMAX SIGSTKFLT sigwaitinfo sigtimedwait pidfd_send_signal",
    socket: "SO_PEERCRED SOCK_CLOEXEC SOCK_NONBLOCK AF_NETLINK AF_PACKET TCP_QUICKACK TCP_USER_TIMEOUT",
    time: "CLOCK_BOOTTIME pthread_getcpuclockid",
}


def without_proc(function):
    """open or one of its kin, for which /proc and /sys are not there."""
    def opened(path, *args, **kwargs):
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(("/proc/", "/sys/")):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return function(path, *args, **kwargs)

    return opened


class Library:
    """The program's own symbols, without those of glibc and of Linux's kernel."""

    def __init__(self, name=None, *args, **kwargs):
        if name is not None:
            raise OSError(f"{name}: no such library here")


def become_macos():
    import torch  # noqa: F401  its own files are those of the system that it was built for

    sysconfig.get_config_vars()  # likewise: Python's
    sys.platform = "darwin"
    builtins.open = io.open = without_proc(io.open)
    os.open, os.listdir, os.stat = map(without_proc, (os.open, os.listdir, os.stat))
    ctypes.CDLL = Library
    for module, names in LINUX_ONLY.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)


def become_windows():
    """No library is imported first: it has to be refused before one is missed."""
    sys.platform = "win32"
    for name in UNIX_MODULES:
        sys.modules[name] = None  # importing it raises ImportError
    ctypes.CDLL = Library


def main(system, program, *args):
    sys.argv = [program, *args]
    sys.path.insert(0, os.getcwd())
    {"macos": become_macos, "windows": become_windows}[system]()
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
