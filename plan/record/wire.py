"""A wire that answers at once, and remembers what was asked of it.

Nothing is sent: the result of an exchange keeps the shape that it has, and no values. What a rank posts and
awaits is kept in the order in which it does so (`PostedExchange`, `Wait`), for plan/record/check.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch
from torch import Tensor

from parallel.wire.clock import Handle
from parallel.wire.comm import Group
from plan.record.events import Event, PostedExchange, Wait

Data = TypeVar("Data")


@dataclass
class RecordingWire:
    """events: in the order of this rank, with other events of it between them. now: how many launches there
    were. answers: what other ranks say where each says something of its own; all others say what this one
    says."""

    now: Callable[[], int] = lambda: 0
    events: list[Event] = field(default_factory=list)
    answers: Mapping[int, object] = field(default_factory=dict)
    count: int = 0

    def exchange(self, group: Group, verb: str, sent: Tensor, received: Tensor) -> None:
        self.start(group, verb, sent, received).wait()

    def start(self, group: Group, verb: str, sent: Tensor, received: Tensor) -> Handle:
        larger = max(sent, received, key=lambda x: x.nbytes)
        return self.post(group, verb, larger.nbytes, [sent, received])

    def transfers(
        self, group: Group, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]
    ) -> list[Handle]:
        posted: list[Handle] = []
        batch = self.count
        for verb, messages in (("send", sends), ("receive", receives)):
            for x, peer in messages:
                posted.append(self.post(group, verb, x.nbytes, [x], group.ranks[peer], batch))
        return posted

    def objects(self, group: Group, x: Data) -> list[Data]:
        return [cast(Data, self.answers.get(rank, x)) for rank in group.ranks]

    def post(
        self,
        group: Group,
        verb: str,
        nbytes: int,
        tensors: list[Tensor],
        peer: int | None = None,
        batch: int | None = None,
    ) -> "PostedHandle":
        number = self.count
        self.count += 1
        exchange = PostedExchange(
            number,
            batch=number if batch is None else batch,
            lane=(group.channel, group.ranks),
            group=group.name,
            verb=verb,
            nbytes=nbytes,
            dtype=tensors[0].dtype,
            peer=peer,
            time=self.now(),
        )
        self.events.append(exchange)
        return PostedHandle(self, number, tensors)


class Said(Exception):
    """Ends a program with what it says to other ranks: `data`."""

    def __init__(self, data: object) -> None:
        super().__init__("a rank says something to others")
        self.data = data


class AskingWire(RecordingWire):
    """A wire on which the first plain data that a rank says to others ends its program."""

    def objects(self, group: Group, x: Data) -> list[Data]:
        raise Said(x)


class PostedHandle:
    """The handle of an exchange: it has ended as soon as somebody waits for it.

    tensors: it keeps them, as torch's own handles do.
    """

    def __init__(self, wire: RecordingWire, number: int, tensors: list[Tensor]) -> None:
        self.wire = wire
        self.number = number
        self.tensors = tensors

    def wait(self) -> bool:
        self.wire.events.append(Wait(self.number, self.wire.now()))
        return True

    def is_completed(self) -> bool:
        return False

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        raise RuntimeError("no time is measured")
