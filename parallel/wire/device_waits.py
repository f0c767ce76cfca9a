"""Find the exchange a GPU is waiting for. Over NCCL the host does not know: wait() returns at once, and the
stream waits.

So an event is recorded on the compute stream before and after each wait. A stream runs in order: the first
wait whose second event is pending is where it is, if its first event has completed. durable/peers.py queries
this from another thread, because the main thread may be blocked on a full launch queue.
"""
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch.cuda import Event

MAX_WAITS = 1 << 16  # maximum number kept if nobody asks
What = TypeVar("What")  # describes an exchange


@dataclass(frozen=True)
class DeviceWait(Generic[What]):
    """A wait of the compute stream, between the events start and end."""
    what: What
    start: Event
    end: Event


@dataclass
class DeviceWaits(Generic[What]):
    """The pending waits of one stream, oldest first."""
    waits: deque[DeviceWait[What]] = field(default_factory=deque)
    front: DeviceWait[What] | None = None  # the wait that the stream was in at the last query
    front_since: float = 0.0  # when it was first seen there, in seconds of time.monotonic
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, what: What, start: Event, end: Event) -> None:
        """Add a wait. Call it once the second event is recorded."""
        with self.lock:
            if len(self.waits) == MAX_WAITS:
                self.waits.popleft()
            self.waits.append(DeviceWait(what, start, end))

    def current(self) -> tuple[What, float] | None:
        """Return (the exchange that the stream waits for, for how many seconds it has been seen there).

        None if it waits for none.
        """
        with self.lock:
            for _ in range(self.count_ended()):
                self.waits.popleft()
            oldest = self.waits[0] if self.waits else None
            if oldest is None or not oldest.start.query():
                self.front = None
                return None
            if oldest is not self.front:
                self.front = oldest
                self.front_since = time.monotonic()
            return oldest.what, time.monotonic() - self.front_since

    def count_ended(self) -> int:
        """Count finished waits by bisection: the events of a stream complete in order."""
        low = 0
        high = len(self.waits)
        while low < high:
            middle = (low + high) // 2
            if self.waits[middle].end.query():
                low = middle + 1
            else:
                high = middle
        return low
