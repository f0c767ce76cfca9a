"""Track which bytes are alive while a program runs, and what holds them.

Every storage returned by a torch operation counts until nothing refers to it. This works alike for real
tensors and those without storage, so a record can be compared with a run. Allocator overhead (blocks of at
least 512 bytes, and fragmentation) is not included.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class Holder(NamedTuple):
    """The code that allocated memory.

    phase: build, forward, backward or optimizer. place: file and function of this repository. module: the
    class of the innermost model part whose forward was running, or "".
    """

    phase: str
    place: str
    module: str = ""


class Point(NamedTuple):
    """Bytes alive after an allocation or a release. time: number of preceding launches."""

    time: int
    nbytes: int


class Change(NamedTuple):
    """An allocation, or a release with negative bytes. time: number of preceding launches. storage: unique
    among the storages alive at the same time."""

    time: int
    storage: int
    nbytes: int
    holder: Holder


@dataclass
class LiveBytes:
    """now, peak: bytes. held: the current bytes by holder. at_peak: the same at the peak.

    clock: number of launches so far. storages: {storage: its bytes and holder}. is_rising: nothing was
    released since the peak. begun_with: the storages alive at begin(). changes: since then.
    """

    clock: Callable[[], int] = lambda: 0
    now: int = 0
    peak: int = 0
    held: Counter[Holder] = field(default_factory=Counter[Holder])
    at_peak: Counter[Holder] = field(default_factory=Counter[Holder])
    storages: dict[int, tuple[int, Holder]] = field(default_factory=dict[int, tuple[int, Holder]])
    begun_with: list[Change] = field(default_factory=list[Change])
    changes: list[Change] = field(default_factory=list[Change])
    is_rising: bool = False

    def begin(self) -> None:
        """Reset the peak and the changes to what is alive now."""
        self.peak, self.at_peak = self.now, self.held.copy()
        self.begun_with = [Change(0, key, *of_storage) for key, of_storage in self.storages.items()]
        self.changes = []
        self.is_rising = False

    def copy(self) -> "LiveBytes":
        """Copy the current bytes. Releases of tensors that are alive now do not affect the copy."""
        own = {name: copy(value) for name, value in vars(self).items() if name != "clock"}
        return LiveBytes(self.clock, **own)

    def has(self, x: Tensor) -> bool:
        """Return whether the storage of a tensor is counted here."""
        return x.untyped_storage()._cdata in self.storages

    def see(self, tensors: Iterable[Tensor], holder: Holder) -> None:
        """Count the storages of tensors that are not counted yet."""
        for x in tensors:
            storage = x.untyped_storage()
            key = storage._cdata
            nbytes = storage.nbytes()
            if key in self.storages or not nbytes:
                continue
            weakref.finalize(storage, self.release, key)
            self.add(key, nbytes, holder)

    def add(self, key: int, nbytes: int, holder: Holder) -> None:
        self.storages[key] = nbytes, holder
        self.held[holder] += nbytes
        self.change(key, nbytes, holder)

    def release(self, key: int) -> None:
        nbytes, holder = self.storages.pop(key)
        if self.is_rising:
            self.leave_peak()
        self.held[holder] -= nbytes
        self.change(key, -nbytes, holder)

    def change(self, key: int, nbytes: int, holder: Holder) -> None:
        self.now += nbytes
        if self.now > self.peak:
            self.peak = self.now
            self.is_rising = True
        self.changes.append(Change(self.clock(), key, nbytes, holder))

    def leave_peak(self) -> None:
        """Save the holders of the peak, once, at the first release after it."""
        self.at_peak = +self.held
        self.is_rising = False

    def holders_of_peak(self) -> Counter[Holder]:
        """Return the holders at the peak since begin()."""
        if self.is_rising:
            self.leave_peak()
        return self.at_peak


def memory_curve(begun_with: Iterable[Change], changes: Iterable[Change]) -> list[Point]:
    """Return the bytes over time."""
    now = sum(change.nbytes for change in begun_with)
    curve = [Point(0, now)]
    for change in changes:
        now += change.nbytes
        curve.append(Point(change.time, now))
    return curve
