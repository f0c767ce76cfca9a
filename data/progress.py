"""The progress line of scripts.prepare_data and scripts.corpus."""
import shutil
import time
from typing import TextIO

TERMINAL_SECONDS = 0.1  # between redraws of the progress line on a terminal
PLAIN_SECONDS = 10  # between progress lines elsewhere
MAX_BAR = 40  # columns


class Progress:
    """A progress line, redrawn on a terminal, or printed every ten seconds elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.tty = stream.isatty()
        self.start = time.monotonic()
        self.last = 0.0  # time of the last line
        self.open = False  # the cursor is at the end of a progress line

    def show(self, done: int, whole: int) -> None:
        """Show `done` of `whole` bytes, unless a line was shown very recently."""
        now = time.monotonic()
        if done == 0:  # tokenizing starts, possibly after training a tokenizer
            self.start = self.last = now
        is_end = self.tty and done >= whole
        if now - self.last < (TERMINAL_SECONDS if self.tty else PLAIN_SECONDS) and not is_end:
            return
        self.last = now

        fraction = done / max(1, whole)
        seconds = max(1e-9, now - self.start)
        remaining = seconds * (1 - fraction) / fraction if fraction else 0
        text = (f"prepare {fraction:4.0%}  {done / 1e6:,.1f} of {whole / 1e6:,.1f} MB  "
                f"{done / 1e6 / seconds:.1f} MB/s  eta {duration(remaining)}")
        if self.tty:
            width = max(0, min(MAX_BAR, shutil.get_terminal_size().columns - len(text) - 4))
            bar = "█" * round(fraction * width)
            text = f"\r{text}  {bar:░<{width}}\x1b[K"
        print(text, end="" if self.tty else "\n", file=self.stream, flush=True)
        self.open = self.tty

    def say(self, text: str) -> None:
        """Print a separate line."""
        self.end()
        print(text, file=self.stream, flush=True)

    def end(self) -> None:
        """End the progress line."""
        if self.open:
            print(file=self.stream, flush=True)
        self.open = False


def duration(seconds: float) -> str:
    """Format seconds as 1h02m, 3m05s or 7s."""
    minutes, rest = divmod(int(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
