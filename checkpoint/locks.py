"""Who may touch what: one run writes to a folder, and a checkpoint that is being read is not purged.

Both are flock: the kernel frees them when their holder dies, however it dies. Where a filesystem has no flock across
nodes (some parallel ones), two jobs on different nodes are not kept apart; within a node they always are.
"""
import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from checkpoint.files import storing
from config import ConfigError

WAIT = 1.0  # seconds until the lock is given up: a holder that was just killed may take a moment to be gone


@contextlib.contextmanager
def lock(folder: Path | str) -> Iterator[None]:
    """The run lock of `folder` (made if it is not there). Raises ConfigError naming the holder, StorageError."""
    path = Path(folder) / ".lock"
    with storing(path, 0):
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + WAIT
        while not take(fd):
            if time.monotonic() > deadline:
                holder = os.pread(fd, 200, 0).decode("ascii", "replace").strip() or "another process"
                raise ConfigError(f"{folder}: in use by {holder}; wait for it, stop it, or choose another log.name")
            time.sleep(0.05)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{socket.gethostname()} pid {os.getpid()}\n".encode("ascii", "replace"), 0)
        yield
    finally:
        os.close(fd)  # frees the lock; the file stays, since removing it would race with the next holder


def take(fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    """True if the lock is ours now, or if this filesystem has none to give."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as e:
        return e.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


@contextlib.contextmanager
def held(folder: Path, kind: int) -> Iterator[bool]:
    """A lease on a checkpoint folder: LOCK_SH to read it, LOCK_EX to move it away. Yields whether it was got."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # not there: whoever opens its files says so better
        yield True
        return
    try:
        yield take(fd, kind)
    finally:
        os.close(fd)
