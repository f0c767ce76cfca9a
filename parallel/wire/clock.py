"""CommunicationClock: how long a rank waited for others in a step, and how long exchanges were hidden.

    exposed   the union of all times in which the rank waited for an exchange. On a CPU: host time in
              Group.run_exchange. On a GPU: time on the computing stream, between events before and after the
              wait.
    hidden    the union of the times in which a started exchange was under way, from its start to its end,
              less what was exposed: it ran beside the computation.

The end of an exchange is known from its future (gloo: all-reduce, all-gather, all-to-all). gloo reports no
end of a reduce-scatter and nothing of a transfer. So a reduce-scatter counts as hidden if it is still under
way when it is awaited, and a transfer never. On a GPU no end is known: a stream that waited for each exchange
could share a hardware queue with the one that has to run for it to end. What was hidden there is in the
traces of profile.steps. Nothing here waits: the events of a GPU are read where the metrics are
(runtime/metrics.py).
"""
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch

MAX_SPANS = 1 << 16  # spans that are kept if nobody collects them

Stamp = float | torch.cuda.Event  # seconds of time.monotonic, or an event on a stream of a GPU
Span = tuple[Stamp, Stamp]


class Handle(Protocol):
    """What is read of torch's handle of a started exchange: torch.distributed.Work."""

    def wait(self) -> bool: ...

    def is_completed(self) -> bool: ...

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]: ...


@dataclass
class PendingSpan:
    """The time of a started exchange. end: None while it is not known."""
    start: float
    end: float | None = None


@dataclass(frozen=True)
class StepTimes:
    """The spans of one step, not yet read."""
    waits: deque[Span]
    exchanges: deque[Span] | None  # None: on a GPU, where their ends are not known
    groups: deque[str] = field(default_factory=deque)  # of each wait: the name of the group

    def read(self) -> tuple[float, float | None]:
        """(exposed, hidden) in ms; hidden: None where it is not known. On a GPU the step must have ended."""
        spans = [*self.waits, *(self.exchanges or ())]
        first = spans[0][0] if spans else 0.0
        waits = spans_in_ms(first, self.waits)
        exposed = union_length(waits)
        if self.exchanges is None:
            return exposed, None
        exchanges = spans_in_ms(first, self.exchanges)
        return exposed, max(0.0, union_length(waits + exchanges) - exposed)

    def read_by_group(self) -> dict[str, float]:
        """{name of a group: ms in which this rank waited for its exchanges}. As for read()."""
        found: dict[str, float] = {}
        for (start, end), group in zip(self.waits, self.groups):
            found[group] = found.get(group, 0.0) + elapsed_ms(start, end)
        return found


@dataclass
class CommunicationClock:
    """One for all groups of a job. Call collect() once a step.

    An exchange counts in the step in which it is awaited.
    """
    device: torch.device | None = None  # a GPU, whose own time is measured then; None: host time
    waits: deque[Span] = field(default_factory=lambda: deque(maxlen=MAX_SPANS))
    exchanges: deque[Span] = field(default_factory=lambda: deque(maxlen=MAX_SPANS))
    groups: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_SPANS))  # of each wait

    def record_event(self) -> Stamp:
        """Now: on the computing stream of the GPU; without a GPU, on the host."""
        if self.device is None:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def record_start(self, handle: Handle) -> PendingSpan | None:
        """The time of an exchange that starts now, and whose end is recorded when it comes.

        None on a GPU.
        """
        if self.device is not None:
            return None
        pending = PendingSpan(time.monotonic())

        def record_end(_: torch.futures.Future[list[torch.Tensor]]) -> None:
            pending.end = time.monotonic()

        try:
            handle.get_future().add_done_callback(record_end)
        except RuntimeError:  # this kind of exchange has no future
            pass
        return pending

    def record_arrival(self, pending: PendingSpan, handle: Handle) -> None:
        """To be called before the wait for a started exchange: what follows is exposed.

        An end that is not known is not guessed.
        """
        is_under_way = pending.end is None and not handle.is_completed()
        end = time.monotonic() if is_under_way else pending.end
        if end is not None:
            self.exchanges.append((pending.start, end))

    def record_wait(self, start: Stamp, group: str) -> Stamp:
        """Records a wait for an exchange of `group`, from `start` until now. Returns its end."""
        end = self.record_event()
        self.waits.append((start, end))
        self.groups.append(group)
        return end

    def collect(self) -> StepTimes:
        """The spans since the last call."""
        exchanges = self.exchanges.copy() if self.device is None else None
        step = StepTimes(self.waits.copy(), exchanges, self.groups.copy())
        self.waits.clear()
        self.groups.clear()
        self.exchanges.clear()
        return step


def spans_in_ms(first: Stamp, spans: Iterable[Span]) -> list[tuple[float, float]]:
    """(start, end) of each span, in ms after `first`."""
    return [(elapsed_ms(first, start), elapsed_ms(first, end)) for start, end in spans]


def elapsed_ms(first: Stamp, then: Stamp) -> float:
    """Milliseconds between two stamps; those of a GPU must have come.

    Raises TypeError if one is of the host and the other of a GPU.
    """
    if isinstance(first, (int, float)) and isinstance(then, (int, float)):
        return 1000 * (then - first)
    if isinstance(first, (int, float)) or isinstance(then, (int, float)):
        raise TypeError(f"a stamp of the host and one of a GPU have no time between them: {first}, {then}")
    return first.elapsed_time(then)


def union_length(spans: list[tuple[float, float]]) -> float:
    """The length of the union of the spans."""
    total = 0.0
    covered_until = float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return total
