"""A wire that answers at once, and records every request.

Nothing is sent: the result of an exchange keeps its shape, without values. What a rank posts and awaits is
recorded in order (parallel/wire/lanes.py), for plan/record/check.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch
from torch import Tensor

from parallel.wire.clock import Handle
from parallel.wire.comm import Group
from parallel.wire.lanes import LaneLog
from plan.record.events import Event

Data = TypeVar("Data")


@dataclass
class RecordingWire:
    """events: of this rank in order, with its other events in between. now: returns the number of launches so
    far. answers: data of other ranks, if they differ; otherwise all others say the same as this one."""

    now: Callable[[], int] = lambda: 0
    events: list[Event] = field(default_factory=list)
    answers: Mapping[int, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.log = LaneLog(self.now, self.events)

    def exchange(self, group: Group, verb: str, sent: Tensor, received: Tensor) -> None:
        self.start(group, verb, sent, received).wait()

    def start(self, group: Group, verb: str, sent: Tensor, received: Tensor) -> Handle:
        larger = max(sent, received, key=lambda x: x.nbytes)
        return self.post(group, verb, larger.nbytes, [sent, received])

    def transfers(
        self, group: Group, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]
    ) -> list[Handle]:
        posted: list[Handle] = []
        batch = self.log.count
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
        lane = (group.channel, group.ranks)
        dtype = tensors[0].dtype
        number = self.log.post(lane, group.name, verb, nbytes, dtype, peer=peer, batch=batch)
        return PostedHandle(self.log, number, tensors)


class Said(Exception):
    """Ends a program when it sends `data` to other ranks."""

    def __init__(self, data: object) -> None:
        super().__init__("a rank says something to others")
        self.data = data


class AskingWire(RecordingWire):
    """A wire that ends its program at the first plain data sent to other ranks."""

    def objects(self, group: Group, x: Data) -> list[Data]:
        raise Said(x)


class PostedHandle:
    """The handle of an exchange, which ends as soon as someone waits for it.

    tensors: kept alive, as by torch's handles.
    """

    def __init__(self, log: LaneLog, number: int, tensors: list[Tensor]) -> None:
        self.log = log
        self.number = number
        self.tensors = tensors

    def wait(self) -> bool:
        self.log.wait(self.number)
        return True

    def is_completed(self) -> bool:
        return False

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        raise RuntimeError("no time is measured")
