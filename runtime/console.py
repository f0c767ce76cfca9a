"""What a run looks like in a terminal: numbers for people, and lines of steady width.

Promises: nothing that happens to stdout (closed pipe, full disk, an encoding without block characters) reaches the
training loop; colours only where `color` allows them; text from the model is shown without its control characters.
"""
import math
import os
import sys
from collections.abc import Sequence

WIDTH = 110  # what a line with free text at its end is cut to
BLOCKS = "▁▂▃▄▅▆▇█"
DIM, RED, GREEN, YELLOW, BLUE, MAGENTA, CYAN = 2, 31, 32, 33, 34, 35, 36

# label, columns with the space before them, colour: one per kind of number
COLUMNS = (("loss", 9, GREEN), ("gnorm", 9, YELLOW), ("lr", 9, MAGENTA), ("tok/s", 8, CYAN), ("TFLOP/s", 9, CYAN),
           ("mfu", 7, CYAN), ("mem", 7, BLUE), ("data", 6, BLUE), ("tokens", 9, 0), ("eta", 9, 0))


# ---- numbers ---------------------------------------------------------------------------------------------------------

def short(n: float, least: float = 1.0) -> str:
    """950, 2.0K, 1.23M, 7.00B, 1.50T. `least` is the smallest number a unit may show: 0.1 makes 890,000 to 0.89M."""
    unit, digits = "", 0
    for larger, more in (("K", 1), ("M", 2), ("B", 2), ("T", 2)):
        if not round(abs(n), digits) >= 1000 * least:  # as rounded: never 1000.0K
            break
        n, unit, digits = n / 1000, larger, more
    return f"{n:.{digits}f}{unit}"


def params(n: int) -> str:
    """0.89M, 7.00B"""
    return short(n, 0.1)


def size(n: float) -> str:
    """Bytes: 812 B, 10.9 MB, 1.5 TB"""
    unit, digits = "B", 0
    for larger in ("KB", "MB", "GB", "TB"):
        if round(n, digits) < 1000:
            break
        n, unit, digits = n / 1000, larger, 1
    return f"{n:.{digits}f} {unit}"


def duration(seconds: float) -> str:
    """0s, 44s, 1m44s, 1h02m, 2d03h"""
    if not math.isfinite(seconds):
        return "?"
    s = max(0, round(seconds))
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02d}s"
    minutes = s // 60
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes // 1440}d{minutes % 1440 // 60:02d}h"


def decimals(x: float | None, digits: int) -> str:
    """x with so many decimals where it fits six columns, else as 1.2e+05; None as n/a."""
    if x is None:
        return "n/a"
    return f"{x:.{digits}f}" if abs(x) < 10 ** (5 - digits) or not math.isfinite(x) else f"{x:.1e}"


def sparkline(values: Sequence[float | None], width: int = 11) -> str:
    """The course of a loss in `width` characters, each the mean of its share; what is not finite is left out."""
    good = [v for v in values if v is not None and math.isfinite(v)]
    width = min(width, len(good))
    cuts = [len(good) * i // max(width, 1) for i in range(width + 1)]
    means = [sum(good[a:b]) / (b - a) for a, b in zip(cuts, cuts[1:])]
    if not means:
        return ""
    low, span = min(means), max(means) - min(means)
    return "".join(BLOCKS[round((m - low) / span * (len(BLOCKS) - 1)) if span else 0] for m in means)


def visible(text: str, width: int) -> str:
    """One line of at most `width` columns: a sample may hold line ends, and codes that would steer the terminal."""
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return line if len(line) <= width else line[:max(0, width - 1)] + "…"


# ---- lines -----------------------------------------------------------------------------------------------------------

def first(steps: int) -> int:
    """Width of the first column, which says 100/600."""
    return max(9, 2 * len(str(steps)) + 2)


class Console:
    """Writes lines to `out` (None: to nowhere, as on every rank but the first)."""

    def __init__(self, out=None, color: bool = False):
        self.out = out
        self.color = color
        self.lost = 0  # lines that could not be written

    def write(self, text: str) -> None:
        if self.out is None:
            return
        try:
            try:
                self.out.write(text + "\n")
            except UnicodeEncodeError:
                self.out.write(text.encode("ascii", "replace").decode() + "\n")
            self.out.flush()
        except BrokenPipeError:  # `| head` has seen enough
            self.hang_up()
        except (OSError, ValueError):  # full disk; closed file
            self.lost += 1

    def hang_up(self) -> None:
        """Nobody reads on. stdout is pointed elsewhere, or Python's flush at the exit would turn the code into 120."""
        if self.out is sys.stdout:
            try:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self.out.fileno())
                os.close(null)
            except (OSError, ValueError, AttributeError):  # not a file of the system
                pass
        self.out = None

    def paint(self, text: str, color: int) -> str:
        return f"\033[{color}m{text}\033[0m" if self.color and color else text

    def dim(self, text: str) -> str:
        return self.paint(text, DIM)

    def label(self, name: str, text: str) -> None:
        """model    llama-tiny …"""
        self.write(f"{self.dim(f'{name:<9}')}{text}")

    def columns(self, steps: int) -> None:
        """The header of the step lines of a run of so many steps."""
        self.write("")
        self.write(self.dim(f"{' step':<{first(steps)}}" + "".join(f"{name:>{width}}" for name, width, _ in COLUMNS)))

    def step(self, step: int, steps: int, row: dict, rates: dict, eta: float) -> None:
        """One step line. row: as in metrics.jsonl; rates: tokens_per_s, tflops, mfu, data, skipped since the last."""
        cells = (decimals(row["loss"], 4), decimals(row["grad_norm"], 3), f"{row['lr']:.1e}",
                 short(rates["tokens_per_s"]), decimals(rates["tflops"], 2),
                 "n/a" if rates["mfu"] is None else f"{rates['mfu']:.1%}",
                 f"{row['mem_gib']:.1f}G", f"{rates['data']:.0%}", short(row["tokens"]), duration(eta))
        line = "".join(self.paint(f"{cell:>{width}}", color) for cell, (_, width, color) in zip(cells, COLUMNS))
        tail = self.paint(f"  {rates['skipped']} skipped", RED) if rates["skipped"] else ""
        self.write(self.dim(f"{f'{step}/{steps}':>{first(steps)}}") + line + tail)

    def eval(self, step: int, loss: float, ppl: float, bpb: float, sample: str = "") -> None:
        line = (f"{self.dim(' eval')} {step}  {self.dim('val')} {self.paint(decimals(loss, 3), GREEN)}  "
                f"{self.dim('ppl')} {decimals(ppl, 1)}  {self.dim('bpb')} {decimals(bpb, 2)}")
        self.write(line + (f"   {self.dim('|')} {visible(sample, 50)}" if sample else ""))
