"""Sinks for metrics in addition to metrics.jsonl and the console: W&B, MLflow, Comet, TensorBoard.

All sinks share one interface, and none can stop training: a sink that fails reports it once, and
metrics.jsonl has everything.
"""
import importlib.util
import shlex
import shutil
from pathlib import Path
from typing import Any

from config import ConfigError, LogConfig
from config.exit_codes import FINISHED, STOPPED_EARLY

Values = dict[str, Any]

# {exit code: (how the run ended, alert level)}; any other code is a failure.
ENDINGS = {FINISHED: ("finished", "INFO"), STOPPED_EARLY: ("stopped early", "WARN")}
PACKAGES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "comet": "comet_ml"}  # by key of log


class Sink:
    """A destination for metrics. Methods never block for long and never raise; this one does nothing.

    trouble: what went wrong, after which nothing more is written. dropped: records that did not arrive.
    note: a line for the header, or "". hint: a command for the closing lines, or "".
    """
    title = ""  # in its warning
    note = ""
    hint = ""

    def __init__(self) -> None:
        self.trouble: str | None = None
        self.dropped = 0
        self.warned = False

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
        if self.warned or not (self.trouble or self.dropped):
            return None
        self.warned = True
        cause = self.trouble or "cannot keep up"
        return f"{self.title}: {cause}; training continues without it, metrics.jsonl has everything"

    def close(self, code: int, closing_line: str) -> None:
        """Close the sink with the run's exit code and closing line."""


def asked_trackers(log: LogConfig) -> dict[str, str]:
    """Return {mlflow or comet: the value of its key}, of those that are on."""
    values = {"mlflow": log.mlflow, "comet": None if log.comet == "off" else log.comet}
    return {tracker: value for tracker, value in values.items() if value is not None}


def run_tags(text: str | None) -> tuple[str, ...]:
    """Split log.tags at its commas."""
    return tuple(tag.strip() for tag in (text or "").split(",") if tag.strip())


def check_reports(log: LogConfig) -> None:
    """Raise ConfigError for a sink without its package, no tags in a list, an alert without program."""
    asked = [*(["tensorboard"] if log.tensorboard else []), *asked_trackers(log)]
    for key in asked:
        package = PACKAGES[key]
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"log.{key}: needs the package {package} (pip install {package})")
    if log.tags is not None and not run_tags(log.tags):
        raise ConfigError(f"log.tags: {log.tags!r} has no tag; write them with commas, such as red,blue")
    if log.alert_command is not None:
        split_alert_command(log.alert_command)


def split_alert_command(command: str) -> list[str]:
    """Return program and arguments of log.alert_command, split as a shell does. Raises ConfigError."""
    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"log.alert_command: {command}: {error}; close the quotes") from None
    if not arguments or shutil.which(arguments[0]) is None:
        program = arguments[0] if arguments else "''"
        raise ConfigError(f"log.alert_command: {program}: no such program; give the path of one")
    return arguments


def ending(code: int) -> tuple[str, str]:
    """Return ("finished", "stopped early" or "failed with code 77"; INFO, WARN or ERROR)."""
    return ENDINGS.get(code, (f"failed with code {code}", "ERROR"))
