"""Preloaded spare processes that the launcher turns into ranks.

Importing Python, torch and train.py's modules takes seconds of a core, for each rank and again at each
restart. A spare has done that in advance: `train.py --spare` imports everything, reports that it is ready,
and waits for the arguments and the environment of a rank. Until then it holds no port, device or lock.

- It is a separate process, not a fork of one that has torch loaded, so no thread or lock is copied.
- It is a child of the launcher, like every rank, and dies with it.
- It is used only if the source files are still those that it has loaded; otherwise it is killed.
"""
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import config
from runtime.processes import death_signal_setter
from runtime.setup import become_rank

SPARE_WORD = "--spare"  # the only argument of a spare
READY = b"+"
CHUNK = 1 << 16  # bytes per read


class RankJob(NamedTuple):
    """The job of a rank. environment: the variables that differ from the launcher's."""

    words: list[str]
    environment: dict[str, str]


@dataclass
class Spare:
    """A waiting process. channel: connected to its stdin. code: sha256 of the source files that it loads."""

    process: subprocess.Popen[bytes]
    channel: socket.socket
    code: str
    is_ready: bool = False

    def lives(self) -> bool:
        return self.process.poll() is None

    def look(self) -> None:
        """Check whether it has reported that it is ready."""
        with contextlib.suppress(OSError):
            self.is_ready = self.is_ready or self.channel.recv(1) == READY

    def end(self) -> None:
        self.channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Spares:
    """`with Spares(command, wanted) as spares:` around all launches of a job.

    command: that of train.py, without arguments. wanted: the number of spares to keep.
    """

    def __init__(self, command: Sequence[str], wanted: int) -> None:
        self.command = [*command, SPARE_WORD]
        self.wanted = wanted
        self.waiting: list[Spare] = []
        self.used: list[Spare] = []  # now ranks

    def __enter__(self) -> "Spares":
        return self

    def __exit__(self, *_: object) -> None:
        for spare in self.waiting:
            spare.end()
        for spare in self.used:
            spare.channel.close()

    def replace_missing(self) -> None:
        """Start a missing spare unless one is loading; call this repeatedly while the ranks train.

        Only one loads at a time, since that takes a core from the ranks. After one has died while loading, no
        more are started, since the next would die too.
        """
        if len(self.waiting) >= self.wanted:
            return
        if self.waiting and not self.waiting[-1].is_ready:
            self.waiting[-1].look()
            return
        self.waiting.append(start_spare(self.command))

    def take(self, words: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
        """Turn a spare into a rank with these arguments and variables. Returns None if none is usable."""
        self.close_used()
        while self.waiting:
            spare = self.waiting.pop(0)
            if spare.code != config.code_hash() or not spare.lives():
                spare.end()
                continue
            message = json.dumps(RankJob(list(words), dict(environment))._asdict())
            try:
                spare.channel.setblocking(True)
                spare.channel.sendall(message.encode())
                spare.channel.shutdown(socket.SHUT_WR)  # the end of the message
            except OSError:  # it has just died
                spare.end()
                continue
            self.used.append(spare)
            return spare.process
        return None

    def close_used(self) -> None:
        """Close the channels of ranks that have exited; one that is still loading writes to its channel."""
        for spare in self.used:
            if not spare.lives():
                spare.channel.close()
        self.used = [spare for spare in self.used if spare.lives()]


def start_spare(command: Sequence[str]) -> Spare:
    code = config.code_hash()  # before it reads the files
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            command,
            stdin=theirs.fileno(),
            start_new_session=True,
            preexec_fn=death_signal_setter(os.getpid()),
        )
    ours.setblocking(False)
    return Spare(process, ours, code)


def wait_for_job() -> RankJob | None:
    """In a spare, report that it is ready and wait for its job. Returns None if it is not needed."""
    os.write(0, READY)
    received = b""
    with contextlib.suppress(ConnectionResetError):  # the launcher ended before it read READY
        while chunk := os.read(0, CHUNK):
            received += chunk
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return RankJob(**json.loads(received)) if received else None


def process_words(argv: list[str]) -> list[str]:
    """Return argv. A spare waits for the arguments of the rank it becomes instead.

    A spare also takes that rank's environment, or exits here if it is not needed.
    """
    if argv != [SPARE_WORD]:
        return argv
    job = wait_for_job()
    if job is None:
        sys.exit(0)
    become_rank(job.environment)
    return job.words
