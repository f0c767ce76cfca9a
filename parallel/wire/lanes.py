"""Lanes: the exchanges that a rank posts and waits for, in order.

A lane is a communicator. NCCL runs its exchanges one after the other, in the order in which a rank posts
them; gloo does not. So a job that trains over gloo may block over NCCL. plan/record/check.py finds that out
from the logs of all ranks, recorded without a job (scripts/dry_run.py) or in a real one
(`scripts.verify --lanes`).
"""
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from parallel.wire.connection import Connection


class PostedExchange(NamedTuple):
    """An exchange posted by a rank.

    number: on this rank, from 0. batch: the number of the first exchange posted together with it. lane: its
    ranks share connections, and run their exchanges in the order of posting. group: its name. nbytes: of the
    larger side. peer: the other global rank of a send or a receive, None for a collective. time: number of
    preceding launches.
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


class LaneLog:
    """The exchanges of one rank.

    now returns the number of launches so far. events holds what is posted and awaited, and may hold other
    events of the rank in between.
    """

    def __init__(self, now: Callable[[], int] = lambda: 0, events: list[Any] | None = None) -> None:
        self.now = now
        self.events: list[Any] = [] if events is None else events
        self.count = 0

    def post(
        self, lane: Connection, group: str, verb: str, nbytes: int, dtype: torch.dtype, *,
        peer: int | None = None, batch: int | None = None,
    ) -> int:
        """Add an exchange and return its number. See PostedExchange."""
        number = self.count
        self.count += 1
        posted = PostedExchange(
            number,
            batch=number if batch is None else batch,
            lane=lane,
            group=group,
            verb=verb,
            nbytes=nbytes,
            dtype=dtype,
            peer=peer,
            time=self.now(),
        )
        self.events.append(posted)
        return number

    def wait(self, number: int) -> None:
        """Add that the rank waits for an exchange."""
        self.events.append(Wait(number, self.now()))
