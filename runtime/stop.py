"""Stop early at a signal, at a STOP file in the run folder, or at the time limit.

The exit code is then 75: everything is saved. An empty STOP file comes from a person, and the job is not
requeued. One with the text `requeue` comes from a scheduler (train.sbatch writes it before the time limit)
and asks for a requeue, as do a signal and the time limit. Both end with code 75, because 0 means that the
horizon was reached and that dependent jobs may start; `requeue` in exit_reason.json distinguishes the two.

Guarantees
- A signal handler only sets a flag, so a second signal (SLURM delivers USR1 twice) or one during a save
  changes nothing.
- Time is monotonic. A jump of the wall clock neither stops a run nor keeps it running.
- A stop request on any rank counts: the training loop shares it, so that all ranks stop at the same step.
  Only rank 0 looks for the STOP file.
"""
import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType

WRITE_SECONDS = 0.2  # wait for the text: a shell creates the STOP file before writing to it
MAX_WORD_BYTES = 100
# torchrun forwards the first three (--signals-to-handle); SIGHUP comes from a closed terminal or ssh
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class StopRequest:
    """Install the signal handlers; call `reason_to_stop()` once per step.

    max_minutes: the time limit from now, or None for no limit. watches_file: whether this rank looks for the
    STOP file. requeue (attribute): whether to requeue the job.
    """

    def __init__(self, run_dir: Path, max_minutes: float | None = None, watches_file: bool = True) -> None:
        self.file = Path(run_dir) / "STOP"
        self.watches_file = watches_file
        self.max_minutes = max_minutes
        self.deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self.requeue = True
        self.reason: str | None = None

        self.first_signal: int | None = None
        self.old_handlers = {}
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            wanted = [number for number in SIGNALS if not is_under_nohup(number)]
            self.old_handlers = {number: signal.signal(number, self.on_signal) for number in wanted}

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self.first_signal = self.first_signal or number

    def reason_to_stop(self) -> str | None:
        """Return why to stop, or None. Once there is a reason, it does not change."""
        self.reason = self.reason or self.find_reason()
        return self.reason

    def find_reason(self) -> str | None:
        if self.first_signal:
            return f"{signal.Signals(self.first_signal).name} received"
        if self.watches_file and os.path.lexists(self.file):
            self.requeue = self.read_word() == "requeue"
            return f"{self.file} found{self.remove_file()}"
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return f"time limit of {self.max_minutes:g} min reached (train.max_minutes)"
        return None

    def read_word(self) -> str:
        """Return the text of the STOP file; "" for a folder, a dangling link or an unreadable file."""
        if not self.file.is_file():
            return ""
        for pause in (WRITE_SECONDS, 0.0):
            with contextlib.suppress(OSError):
                with open(self.file, "rb") as file:
                    data = file.read(MAX_WORD_BYTES)
                word = data.decode("ascii", "replace").strip()
                if word:
                    return word
            time.sleep(pause)
        return ""

    def remove_file(self) -> str:
        """Remove the STOP file, which would also stop the next launch. Returns a message if that fails."""
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

    def close(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self.old_handlers.items():
            signal.signal(number, handler)
        self.old_handlers = {}


def is_under_nohup(number: int) -> bool:
    """Return whether this is SIGHUP and ignored because of `nohup`, so that the run outlives its terminal."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
