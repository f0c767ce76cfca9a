"""Where a run's numbers go beside metrics.jsonl and the console: Weights & Biases, TensorBoard.

Every sink takes the same four things, and none of them stops training: a sink that fails says so once, and
metrics.jsonl has everything.
"""
from pathlib import Path
from typing import Any, Protocol

from config.exit_codes import FINISHED, STOPPED_EARLY

Values = dict[str, Any]

# Exit code: how a run ended, and the level of the alert that says so. Any other is a failure.
ENDINGS = {FINISHED: ("finished", "INFO"), STOPPED_EARLY: ("stopped early", "WARN")}


class Sink(Protocol):
    """A place that keeps what a run reports. No method waits long, and none raises."""

    def describe(self, facts: Values) -> None:
        """The facts of the run: sizes, layout, FLOPs a token."""

    def put(self, step: int, values: Values) -> None:
        """Numbers of one step, by their names in the sink ("train/loss")."""

    def text(self, step: int, name: str, text: str) -> None:
        """A text that the model wrote."""

    def picture(self, step: int, name: str, path: Path) -> None:
        """A PNG file."""

    def checkpoint(self, step: int, folder: Path, files: list[Path]) -> None:
        """Where the newest checkpoint lies, and files of the run that say what it is."""

    def rewind(self, step: int) -> None:
        """The run goes back: the steps after this one are trained, and reported, again."""

    def warning(self) -> str | None:
        """The first call says what went wrong, later ones return None."""

    def close(self, code: int, closing_line: str) -> None:
        """The run is over: its exit code, and how it says so."""


def ending(code: int) -> tuple[str, str]:
    """("finished", "stopped early" or "failed with code 77"; INFO, WARN or ERROR)."""
    return ENDINGS.get(code, (f"failed with code {code}", "ERROR"))
