"""A rank's events in a step other than launches, in order: exchanges, waits, begins and ends of ops."""

import contextlib
import gc
from collections.abc import Iterator
from typing import NamedTuple

from parallel.wire.lanes import PostedExchange, Wait


class HostRead(NamedTuple):
    """The host synchronizes with the device, to read a value. place: the (file, function) that does so."""

    place: tuple[str, str]
    time: int


class StreamWait(NamedTuple):
    """Work queued on a stream after this waits for those of the first `until` launches of the step that are
    on stream `other`. stream: "" for the host itself."""

    stream: str
    other: str
    until: int
    time: int


class OpBegins(NamedTuple):
    """A pipeline op begins. name: "F", "B", "I", "W" with a stage and a microbatch, or "optimizer"."""

    name: str
    time: int


class OpEnds(NamedTuple):
    """The op that began last ends."""

    time: int


Event = PostedExchange | Wait | HostRead | StreamWait | OpBegins | OpEnds


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Disable Python's garbage collector: the millions of tuples of a record contain no cycles, but it would
    scan them again and again."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()
