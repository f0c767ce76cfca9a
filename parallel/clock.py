"""How long this rank stood still for others in a step, and how long exchanges travelled under its computation.

exposed   the union of all times in which the rank waited for an exchange: on a CPU host time in Group.run; on a GPU time on the
          computing stream, between an event before the wait and one after it
hidden    the union of the times in which a started exchange was under way, from its start to its end, less what was exposed

An exchange's end is told by its future (gloo: all-reduce, all-gather, all-to-all) or by an event on a stream that waits for it
alone (GPU, where nothing here has run yet). gloo tells no end of a reduce-scatter, and nothing of a transfer: the first counts as
hidden where it is still under way when it is waited for, the second never. Nothing here waits: a GPU's events are read where the
metrics are (runtime/metrics.py).
"""
import time
from collections import deque
from dataclasses import dataclass, field

import torch

MOST = 1 << 16  # spans that are kept where nobody takes them
Span = tuple[object, object]  # two stamps: seconds of time.monotonic, or CUDA events


@dataclass
class Flight:
    """A started exchange. end: None while nobody knows."""
    start: object
    end: object = None


@dataclass(frozen=True)
class Step:
    """What one step took, unread."""
    waits: deque[Span]
    flights: deque[Span]

    def read(self) -> tuple[float, float]:
        """(exposed, hidden) in ms. On a GPU the step must have ended there."""
        first = next((a for spans in (self.waits, self.flights) for a, _ in spans), 0.0)
        waits, flights = ([(elapsed(first, a), elapsed(first, b)) for a, b in spans] for spans in (self.waits, self.flights))
        exposed = union(waits)
        return exposed, max(0.0, union(waits + flights) - exposed)


@dataclass
class Clock:
    """One for all groups of a job; take() once a step. A flight counts in the step in which it is waited for."""
    device: torch.device | None = None  # a GPU, whose own clock then counts
    waits: deque[Span] = field(default_factory=lambda: deque(maxlen=MOST))
    flights: deque[Span] = field(default_factory=lambda: deque(maxlen=MOST))
    side: object = None  # a stream on which ends are marked

    def stamp(self, stream=None):
        """Now: on the computing stream of a GPU, or on `stream`."""
        if self.device is None:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream or torch.cuda.current_stream(self.device))
        return event

    def start(self, work) -> Flight:
        """An exchange was started: `work` is torch's handle of it."""
        flight = Flight(self.stamp())
        if self.device is not None:
            self.side = self.side or torch.cuda.Stream(self.device)
            with torch.cuda.stream(self.side):
                work.wait()  # the side stream does, not the host
                flight.end = self.stamp(self.side)
            return flight
        try:
            work.get_future().add_done_callback(lambda _: setattr(flight, "end", time.monotonic()))
        except RuntimeError:  # this kind of exchange has none
            pass
        return flight

    def arrive(self, flight: Flight, work) -> None:
        """Before the wait for it. What follows is exposed; an end that nobody told is not made up."""
        end = self.stamp() if flight.end is None and not work.is_completed() else flight.end
        if end is not None:
            self.flights.append((flight.start, end))

    def wait(self, start) -> None:
        """A wait that began at this stamp is over."""
        self.waits.append((start, self.stamp()))

    def take(self) -> Step:
        step = Step(self.waits.copy(), self.flights.copy())
        self.waits.clear(), self.flights.clear()
        return step


def elapsed(first, then) -> float:
    """Milliseconds between two stamps."""
    if isinstance(then, float):
        return 1000 * (then - first)
    then.synchronize()
    return first.elapsed_time(then)


def union(spans: list[tuple[float, float]]) -> float:
    """The length of what the spans cover together."""
    total, end = 0.0, float("-inf")
    for a, b in sorted(spans):
        total += max(0.0, b - max(a, end))
        end = max(end, b)
    return total
