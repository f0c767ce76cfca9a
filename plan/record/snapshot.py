"""Export memory over a step in the format of torch.cuda.memory._snapshot(), for pytorch.org/memory_viz.

A device is a recorded rank. Addresses are made up: each allocation gets the lowest free range that fits, in
blocks of 512 bytes, in one segment that grows as needed. Allocator overhead is unknown.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from plan.record.memory import Change, Holder
from plan.record.summary import MemoryTrace

BLOCK = 512  # rounding of the caching allocator, in bytes
FIRST_ADDRESS = 1 << 46
OF_A_DEVICE = 1 << 44  # addresses per device


@dataclass
class Room:
    """Address space of a device. free: [(address, bytes)] of gaps, in order. end: of all addresses used.
    taken: {storage: its address}."""

    end: int
    free: list[tuple[int, int]] = field(default_factory=list)
    taken: dict[int, int] = field(default_factory=dict)

    def take(self, storage: int, nbytes: int) -> int:
        for place, (address, room) in enumerate(self.free):
            if room >= nbytes:
                rest = [(address + nbytes, room - nbytes)] if room > nbytes else []
                self.free[place : place + 1] = rest
                break
        else:
            address = self.end
            self.end += nbytes
        self.taken[storage] = address
        return address

    def give(self, storage: int, nbytes: int) -> int:
        """Free a storage, and merge it with adjacent gaps. Return its address."""
        address = start = self.taken.pop(storage)
        end = address + nbytes
        place = bisect_left(self.free, (address, 0))
        if place < len(self.free) and self.free[place][0] == end:
            end += self.free.pop(place)[1]
        if place and sum(self.free[place - 1]) == start:
            place -= 1
            start = self.free.pop(place)[0]
        self.free.insert(place, (start, end - start))
        return address


def snapshot(traces: Sequence[MemoryTrace]) -> dict:
    """Return a snapshot with a device for each trace, in order."""
    segments, entries = [], []
    for device, trace in enumerate(traces):
        segment, of_device = device_snapshot(device, trace)
        segments.append(segment)
        entries.append(of_device)
    return {"segments": segments, "device_traces": entries, "allocator_settings": {}}


def device_snapshot(device: int, trace: MemoryTrace) -> tuple[dict, list[dict]]:
    """Return (the segment at the end of the step, the list of events)."""
    first = FIRST_ADDRESS + device * OF_A_DEVICE
    room = Room(end=first)
    entries: list[dict] = []
    alive: dict[int, Change] = {}  # by address
    for change in (*trace.begun_with, *trace.changes):
        size = rounded(abs(change.nbytes))
        if change.nbytes > 0:
            address = room.take(change.storage, size)
            alive[address] = change
            entries.append(entry("alloc", address, change, len(entries)))
        else:
            address = room.give(change.storage, size)
            del alive[address]
            entries.append(entry("free_requested", address, change, len(entries)))
            entries.append(entry("free_completed", address, change, len(entries)))

    total = room.end - first
    blocks: list[dict] = []
    address = first
    for start in (*sorted(alive), room.end):
        if start > address:
            blocks.append(block(address, start - address, None))
        if start in alive:
            size = rounded(alive[start].nbytes)
            blocks.append(block(start, size, alive[start]))
            address = start + size
    active = sum(part["size"] for part in blocks if part["state"] == "active_allocated")
    segment = {
        "device": device,
        "address": first,
        "total_size": total,
        "allocated_size": active,
        "active_size": active,
        "requested_size": sum(change.nbytes for change in alive.values()),
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }
    begin = {"action": "segment_alloc", "addr": first, "size": total, "stream": 0, "frames": [], "time_us": 0}
    return segment, [begin, *entries]


def rounded(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


def entry(action: str, address: int, change: Change, time: int) -> dict:
    """Make a trace entry. `time` only keeps the order; host time is not modeled."""
    return {
        "action": action,
        "addr": address,
        "size": abs(change.nbytes),
        "stream": 0,
        "time_us": time,
        "category": change.holder.phase,
        "frames": frames(change.holder),
    }


def block(address: int, size: int, change: Change | None) -> dict:
    """Make a block. `change` is the allocation in it, or None if it is free."""
    return {
        "address": address,
        "size": size,
        "requested_size": change.nbytes if change else 0,
        "state": "active_allocated" if change else "inactive",
        "frames": frames(change.holder) if change else [],
    }


@cache
def frames(holder: Holder) -> list[dict]:
    """Make frames for the innermost function of this repository, its model part and its phase."""
    file, _, function = holder.place.partition(":")
    parts = [{"filename": "model", "line": 0, "name": holder.module}] if holder.module else []
    return [
        {"filename": file or "outside", "line": 0, "name": function or "outside"},
        *parts,
        {"filename": "step", "line": 0, "name": holder.phase},
    ]
