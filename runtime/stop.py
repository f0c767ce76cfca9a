"""When to stop early: a signal, a STOP file in the run folder, or the time limit (exit code 75: everything is
saved).

A STOP file is a person's word, and ends the job for good; one whose text is `requeue` is a scheduler's
(train.sbatch writes it before the time limit), and asks for another start, as a signal and the time limit do.
Both are code 75, for 0 says that the horizon was reached and what waits for that may begin; `again` in
exit_reason.json tells them apart.

Promises: a handler does nothing but set a flag, so a second signal (SLURM delivers USR1 twice) or one that
lands in the middle of a save changes nothing; time is measured on the monotonic clock, so a wall clock that
jumps neither stops a run nor keeps one going. Any rank's answer counts: the loop passes it on, so that all
leave at the same step. The STOP file is looked for by rank 0 alone.
"""
import contextlib
import os
import signal
import threading
import time
from pathlib import Path

WRITING = 0.2  # seconds given to whoever writes a STOP file to finish it
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # torchrun forwards all three (--signals-to-handle)


class Stop:
    """Ask `check()` once a step. `run_dir` is the run folder, `max_minutes` the limit from now on (None: no
    limit); `looks`: for the STOP file. `again`: does who stopped the run want it to be started again?"""

    def __init__(self, run_dir: Path, max_minutes: float | None = None, looks: bool = True):
        self.looks, self.again = looks, True
        self.file = Path(run_dir) / "STOP"
        self.limit = max_minutes
        self.deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self.reason: str | None = None
        self.caught: int | None = None  # the first signal's number
        main = threading.current_thread() is threading.main_thread()  # elsewhere Python allows no handlers
        self.before = {s: signal.signal(s, self.on_signal) for s in SIGNALS} if main else {}

    def on_signal(self, number, frame):
        self.caught = self.caught or number

    def check(self) -> str | None:
        """The reason to stop, or None. Once it has said stop it keeps saying so."""
        self.reason = self.reason or self.look()
        return self.reason

    def look(self) -> str | None:
        if self.caught:
            return f"{signal.Signals(self.caught).name} received"
        if self.looks and os.path.lexists(self.file):
            self.again = self.text() == "requeue"
            return f"{self.file} found{self.take_away()}"
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return f"time limit of {self.limit:g} min reached (train.max_minutes)"
        return None

    def text(self) -> str:
        """The STOP file's word; empty for a folder, a link to nowhere and what cannot be read."""
        if not self.file.is_file():
            return ""
        for wait in (WRITING, 0.0):  # a shell makes the file before it writes into it
            with contextlib.suppress(OSError):
                with open(self.file, "rb") as file:
                    if word := file.read(100).decode("ascii", "replace").strip():
                        return word
            time.sleep(wait)
        return ""

    def take_away(self) -> str:
        """The next start must not stop on the file that stopped this one. Returns what to say where it
        stays."""
        try:
            if self.file.is_dir() and not self.file.is_symlink():
                self.file.rmdir()
            else:
                self.file.unlink()
        except FileNotFoundError:
            pass
        except OSError as error:
            return f" (remove it before the next start: {error.strerror})"
        return ""

    def close(self):
        """Gives the signals back to whoever had them."""
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before = {}
