"""What a rank does in a step beside its launches, in order: exchanges, waits, begins and ends of ops."""

import contextlib
import gc
from collections.abc import Iterator
from typing import NamedTuple

import torch

from parallel.wire.connection import Connection


class PostedExchange(NamedTuple):
    """One exchange that a rank posts.

    number: on this rank, from 0. batch: the number of the first of those that are posted with it. lane: its
    ranks share connections, and what they exchange there runs in the order of posting. group: its name.
    nbytes: of the larger side. peer: the other global rank of a send or a receive, None of a collective.
    time: launches before it.
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
        """send of 4,096 bytes to rank 3 in group pp"""
        direction = {"send": " to", "receive": " from"}.get(self.verb, "")
        peer = f"{direction} rank {self.peer}" if self.peer is not None else ""
        return f"{self.verb} of {self.nbytes:,} bytes{peer} in group {self.group}"


class Wait(NamedTuple):
    """The rank waits until exchange number `number` has ended."""

    number: int
    time: int


class HostRead(NamedTuple):
    """The host waits for the device, to read a value of it. place: (file, function) that does so."""

    place: tuple[str, str]
    time: int


class StreamWait(NamedTuple):
    """What a stream starts after this waits for the first `until` launches of the step, as far as they are
    of stream `other`. stream: "" for the host itself."""

    stream: str
    other: str
    until: int
    time: int


class OpBegins(NamedTuple):
    """An op of the pipeline begins. name: "F", "B", "I", "W" of a stage and a microbatch, or "optimizer"."""

    name: str
    time: int


class OpEnds(NamedTuple):
    """The op that began last ends."""

    time: int


Event = PostedExchange | Wait | HostRead | StreamWait | OpBegins | OpEnds


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Inside, Python does not look for cycles: there are none among the millions of tuples of a record, which
    it would go through again and again."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()
