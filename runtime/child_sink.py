"""Send metrics to a tracker (W&B, MLflow, Comet) from a child process.

A tracker may fail, block or never answer without affecting training: the child is behind a pipe that is never
waited for. A thread would share the interpreter lock with the step, and a hung one would block the exit:
wandb's exit hooks wait for its server (9 s and a flood of messages, measured).

Guarantees: put() returns at once; records that do not fit are dropped and counted; there is at most one
warning; close() waits a few seconds, then kills. metrics.jsonl has everything.
"""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from runtime.setup import redact
from runtime.sinks import Sink, ending

CLOSE_SECONDS = 5.0  # how long close() waits for the tracker
CHILD_PROGRAM = Path(__file__).with_name("tracker_child.py")
BUFFER_BYTES = 4 * 2**20  # maximum backlog for the pipe, about 10,000 records
WRITE_BYTES = 65536  # per write to the pipe
POLL_SECONDS = 0.01


class Child(subprocess.Popen[bytes]):
    """The process of a tracker, with pipes to its stdin and from its stdout."""

    stdin: IO[bytes]
    stdout: IO[bytes]

    def __init__(self, program: list[str]) -> None:
        # a new session, so that Ctrl-C reaches only the trainer, and the child can be killed together with
        # the tracker's processes
        super().__init__(program, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                         stderr=subprocess.DEVNULL, start_new_session=True)


class ChildSink(Sink):
    """A sink whose child process talks to the tracker `title`. Until begin() every method does nothing.

    max_buffered: maximum backlog for the pipe in bytes. late_hint (attribute): what the warning adds if the
    tracker does not answer in time, such as how to upload later.
    """
    late_hint = ""

    def __init__(self, max_buffered: int = BUFFER_BYTES) -> None:
        super().__init__()
        self.max_buffered = max_buffered
        self.buffer = bytearray()  # not yet accepted by the pipe
        self.child: Child | None = None

    def begin(self, first: dict[str, Any]) -> None:
        """Start the child and send its first message. Never blocks. Raises OSError.

        tracker_child.py lists the messages.
        """
        self.child = Child([sys.executable, str(CHILD_PROGRAM), str(os.getpid())])
        os.set_blocking(self.child.stdin.fileno(), False)
        self.send(first)

    def describe(self, facts: dict[str, Any]) -> None:
        """Add facts about the run to its config under "run"."""
        self.offer({"config": {"run": facts}})

    def put(self, step: int, values: dict[str, Any]) -> None:
        """Send one record, {name: value}. Never blocks."""
        self.offer({"step": step, "values": values})

    def text(self, step: int, name: str, text: str) -> None:
        self.offer({"step": step, "name": name, "text": text})

    def picture(self, step: int, name: str, path: Path) -> None:
        """Send the path of a picture, which the child reads."""
        self.offer({"step": step, "name": name, "picture": str(path.resolve())})

    def checkpoint(self, step: int, folder: Path, files: list[Path]) -> None:
        """Send the location of a checkpoint, which is only referenced; `files` alone may be copied."""
        paths = [str(file.resolve()) for file in files]
        self.offer({"step": step, "checkpoint": str(folder.resolve()), "files": paths})

    def rewind(self, step: int) -> None:
        """Report that the run goes back to `step`. Trackers keep the values of later steps, old and new."""
        self.offer({"rewind": step})

    def offer(self, message: dict[str, Any]) -> None:
        """Send a message, or count it as dropped. Never blocks."""
        if self.trouble:
            self.dropped += 1
        elif self.child is None:
            return
        elif len(self.buffer) > self.max_buffered:
            self.dropped += 1
        else:
            self.send(message)

    def send(self, message: dict[str, Any]) -> None:
        self.buffer += json.dumps(message).encode() + b"\n"
        self.write_buffer()

    def write_buffer(self) -> None:
        """Write as much as the pipe accepts without blocking."""
        if self.child is None:
            return
        try:
            while self.buffer:
                written = os.write(self.child.stdin.fileno(), self.buffer[:WRITE_BYTES])
                del self.buffer[:written]
        except BlockingIOError:
            pass
        except OSError:  # the child has exited and reported why
            self.kill()

    def close(self, code: int = 0, closing_line: str = "", wait: float = CLOSE_SECONDS) -> None:
        """Send what is left, an alert and the exit code, and wait at most `wait` seconds for the child."""
        child = self.child
        if child is None or self.trouble:
            return
        title, level = ending(code)
        self.send({"finish": code, "title": title, "level": level, "text": closing_line})
        deadline = time.monotonic() + wait
        while child.poll() is None and not self.trouble and time.monotonic() < deadline:
            self.write_buffer()
            time.sleep(POLL_SECONDS)
        if child.poll() is None and not self.trouble:
            self.trouble = f"no answer in {wait:g} s at the end{self.late_hint}"
        self.kill()

    def kill(self) -> None:
        """Kill the child with its own children, and read its last output."""
        child = self.child
        if child is None or child.stdin.closed:
            return
        has_finished = child.poll() == 0
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        child.wait()

        os.set_blocking(child.stdout.fileno(), False)
        output = (child.stdout.read() or b"").decode(errors="replace").strip()
        if not has_finished and not self.trouble:
            self.trouble = redact(output) or f"its process ended with {child.returncode}"
        child.stdin.close()
        child.stdout.close()
        self.buffer.clear()
