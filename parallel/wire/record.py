"""NumbersRecord: checksums of everything that a rank computes, sends and receives, in order.

Two records of one step, made from the same weights and samples, are equal if the step was bitwise
reproducible. If not, the first differing entry tells who is to blame. A rank that received the same numbers
as before, but then sends or holds different ones, computed them wrongly. A rank that received different
numbers first only forwards them. If all ranks sent the same and one received something else, a link is
faulty.

Cost: each number is read once more, on its device. Nothing blocks until digests() is called.
"""
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from parallel.wire.checksum import checksum


class RecordEntry(NamedTuple):
    """One tensor of a record.

    what describes it. is_own: this rank produced it, otherwise it was received. digest is an int64 scalar.
    """
    what: str
    is_own: bool
    digest: Tensor


class NumbersRecord:
    """The numbers of one rank in one run of a step, with entries in chronological order."""

    def __init__(self) -> None:
        self.entries: list[RecordEntry] = []

    def add_own(self, what: str, x: Tensor) -> None:
        """Record a tensor that this rank has computed or is about to send."""
        self.entries.append(RecordEntry(what, True, checksum(x)))

    def add_received(self, what: str, x: Tensor) -> None:
        """Record a tensor that has arrived."""
        self.entries.append(RecordEntry(what, False, checksum(x)))

    def digests(self, device: torch.device) -> list[int]:
        """Return the checksum of each entry. Waits for the device, once."""
        if not self.entries:
            return []
        return torch.stack([entry.digest.to(device) for entry in self.entries]).tolist()


def different(record: NumbersRecord, digests: Sequence[int], others: Sequence[int]) -> list[RecordEntry]:
    """Return the entries whose checksums differ from those of another run (`others`), in order."""
    found = [entry for entry, one, other in zip(record.entries, digests, others) if one != other]
    if not found and len(digests) != len(others):
        found = record.entries[min(len(digests), len(others)):][:1] or record.entries[-1:]
    return found
