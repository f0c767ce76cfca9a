"""Commands in child processes, each with a time limit, several at a time.

A command reports JSON lines on stdout. A crash or a hang only costs its own time.
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO

POLL_S = 0.05
ERROR_LENGTH = 160  # characters of an error shown in a table


@dataclass(frozen=True)
class Task:
    """A command and its environment. It is killed after limit_s seconds."""

    name: str
    command: list[str]
    env: Mapping[str, str]
    limit_s: float


@dataclass(frozen=True)
class Outcome:
    """How a task ended.

    messages: the JSON objects that it printed. output, errors: stdout and stderr.
    exit_code: negative if a signal ended it.
    """

    messages: list[dict]
    output: str
    errors: str
    timed_out: bool
    exit_code: int
    seconds: float

    def problem(self) -> str | None:
        """Why the task failed, or None if it did not."""
        if self.timed_out:
            return f"hung: stopped after its {self.seconds:.0f} s"
        if self.exit_code < 0:
            return f"crashed ({signal.Signals(-self.exit_code).name}): {last_error_line(self.errors)}"
        if self.exit_code > 0:
            return f"exit code {self.exit_code}: {last_error_line(self.errors)}"
        return None


class RunningTask:
    """A started task, in a new session, so that its children end with it."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.started = time.monotonic()
        self.out: IO[str] = tempfile.TemporaryFile("w+")
        self.errors: IO[str] = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            task.command,
            stdout=self.out,
            stderr=self.errors,
            stdin=subprocess.DEVNULL,
            env=dict(task.env),
            start_new_session=True,
        )

    def is_due(self) -> bool:
        """Return whether it has reached its time limit."""
        return time.monotonic() - self.started >= self.task.limit_s

    def kill(self) -> None:
        """Kill the whole session, including any compilers that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self, timed_out: bool) -> Outcome:
        """Kill what is left of it, and return how it ended."""
        seconds = time.monotonic() - self.started
        exit_code = self.process.poll()
        self.kill()
        output, errors = read_and_close(self.out), read_and_close(self.errors)
        return Outcome(
            messages=json_lines(output),
            output=output,
            errors=errors,
            timed_out=timed_out,
            exit_code=0 if exit_code is None else exit_code,
            seconds=seconds,
        )


def run_tasks(
    tasks: Iterable[Task], most: int, seconds_left: Callable[[], float] = lambda: float("inf")
) -> Iterator[tuple[Task, Outcome]]:
    """Run tasks, at most `most` at a time, and yield each as it ends.

    When no seconds are left, running tasks are killed, and waiting ones are reported as hung. All are also
    killed if the caller stops early or is interrupted.
    """
    waiting = list(tasks)
    running: list[RunningTask] = []
    try:
        while waiting or running:
            while waiting and len(running) < most and seconds_left() > 0:
                running.append(RunningTask(waiting.pop(0)))
            is_late = seconds_left() <= 0
            for one in list(running):
                has_ended = one.process.poll() is not None
                if has_ended or is_late or one.is_due():
                    running.remove(one)
                    yield one.task, one.close(timed_out=not has_ended)
            if is_late:
                for task in waiting:
                    yield task, Outcome([], "", "", timed_out=True, exit_code=0, seconds=0.0)
                waiting = []
            time.sleep(POLL_S)
    finally:
        for one in running:
            one.close(timed_out=True)


def run_task(task: Task) -> Outcome:
    """Run one task."""
    [(_, outcome)] = run_tasks([task], most=1)
    return outcome


def read_and_close(file: IO[str]) -> str:
    file.seek(0)
    with file:
        return file.read()


def json_lines(output: str) -> list[dict]:
    """Return the complete lines that are JSON objects."""
    lines = [line for line in output.splitlines() if line.startswith("{") and line.endswith("}")]
    return [json.loads(line) for line in lines]


def last_error_line(errors: str) -> str:
    """Return the last line of a dead process's stderr that names an error."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    if not lines:
        return "exited without output"
    named = [line for line in lines if "Error" in line]
    return (named or lines)[-1][:ERROR_LENGTH]


@contextlib.contextmanager
def terminates_cleanly() -> Iterator[None]:
    """Raise SystemExit on SIGTERM inside: children are killed, and results so far still get their table."""

    def stop(*_: object) -> None:
        raise SystemExit(143)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
