"""The one mouth to torch.distributed: every collective and transfer of Bevatron goes through here, by name and counted.

A Group of one rank is the identity: nothing is called, nothing counted, so one process runs the same code as many.
The ledger counts calls and payload bytes of each (group, verb); tests hold it against closed forms.
"""
from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Group:
    """Ranks that talk to each other. name: its axes ("tp"); ranks: global; index: this rank's place among them."""
    name: str
    ranks: tuple[int, ...] = (0,)
    index: int = 0
    handle: object = None  # torch.distributed process group; None where the group has one rank
    ledger: Counter = field(default_factory=Counter, compare=False, repr=False)

    @property
    def size(self) -> int:
        return len(self.ranks)


def count(group: Group, verb: str, x: Tensor) -> None:
    group.ledger[group.name, verb, "calls"] += 1
    group.ledger[group.name, verb, "bytes"] += x.numel() * x.element_size()


def sum_(x: Tensor, group: Group) -> Tensor:
    """In place: the sum over the group, on every rank."""
    if group.size > 1:
        count(group, "all_reduce", x)
        dist.all_reduce(x, group=group.handle)
    return x


def max_(x: Tensor, group: Group) -> Tensor:
    """In place: the maximum of integers over the group (gloo's float maximum drops a NaN that is not on rank 0)."""
    if group.size > 1:
        assert not x.is_floating_point(), "reduce a flag as an int: a float maximum loses NaNs"
        count(group, "all_reduce", x)
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group.handle)
    return x


def init(backend: str, rank: int, world: int, timeout_s: float) -> None:
    """Join the job. The rendezvous comes from the launcher's variables."""
    from datetime import timedelta
    dist.init_process_group(backend, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))


def close() -> None:
    """Always leave by this door: a rank that exits with a live group can abort its peers."""
    if dist.is_initialized():
        dist.destroy_process_group()


def synchronize(device: torch.device) -> None:
    """Wait for the device, for clocks."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
