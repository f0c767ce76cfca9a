"""Two locks: only one run writes to a run folder, and a checkpoint that is being read is not purged.

Both use flock: the kernel releases the lock when the process that holds it ends, however it ends. Some
parallel filesystems have no flock across nodes. There a lease keeps two jobs on different nodes apart
(checkpoint/lease.py).
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
from checkpoint.lease import Lease, is_of_another
from config import ConfigError

LOCK_FILE = ".lock"
LOCK_TIMEOUT_S = 1.0  # a holder that was just killed may need a moment to end
RETRY_INTERVAL_S = 0.05
MAX_HOLDER_BYTES = 200  # of the lock file, shown in an error message
WRONG_PLACE = (  # another start at the same place fails alike
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
)


@contextlib.contextmanager
def run_lock(folder: Path | str) -> Iterator[Lease]:
    """Holds the run lock of `folder`, which is created if it does not exist.

    Yields its lease. After a ConfigError inside, what it has made is removed again, if nothing else came into
    the folder. Raises ConfigError naming the holder if another process has the lock, or if nothing can be
    written there; StorageError if the disk fails.
    """
    path = Path(folder) / LOCK_FILE
    made = [place for place in (path, *path.parents) if not os.path.lexists(place)]
    fd = open_locked(path)
    try:
        # Write down who holds the lock, for the error message of another process.
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{socket.gethostname()} pid {os.getpid()}\n".encode("ascii", "replace"), 0)
        lease = Lease(Path(folder))
        try:
            lease.take(flock_works(fd))
            yield lease
        finally:
            lease.release()
    except ConfigError:
        remove_vain(path, made)
        raise
    finally:
        os.close(fd)  # releases the lock. The file stays


def open_locked(path: Path) -> int:
    """Opens and locks the file, which is created. Raises as run_lock does."""
    while True:
        with storage_errors(path, 0), refused_places(path.parent):
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
        os.close(fd)  # a refused start, which had the lock, has removed it


def remove_vain(path: Path, made: list[Path]) -> None:
    """Removes the lock file of a start that was refused, and the folders that it has made, inner ones first,
    where nothing else is in them. The caller holds the lock."""
    with contextlib.suppress(OSError):
        if path in made and os.listdir(path.parent) == [path.name]:
            path.unlink()
            for place in made[1:]:
                place.rmdir()


@contextlib.contextmanager
def refused_places(folder: Path | str) -> Iterator[None]:
    """Turns an OSError of a path that cannot be written to into a ConfigError."""
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
    """Yields whether a run has been in the folder, and none is there now; inside, none can begin.

    Makes nothing, and waits for nothing.
    """
    try:
        fd = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # no run has been there
        yield False
        return
    try:
        yield try_lock(fd) and not is_of_another(folder, flock_works(fd))
    finally:
        os.close(fd)


def flock_works(fd: int) -> bool:
    """Whether this filesystem has locks at all. The caller holds the lock, if it does."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def read_holder(fd: int) -> str:
    """The holder that the lock file names."""
    text = os.pread(fd, MAX_HOLDER_BYTES, 0).decode("ascii", "replace")
    return text.strip() or "another process"


def try_lock(fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Takes the lock without waiting. Returns True if it is taken, or if this filesystem has no locks."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        held_by_another = error.errno in (errno.EWOULDBLOCK, errno.EACCES)
        return not held_by_another
    return True


@contextlib.contextmanager
def folder_lock(folder: Path, kind: int) -> Iterator[bool]:
    """Locks a checkpoint folder, without waiting: LOCK_SH to read it, LOCK_EX to move it away.

    Yields whether the lock was taken.
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
