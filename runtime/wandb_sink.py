"""Weights & Biases, at arm's length: it may fail, block or never answer, and training does not notice.

wandb lives in a child process behind a pipe that is never waited for. A thread would share the interpreter lock with
the step, and a hung one takes the exit with it: wandb's exit hooks wait for its server (9 s and a flood of messages,
measured). Promises: put() returns at once; what does not fit is dropped and counted; there is one warning, whatever
happens; the end waits a few seconds, then kills. The truth is metrics.jsonl. A resumed run keeps its W&B id (file
wandb_id in the run folder), so that W&B shows one run.
"""
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

from runtime.setup import Wandb, redact

WAIT = 5.0  # seconds the end waits for W&B
ROOM = 4 * 2**20  # bytes that may wait here, about 10,000 records


class Sink:
    """mode off: an idle object with the same face, so that nobody asks whether there is one."""

    def __init__(self, settings: Wandb, run_dir: Path, name: str, tree: dict, room: int = ROOM):
        """`tree` is the resolved config as plain data, `name` the run's. Starts the child and returns."""
        self.room = room
        self.buffer = bytearray()  # what the pipe has not taken yet
        self.dropped = 0  # records
        self.trouble: str | None = None
        self.warned = False
        self.child: subprocess.Popen | None = None
        if settings.mode != "off":
            try:
                self.begin(settings, Path(run_dir), name, tree)
            except OSError as e:
                self.trouble = str(e)

    def begin(self, s: Wandb, run_dir: Path, name: str, tree: dict) -> None:
        folder = Path(s.dir or run_dir)
        folder.mkdir(parents=True, exist_ok=True)  # wandb would fall back to a temporary folder
        start = {"project": s.project, "entity": s.entity, "name": name, "id": s.id or stable_id(run_dir),
                 "dir": str(folder), "mode": s.mode, "resume": "allow", "config": tree}
        # A session of its own: Ctrl-C is ours to hear, and wandb's own processes can be killed together.
        program = str(Path(__file__).with_name("wandb_child.py"))
        self.child = subprocess.Popen([sys.executable, program, str(os.getpid())], bufsize=0, stdin=subprocess.PIPE,
                                      stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
        os.set_blocking(self.child.stdin.fileno(), False)
        self.send(start)

    def put(self, step: int, values: dict) -> None:
        """Hands over one record, values by their W&B names. Never waits."""
        if self.child is None or self.trouble:
            self.dropped += self.trouble is not None
        elif len(self.buffer) > self.room:
            self.dropped += 1
        else:
            self.send({"step": step, "values": values})

    def send(self, record: dict) -> None:
        self.buffer += json.dumps(record).encode() + b"\n"
        self.push()

    def push(self) -> None:
        """Gives the pipe what it takes without waiting."""
        try:
            while self.buffer:
                del self.buffer[:os.write(self.child.stdin.fileno(), self.buffer[:65536])]
        except BlockingIOError:
            pass
        except OSError:  # the child is gone, and has said why
            self.kill()

    def warning(self) -> str | None:
        """What went wrong, said once."""
        if self.warned or not (self.trouble or self.dropped):
            return None
        self.warned = True
        return f"W&B: {self.trouble or 'does not keep up'}; training goes on without it, metrics.jsonl has everything"

    def close(self, code: int = 0, wait: float = WAIT) -> None:
        """Sends what is left and the run's exit code; gives up after `wait` seconds."""
        if self.child is None or self.trouble:
            return
        self.send({"finish": code})
        until = time.monotonic() + wait
        while self.child.poll() is None and not self.trouble and time.monotonic() < until:
            self.push()
            time.sleep(0.01)
        if self.child.poll() is None:
            self.trouble = self.trouble or f"no answer in {wait:g} s at the end; `wandb sync` can send what is on disk"
        self.kill()

    def kill(self) -> None:
        """Ends the child and its children, and hears its last words."""
        if self.child.stdin.closed:
            return
        ended = self.child.poll() == 0
        try:
            os.killpg(self.child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.child.wait()
        os.set_blocking(self.child.stdout.fileno(), False)
        words = (self.child.stdout.read() or b"").decode(errors="replace").strip()
        if not ended:
            self.trouble = self.trouble or redact(words) or f"its process ended with {self.child.returncode}"
        self.child.stdin.close()
        self.child.stdout.close()
        self.buffer.clear()


def stable_id(run_dir: Path) -> str:
    """The W&B id of this run folder, made on first use."""
    file = Path(run_dir) / "wandb_id"
    if not (file.exists() and file.read_text().strip()):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(secrets.token_hex(4) + "\n")
    return file.read_text().strip()
