"""metrics.jsonl as a file: appended to in whole lines, cut at a resume, read back.

Promises: each step stands there once, whatever killed the run before; a float reads back bit for bit; every line is
valid JSON (a value that is not finite is null, and the line says nonfinite). A full disk drops records, never raises.
"""
import json
import math
import os
import re
from pathlib import Path

NAME = "metrics.jsonl"
LINE = re.compile(rb'\{"step": (\d{1,15}), .*\}\n')  # as written here; anything else is torn or foreign


class Lines:
    """The file of one run, open for appending. start_step: the step of the checkpoint that the run goes on from."""

    def __init__(self, run_dir: Path, start_step: int):
        self.path = Path(run_dir) / NAME
        self.fd: int | None = None
        self.dropped = 0  # records
        self.trouble: str | None = None
        self.warned = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            cut(self.path, start_step or -1)  # a run that begins anew also judges step 0 anew
            self.open()
        except OSError as e:
            self.trouble = e.strerror

    def open(self) -> None:
        self.fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)

    def add(self, rows: list[dict]) -> None:
        """Appends a line for each row, in one write; the half line that a kill may leave is cut at the next start."""
        if not rows:
            return
        block = "".join(json.dumps(finite(row), allow_nan=False) + "\n" for row in rows).encode()
        try:
            if self.fd is None:
                self.open()
            before, done = os.fstat(self.fd).st_size, 0
            try:
                while done < len(block):
                    done += os.write(self.fd, block[done:])
            except OSError:
                os.ftruncate(self.fd, before)  # the disk filled up on the way: leave no half line behind
                raise
        except OSError as e:
            self.dropped += len(rows)
            self.trouble = e.strerror

    def warning(self) -> str | None:
        """What went wrong, said once."""
        if not self.trouble or self.warned:
            return None
        self.warned = True
        return f"{self.path}: {self.trouble}; training goes on without these records"

    def close(self) -> int:
        """The number of records dropped."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        return self.dropped


def finite(row: dict) -> dict:
    """JSON has no NaN."""
    bad = [k for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)]
    return row | dict.fromkeys(bad) | {"nonfinite": True} if bad else row


def cut(path: Path, step: int) -> None:
    """Leaves the whole lines up to `step`, atomically. Raises OSError; the file is then as it was."""
    if not path.exists():
        return
    temp = path.with_name(path.name + ".tmp")
    with open(path, "rb") as old, open(temp, "wb") as new:
        for line in old:
            found = LINE.fullmatch(line)
            if found and int(found[1]) <= step:
                new.write(line)
        new.flush()
        os.fsync(new.fileno())
        same = new.tell() == old.tell()
    os.unlink(temp) if same else os.replace(temp, path)


def parse(line: bytes) -> dict | None:
    """The row that a line says; None where it is damaged: no JSON, no numbers, or neither a step nor an
    evaluation."""
    try:
        row = json.loads(line)
        values = [x for value in row.values() for x in (value if isinstance(value, list) else [value])]
        sound = all(x is None or isinstance(x, (int, float)) and math.isfinite(x) for x in values)
        known = type(row.get("step")) is int and ("loss" in row or "val_loss" in row)
        return row if sound and known and not isinstance(row.get("loss"), list) else None
    except (ValueError, RecursionError, OverflowError, AttributeError):
        return None


def read(run_dir: Path, most: int = 20_000, bad: list[int] | None = None) -> tuple[list[dict], list[dict]]:
    """The step rows and the evaluation rows of a run folder, in their order; empty where there is no file. A
    line that is damaged is left out, and its number added to `bad`.

    Of more than `most` steps every n-th is read, and the last: parsing a million takes longer than drawing them.
    """
    bad = [] if bad is None else bad
    path = Path(run_dir) / NAME
    if not path.exists():
        return [], []
    with open(path, "rb") as f:
        count = sum(LINE.fullmatch(line) is not None and b'"val_loss"' not in line for line in f)
    train, valid, seen, every = [], [], 0, -(-count // most)
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            fits = LINE.fullmatch(line) is not None
            step = fits and b'"val_loss"' not in line
            wanted = not step or seen < count and (seen % every == 0 or seen == count - 1)
            seen += step
            if not wanted:
                continue
            row = parse(line) if fits else None
            if row is None:
                bad.append(number)
            else:
                (train if "loss" in row else valid).append(row)
    return train, valid
