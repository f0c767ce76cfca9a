"""Two locks: only one run writes to a run folder, and a checkpoint that is being read is not purged.

Both use flock, which the kernel releases when the holder exits, however it exits. Some parallel filesystems
lack flock across nodes; there a lease keeps jobs on different nodes apart (checkpoint/disk/lease.py).
"""
import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from checkpoint.disk.files import storage_errors
from checkpoint.disk.lease import Lease, is_of_another
from config import ConfigError

LOCK_FILE = ".lock"
LOCK_TIMEOUT_S = 1.0  # a holder that was just killed may need a moment to exit
RETRY_INTERVAL_S = 0.05
MAX_HOLDER_BYTES = 200  # of the lock file, in an error message
WRONG_PLACE = (  # relaunching at the same place fails the same way
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
)


@contextlib.contextmanager
def run_lock(folder: Path | str) -> Iterator[Lease]:
    """Hold the run lock of `folder`, which is created if missing.

    Yields the lease. After a ConfigError inside, whatever was created is removed again unless something else
    is in the folder by then. Raises ConfigError naming the holder if another process has the lock, or if the
    folder is not writable; StorageError if the disk fails.
    """
    path = Path(folder) / LOCK_FILE
    made = [place for place in (path, *path.parents) if not os.path.lexists(place)]
    fd = open_locked(path)
    try:
        # record the holder, for error messages of other processes
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{socket.gethostname()} pid {os.getpid()}\n".encode("ascii", "replace"), 0)
        lease = Lease(Path(folder))
        try:
            lease.take(flock_works(fd))
            yield lease
        finally:
            lease.release()
    except ConfigError:
        remove_created(path, made)
        raise
    finally:
        os.close(fd)  # releases the lock; the file stays


def open_locked(path: Path) -> int:
    """Create, open and lock the file. Raises the same errors as run_lock."""
    while True:
        with storage_errors(path, 0), unwritable_folder_errors(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while not try_lock(fd):
            if time.monotonic() > deadline:
                holder = read_holder(fd)
                os.close(fd)
                raise ConfigError(
                    f"{path.parent}: in use by {holder}; wait for it, stop it, or choose another log.name"
                )
            time.sleep(RETRY_INTERVAL_S)
        try:
            if os.path.samestat(os.fstat(fd), os.lstat(path)):
                return fd
        except OSError:
            pass
        os.close(fd)  # removed by a refused launch that held the lock


def remove_created(path: Path, made: list[Path]) -> None:
    """Remove the lock file of a refused launch and the folders that it created, innermost first, unless
    something else is in them. The caller holds the lock."""
    with contextlib.suppress(OSError):
        if path in made and os.listdir(path.parent) == [path.name]:
            path.unlink()
            for place in made[1:]:
                place.rmdir()


@contextlib.contextmanager
def unwritable_folder_errors(folder: Path | str) -> Iterator[None]:
    """Convert an OSError for a path that is not writable into a ConfigError."""
    try:
        yield
    except OSError as error:
        if error.errno not in WRONG_PLACE:
            raise
        raise ConfigError(
            f"log.dir: a run cannot write to {folder} ({error.strerror}); give another log.dir or log.name"
        ) from None


@contextlib.contextmanager
def idle_folder(folder: Path) -> Iterator[bool]:
    """Yield whether the folder has had a run but none is active. Inside the block none can begin.

    Creates nothing and never waits.
    """
    try:
        fd = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # never had a run
        yield False
        return
    try:
        yield try_lock(fd) and not is_of_another(folder, flock_works(fd))
    finally:
        os.close(fd)


def flock_works(fd: int) -> bool:
    """Return whether this filesystem supports locks. The caller holds the lock, if so."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def read_holder(fd: int) -> str:
    """Return the holder named in the lock file."""
    text = os.pread(fd, MAX_HOLDER_BYTES, 0).decode("ascii", "replace")
    return text.strip() or "another process"


def try_lock(fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Try to lock without waiting. Returns True if locked, or if this filesystem has no locks."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        held_by_another = error.errno in (errno.EWOULDBLOCK, errno.EACCES)
        return not held_by_another
    return True


@contextlib.contextmanager
def folder_lock(folder: Path, kind: int) -> Iterator[bool]:
    """Lock a checkpoint folder without waiting: LOCK_SH to read it, LOCK_EX to move it away.

    Yields whether it was locked.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # no such folder: opening its files gives a better message
        yield True
        return
    try:
        yield try_lock(fd, kind)
    finally:
        os.close(fd)
