"""Console output of a run: lines that fit the terminal.

In a narrow terminal the least important columns of the step lines are omitted (StepColumn.priority) and other
lines are wrapped between their parts; a file gets full lines (config/terminal.py).

Guarantees: no problem with stdout (a closed pipe, a full disk, an encoding without block characters) reaches
the training loop; colours appear only if `color` is set; text from the model is shown without its control
characters.
"""
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

from config.numbers import decimals, duration, short_number
from config.terminal import display_width, fitting_columns, hanging_lines, output_width, visible, wrapped
from runtime.processes import redirect_to_null

SAMPLE_WIDTH = 50  # maximum columns for a sample of the model
MIN_SAMPLE_WIDTH = 12  # a sample is not shown in fewer columns
LABEL_WIDTH = 9  # of the labels of the header

# ANSI colours
DIM, RED, GREEN, YELLOW, BLUE, MAGENTA, CYAN = 2, 31, 32, 33, 34, 35, 36
PLAIN = 0


class StepColumn(NamedTuple):
    """A column of the step lines."""
    label: str
    width: int  # including the space before it
    color: int
    priority: int  # columns with the largest numbers are omitted first in a narrow terminal


COLUMNS = (  # in display order
    StepColumn("loss", 9, GREEN, priority=1),
    StepColumn("gnorm", 9, YELLOW, priority=4),
    StepColumn("lr", 9, MAGENTA, priority=5),
    StepColumn("tok/s", 8, CYAN, priority=3),
    StepColumn("TFLOP/s", 9, CYAN, priority=10),  # follows from tok/s
    StepColumn("mfu", 7, CYAN, priority=6),
    StepColumn("mem", 7, BLUE, priority=7),
    StepColumn("data", 6, BLUE, priority=8),
    StepColumn("tokens", 9, PLAIN, priority=9),  # follows from the step
    StepColumn("eta", 9, PLAIN, priority=2),
)
ALWAYS_SHOWN = 1  # the column with this priority is always shown, like the step
SKIPPED_STEPS = (  # at the end of a step line: (name of the count, label, colour)
    ("skipped", "skipped", RED),
    ("without_targets", "without targets", YELLOW),
)


# ---- lines -------------------------------------------------------------------------------------------------

def first_column_width(steps: int) -> int:
    """Return the width of the column that shows 100/600."""
    return max(9, 2 * len(str(steps)) + 2)


def shown_columns(steps: int, width: int | None) -> list[StepColumn]:
    """Return the columns of the step lines that fit into `width`, or all if it is None."""
    least_first = sorted(COLUMNS, key=lambda column: -column.priority)
    labels = fitting_columns(
        {column.label: column.width for column in COLUMNS},
        first_to_go=[column.label for column in least_first if column.priority > ALWAYS_SHOWN],
        width=None if width is None else width - first_column_width(steps),
    )
    return [column for column in COLUMNS if column.label in labels]


class Console:
    """Write lines to `out`, or discard them if it is None, as on every rank but the first.

    width: returns the columns of the terminal, or None for a file; called for every line.
    """

    def __init__(
        self,
        out: TextIO | None = None,
        color: bool = False,
        width: Callable[[], int | None] = output_width,
    ) -> None:
        self.out = out
        self.color = color
        self.width = width
        self.lost = 0  # lines that could not be written
        self.labelled: list[StepColumn] | None = None  # the columns of the last line of labels

    def write(self, text: str) -> None:
        """Write one line. Never raises."""
        if self.out is None:
            return
        try:
            try:
                self.out.write(text + "\n")
            except UnicodeEncodeError:
                self.out.write(text.encode("ascii", "replace").decode() + "\n")
            self.out.flush()
        except BrokenPipeError:  # the reader of a pipe, such as `| head`, has closed it
            self.disconnect()
        except (OSError, ValueError):  # a full disk; a closed file
            self.lost += 1

    def disconnect(self) -> None:
        """Stop writing, and redirect stdout so that Python's flush at exit does not end with code 120."""
        if self.out is not None and self.out is sys.stdout:
            redirect_to_null(self.out)
        self.out = None

    def paint(self, text: str, color: int) -> str:
        return f"\033[{color}m{text}\033[0m" if self.color and color else text

    def dim(self, text: str) -> str:
        return self.paint(text, DIM)

    def write_wrapped(self, text: str) -> None:
        """Write prose, wrapped between its parts and words in a narrow terminal."""
        for line in wrapped(text, self.width()):
            self.write(line)

    def hanging(self, start: str, text: str) -> None:
        """Write `start` and the text, wrapped with a hanging indent in a narrow terminal."""
        for line in hanging_lines(start, text, self.width()):
            self.write(line)

    def label(self, name: str, text: str) -> None:
        """Write a labelled header line, such as "model    llama-tiny …"."""
        self.hanging(self.dim(f"{name:<{LABEL_WIDTH}}"), text)

    def hints(self, name: str, commands: Sequence[str]) -> None:
        """Write commands to copy, one per line, without wrapping."""
        for command in commands:
            self.write(f"{self.dim(f'{name:<{LABEL_WIDTH}}')}{command}")
            name = ""

    def columns(self, steps: int) -> None:
        """Write the labels above the step lines. steps: the last step of the run."""
        self.labelled = shown_columns(steps, self.width())
        first = f"{' step':<{first_column_width(steps)}}"
        labels = [f"{column.label:>{column.width}}" for column in self.labelled]
        self.write("")
        self.write(self.dim(first + "".join(labels)))

    def show_step(
        self, step: int, steps: int, row: dict[str, Any], rates: dict[str, Any], eta: float
    ) -> None:
        """Write one step line, preceded by the labels if the width of the terminal has changed.

        row: as in metrics.jsonl. eta: seconds left.
        rates: since the previous line: tokens_per_s, tflops, mfu, data (fraction of the time), and the counts
        of SKIPPED_STEPS.
        """
        cells = {
            "loss": decimals(row["loss"], 4),
            "gnorm": decimals(row["grad_norm"], 3),
            "lr": f"{row['lr']:.1e}",
            "tok/s": short_number(rates["tokens_per_s"]),
            "TFLOP/s": decimals(rates["tflops"], 2),
            "mfu": "n/a" if rates["mfu"] is None else f"{rates['mfu']:.1%}",
            "mem": f"{row['mem_gib']:.1f}G",
            "data": f"{rates['data']:.0%}",
            "tokens": short_number(row["tokens"]),
            "eta": duration(eta),
        }
        width = self.width()
        columns = shown_columns(steps, width)
        if self.labelled not in (None, columns):
            self.columns(steps)

        line_width = first_column_width(steps)
        line = self.dim(f"{f'{step}/{steps}':>{line_width}}")
        for column in columns:
            line += self.paint(f"{cells[column.label]:>{column.width}}", column.color)
            line_width += column.width
        texts = {name: f"  {rates[name]} {words}" for name, words, _ in SKIPPED_STEPS if rates[name]}
        if texts and width is not None and line_width + len("".join(texts.values())) > width:
            line += "\n"
        for name, _, color in SKIPPED_STEPS:
            line += self.paint(texts.get(name, ""), color)
        self.write(line)

    def show_task(self, step: int, text: str) -> None:
        """Write a line of task scores."""
        self.hanging(f"{self.dim(' task')} {step}  ", text)

    def show_evaluation(
        self,
        step: int,
        loss: float | None,
        perplexity: float | None,
        bits_per_byte: float | None,
        sample: str = "",
        ema_loss: float | None = None,
    ) -> None:
        """Write the line of a validation. sample: generated text. ema_loss: loss of the averaged weights."""
        parts = [
            f"{self.dim(' eval')} {step}",
            f"{self.dim('val')} {self.paint(decimals(loss, 3), GREEN)}",
            f"{self.dim('ppl')} {decimals(perplexity, 1)}",
        ]
        if bits_per_byte is not None and not math.isnan(bits_per_byte):  # the bytes are known
            parts.append(f"{self.dim('bpb')} {decimals(bits_per_byte, 2)}")
        if ema_loss is not None:
            parts.append(f"{self.dim('ema')} {decimals(ema_loss, 3)}")
        line = "  ".join(parts)
        width = self.width()
        room = SAMPLE_WIDTH if width is None else min(SAMPLE_WIDTH,
                                                      width - display_width(line) - len("   | "))
        if sample and room >= MIN_SAMPLE_WIDTH:
            line += f"   {self.dim('|')} {visible(sample, room)}"
        self.write(line)

    def show_sources(self, step: int, losses: Mapping[str, float | None]) -> None:
        """Write the validation loss of each source of a blend."""
        parts = [f"{name} {self.paint(decimals(loss, 3), GREEN)}" for name, loss in losses.items()]
        self.hanging(f"{self.dim(' eval')} {step}  {self.dim('of sources')}  ", "  ".join(parts))

    def show_outcome(self, outcome: str, sample: str, name: str = "sample") -> None:
        """Write how the run ended and the last sample of the model, on a second line if needed.

        name: the label of the sample.
        """
        label = f"{name}: "
        width = self.width()
        room = SAMPLE_WIDTH if width is None else min(SAMPLE_WIDTH, width - len(label))
        text = label + visible(sample, room)
        whole = f"{outcome}   {text}"
        if not sample:
            self.write_wrapped(outcome)
        elif width is None or display_width(whole) <= width:
            self.write(whole)
        else:
            self.write_wrapped(outcome)
            self.write(text)
