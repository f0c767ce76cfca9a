"""Forward a launcher's signals to its running ranks, or remember them until some run. Needs no torch."""
import signal
import subprocess
import time
from types import FrameType, TracebackType

from runtime.stop import SIGNALS, is_under_nohup

SAME_PRESS_SECONDS = 0.5  # a second SIGINT within this time is the same Ctrl-C, forwarded by a wrapper


class SignalRelay:
    """`with SignalRelay() as relay:` around everything a launcher does: no signal ends it, and none is lost.

    processes (attribute): running processes, to which each signal is forwarded. received: the signals so far.
    is_impatient: a second SIGINT has arrived, so the ranks should be killed.
    """

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.received: list[int] = []
        self.is_impatient = False
        self.interrupted_at: float | None = None
        self.old_handlers = {}

    def __enter__(self) -> "SignalRelay":
        wanted = [number for number in SIGNALS if not is_under_nohup(number)]
        self.old_handlers = {number: signal.signal(number, self.on_signal) for number in wanted}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for number, handler in self.old_handlers.items():
            signal.signal(number, handler)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        if number == signal.SIGINT:
            self.note_interrupt(time.monotonic())
        for process in self.processes:
            process.send_signal(number)  # does nothing if it has exited

    def note_interrupt(self, now: float) -> None:
        if self.interrupted_at is None:
            self.interrupted_at = now
        elif now > self.interrupted_at + SAME_PRESS_SECONDS:
            self.is_impatient = True

    def add(self, process: subprocess.Popen[bytes]) -> None:
        """Forward signals to a process, including those that arrived while it was being started."""
        self.processes.append(process)
        for number in self.received:
            process.send_signal(number)

    def first_name(self) -> str:
        """Return the name of the first signal received."""
        return signal.Signals(self.received[0]).name
