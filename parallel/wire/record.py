"""NumbersRecord: checksums of what a rank computes, sends and receives, in the order in which it does.

Two records of one step, made from the same weights and samples, are alike where the step gave the same bits
twice. Where they are not, the first entry that differs says who is to blame. A rank that received the same
numbers as before, and then sends or has others, computed them wrongly. A rank that was sent other numbers
first only passes them on. If all ranks sent the same and one received something else, a link is wrong.

Cost: each number is read once more, on its device. Nothing waits for it before digests() is called.
"""
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from parallel.wire.checksum import checksum


class RecordEntry(NamedTuple):
    """One tensor of a record.

    what: in words. is_own: whether this rank made it, else it was received. digest: int64 scalar.
    """
    what: str
    is_own: bool
    digest: Tensor


class NumbersRecord:
    """What one rank had in one run of a step. entries: in the order in which they came."""

    def __init__(self) -> None:
        self.entries: list[RecordEntry] = []

    def add_own(self, what: str, x: Tensor) -> None:
        """Notes what this rank has computed, or is about to send."""
        self.entries.append(RecordEntry(what, True, checksum(x)))

    def add_received(self, what: str, x: Tensor) -> None:
        """Notes what has arrived."""
        self.entries.append(RecordEntry(what, False, checksum(x)))

    def digests(self, device: torch.device) -> list[int]:
        """The checksum of each entry. Waits for the device, once."""
        if not self.entries:
            return []
        return torch.stack([entry.digest.to(device) for entry in self.entries]).tolist()


def different(record: NumbersRecord, digests: Sequence[int], others: Sequence[int]) -> list[RecordEntry]:
    """The entries whose checksums differ, in order. digests: of the record; others: of another run."""
    found = [entry for entry, one, other in zip(record.entries, digests, others) if one != other]
    if not found and len(digests) != len(others):
        found = record.entries[min(len(digests), len(others)):][:1] or record.entries[-1:]
    return found
