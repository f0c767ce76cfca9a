"""Processes that wait with their imports done, until scripts/launch.py makes ranks of them. Needs no torch.

Python, torch and the modules of train.py take seconds of a core to load, for each rank, and again at each
restart. A spare has that behind it: `train.py --spare` imports everything, says that it is ready, and waits
for the words and the environment of a rank. Until then it has joined nothing: no port, no device, no lock.

- It is a process of its own, not a fork of one that has torch loaded: no thread or lock is copied.
- It is a child of the launcher, as every rank is, and dies with it.
- It is used only while the files of the code are those that it has loaded; else it is ended.
"""
import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import config
from runtime.processes import dying_with

SPARE_WORD = "--spare"  # the only word of such a process
READY = b"+"
CHUNK = 1 << 16  # bytes that are read at once


class RankJob(NamedTuple):
    """The job of a rank. environment: the variables in which it differs from the launcher's."""

    words: list[str]
    environment: dict[str, str]


@dataclass
class Spare:
    """A process that waits. channel: to its standard input. code: sha256 of the files that it loads."""

    process: subprocess.Popen[bytes]
    channel: socket.socket
    code: str
    is_ready: bool = False

    def lives(self) -> bool:
        return self.process.poll() is None

    def look(self) -> None:
        """Notes whether it has said that it is ready."""
        with contextlib.suppress(OSError):
            self.is_ready = self.is_ready or self.channel.recv(1) == READY

    def end(self) -> None:
        self.channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Spares:
    """`with Spares(command, wanted) as spares:` around all starts of a job.

    command: of train.py, without words. wanted: how many are to wait.
    """

    def __init__(self, command: Sequence[str], wanted: int) -> None:
        self.command = [*command, SPARE_WORD]
        self.wanted = wanted
        self.waiting: list[Spare] = []
        self.used: list[Spare] = []  # that have become ranks

    def __enter__(self) -> "Spares":
        return self

    def __exit__(self, *_: object) -> None:
        for spare in self.waiting:
            spare.end()
        for spare in self.used:
            spare.channel.close()

    def tend(self) -> None:
        """Starts one that is missing, if none is loading: call it again and again while the ranks train.

        One at a time, since loading takes a core from the ranks. None follows one that has ended while it was
        loading: the next would too.
        """
        if len(self.waiting) >= self.wanted:
            return
        if self.waiting and not self.waiting[-1].is_ready:
            self.waiting[-1].look()
            return
        self.waiting.append(start_spare(self.command))

    def take(self, words: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
        """A spare that becomes a rank, with these words and variables; None if there is none to use."""
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
            except OSError:  # it has just ended
                spare.end()
                continue
            self.used.append(spare)
            return spare.process
        return None

    def close_used(self) -> None:
        """Closes the channels of ranks that have ended. One that is still loading writes to its own."""
        for spare in self.used:
            if not spare.lives():
                spare.channel.close()
        self.used = [spare for spare in self.used if spare.lives()]


def start_spare(command: Sequence[str]) -> Spare:
    code = config.code_hash()  # before it reads any
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            command,
            stdin=theirs.fileno(),
            start_new_session=True,
            preexec_fn=dying_with(os.getpid()),
        )
    ours.setblocking(False)
    return Spare(process, ours, code)


def wait_for_job() -> RankJob | None:
    """In a spare: says that it is ready, and waits for its job. Returns None if it is needed no more."""
    os.write(0, READY)
    received = b""
    with contextlib.suppress(ConnectionResetError):  # the launcher ended before it read READY
        while chunk := os.read(0, CHUNK):
            received += chunk
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return RankJob(**json.loads(received)) if received else None
