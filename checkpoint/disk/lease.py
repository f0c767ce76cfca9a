"""A lease on the run folder, for filesystems whose flock does not reach other hosts.

If flock is missing, or local to one host, two jobs on different hosts would silently write to the same run
folder. So the holder of the run lock (checkpoint/disk/locks.py) also keeps a small file there that names the
holder and is rewritten every few seconds with a new number.

- Between processes under one kernel and mount flock decides, if the filesystem has it at all.
- A lease of another host is watched: it is held if the number changes, and abandoned by a dead host if it
  does not change in any poll during EXPIRES_S. Clocks of hosts are never compared. An unreadable lease counts
  as held.
- A holder that was cut off that long and comes back finds the lease of the run that took over, and ends
  before its next step or save. So does one of two that found a fresh folder at the same time.
"""
import contextlib
import json
import math
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from checkpoint.disk.files import StorageError, storage_errors
from config import ConfigError
from parallel.extras import Extra

NAME = ".lease"
RENEW_S = 4.0  # heartbeat interval of the holder
EXPIRES_S = 20.0  # without a heartbeat
TAKE_TRIES = 5  # to write the lease while others do so
POLL_S = 0.5  # between two polls of another host's lease
MAX_BYTES = 1000
UNREADABLE = "unreadable"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Lease:
    """Acquired by `take`, renewed by a thread, given up by `release`.

    `folder` is the run folder. For `renew_s` and `expires_s` see RENEW_S and EXPIRES_S.
    """

    def __init__(self, folder: Path, renew_s: float = RENEW_S, expires_s: float = EXPIRES_S) -> None:
        self.folder = folder
        self.path = folder / NAME
        self.renew_s = renew_s
        self.expires_s = expires_s
        self.id = uuid.uuid4().hex
        self.number = 0
        self.renewed = time.monotonic()
        self.successor = ""  # who took the lease over
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.renew, name="lease", daemon=True)

    def take(self, flock_works: bool) -> None:
        """Wait until the folder is not held by a run that flock cannot keep away. The caller holds the flock.

        Raises ConfigError naming the holder, or StorageError if the disk fails.
        """
        before = read(self.path)
        is_decided = flock_works and before.get("kernel") == get_kernel_id(self.folder)
        if before and not is_decided:
            self.wait_until_expired(before)
        # including a file that a holder hanging in write() would later rename over this lease
        for left_behind in self.folder.glob(f"{NAME}-*"):
            with contextlib.suppress(OSError):
                left_behind.unlink()
        self.write_among_others()
        if before and not is_decided:  # another host may have waited too: the last writer wins
            time.sleep(min(POLL_S, self.renew_s))
            self.check()
        self.thread.start()

    def wait_until_expired(self, before: dict[str, object]) -> None:
        pause = min(POLL_S, self.renew_s / 2)
        for _ in range(math.ceil(self.expires_s / pause)):  # polls, not seconds: a poll may hang
            time.sleep(pause)
            now = read(self.path)
            if not now:  # released
                return
            if UNREADABLE in (*now, *before):
                before = before if UNREADABLE in now else now
            elif now != before:
                raise ConfigError(
                    f"{self.folder}: in use by {describe_holder(now)}; wait for it, stop it, or choose "
                    "another log.name"
                )

    def write(self) -> None:
        """Write the lease. Raises StorageError."""
        self.number += 1
        text = json.dumps({
            "id": self.id,
            "kernel": get_kernel_id(self.folder),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "number": self.number,
        })
        beside = self.path.with_name(f"{NAME}-{self.id}")
        with storage_errors(self.path, 0):
            beside.write_text(text)
            if not self.ended.is_set():
                os.replace(beside, self.path)
                self.renewed = time.monotonic()

    def write_among_others(self) -> None:
        """Call write(), retrying if another launch that takes the lease now has removed the temporary file.

        Raises StorageError.
        """
        for number in range(1, TAKE_TRIES + 1):
            try:
                return self.write()
            except StorageError as error:
                was_removed = isinstance(error.__cause__, FileNotFoundError) and self.folder.is_dir()
                if not was_removed or number == TAKE_TRIES:
                    raise

    def renew(self) -> None:
        """Run the renewal thread. It survives temporary disk failures and ends if another holder takes
        over."""
        while not self.ended.wait(self.renew_s):
            with contextlib.suppress(StorageError):
                if self.is_taken_over():
                    return
                self.write()

    def is_taken_over(self) -> bool:
        now = read(self.path)
        if now and UNREADABLE not in now and now.get("id") != self.id:
            self.successor = describe_holder(now)
        return bool(self.successor)

    def check(self) -> None:
        """Raise ConfigError if another run has taken the folder over."""
        is_late = time.monotonic() - self.renewed > self.expires_s / 2  # the thread hangs, or the host did
        if is_late or not self.thread.is_alive():
            self.is_taken_over()
        if self.successor:
            raise ConfigError(
                f"{self.folder}: taken over by {self.successor}, which had no heartbeat from this run for "
                f"{self.expires_s:g} s, or started at the same time; this run ends here, and its checkpoints "
                "are kept"
            )

    def release(self) -> None:
        """Remove the lease, if it still belongs to this one."""
        self.ended.set()
        if self.thread.is_alive():
            self.thread.join(self.renew_s)
        if not self.is_taken_over():
            with contextlib.suppress(OSError):
                self.path.unlink()


class LeaseCheck(Extra):
    """Ends the run at a step, or before a save, once another run has taken its folder over."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease

    def before_step(self, run: Any, step: int) -> None:
        self.lease.check()

    def before_save(self, run: Any, step: int) -> None:
        self.lease.check()


def is_of_another(folder: Path, flock_works: bool) -> bool:
    """Return whether another host, or without flock any process, may hold a lease."""
    found = read(folder / NAME)
    is_decided = flock_works and found.get("kernel") == get_kernel_id(folder)
    return bool(found) and not is_decided


def read(path: Path) -> dict[str, object]:
    """Return the lease in the file, {} if missing, or {UNREADABLE: ...} if damaged or unreadable."""
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(MAX_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        return {UNREADABLE: str(error)}
    return found if isinstance(found, dict) and found.get("id") else {UNREADABLE: "no lease"}


def describe_holder(found: dict[str, object]) -> str:
    return f"{found.get('host')} pid {found.get('pid')}"


def get_kernel_id(folder: Path) -> str:
    """Return an id shared by all processes among which flock decides: those under one kernel and one mount.

    Processes in containers share it. If the kernel's boot id is unknown, the host name replaces it.
    """
    try:
        kernel = BOOT_ID.read_text("ascii").strip()
    except (OSError, ValueError):
        kernel = socket.gethostname()
    return f"{kernel}/{os.stat(folder).st_dev}"
