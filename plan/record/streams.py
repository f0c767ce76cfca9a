"""Streams and events without a GPU: a recorder notes the stream of each launch, and who waits for what."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol
from unittest import mock

import torch

from plan.record.events import Event, StreamWait

COMPUTE = "compute"
HOST = ""  # instead of a waiting stream


class Notes(Protocol):
    """The recorder interface that streams use."""

    stream: str
    events: list[Event]
    now: Callable[[], int]


class SimulatedEvent(mock.MagicMock):
    """Emulates torch.cuda.Event, a point in a stream."""

    stream = COMPUTE
    until = 0

    def record(self, stream: "SimulatedStream | None" = None) -> None:
        if stream is not None:
            stream.record_event(self)


class SimulatedStream:
    """Emulates torch.cuda.Stream. name: all streams other than the compute stream share one."""

    def __init__(self, notes: Notes, name: str) -> None:
        self.notes = notes
        self.name = name
        self.device = torch.device("cuda", 0)

    def wait_stream(self, other: "SimulatedStream") -> None:
        self.note(self.name, other.name, self.notes.now())

    def record_event(self, event: SimulatedEvent) -> SimulatedEvent:
        event.stream, event.until = self.name, self.notes.now()
        return event

    def wait_event(self, event: SimulatedEvent) -> None:
        self.note(self.name, event.stream, event.until)

    def synchronize(self) -> None:
        self.note(HOST, self.name, self.notes.now())

    def note(self, waiting: str, other: str, until: int) -> None:
        self.notes.events.append(StreamWait(waiting, other, until, self.notes.now()))


@contextlib.contextmanager
def stream_context(stream: SimulatedStream | None) -> Iterator[None]:
    """Emulate torch.cuda.stream: launches inside go to the stream."""
    if stream is None:
        yield
        return
    before, stream.notes.stream = stream.notes.stream, stream.name
    try:
        yield
    finally:
        stream.notes.stream = before
