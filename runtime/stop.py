"""When to stop early: a signal, a STOP file in the run folder, or the time limit (exit code 75: saved, start me again).

Promises: a handler does nothing but set a flag, so a second signal (SLURM delivers USR1 twice) or one that lands in the
middle of a save changes nothing; time is measured on the monotonic clock, so a wall clock that jumps neither stops a
run nor keeps one going. Only rank 0's answer counts: the loop broadcasts it, so that all ranks leave at the same step.
"""
import signal
import threading
import time
from pathlib import Path

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # torchrun forwards all three (--signals-to-handle)


class Stop:
    """Ask `check()` once a step. `run_dir` is the run folder, `max_minutes` the limit from now on (None: no limit)."""

    def __init__(self, run_dir: Path, max_minutes: float | None = None):
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
        if self.file.exists():
            # Taken away when honoured: a requeued job must not stop again on the file that stopped it before.
            self.file.unlink(missing_ok=True)
            return f"{self.file} found"
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return f"time limit of {self.limit:g} min reached (train.max_minutes)"
        return None

    def close(self):
        """Gives the signals back to whoever had them."""
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before = {}
