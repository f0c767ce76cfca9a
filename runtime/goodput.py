"""Goodput and ETTR: how much of a run's time went into its weights, over all its starts.

starts.jsonl in the run folder has a line for each start. The line has a fixed length and is rewritten in
place while the run goes on, so a killed start leaves how far it came. Rank 0 alone writes.

    goodput   minutes of steps whose result is in the weights / minutes since the first start
    ETTR      effective training time ratio (arXiv 2410.21680, "Revisiting Reliability in Large-Scale Machine
              Learning Research Clusters"): productive runtime / available wallclock time of a run. As there,
              what is not productive is: waiting for a start, starting, and training again what was lost. So
              validation and saving lower the goodput, and not the ETTR.

Within a start all times are monotonic. Between two starts there is the wall clock alone: a gap that is
negative, because the clock was set back, counts as 0, and the report says so; a clock that was set forward
cannot be told from waiting. After a start that finished the run, waiting does not count.

What a killed start did after its last line is waiting: in steps at most BEAT_SECONDS and a step, and what
it was loading, validating or saving then. A line that does not read is left out, and so are lines that a full
disk refuses.
"""
import contextlib
import json
import math
import os
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from config import ConfigError
from config.exit_codes import FINISHED
from config.reading.run_name import STARTS_FILE
from parallel.extras import Extra
from runtime import failure
from runtime.console import duration

LINE_BYTES = 1024  # of a line, with spaces at its end
MAX_LINE_BYTES = 16 * LINE_BYTES  # that is read of one line: longer ones are damaged
MAX_MARKS = 16  # of a start: the newest saves, to which a later start may go back
BEAT_SECONDS = 1.0  # between two writes of the line while nothing but steps happens
MINUTE = 60.0

# why time is lost, by the names of summary.json: {name: its words on the console}
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
    """A line of starts.jsonl. Times are seconds.

    time: the wall clock at the start, since 1970. seconds: from the start until the line was written.
    first_step: the first that it trains; None until it comes so far. last_step: the last that it has done.
    in_steps: in steps first_step .. last_step. marks: ((step, in_steps after it), ...) of its newest saves.
    repeated: in steps that it went back before (optim.spike_rewind), which in_steps leaves out.
    exit_code: None if no exit was recorded.
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
        """In steps first_step .. step; between two known points, steps count as equally long."""
        if self.first_step is None or step < self.first_step:
            return 0.0
        if step >= self.last_step:
            return self.in_steps
        points = [(self.first_step - 1, 0.0), *self.marks, (self.last_step, self.in_steps)]
        right = bisect_left([point[0] for point in points], step)
        (first, low), (last, high) = points[right - 1], points[right]
        return low + (high - low) * (step - first) / (last - first)

    def to_line(self) -> bytes:
        """LINE_BYTES with a newline at the end. The oldest marks are left out where it would be longer."""
        record = asdict(self)
        for first in range(len(self.marks) + 1):
            marks = self.marks[first:]
            record["marks"] = [[step, math.floor(1000 * seconds) / 1000] for step, seconds in marks]
            line = json.dumps(record, allow_nan=False).encode()
            if len(line) < LINE_BYTES:
                return line.ljust(LINE_BYTES - 1) + b"\n"
        raise ValueError(f"a line of {STARTS_FILE} has more than {LINE_BYTES} bytes: {record}")


def parse_start(line: bytes) -> StartRecord | None:
    """The record in a line; None where it is damaged."""
    try:
        values: dict[str, Any] = json.loads(line)
        marks = tuple((whole(step), amount(seconds)) for step, seconds in values["marks"])
        first_step, exit_code = values["first_step"], values["exit_code"]
        record = StartRecord(
            time=amount(values["time"]),
            world=whole(values["world"]),
            seconds=amount(values["seconds"]),
            first_step=None if first_step is None else whole(first_step),
            last_step=whole(values["last_step"]),
            in_steps=amount(values["in_steps"]),
            repeated=amount(values["repeated"]),
            start_up=amount(values["start_up"]),
            saving=amount(values["saving"]),
            validation=amount(values["validation"]),
            marks=marks,
            exit_code=None if exit_code is None else whole(exit_code),
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    steps = [(record.first_step or 1) - 1, *(step for step, _ in marks), record.last_step]
    seconds = [0.0, *(value for _, value in marks), record.in_steps]
    is_ordered = steps == sorted(steps) and seconds == sorted(seconds)
    return record if is_ordered or record.first_step is None or not record.in_steps else None


def whole(value: Any) -> int:
    """The value. Raises ValueError if it is not an integer."""
    if type(value) is not int:
        raise ValueError(f"{value!r} is no whole number")
    return value


def amount(value: Any) -> float:
    """The value. Raises ValueError unless it is a finite number of at least 0."""
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is no time")
    return float(value)


def read_starts(folder: Path) -> list[StartRecord]:
    """The starts of a run, in order; damaged lines are left out. Raises OSError."""
    found: list[StartRecord] = []
    with contextlib.suppress(FileNotFoundError), open(folder / STARTS_FILE, "rb") as file:
        while line := file.readline(MAX_LINE_BYTES):
            record = parse_start(line)
            if record is not None:
                found.append(record)
    return found


# ---- the report --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GoodputReport:
    """Where the time of a run went, in minutes since its first start.

    lost: {one of REASONS: minutes}. clock_set_back: gaps between starts that were negative.
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
        """The effective training time ratio (arXiv 2410.21680)."""
        unproductive = sum(self.lost[name] for name in NOT_PRODUCTIVE)
        return max(0.0, 1 - unproductive / self.minutes) if self.minutes else 0.0

    def to_summary(self) -> dict[str, Any]:
        """The fields of summary.json."""
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
        """goodput 87.5 % of 2h14m in 3 starts, ETTR 92.0 %; lost: repeated steps 8m00s, start-up 2m43s"""
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


def reckon(starts: Sequence[StartRecord], skipped_seconds: float = 0.0) -> GoodputReport:
    """Where the time of these starts went; the last of them is the present one.

    skipped_seconds: in steps that were not repeated, but changed no weights.
    """
    useful = 0.0
    lost = dict.fromkeys(REASONS, 0.0)
    total = 0.0
    set_back = 0
    for index, start in enumerate(starts):
        # steps that no later start has trained again
        later = [other.first_step - 1 for other in starts[index + 1:] if other.first_step is not None]
        kept = start.seconds_until(min(later)) if later else start.in_steps
        useful += kept
        repeated = start.in_steps - kept + start.repeated
        lost["repeated_steps"] += repeated

        # what else the start did
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

        # until the next one
        if index + 1 < len(starts) and start.exit_code != FINISHED:
            gap = starts[index + 1].time - (start.time + seconds)
            set_back += gap < 0
            lost["waiting"] += max(0.0, gap)
            total += max(0.0, gap)

    skipped = min(skipped_seconds, useful)
    lost["skipped_steps"] = skipped
    minutes_lost = {name: seconds / MINUTE for name, seconds in lost.items()}
    return GoodputReport(len(starts), total / MINUTE, (useful - skipped) / MINUTE, minutes_lost, set_back)


# ---- the present start -------------------------------------------------------------------------------------


class GoodputClock(Extra):
    """The present start: call its methods as the run goes on, and end() at its end.

    folder: of the run, or None if this rank writes nothing. seconds_before: since this process was started.
    trouble (attribute): why the record is not written, or None.
    """

    def __init__(self, folder: Path | None, world: int, seconds_before: float = 0.0) -> None:
        self.began = time.monotonic() - seconds_before
        self.record = StartRecord(time=max(0.0, time.time() - seconds_before), world=world)
        self.step_began = self.began
        self.earlier: list[StartRecord] = []
        self.fd: int | None = None
        self.offset = 0  # of the line in the file
        self.written = -math.inf  # when the line was written, by the monotonic clock
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
        """Opens the file behind its last whole line. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        self.offset = os.fstat(self.fd).st_size
        if self.offset and os.pread(self.fd, 1, self.offset - 1) != b"\n":  # a torn line
            os.pwrite(self.fd, b"\n", self.offset)
            self.offset += 1

    def write(self) -> None:
        """Rewrites the line. Raises nothing: a full disk ends no run."""
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
        self.trouble = f"{self.path}: {cause}; later starts do not know of this one"
        self.close_file()

    @contextlib.contextmanager
    def spending(self, name: str) -> Iterator[None]:
        """Counts the time inside as "saving" or "validation"."""
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
        """A checkpoint of this step was made, to which a later start may go back."""
        marks = [mark for mark in self.record.marks if mark[0] < step]
        marks.append((step, self.record.in_steps))
        self.record = replace(self.record, marks=tuple(marks[-MAX_MARKS:]))
        self.write()

    def rewound(self, step: int) -> None:
        """The steps after this one are trained again, in this start."""
        record = self.record
        if record.first_step is None or step >= record.last_step:
            return
        kept = record.seconds_until(step)
        self.record = replace(
            record,
            first_step=min(record.first_step, step + 1),  # steps of an earlier start are trained again, too
            last_step=step,
            in_steps=kept,
            repeated=record.repeated + record.in_steps - kept,
            marks=tuple(mark for mark in record.marks if mark[0] <= step),
        )
        self.write()

    def report(self, skipped_seconds: float = 0.0) -> GoodputReport:
        """The report until now. skipped_seconds: see reckon."""
        self.write()
        return reckon([*self.earlier, self.record], skipped_seconds)

    def end(self, exit_code: int) -> None:
        self.record = replace(self.record, exit_code=exit_code)
        self.write()
        self.close_file()

    def forget(self) -> None:
        """Takes the line back: nothing was started."""
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
    """Records the exit code of a failure inside. Forgets a start that is refused before its first step."""
    try:
        yield
    except ConfigError:
        if goodput.record.first_step is None:
            goodput.forget()
        else:
            goodput.end(failure.USER_MISTAKE)
        raise
    except BaseException as error:
        goodput.end(failure.code_of(error))
        raise
