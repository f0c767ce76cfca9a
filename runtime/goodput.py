"""Goodput and ETTR of a run: the fraction of time that went into its weights, over all launches.

starts.jsonl in the run folder has a line for each launch. The line has a fixed length and is rewritten in
place during the run, so that a killed launch leaves a record of its progress. Only rank 0 writes.

    goodput   minutes of steps whose result is in the weights / minutes since the first launch
    ETTR      effective training time ratio (arXiv 2410.21680, "Revisiting Reliability in Large-Scale Machine
              Learning Research Clusters"): productive runtime / available wallclock time of a run. As defined
              there, unproductive time is waiting for a launch, starting up, and retraining lost steps. So
              validation and saving lower the goodput but not the ETTR.

Within a launch all times are monotonic. Gaps between launches can only be measured by the wall clock: a
negative gap, because the clock was set back, counts as 0 and is reported; a clock that was set forward cannot
be distinguished from waiting. After a launch that finished the run, waiting does not count.

Whatever a killed launch did after its last write counts as waiting: at most BEAT_SECONDS plus one step of
training, or the load, validation or save that it was in. Unreadable lines are skipped; lines are lost if the
disk is full.
"""
import contextlib
import json
import math
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from config import ConfigError
from config.exit_codes import FINISHED
from config.numbers import duration
from config.reading.run_name import STARTS_FILE
from parallel.extras import Extra
from runtime import failure

LINE_BYTES = 1024  # length of a line, padded with spaces
MAX_LINE_BYTES = 16 * LINE_BYTES  # the most to read of one line; longer ones are damaged
MAX_MARKS = 16  # newest saves kept per launch, which a later launch may resume from
BEAT_SECONDS = 1.0  # minimum time between writes of the line during steps
MINUTE = 60.0

# reasons for lost time: {name in summary.json: label on the console}
REASONS = {
    "repeated_steps": "repeated steps",
    "skipped_steps": "skipped steps",
    "start_up": "start-up",
    "saving": "saving",
    "validation": "validation",
    "waiting": "waiting between starts",
    "other": "other",
}
NOT_PRODUCTIVE = ("repeated_steps", "start_up", "waiting")  # by the definition of ETTR


@dataclass(frozen=True)
class StartRecord:
    """A line of starts.jsonl, one per launch. Times are in seconds.

    time: Unix time of the launch. seconds: from the launch until the line was written. first_step: the first
    step it trains, or None before that. last_step: the last completed step. in_steps: time in steps
    first_step .. last_step. marks: ((step, in_steps after it), ...) for its newest saves. repeated: time in
    steps undone by a rewind (optim.spike_rewind), not included in in_steps. exit_code: None if not recorded.
    """

    time: float
    world: int
    seconds: float = 0.0
    first_step: int | None = None
    last_step: int = 0
    in_steps: float = 0.0
    repeated: float = 0.0
    start_up: float = 0.0
    saving: float = 0.0
    validation: float = 0.0
    marks: tuple[tuple[int, float], ...] = ()
    exit_code: int | None = None

    def seconds_until(self, step: int) -> float:
        """Return the time in steps first_step .. step, interpolated between known points."""
        if self.first_step is None or step < self.first_step:
            return 0.0
        if step >= self.last_step:
            return self.in_steps
        points = [(self.first_step - 1, 0.0), *self.marks, (self.last_step, self.in_steps)]
        right = bisect_left([point[0] for point in points], step)
        (first, low), (last, high) = points[right - 1], points[right]
        return low + (high - low) * (step - first) / (last - first)

    def to_line(self) -> bytes:
        """Format as LINE_BYTES bytes including the newline, dropping the oldest marks if necessary."""
        record = asdict(self)
        for first in range(len(self.marks) + 1):
            marks = self.marks[first:]
            record["marks"] = [[step, math.floor(1000 * seconds) / 1000] for step, seconds in marks]
            line = json.dumps(record, allow_nan=False).encode()
            if len(line) < LINE_BYTES:
                return line.ljust(LINE_BYTES - 1) + b"\n"
        raise ValueError(f"a line of {STARTS_FILE} has more than {LINE_BYTES} bytes: {record}")


def parse_start(line: bytes) -> StartRecord | None:
    """Parse a line. Returns None if it is damaged."""
    try:
        values: dict[str, Any] = json.loads(line)
        checked = {field.name: READERS[field.type](values[field.name]) for field in fields(StartRecord)}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    record = StartRecord(**checked)
    steps = [(record.first_step or 1) - 1, *(step for step, _ in record.marks), record.last_step]
    seconds = [0.0, *(value for _, value in record.marks), record.in_steps]
    is_ordered = steps == sorted(steps) and seconds == sorted(seconds)
    return record if is_ordered or record.first_step is None or not record.in_steps else None


def whole(value: Any) -> int:
    """Return the value. Raises ValueError if it is not an integer."""
    if type(value) is not int:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def amount(value: Any) -> float:
    """Return the value as a float. Raises ValueError unless it is finite and at least 0."""
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is not a time")
    return float(value)


READERS: dict[Any, Callable[[Any], Any]] = {  # {type of a field of StartRecord: checks a value}
    int: whole,
    int | None: lambda value: None if value is None else whole(value),
    float: amount,
    tuple[tuple[int, float], ...]: lambda marks: tuple((whole(step), amount(time)) for step, time in marks),
}


def read_starts(folder: Path) -> list[StartRecord]:
    """Read the launches of a run in order, skipping damaged lines. Raises OSError."""
    results: list[StartRecord] = []
    with contextlib.suppress(FileNotFoundError), open(folder / STARTS_FILE, "rb") as file:
        while line := file.readline(MAX_LINE_BYTES):
            record = parse_start(line)
            if record is not None:
                results.append(record)
    return results


# ---- the report --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GoodputReport:
    """Breakdown of the time since the first launch of a run, in minutes.

    lost: {one of REASONS: minutes}. clock_set_back: number of negative gaps between launches.
    """

    starts: int
    minutes: float
    useful: float
    lost: dict[str, float]
    clock_set_back: int

    @property
    def goodput(self) -> float:
        return self.useful / self.minutes if self.minutes else 0.0

    @property
    def ettr(self) -> float:
        """Effective training time ratio (arXiv 2410.21680)."""
        unproductive = sum(self.lost[name] for name in NOT_PRODUCTIVE)
        return max(0.0, 1 - unproductive / self.minutes) if self.minutes else 0.0

    def to_summary(self) -> dict[str, Any]:
        """Return the fields for summary.json."""
        return {
            "starts": self.starts,
            "minutes": self.minutes,
            "useful_minutes": self.useful,
            "lost_minutes": self.lost,
            "goodput": self.goodput,
            "ettr": self.ettr,
            "clock_set_back": self.clock_set_back,
        }

    def line(self) -> str:
        """Format as:
        goodput 87.5 % of 2h14m in 3 starts, ETTR 92.0 %; lost: repeated steps 8m00s, start-up 2m43s
        """
        shown = sorted(self.lost.items(), key=lambda item: -item[1])
        words = [(REASONS[name], MINUTE * minutes) for name, minutes in shown]
        lost = ", ".join(f"{name} {duration(seconds)}" for name, seconds in words if seconds >= 1)
        starts = f"{self.starts} start{'s' if self.starts > 1 else ''}"
        total = duration(MINUTE * self.minutes)
        text = f"goodput {self.goodput:.1%} of {total} in {starts}, ETTR {self.ettr:.1%}"
        if lost:
            text += f"; lost: {lost}"
        if self.clock_set_back:
            text += f"; the clock was set back between starts ({self.clock_set_back}x), which counts as 0"
        return text.replace("%", " %")


def compute_goodput(starts: Sequence[StartRecord], skipped_seconds: float = 0.0) -> GoodputReport:
    """Compute the report of these launches, the last of which is the current one.

    skipped_seconds: time in skipped steps, which were not repeated but changed no weights.
    """
    useful = 0.0
    lost = dict.fromkeys(REASONS, 0.0)
    total = 0.0
    set_back = 0
    for index, start in enumerate(starts):
        # steps that no later launch has retrained
        later = [other.first_step - 1 for other in starts[index + 1:] if other.first_step is not None]
        kept = start.seconds_until(min(later)) if later else start.in_steps
        useful += kept
        repeated = start.in_steps - kept + start.repeated
        lost["repeated_steps"] += repeated

        # the remaining time of the launch
        start_up = start.start_up
        known = start.in_steps + start.repeated + start.saving + start.validation
        if start.first_step is None:
            start_up = max(0.0, start.seconds - known)
        seconds = max(start.seconds, known + start_up)
        lost["start_up"] += start_up
        lost["saving"] += start.saving
        lost["validation"] += start.validation
        lost["other"] += seconds - known - start_up
        total += seconds

        # the gap before the next launch
        if index + 1 < len(starts) and start.exit_code != FINISHED:
            gap = starts[index + 1].time - (start.time + seconds)
            set_back += gap < 0
            lost["waiting"] += max(0.0, gap)
            total += max(0.0, gap)

    skipped = min(skipped_seconds, useful)
    lost["skipped_steps"] = skipped
    minutes_lost = {name: seconds / MINUTE for name, seconds in lost.items()}
    return GoodputReport(len(starts), total / MINUTE, (useful - skipped) / MINUTE, minutes_lost, set_back)


# ---- the current launch ------------------------------------------------------------------------------------


class GoodputClock(Extra):
    """Track the time of the current launch; call end() when it ends.

    folder: the run folder, or None if this rank does not write. seconds_before: age of this process.
    trouble (attribute): why the record is not written, or None.
    """

    def __init__(self, folder: Path | None, world: int, seconds_before: float = 0.0) -> None:
        self.began = time.monotonic() - seconds_before
        self.record = StartRecord(time=max(0.0, time.time() - seconds_before), world=world)
        self.step_began = self.began
        self.earlier: list[StartRecord] = []
        self.fd: int | None = None
        self.offset = 0  # of the line in the file
        self.written = -math.inf  # monotonic time of the last write
        self.trouble: str | None = None
        if folder is not None:
            self.path = folder / STARTS_FILE
            try:
                self.earlier = read_starts(folder)
                self.open()
            except OSError as error:
                self.give_up(error)
        self.write()

    def open(self) -> None:
        """Open the file and position after its last complete line. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        self.offset = os.fstat(self.fd).st_size
        if self.offset and os.pread(self.fd, 1, self.offset - 1) != b"\n":  # a torn line
            os.pwrite(self.fd, b"\n", self.offset)
            self.offset += 1

    def write(self) -> None:
        """Rewrite the line. Never raises, since a full disk must not end a run."""
        now = time.monotonic()
        self.record = replace(self.record, seconds=now - self.began)
        self.written = now
        if self.fd is None:
            return
        try:
            os.pwrite(self.fd, self.record.to_line(), self.offset)
        except (OSError, ValueError) as error:
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        cause = error.strerror if isinstance(error, OSError) else str(error)
        self.trouble = f"{self.path}: {cause}; later starts will not count this one"
        self.close_file()

    @contextlib.contextmanager
    def spending(self, name: str) -> Iterator[None]:
        """Count the time inside as "saving" or "validation"."""
        began = time.monotonic()
        try:
            yield
        finally:
            spent = getattr(self.record, name) + time.monotonic() - began
            self.record = replace(self.record, **{name: spent})
            self.write()

    def before_step(self, run: Any, step: int) -> None:
        self.step_began = time.monotonic()
        if self.record.first_step is None:
            start_up = self.step_began - self.began - self.record.validation - self.record.saving
            begun = {"first_step": step, "last_step": step - 1, "start_up": max(0.0, start_up)}
            self.record = replace(self.record, **begun)
            self.write()

    def after_step(self, run: Any, step: int) -> None:
        now = time.monotonic()
        in_steps = self.record.in_steps + now - self.step_began
        self.record = replace(self.record, last_step=step, in_steps=in_steps)
        if now - self.written >= BEAT_SECONDS:
            self.write()

    def saved(self, step: int) -> None:
        """Record a checkpoint of this step, which a later launch may resume from."""
        marks = [mark for mark in self.record.marks if mark[0] < step]
        marks.append((step, self.record.in_steps))
        self.record = replace(self.record, marks=tuple(marks[-MAX_MARKS:]))
        self.write()

    def rewound(self, step: int) -> None:
        """Record that this launch was rewound and retrains the steps after this one."""
        record = self.record
        if record.first_step is None or step >= record.last_step:
            return
        kept = record.seconds_until(step)
        self.record = replace(
            record,
            first_step=min(record.first_step, step + 1),  # may also retrain steps of an earlier launch
            last_step=step,
            in_steps=kept,
            repeated=record.repeated + record.in_steps - kept,
            marks=tuple(mark for mark in record.marks if mark[0] <= step),
        )
        self.write()

    def report(self, skipped_seconds: float = 0.0) -> GoodputReport:
        """Return the report up to now. skipped_seconds: see reckon."""
        self.write()
        return compute_goodput([*self.earlier, self.record], skipped_seconds)

    def end(self, exit_code: int) -> None:
        self.record = replace(self.record, exit_code=exit_code)
        self.write()
        self.close_file()

    def forget(self) -> None:
        """Remove the line of a launch that did not train."""
        with contextlib.suppress(OSError):
            if self.fd is not None:
                os.ftruncate(self.fd, self.offset)
                if self.offset == 0:
                    self.path.unlink()
        self.close_file()

    def close_file(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


@contextlib.contextmanager
def recorded_start(goodput: GoodputClock) -> Iterator[None]:
    """Record the exit code of a failure inside. Forget a launch that is rejected before its first step."""
    try:
        yield
    except ConfigError:
        if goodput.record.first_step is None:
            goodput.forget()
        else:
            goodput.end(failure.USER_MISTAKE)
        raise
    except BaseException as error:
        goodput.end(failure.get_exit_code(error))
        raise
