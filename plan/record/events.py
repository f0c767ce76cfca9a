"""A rank's events in a step other than launches, in order: exchanges, waits, begins and ends of ops."""

import contextlib
import gc
from collections.abc import Iterator
from typing import NamedTuple

import torch

from parallel.wire.connection import Connection


class PostedExchange(NamedTuple):
    """An exchange posted by a rank.

    number: on this rank, from 0. batch: the number of the first exchange posted together with it. lane: its
    ranks share connections, and run their exchanges in the order of posting. group: its name. nbytes: of the
    larger side.
    peer: the other global rank of a send or a receive, None for a collective. time: number of preceding
    launches.
    """

    number: int
    batch: int
    lane: Connection
    group: str
    verb: str
    nbytes: int
    dtype: torch.dtype
    peer: int | None
    time: int

    def __str__(self) -> str:
        """Format as "send of 4,096 bytes to rank 3 in group pp"."""
        direction = {"send": " to", "receive": " from"}.get(self.verb, "")
        peer = f"{direction} rank {self.peer}" if self.peer is not None else ""
        return f"{self.verb} of {self.nbytes:,} bytes{peer} in group {self.group}"


class Wait(NamedTuple):
    """The rank waits until exchange `number` has ended."""

    number: int
    time: int


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
