"""Jobs in forked processes: the parent has imported what they need, and has not touched the GPU.

A job reports rows as it comes to them. One that crashes, or says nothing for longer than its limit, costs
its own time alone: what it was doing gets a row, and a new process goes on behind that.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from pathlib import Path

import torch

from lab.benchmarks.process import last_error_line

POLL_S = 0.05
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
OUT_OF_MEMORY = "out of memory"
Report = Callable[..., None]


@dataclass(frozen=True)
class ForkedJob:
    """Rows that one process reports: run(report, done).

    run: calls report(starting=NAME) before a row, and report(row=NAME, state=..., ...) for it. It leaves out
    the rows in `done`; a job of one row has its name, and is left out as a whole. limit_s: how long it may
    say nothing. alternative: runs in its place where memory was too small. goes_on: a new process does what
    is behind a row that crashed or hung.
    """

    name: str
    run: Callable[[Report, frozenset[str]], None] = field(repr=False)
    limit_s: float
    alternative: "ForkedJob | None" = None
    goes_on: bool = True


@dataclass(frozen=True)
class JobPlace:
    """How processes start (of multiprocessing), and the folder of what they write."""

    context: BaseContext
    logs: Path


def die_with_parent() -> None:
    """Linux kills this process when its parent is gone, however that ended."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run_in_child(job: ForkedJob, done: frozenset[str], messages: str, log: str) -> None:
    """The whole life of a job's process: it leads a session, so that all that it starts can be ended."""
    os.setsid()
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.stdout = sys.stderr = open(log, "a", buffering=1)
    for stream in (1, 2):
        os.dup2(sys.stdout.fileno(), stream)
    with open(messages, "a", buffering=1) as file:

        def report(**message: object) -> None:
            file.write(json.dumps(message) + "\n")

        try:
            if job.name not in done:
                job.run(report, done)
            report(complete=True)
            code = 0
        except BaseException:
            traceback.print_exc()
            code = 1
    sys.stdout.flush()
    os._exit(code)  # do not wait for a library's threads and exit hooks


def begin_again_if_lost(report: Report) -> None:
    """After an illegal access the GPU takes no more calls of this process: a new one goes on."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        report(again=True)
        os._exit(0)


class RunningJob:
    """A started job. is_wrong: whether a row of it was, in a process before this one."""

    def __init__(self, job: ForkedJob, done: frozenset[str], is_wrong: bool, place: JobPlace) -> None:
        self.job = job
        self.done = done
        self.is_wrong = is_wrong
        self.doing = ""  # the row that was begun and has not come
        self.is_complete = False
        self.again = False  # it asked for a new process
        self.read = 0
        self.last = time.monotonic()
        stem = job.name.replace("/", "-").replace(" ", "-")
        self.log = place.logs / f"{stem}.log"
        self.replaced = False  # by its alternative
        handle, messages = tempfile.mkstemp(suffix=".messages", dir=place.logs)
        os.close(handle)
        self.messages = Path(messages)
        arguments = (job, done, str(self.messages), str(self.log))
        self.process = place.context.Process(target=run_in_child, args=arguments)
        self.process.start()

    def new_rows(self) -> Iterator[dict]:
        """The rows that have come since the last call."""
        with self.messages.open() as file:
            file.seek(self.read)
            text = file.read()
        complete = text[: text.rfind("\n") + 1]
        self.read += len(complete)
        for line in complete.splitlines():
            self.last = time.monotonic()
            message = json.loads(line)
            self.doing = message.get("starting", self.doing)
            self.is_complete |= "complete" in message
            self.again |= "again" in message
            if "row" in message:
                self.done |= {message["row"]}
                self.doing = ""
                self.is_wrong |= message["state"] == "wrong"
                yield {"job": self.job.name, **message}

    def is_stuck(self) -> bool:
        return time.monotonic() - self.last >= self.job.limit_s

    def kill(self) -> None:
        """Ends the whole session, and waits for the process."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # also where it has not yet made its session
        self.process.join()
        self.messages.unlink(missing_ok=True)

    def lost_row(self, problem: str) -> dict:
        """The row of what it was doing when it ended."""
        name = self.doing or self.job.name
        self.done |= {name}
        self.is_wrong = True
        return {"job": self.job.name, "row": name, "state": "wrong", "problem": problem}

    def how_it_ended(self) -> str:
        code = self.process.exitcode or 0
        last = last_error_line(self.log.read_text(errors="replace") if self.log.exists() else "")
        if code < 0:
            return f"crashed ({signal.Signals(-code).name}): {last}"
        return f"exit code {code}: {last}"


def run_jobs(
    jobs: Iterable[ForkedJob],
    place: JobPlace,
    *,
    most: int,
    seconds_left: Callable[[], float],
    done: Mapping[str, frozenset[str]],
) -> Generator[dict, None, None]:
    """Runs jobs, at most `most` beside each other; yields their rows, and {"job", "complete"} of each.

    done: {job: rows that it leaves out}. When no seconds are left all are ended, without a row: what is
    missing had no time. If the caller stops early, or is interrupted, all are ended.
    """
    waiting = [(job, done.get(job.name, frozenset()), False) for job in jobs]
    running: list[RunningJob] = []
    try:
        while waiting or running:
            while waiting and len(running) < most and seconds_left() > 0:
                running.append(RunningJob(*waiting.pop(0), place))
            for one in list(running):
                has_ended = not one.process.is_alive()
                for row in one.new_rows():
                    if row.get("problem") == OUT_OF_MEMORY and one.job.alternative:
                        waiting.insert(0, (one.job.alternative, frozenset(), False))
                        one.replaced = True
                    else:
                        yield row
                if not has_ended and not one.is_stuck():
                    continue
                running.remove(one)
                one.kill()
                if one.again:
                    waiting.insert(0, (one.job, one.done, one.is_wrong))
                if one.again or one.replaced:
                    continue
                if one.is_complete:
                    if not one.is_wrong:
                        one.log.unlink(missing_ok=True)
                    yield {"job": one.job.name, "complete": True}
                    continue
                was_doing = one.doing
                yield one.lost_row(one.how_it_ended() if has_ended else f"hung for {one.job.limit_s:.0f} s")
                if not (was_doing and one.job.goes_on):
                    yield {"job": one.job.name, "complete": True}
                else:
                    waiting.insert(0, (one.job, one.done, one.is_wrong))
            if seconds_left() <= 0:
                return
            time.sleep(POLL_S)
    finally:
        for one in running:
            one.kill()


