"""Which bytes are alive while a program runs, and what holds them.

Every storage that an operation of torch returns counts from then until nothing refers to it. It works alike
on real tensors and on those without storage, so a record can be held against a run. What an allocator adds
(blocks of 512 bytes and more, and pieces that nothing fits into) is not in it.
"""

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class Holder(NamedTuple):
    """The code that asked for memory.

    phase: build, forward, backward or optimizer. place: file and function of this repository.
    """

    phase: str
    place: str


class Point(NamedTuple):
    """Bytes that are alive after an allocation or a release. time: operations before it."""

    time: int
    nbytes: int


@dataclass
class LiveBytes:
    """now, peak: bytes. held: those of now, by what holds them. at_peak: those of the peak. curve: over time.

    time: operations so far. storages: {storage: its bytes and holder}. is_rising: nothing was released since
    the peak.
    """

    now: int = 0
    peak: int = 0
    held: Counter[Holder] = field(default_factory=Counter[Holder])
    at_peak: Counter[Holder] = field(default_factory=Counter[Holder])
    curve: list[Point] = field(default_factory=list[Point])
    time: int = 0
    storages: dict[int, tuple[int, Holder]] = field(default_factory=dict[int, tuple[int, Holder]])
    is_rising: bool = False

    def begin(self) -> None:
        """Forgets the peak and the curve: what is alive now is where they begin."""
        self.peak, self.at_peak = self.now, self.held.copy()
        self.curve = [Point(self.time, self.now)]
        self.is_rising = False

    def has(self, x: Tensor) -> bool:
        """Whether the storage of a tensor is counted here."""
        return x.untyped_storage()._cdata in self.storages

    def see(self, tensors: Iterable[Tensor], holder: Holder) -> None:
        """Counts the storages of tensors that were not there before."""
        for x in tensors:
            storage = x.untyped_storage()
            key = storage._cdata
            nbytes = storage.nbytes()
            if key in self.storages or not nbytes:
                continue
            self.storages[key] = nbytes, holder
            weakref.finalize(storage, self.release, key)
            self.held[holder] += nbytes
            self.change(nbytes)

    def release(self, key: int) -> None:
        nbytes, holder = self.storages.pop(key)
        if self.is_rising:
            self.leave_peak()
        self.held[holder] -= nbytes
        self.change(-nbytes)

    def change(self, nbytes: int) -> None:
        self.now += nbytes
        if self.now > self.peak:
            self.peak = self.now
            self.is_rising = True
        self.curve.append(Point(self.time, self.now))

    def leave_peak(self) -> None:
        """What holds the peak is looked at once, when the first of it is released."""
        self.at_peak = +self.held
        self.is_rising = False

    def holders_of_peak(self) -> Counter[Holder]:
        """What holds the most bytes that were alive since begin()."""
        if self.is_rising:
            self.leave_peak()
        return self.at_peak
