"""Writes TensorBoard's event files into RUN/tensorboard, with the package `tensorboard`.

Its writer has a thread of its own: a put copies some numbers. A resumed run hides what a killed one wrote
after the checkpoint (purge_step), and a run that goes back what it wrote of later steps. So the curves are
those of metrics.jsonl.
"""
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from config import ConfigError
from config.reading import flatten_tree
from runtime.sinks import Values, ending

FLUSH_SECONDS = 10  # between writes to the disk


def check_tensorboard() -> None:
    """Raises ConfigError if the package is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("log.tensorboard: needs the package tensorboard (pip install tensorboard)")


class TensorboardSink:
    """start_step: of the checkpoint that the run resumes from. tree: the resolved config as plain data."""

    def __init__(self, run_dir: Path, tree: Values, start_step: int) -> None:
        self.trouble: str | None = None
        self.warned = False
        self.writer: Any = None
        self.attempt(lambda: self.open(Path(run_dir) / "tensorboard", tree, start_step))

    def open(self, folder: Path, tree: Values, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter
        self.writer = SummaryWriter(str(folder), purge_step=start_step + 1, flush_secs=FLUSH_SECONDS)
        self.writer.add_text("config", as_table(flatten_tree(tree)), start_step)

    def attempt(self, write: Callable[[], None]) -> None:
        """The first thing that goes wrong is kept, and is the last that is tried."""
        if self.trouble:
            return
        try:
            write()
        except Exception as error:  # of the disk, or of the package
            self.trouble = f"{type(error).__name__}: {error}"

    def describe(self, facts: Values) -> None:
        self.attempt(lambda: self.writer.add_text("run", as_table(flatten_tree(facts)), 0))

    def put(self, step: int, values: Values) -> None:
        def write() -> None:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self.writer.add_scalar(name, value, step)
        self.attempt(write)

    def text(self, step: int, name: str, text: str) -> None:
        quoted = "\n".join(f"    {line}" for line in text.splitlines())  # Markdown: as it stands
        self.attempt(lambda: self.writer.add_text(name, quoted, step))

    def picture(self, step: int, name: str, path: Path) -> None:
        def write() -> None:
            from matplotlib.image import imread
            pixels = (255 * imread(path)[..., :3]).astype(np.uint8)  # [height, width, 3]
            self.writer.add_image(name, pixels, step, dataformats="HWC")
        self.attempt(write)

    def checkpoint(self, step: int, folder: Path, files: list[Path]) -> None:
        """TensorBoard keeps none."""

    def rewind(self, step: int) -> None:
        """Hides what was written of later steps, as a resumed run does."""
        def write() -> None:
            from tensorboard.compat.proto import event_pb2
            messages: Any = event_pb2  # made by protoc, which pyright cannot see into
            log = messages.SessionLog(status=messages.SessionLog.START)
            self.writer.file_writer.add_event(messages.Event(step=step + 1, session_log=log))
        self.attempt(write)

    def warning(self) -> str | None:
        if self.warned or not self.trouble:
            return None
        self.warned = True
        return f"TensorBoard: {self.trouble}; training goes on without it, metrics.jsonl has everything"

    def close(self, code: int, closing_line: str) -> None:
        def write() -> None:
            self.writer.add_text("end", f"{ending(code)[0]}: {closing_line}", 0)
            self.writer.close()
        self.attempt(write)


def as_table(facts: Values) -> str:
    """Markdown."""
    lines = ["| | |", "|---|---|"]
    return "\n".join(lines + [f"| {key} | {value} |" for key, value in facts.items()])
