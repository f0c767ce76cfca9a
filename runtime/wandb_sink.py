"""Send metrics to Weights & Biases from a child process.

W&B may fail, block or never answer without affecting training: the child is behind a pipe that is never
waited for. A thread would share the interpreter lock with the step, and a hung one would block the exit:
wandb's exit hooks wait for its server (9 s and a flood of messages, measured).

Guarantees: put() returns at once; records that do not fit are dropped and counted; there is at most one
warning; close() waits a few seconds, then kills. metrics.jsonl has everything. A resumed run keeps its W&B id
(file wandb_id in the run folder), so that W&B shows a single run, and the offset of W&B's step from its own
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
BUFFER_BYTES = 4 * 2**20  # maximum backlog for the pipe, about 10,000 records
WRITE_BYTES = 65536  # per write to the pipe
POLL_SECONDS = 0.01
ID_FILE = "wandb_id"  # in the run folder: the id, and the folder it was created for
SHIFT_FILE = "wandb_shift"


class Child(subprocess.Popen[bytes]):
    """The process of wandb_child.py, with pipes to its stdin and from its stdout."""

    stdin: IO[bytes]
    stdout: IO[bytes]

    def __init__(self, program: list[str]) -> None:
        # a new session, so that Ctrl-C reaches only the trainer, and the child can be killed together with
        # wandb's processes
        super().__init__(program, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                         stderr=subprocess.DEVNULL, start_new_session=True)


class WandbSink:
    """W&B sink. With mode off there is no child process, and every method does nothing.

    name: the run's name. tree: the resolved config as plain data. command: the train.py command that W&B
    shows. max_buffered: maximum backlog for the pipe in bytes. sync_command (attribute): the command that
    uploads all launches of an offline run, or "". copied_from (attribute): copied_from(run_dir).
    """

    def __init__(self, settings: WandbSettings, run_dir: Path, name: str, tree: dict[str, Any], *,
                 command: str = "", max_buffered: int = BUFFER_BYTES) -> None:
        """Start the child and return at once."""
        self.command = command
        self.sync_command = ""
        self.copied_from = ""
        self.max_buffered = max_buffered
        self.buffer = bytearray()  # not yet accepted by the pipe
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
        folder.mkdir(parents=True, exist_ok=True)  # otherwise wandb writes to a temporary folder
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
        """Add facts about the run to its config in W&B, under "run"."""
        self.offer({"config": {"run": facts}})

    def put(self, step: int, values: dict[str, Any]) -> None:
        """Send one record, {W&B name: value}. Never blocks."""
        self.offer({"step": step, "values": values})

    def text(self, step: int, name: str, text: str) -> None:
        self.offer({"step": step, "name": name, "text": text})

    def picture(self, step: int, name: str, path: Path) -> None:
        """Send the path of a picture, which the child reads."""
        self.offer({"step": step, "name": name, "picture": str(path.resolve())})

    def checkpoint(self, step: int, folder: Path, files: list[Path]) -> None:
        """Send the location of a checkpoint, which W&B only references; it copies just `files`."""
        paths = [str(file.resolve()) for file in files]
        self.offer({"step": step, "checkpoint": str(folder.resolve()), "files": paths})

    def rewind(self, step: int) -> None:
        """Send an alert; W&B keeps the old values of later steps in addition to the new ones."""
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

    def warning(self) -> str | None:
        """Return what went wrong on the first call, and None after that."""
        if self.warned or not (self.trouble or self.dropped):
            return None
        self.warned = True
        cause = self.trouble or "cannot keep up"
        return f"W&B: {cause}; training continues without it, metrics.jsonl has everything"

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
            self.trouble = f"no answer in {wait:g} s at the end; `wandb sync` can send what is on disk"
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


def stable_id(run_dir: Path) -> str:
    """Return the W&B id of this run folder, creating it on the first call.

    A copied folder gets a new id, unless the original is gone, in which case the folder was moved.
    """
    file = Path(run_dir) / ID_FILE
    place = str(file.parent.resolve())
    words = file.read_text().split("\n") if file.exists() else []
    own = words[0].strip() if words else ""
    if own and copied_from(run_dir):
        own = ""
        (file.parent / SHIFT_FILE).unlink(missing_ok=True)  # it belongs to the original
    written = f"{own or secrets.token_hex(4)}\n{place}\n"
    if words != written.split("\n"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(written)
    return written.partition("\n")[0]


def copied_from(run_dir: Path) -> str:
    """Return the folder that this run folder is a copy of, if it still exists, or ""."""
    file = Path(run_dir) / ID_FILE
    try:
        own, place, *_ = [*file.read_text().split("\n"), ""]
        first = Path(place) / ID_FILE
        is_copy = bool(place) and not first.samefile(file) and first.read_text().split("\n")[0] == own
    except OSError:  # neither exists
        return ""
    return place if is_copy else ""
