"""Jobs in forked processes: the parent has imported what they need, and has not touched the GPU.

A job reports each row as soon as it is done. A crash, or silence for longer than its limit, only costs its
own time: the row in progress is reported as failed, and a new process continues after it.
"""

import contextlib
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
from runtime.processes import die_with_parent

POLL_S = 0.05
OUT_OF_MEMORY = "out of memory"
Report = Callable[..., None]


@dataclass(frozen=True)
class ForkedJob:
    """Rows that one process reports: run(report, done).

    run: calls report(starting=NAME) before a row, and report(row=NAME, state=..., ...) after it. It skips the
        rows in `done`; a job with a single row is named after it and is skipped as a whole.
    limit_s: the longest silence. alternative: the job to run instead after running out of memory.
    can_resume: whether a new process continues after a row that crashed or hung.
    """

    name: str
    run: Callable[[Report, frozenset[str]], None] = field(repr=False)
    limit_s: float
    alternative: "ForkedJob | None" = None
    can_resume: bool = True


@dataclass(frozen=True)
class JobPlace:
    """How processes start (multiprocessing's context), and the folder for their output."""

    context: BaseContext
    logs: Path


def run_in_child(job: ForkedJob, done: frozenset[str], messages: str, log: str) -> None:
    """Run a job in its process, as the leader of a session, so that all its children can be killed."""
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
    os._exit(code)  # skip the exit hooks and threads of libraries


def begin_again_if_lost(report: Report) -> None:
    """Ask for a new process after an illegal access, since CUDA rejects all later calls of this one."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        report(again=True)
        os._exit(0)


class RunningJob:
    """A started job. is_wrong: whether one of its rows in an earlier process was wrong."""

    def __init__(self, job: ForkedJob, done: frozenset[str], is_wrong: bool, place: JobPlace) -> None:
        self.job = job
        self.done = done
        self.is_wrong = is_wrong
        self.doing = ""  # the row in progress
        self.is_complete = False
        self.again = False  # a new process was requested
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
        """Yield the rows since the last call."""
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
        """Kill the whole session, and reap the process."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # even if it has not created its session yet
        self.process.join()
        self.messages.unlink(missing_ok=True)

    def lost_row(self, problem: str) -> dict:
        """Return the row that was in progress when it ended."""
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
    """Run jobs, at most `most` at a time, and yield their rows, and {"job", "complete"} for each.

    `done` maps jobs to rows to skip. When no seconds are left, all jobs are killed without a row, and what is
    missing had no time. All are also killed if the caller stops early or is interrupted.
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
                if not (was_doing and one.job.can_resume):
                    yield {"job": one.job.name, "complete": True}
                else:
                    waiting.insert(0, (one.job, one.done, one.is_wrong))
            if seconds_left() <= 0:
                return
            time.sleep(POLL_S)
    finally:
        for one in running:
            one.kill()


