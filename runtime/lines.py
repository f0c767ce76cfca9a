"""Write, truncate and read metrics.jsonl, and write the lines of inside.jsonl by the same rules.

Guarantees: each step appears once, even if an earlier run was killed; floats round-trip bit for bit; every
line is valid JSON (non-finite values are null, and the line says nonfinite). On a full disk records are
dropped without an error. Lines of steps that will be retrained are truncated, which needs no space; if that
fails it is an error, because the steps would appear twice.
"""
import contextlib
import json
import math
import os
import re
from pathlib import Path
from typing import Any

NAME = "metrics.jsonl"
INSIDE = "inside.jsonl"  # statistics of layers (inside.py)
LINE = re.compile(rb'\{"step": (\d{1,15}), .*\}\n')  # as written here; any other line is torn or foreign
SKIPPED = b'"skipped": 1'  # marks lines of skipped steps
NO_TARGETS = b'"targets": 0,'  # marks lines of steps without targets that count
EVALUATION = b'"val_loss"'  # marks lines of evaluations
ALL_STEPS = 1 << 40  # more rows than any run has, so that read_metrics skips none

Rows = list[dict[str, Any]]


class MetricsFile:
    """The metrics.jsonl of one run, or another file of lines that begin with a step, open for appending.

    start_step: the step that the run resumes from. Raises OSError if later lines cannot be removed.
    """

    def __init__(self, run_dir: Path, start_step: int, name: str = NAME) -> None:
        self.path = Path(run_dir) / name
        self.fd: int | None = None
        self.dropped = 0  # records
        self.trouble: str | None = None
        self.warned = False
        self.rewind(start_step)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.open()
        except OSError as error:
            self.trouble = error.strerror

    def rewind(self, step: int) -> None:
        """Remove the lines after this step. Raises OSError and then leaves the file unchanged."""
        self.close()
        truncate_after(self.path, step or -1)  # a run from step 0 evaluates step 0 again

    def open(self) -> int:
        """Return the file descriptor, opening the file if needed. Raises OSError."""
        if self.fd is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self.fd = os.open(self.path, flags, 0o666)
        return self.fd

    def add(self, rows: Rows) -> None:
        """Append one line per row in a single write; the next launch removes a line cut short by a kill."""
        if not rows:
            return
        lines = [json.dumps(finite_row(row), allow_nan=False) + "\n" for row in rows]
        block = "".join(lines).encode()
        try:
            self.append(block)
        except OSError as error:
            self.dropped += len(rows)
            self.trouble = error.strerror

    def append(self, block: bytes) -> None:
        """Append all of the block or nothing. Raises OSError."""
        fd = self.open()
        old_size = os.fstat(fd).st_size
        written = 0
        try:
            while written < len(block):
                written += os.write(fd, block[written:])
        except OSError:
            os.ftruncate(fd, old_size)  # the disk is full: leave no partial line
            raise

    def warning(self) -> str | None:
        """Return what went wrong on the first call, and None after that."""
        if not self.trouble or self.warned:
            return None
        self.warned = True
        return f"{self.path}: {self.trouble}; training continues without these records"

    def close(self) -> int:
        """Close the file. Returns the number of dropped records."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        return self.dropped


def finite_row(row: dict[str, Any]) -> dict[str, Any]:
    """Make a row valid JSON: replace non-finite floats by None and add a field that says so."""
    bad = [name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
    if not bad:
        return row
    return row | dict.fromkeys(bad) | {"nonfinite": True}


def truncate_after(path: Path, step: int) -> None:
    """Keep only the complete lines up to `step`, atomically. Raises OSError and leaves the file unchanged.

    The end of the file is truncated, which works on a full disk. Only if a damaged line is between others are
    the lines to keep written to a new file.
    """
    if not path.exists():
        return
    first_lines = 0  # bytes before the first line to remove
    with open(path, "rb") as file:
        for line in file:
            if not is_kept(line, step):
                break
            first_lines += len(line)
        is_end = not any(is_kept(line, step) for line in file)

    if is_end:
        cut(path, first_lines)
    else:
        rewrite(path, step)


def is_kept(line: bytes, step: int) -> bool:
    """Return whether this is a complete line of a step up to this one."""
    found = LINE.fullmatch(line)
    return found is not None and int(found[1]) <= step


def cut(path: Path, size: int) -> None:
    """Truncate the file to `size` bytes. Raises OSError."""
    if path.stat().st_size == size:
        return
    with open(path, "r+b") as file:
        file.truncate(size)
        os.fsync(file.fileno())


def rewrite(path: Path, step: int) -> None:
    """Replace the file by one with the lines to keep. Raises OSError and leaves the file unchanged."""
    temp = path.with_name(path.name + ".tmp")
    try:
        with open(path, "rb") as old, open(temp, "wb") as new:
            new.writelines(line for line in old if is_kept(line, step))
            new.flush()
            os.fsync(new.fileno())
        os.replace(temp, path)
    except OSError:
        with contextlib.suppress(OSError):
            temp.unlink(missing_ok=True)
        raise


def parse(line: bytes) -> dict[str, Any] | None:
    """Parse a line. Returns None if it is damaged.

    It is damaged if it is not JSON, has a value that is not a number, or is neither a step nor an evaluation.
    """
    row = parse_numbers(line) or {}
    is_step = "loss" in row and not isinstance(row["loss"], list)
    is_evaluation = "val_loss" in row and "loss" not in row
    has_step = type(row.get("step")) is int
    return row if has_step and (is_step or is_evaluation) else None


def parse_numbers(line: bytes) -> dict[str, Any] | None:
    """Parse a line, or return None if it is not JSON or holds something else than numbers."""
    try:
        row = json.loads(line)
        return row if all(map(is_number_or_list, row.values())) else None
    except (ValueError, RecursionError, OverflowError, AttributeError):
        return None


def is_number_or_list(value: object) -> bool:
    """Return whether the value is None, a finite number, or a list of these.

    Raises OverflowError for an integer that does not fit a float.
    """
    elements = value if isinstance(value, list) else [value]
    return all(is_finite_or_none(element) for element in elements)


def is_finite_or_none(value: object) -> bool:
    return value is None or isinstance(value, (int, float)) and math.isfinite(value)


def read_metrics(
    run_dir: Path, max_steps: int = 20_000, damaged_lines: list[int] | None = None
) -> tuple[Rows, Rows]:
    """Return (step rows, evaluation rows) of a run folder, in order; empty if there is no file.

    max_steps: with more steps than this, only every n-th and the last are read, since parsing a million takes
    longer than plotting them. damaged_lines: receives the numbers of damaged lines, which are skipped.
    """
    path = Path(run_dir) / NAME
    if not path.exists():
        return [], []
    with open(path, "rb") as file:
        num_steps = sum(is_step_line(line) for line in file)
    stride = -(-num_steps // max_steps)

    train: Rows = []
    valid: Rows = []
    index = 0  # of the next step line
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if is_step_line(line):
                is_last = index == num_steps - 1
                is_wanted = index < num_steps and (index % stride == 0 or is_last)
                index += 1
                if not is_wanted:
                    continue
            row = parse(line) if LINE.fullmatch(line) else None
            if row is not None:
                rows = train if "loss" in row else valid
                rows.append(row)
            elif damaged_lines is not None:
                damaged_lines.append(number)
    return train, valid


def skipped_seconds(run_dir: Path) -> float:
    """Return the seconds spent in steps that changed no weights. Raises OSError."""
    path = Path(run_dir) / NAME
    if not path.exists():
        return 0.0
    with open(path, "rb") as file:
        rows = [parse(line) for line in file if SKIPPED in line]
    return sum(row.get("step_ms") or 0 for row in rows if row is not None and row.get("skipped")) / 1000


def steps_without_targets(run_dir: Path) -> int:
    """Return the number of steps in which no target counted. Raises OSError."""
    path = Path(run_dir) / NAME
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        return sum(NO_TARGETS in line for line in file)


def is_missing(row: dict[str, Any], name: str) -> bool:
    """Return whether a loss is null because no target counted, rather than because it was not finite."""
    return row[name] is None and not row.get("nonfinite")


def is_step_line(line: bytes) -> bool:
    return LINE.fullmatch(line) is not None and EVALUATION not in line
