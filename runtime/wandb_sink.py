"""Sends metrics to Weights & Biases from a child process.

W&B may fail, block or never answer, and training does not notice: the child is behind a pipe that is never
waited for. A thread would share the interpreter lock with the step, and a hung one would block the exit:
wandb's exit hooks wait for its server (9 s and a flood of messages, measured).

Guarantees: put() returns at once; records that do not fit are dropped and counted; there is at most one
warning; close() waits a few seconds, then kills. metrics.jsonl has everything. A resumed run keeps its W&B id
(file wandb_id in the run folder), so that W&B shows one run, and how far W&B's step is ahead of its own
(wandb_shift).
"""
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from runtime.setup import WandbSettings, redact
from runtime.sinks import ending

TRAIN_FILE = Path(__file__).resolve().parent.parent / "train.py"
CLOSE_SECONDS = 5.0  # how long close() waits for W&B
BUFFER_BYTES = 4 * 2**20  # that may wait for the pipe: about 10,000 records
WRITE_BYTES = 65536  # of one write into the pipe
POLL_SECONDS = 0.01
ID_FILE = "wandb_id"  # of a run folder: the id, and the folder that it is of
SHIFT_FILE = "wandb_shift"


class Child(subprocess.Popen[bytes]):
    """The process of wandb_child.py, with a pipe to its stdin and one from its stdout."""

    stdin: IO[bytes]
    stdout: IO[bytes]

    def __init__(self, program: list[str]) -> None:
        # a session of its own: Ctrl-C goes to the trainer alone, and the child can be killed with the
        # processes of wandb
        super().__init__(program, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                         stderr=subprocess.DEVNULL, start_new_session=True)


class WandbSink:
    """Sends records to W&B. With mode off there is no child, and every method does nothing.

    name: of the run. tree: the resolved config as plain data. command: that of train.py, which W&B shows.
    max_buffered: bytes that may wait for the pipe. sync_command (attribute): sends what an offline run has
    written, of all its starts; "" where there is nothing. copied_from (attribute): copied_from(run_dir).
    """

    def __init__(self, settings: WandbSettings, run_dir: Path, name: str, tree: dict[str, Any], *,
                 command: str = "", max_buffered: int = BUFFER_BYTES) -> None:
        """Starts the child and returns at once."""
        self.command = command
        self.sync_command = ""
        self.copied_from = ""
        self.max_buffered = max_buffered
        self.buffer = bytearray()  # what the pipe has not taken yet
        self.dropped = 0  # records
        self.trouble: str | None = None
        self.warned = False
        self.child: Child | None = None
        if settings.mode != "off":
            try:
                self.start(settings, Path(run_dir), name, tree)
            except OSError as error:
                self.trouble = str(error)

    def start(self, settings: WandbSettings, run_dir: Path, name: str, tree: dict[str, Any]) -> None:
        self.copied_from = copied_from(run_dir)
        folder = Path(settings.dir or run_dir)
        folder.mkdir(parents=True, exist_ok=True)  # else wandb writes to a temporary folder
        init_arguments = {
            "project": settings.project,
            "entity": settings.entity,
            "name": name,
            "id": settings.id or stable_id(run_dir),
            "dir": str(folder),
            "mode": settings.mode,
            "resume": "allow",
            "config": tree,
        }
        program = str(Path(__file__).with_name("wandb_child.py"))
        self.child = Child([sys.executable, program, str(os.getpid())])
        os.set_blocking(self.child.stdin.fileno(), False)
        self.send({
            "init": init_arguments,
            "shift_file": str((run_dir / SHIFT_FILE).resolve()),
            "program": str(TRAIN_FILE),
            "arguments": shlex.split(self.command)[2:],  # after python train.py
        })
        if settings.mode == "offline":
            folders = f"{shlex.quote(str(folder))}/wandb/offline-run-*-{init_arguments['id']}"
            self.sync_command = f"wandb sync {folders}"

    def describe(self, facts: dict[str, Any]) -> None:
        """Adds facts of the run to its config in W&B, under "run"."""
        self.offer({"config": {"run": facts}})

    def put(self, step: int, values: dict[str, Any]) -> None:
        """Sends one record, values by their W&B names. Never waits."""
        self.offer({"step": step, "values": values})

    def text(self, step: int, name: str, text: str) -> None:
        self.offer({"step": step, "name": name, "text": text})

    def picture(self, step: int, name: str, path: Path) -> None:
        """Sends where the picture lies: the child reads it."""
        self.offer({"step": step, "name": name, "picture": str(path.resolve())})

    def checkpoint(self, step: int, folder: Path, files: list[Path]) -> None:
        """Sends where a checkpoint lies: W&B keeps that, and copies the files alone."""
        paths = [str(file.resolve()) for file in files]
        self.offer({"step": step, "checkpoint": str(folder.resolve()), "files": paths})

    def rewind(self, step: int) -> None:
        """Sends an alert: W&B keeps what it has of later steps, and shows beside it what comes."""
        self.offer({"rewind": step})

    def offer(self, message: dict[str, Any]) -> None:
        """Sends a message, or counts it as dropped. Never waits."""
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
        """Writes what the pipe takes without waiting."""
        if self.child is None:
            return
        try:
            while self.buffer:
                written = os.write(self.child.stdin.fileno(), self.buffer[:WRITE_BYTES])
                del self.buffer[:written]
        except BlockingIOError:
            pass
        except OSError:  # the child has ended, and has written why
            self.kill()

    def warning(self) -> str | None:
        """The first call says what went wrong, later ones return None."""
        if self.warned or not (self.trouble or self.dropped):
            return None
        self.warned = True
        cause = self.trouble or "does not keep up"
        return f"W&B: {cause}; training goes on without it, metrics.jsonl has everything"

    def close(self, code: int = 0, closing_line: str = "", wait: float = CLOSE_SECONDS) -> None:
        """Sends what is left, an alert and the exit code, and waits at most `wait` seconds for the child."""
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
            self.trouble = f"no answer in {wait:g} s at the end; `wandb sync` can send what is on disk"
        self.kill()

    def kill(self) -> None:
        """Kills the child with its own children, and reads what it has written last."""
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


def stable_id(run_dir: Path) -> str:
    """The W&B id of this run folder; the first call makes it.

    A copy of a folder is a run of its own, unless the first one is there no more: then it was moved.
    """
    file = Path(run_dir) / ID_FILE
    place = str(file.parent.resolve())
    words = file.read_text().split("\n") if file.exists() else []
    own = words[0].strip() if words else ""
    if own and copied_from(run_dir):
        own = ""
        (file.parent / SHIFT_FILE).unlink(missing_ok=True)  # of the first one's steps
    written = f"{own or secrets.token_hex(4)}\n{place}\n"
    if words != written.split("\n"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(written)
    return written.partition("\n")[0]


def copied_from(run_dir: Path) -> str:
    """The folder whose copy a run folder is, if it is still there; else ""."""
    file = Path(run_dir) / ID_FILE
    try:
        own, place, *_ = [*file.read_text().split("\n"), ""]
        first = Path(place) / ID_FILE
        is_copy = bool(place) and not first.samefile(file) and first.read_text().split("\n")[0] == own
    except OSError:  # neither is there
        return ""
    return place if is_copy else ""
