"""CommunicationClock: how long a rank waited for others in a step, and how much communication was hidden.

    exposed   the union of all times in which the rank waited for an exchange. On a CPU: host time in
              Group.run_exchange. On a GPU: time on the compute stream, between events before and after the
              wait.
    hidden    the union of the times in which an asynchronous exchange was in flight, minus the exposed time:
              it overlapped with the computation.

The end of an exchange comes from its future (gloo: all-reduce, all-gather, all-to-all). gloo reports no end
for a reduce-scatter and nothing for a transfer. So a reduce-scatter counts as hidden if it is still in flight
when it is waited for, and a transfer never. On a GPU no end is known: a stream that waited for each exchange
could share a hardware queue with the one that has to run for it to end. There, hidden time is visible in the
traces of profile.steps. Nothing blocks here: GPU events are read along with the metrics (runtime/metrics.py).
"""
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch

MAX_SPANS = 1 << 16  # maximum number of spans kept if nobody collects them

Stamp = float | torch.cuda.Event  # seconds of time.monotonic, or an event on a stream of a GPU
Span = tuple[Stamp, Stamp]


class Handle(Protocol):
    """The interface of torch's handle of an asynchronous exchange: torch.distributed.Work."""

    def wait(self) -> bool: ...

    def is_completed(self) -> bool: ...

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]: ...


@dataclass
class PendingSpan:
    """The time span of an asynchronous exchange. `end` is None while unknown."""
    start: float
    end: float | None = None


@dataclass(frozen=True)
class StepTimes:
    """The unread spans of one step."""
    waits: deque[Span]
    exchanges: deque[Span] | None  # None on a GPU, where their ends are unknown
    groups: deque[str] = field(default_factory=deque)  # the group's name, for each wait

    def read(self) -> tuple[float, float | None]:
        """Return (exposed, hidden) in ms; hidden is None if unknown. On a GPU the step must have finished."""
        spans = [*self.waits, *(self.exchanges or ())]
        first = spans[0][0] if spans else 0.0
        waits = spans_in_ms(first, self.waits)
        exposed = union_length(waits)
        if self.exchanges is None:
            return exposed, None
        exchanges = spans_in_ms(first, self.exchanges)
        return exposed, max(0.0, union_length(waits + exchanges) - exposed)

    def read_by_group(self) -> dict[str, float]:
        """Return {group name: ms in which this rank waited for its exchanges}. Same condition as read()."""
        result: dict[str, float] = {}
        for (start, end), group in zip(self.waits, self.groups):
            result[group] = result.get(group, 0.0) + elapsed_ms(start, end)
        return result


@dataclass
class CommunicationClock:
    """The clock shared by all groups of a job. Call collect() once a step.

    An exchange counts in the step in which it is waited for.
    """
    device: torch.device | None = None  # a GPU, whose own time is then measured; None for host time
    waits: deque[Span] = field(default_factory=lambda: deque(maxlen=MAX_SPANS))
    exchanges: deque[Span] = field(default_factory=lambda: deque(maxlen=MAX_SPANS))
    groups: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_SPANS))  # for each wait

    def record_event(self) -> Stamp:
        """Return a stamp for now: on the GPU's compute stream, or on the host without a GPU."""
        if self.device is None:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def record_start(self, handle: Handle) -> PendingSpan | None:
        """Start the span of an exchange that starts now; its end is recorded when it finishes.

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
        """Call before waiting for an asynchronous exchange: any further time is exposed.

        An unknown end is not guessed.
        """
        is_under_way = pending.end is None and not handle.is_completed()
        end = time.monotonic() if is_under_way else pending.end
        if end is not None:
            self.exchanges.append((pending.start, end))

    def record_wait(self, start: Stamp, group: str) -> Stamp:
        """Record a wait for an exchange of `group`, from `start` until now. Return its end."""
        end = self.record_event()
        self.waits.append((start, end))
        self.groups.append(group)
        return end

    def collect(self) -> StepTimes:
        """Return the spans since the last call."""
        exchanges = self.exchanges.copy() if self.device is None else None
        step = StepTimes(self.waits.copy(), exchanges, self.groups.copy())
        self.waits.clear()
        self.groups.clear()
        self.exchanges.clear()
        return step


def spans_in_ms(first: Stamp, spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Return (start, end) of each span, in ms after `first`."""
    return [(elapsed_ms(first, start), elapsed_ms(first, end)) for start, end in spans]


def elapsed_ms(first: Stamp, then: Stamp) -> float:
    """Return the milliseconds between two stamps; GPU events must have completed.

    Raises TypeError if one is from the host and the other from a GPU.
    """
    if isinstance(first, (int, float)) and isinstance(then, (int, float)):
        return 1000 * (then - first)
    if isinstance(first, (int, float)) or isinstance(then, (int, float)):
        raise TypeError(f"a stamp of the host and one of a GPU have no time between them: {first}, {then}")
    return first.elapsed_time(then)


def union_length(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of the spans."""
    total = 0.0
    covered_until = float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return total
