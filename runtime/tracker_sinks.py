"""Sinks that send metrics to a tracker (W&B, MLflow, Comet) from a child process, tracker_child.py.

Imported only by a run that asks for one. A tracker may fail, block or never answer without affecting
training: the child is behind a pipe that is never waited for. A thread would share the interpreter lock with
the step, and a hung one would block the exit: wandb's exit hooks wait for its server (9 s and a flood of
messages, measured).

Guarantees: put() returns at once; records that do not fit are dropped and counted; there is at most one
warning; close() waits a few seconds, then kills. metrics.jsonl has everything.

A resumed run continues the same run of the tracker, whose id is in the run folder (wandb_id, mlflow_id,
comet_id). For W&B the run folder also has the offset of its step from the run's (wandb_shift).
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

from config import LogConfig
from config.reading import flatten_tree
from runtime.setup import WandbSettings, redact
from runtime.sinks import Sink, asked_trackers, ending, run_tags

CLOSE_SECONDS = 5.0  # how long close() waits for the tracker
CHILD_PROGRAM = Path(__file__).with_name("tracker_child.py")
BUFFER_BYTES = 4 * 2**20  # maximum backlog for the pipe, about 10,000 records
WRITE_BYTES = 65536  # per write to the pipe
POLL_SECONDS = 0.01
TRAIN_FILE = Path(__file__).resolve().parent.parent / "train.py"
ID_FILE = "wandb_id"  # in the run folder: the id, and the folder it was created for
SHIFT_FILE = "wandb_shift"


def open_trackers(
    settings: WandbSettings, log: LogConfig, run_dir: Path, name: str, tree: dict[str, Any], command: str
) -> "list[ChildSink]":
    """Open the sinks that the config asks for. command: the train.py command that W&B shows."""
    sinks: list[ChildSink] = []
    if settings.mode != "off":
        sinks.append(WandbSink(settings, run_dir, name, tree, command=command))
    return sinks + [SINKS[kind](log, run_dir, name, tree) for kind in asked_trackers(log)]


# ---- the child process -------------------------------------------------------------------------------------


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


# ---- W&B ---------------------------------------------------------------------------------------------------


class WandbSink(ChildSink):
    """W&B sink. name: the run's name. tree: the resolved config as plain data. command: the train.py command
    that W&B shows. max_buffered: maximum backlog for the pipe in bytes."""
    title = "W&B"
    late_hint = "; `wandb sync` can send what is on disk"

    def __init__(self, settings: WandbSettings, run_dir: Path, name: str, tree: dict[str, Any], *,
                 command: str = "", max_buffered: int = BUFFER_BYTES) -> None:
        """Start the child and return at once."""
        super().__init__(max_buffered)
        try:
            self.start(settings, Path(run_dir), name, tree, command)
        except OSError as error:
            self.trouble = str(error)

    def start(
        self, settings: WandbSettings, run_dir: Path, name: str, tree: dict[str, Any], command: str
    ) -> None:
        original = copied_from(run_dir)
        if original:
            self.note = f"{run_dir} is a copy of {original}, and a separate run in W&B from here on"
        folder = Path(settings.dir or run_dir)
        folder.mkdir(parents=True, exist_ok=True)  # otherwise wandb writes to a temporary folder
        init_arguments = {
            "project": settings.project,
            "entity": settings.entity,
            "group": settings.group,
            "tags": list(settings.tags) or None,
            "notes": settings.notes,
            "name": name,
            "id": settings.id or stable_id(run_dir),
            "dir": str(folder),
            "mode": settings.mode,
            "resume": "allow",
            "config": tree,
        }
        self.begin({
            "kind": "wandb",
            "init": init_arguments,
            "shift_file": str((run_dir / SHIFT_FILE).resolve()),
            "program": str(TRAIN_FILE),
            "arguments": shlex.split(command)[2:],  # after python train.py
        })
        if settings.mode == "offline":  # uploads all launches
            folders = f"{shlex.quote(str(folder))}/wandb/offline-run-*-{init_arguments['id']}"
            self.hint = f"wandb sync {folders}"


def stable_id(run_dir: Path) -> str:
    """Return the W&B id of this run folder, creating it on the first call.

    A copied folder gets a new id, unless the original is gone, in which case the folder was moved.
    """
    file = Path(run_dir) / ID_FILE
    place = str(file.parent.resolve())
    before = file.read_text() if file.exists() else ""
    run_id = before.partition("\n")[0].strip()
    if run_id and copied_from(run_dir):
        run_id = ""
        (file.parent / SHIFT_FILE).unlink(missing_ok=True)  # it belongs to the original
    run_id = run_id or secrets.token_hex(4)
    text = f"{run_id}\n{place}\n"
    if text != before:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return run_id


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


# ---- MLflow and Comet --------------------------------------------------------------------------------------


class TrackerSink(ChildSink):
    """A sink of tracker_child.py. name: the run's name. tree: the resolved config as plain data."""
    kind = ""  # the name of the tracker there

    def __init__(self, log: LogConfig, run_dir: Path, name: str, tree: dict[str, Any]) -> None:
        """Start the child and return at once."""
        super().__init__()
        try:
            self.begin({
                "kind": self.kind,
                "name": name,
                "project": log.project,
                "entity": log.entity,
                "group": log.group,
                "tags": list(run_tags(log.tags)),
                "notes": log.notes,
                "id_file": str((run_dir / f"{self.kind}_id").resolve()),
                "new_id": secrets.token_hex(16),
                "dir": str(run_dir.resolve()),
                "settings": flatten_tree(tree),
                **self.own_settings(log),
            })
        except OSError as error:
            self.trouble = str(error)

    def own_settings(self, log: LogConfig) -> dict[str, Any]:
        """Return what only this tracker needs."""
        raise NotImplementedError


class MlflowSink(TrackerSink):
    """MLflow sink. log.mlflow is the address of a server or a database, or a folder."""
    title = "MLflow"
    kind = "mlflow"

    def own_settings(self, log: LogConfig) -> dict[str, Any]:
        address = str(log.mlflow)
        if "://" not in address and not address.startswith(("file:", "databricks")):
            address = Path(address).resolve().as_uri()
        return {"address": address}


class CometSink(TrackerSink):
    """Comet sink. Offline, it leaves an archive in the run folder, which `comet upload` sends."""
    title = "Comet"
    kind = "comet"
    late_hint = "; `comet upload` can send what is on disk"

    def own_settings(self, log: LogConfig) -> dict[str, Any]:
        return {"online": log.comet == "online"}


SINKS = {sink.kind: sink for sink in (MlflowSink, CometSink)}
