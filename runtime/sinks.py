"""Sinks for metrics in addition to metrics.jsonl and the console: Weights & Biases, TensorBoard.

All sinks share one interface, and none can stop training: a sink that fails reports it once, and
metrics.jsonl has everything.
"""
from pathlib import Path
from typing import Any, Protocol

from config.exit_codes import FINISHED, STOPPED_EARLY

Values = dict[str, Any]

# {exit code: (how the run ended, alert level)}; any other code is a failure.
ENDINGS = {FINISHED: ("finished", "INFO"), STOPPED_EARLY: ("stopped early", "WARN")}


class Sink(Protocol):
    """A destination for metrics. Methods never block for long and never raise."""

    def describe(self, facts: Values) -> None:
        """Add facts about the run: sizes, layout, FLOPs per token."""

    def put(self, step: int, values: Values) -> None:
        """Log the values of one step by their names in the sink ("train/loss")."""

    def text(self, step: int, name: str, text: str) -> None:
        """Log generated text."""

    def picture(self, step: int, name: str, path: Path) -> None:
        """Log a PNG file."""

    def checkpoint(self, step: int, folder: Path, files: list[Path]) -> None:
        """Log the location of the newest checkpoint, with files that describe the run."""

    def rewind(self, step: int) -> None:
        """Handle a rewind: the steps after this one will be trained and logged again."""

    def warning(self) -> str | None:
        """Return what went wrong on the first call, and None after that."""

    def close(self, code: int, closing_line: str) -> None:
        """Close the sink with the run's exit code and closing line."""


def ending(code: int) -> tuple[str, str]:
    """Return ("finished", "stopped early" or "failed with code 77"; INFO, WARN or ERROR)."""
    return ENDINGS.get(code, (f"failed with code {code}", "ERROR"))
