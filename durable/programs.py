"""Run train.py and other programs as processes, for experiments of several runs."""
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from config.exit_codes import STOPPED_EARLY
from durable.launcher import TRAIN_FILE
from runtime.setup import environment_with_path
from runtime.stop import SIGNALS, is_under_nohup


class Programs:
    """Runs programs, in parallel if called from several threads.

    A stop signal is passed on to all running programs, after which train.py saves and exits with code 75, and
    no others are started.

    Use it as a context manager from the main thread.
    """

    def __init__(self) -> None:
        self.running: set[subprocess.Popen[bytes]] = set()
        self.is_stopped = False
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> "Programs":
        for number in SIGNALS:
            if is_under_nohup(number):
                continue
            self.previous[number] = signal.signal(number, self.forward_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def forward_signal(self, number: int, frame: object) -> None:
        self.is_stopped = True
        for process in tuple(self.running):
            process.send_signal(number)

    def run(self, words: list[str], output: Path) -> int:
        """Run a command, append its output to a file, and return its exit code."""
        if self.is_stopped:
            return STOPPED_EARLY
        with open(output, "a") as file:
            process = subprocess.Popen(
                words,
                env=environment_with_path(TRAIN_FILE.parent),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self.running.add(process)
            if self.is_stopped:  # the signal came during the start
                process.send_signal(signal.SIGTERM)
            try:
                return process.wait()
            finally:
                self.running.discard(process)

    def train(self, argv: list[str], ranks: int, output: Path, launcher: list[str] | None = None) -> int:
        """Run train.py, directly or through the command `launcher`, which starts its ranks."""
        return self.run([*launcher, *argv] if launcher else train_words(argv, ranks), output)


def train_words(argv: list[str], ranks: int) -> list[str]:
    """Return the command that runs train.py on this many ranks of this node."""
    if ranks == 1:
        return [sys.executable, str(TRAIN_FILE), *argv]
    return [sys.executable, "-m", "scripts.launch", "--nproc", str(ranks), "--", *argv]
