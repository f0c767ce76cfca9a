"""Summary of one rank's record: FLOPs, bytes over time, exchanges, and the order of events.

A record has tens of thousands of launches, of some hundred kinds. A summary stores each kind once.
"""

from array import array
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from plan.record.events import Event, without_collection
from plan.record.launches import Launch
from plan.record.memory import Change, Holder, Point, memory_curve
from plan.record.rates import Work, host_kind
from plan.record.role import RoleRecord
from plan.record.work import Facts, judge

MAX_POINTS = 2000  # of the stored curve: the highest of each section of the step
STATE = {  # {folder or file that allocated memory when the run was built: its category}
    "optim/": "optimizer",
    "parallel/sharding/gradients.py": "gradients",
}


@dataclass(frozen=True)
class Exchanged:
    """calls: of one verb in one group. nbytes: of the larger side, in total."""

    group: str
    verb: str
    calls: int
    nbytes: int


@dataclass(frozen=True)
class HeldAtPeak:
    """Bytes of the peak allocated at one place of the code, in one part of the model."""

    phase: str
    place: str
    module: str
    nbytes: int


class LaunchKind(NamedTuple):
    """Launches with equal costs. place: file:function of the caller. host: of HOST in plan/record/rates.py.
    stream: the stream that they run on."""

    work: Work
    place: str
    phase: str
    host: str
    stream: str


@dataclass(frozen=True)
class RankSteps:
    """A rank's step in order. kinds: of launches; order: the kind of each; events: between launches."""

    kinds: list[LaunchKind]
    order: array
    events: list[Event]


@dataclass(frozen=True)
class MemoryTrace:
    """Allocations and releases of a rank: those at the start of its step, then those in it."""

    begun_with: list[Change]
    changes: list[Change]


@dataclass(frozen=True)
class RoleSummary:
    """flops: of all products and attention. launches: number of kernels. unknown: {kernel: bytes moved} of
    kernels without a formula. waits: {place: how often the host waits for the device there}. Other fields as
    in RoleRecord.
    """

    rank: int
    flops: float
    launches: int
    unknown: dict[str, float]
    exchanges: list[Exchanged]
    state: int
    peak: int
    host: int
    held: list[HeldAtPeak]
    curve: list[Point]
    waits: dict[str, int]
    steps: RankSteps
    memory: MemoryTrace
    seconds: float


@without_collection()
def summarize(record: RoleRecord, facts: Facts) -> RoleSummary:
    kinds, order = kinds_of(record.launches, facts)
    counts = Counter(order)
    unknown: Counter[str] = Counter()
    for number, kind in enumerate(kinds):
        if kind.work.part == "unknown":
            unknown[kind.work.kernel] += int(kind.work.nbytes) * counts[number]
    calls = {key: count for key, count in record.ledger.items() if key[2] == "calls"}
    exchanges = [
        Exchanged(group, verb, count, record.ledger[group, verb, "bytes"])
        for (group, verb, _), count in calls.items()
    ]
    return RoleSummary(
        record.rank,
        flops=sum(kinds[number].work.flops * count for number, count in counts.items()),
        launches=sum(kinds[number].work.launches * count for number, count in counts.items()),
        unknown=dict(unknown),
        exchanges=sorted(exchanges, key=lambda one: -one.nbytes),
        state=record.state,
        peak=record.peak,
        host=record.host,
        held=[HeldAtPeak(*holder, nbytes) for holder, nbytes in record.at_peak.most_common()],
        curve=thinned(memory_curve(record.begun_with, record.changes), MAX_POINTS),
        waits=dict(Counter(f"{file}:{function}" for file, function in record.host_reads)),
        steps=RankSteps(kinds, order, record.events),
        memory=MemoryTrace(record.begun_with, record.changes),
        seconds=record.seconds,
    )


def classify_memory(holder: Holder) -> str:
    """Return a category: weights, gradients, optimizer; a part of the model; or the phase of the step."""
    if holder.phase == "build":
        return next((what for start, what in STATE.items() if holder.place.startswith(start)), "weights")
    return holder.module or holder.phase


class MemoryByKind(NamedTuple):
    """nbytes: {holder: bytes alive at each of `times`}."""
    times: list[int]
    nbytes: dict[str, list[int]]


def memory_by_kind(trace: MemoryTrace, most: int = MAX_POINTS) -> MemoryByKind:
    """Return the memory by holder over the step, at the highest point of each of `most` sections."""
    now: Counter[str] = Counter()
    for change in trace.begun_with:
        now[classify_memory(change.holder)] += change.nbytes
    size = max(1, -(-len(trace.changes) // most))
    points = [(0, now.copy())]
    for start in range(0, len(trace.changes), size):
        highest = (0, -1, now)
        for change in trace.changes[start : start + size]:
            now[classify_memory(change.holder)] += change.nbytes
            total = now.total()
            if total > highest[1]:
                highest = (change.time, total, now.copy())
        points.append((highest[0], highest[2]))
    kinds = {kind: None for _, held in points for kind in held}
    nbytes = {kind: [held[kind] for _, held in points] for kind in kinds}
    return MemoryByKind([time for time, _ in points], nbytes)


def kinds_of(launches: list[Launch], facts: Facts) -> tuple[list[LaunchKind], array]:
    """Return (each kind once, the kind of each launch)."""
    numbers: dict[LaunchKind, int] = {}
    parse_count: dict[int, int] = {}  # by the id of a launch, which may be repeated (splice.py)
    for launch in launches:
        if id(launch) not in parse_count:
            place = f"{launch.file}:{launch.function}"
            work = Work.of(judge(launch, facts))
            kind = LaunchKind(work, place, launch.phase, host_kind(launch), launch.stream)
            parse_count[id(launch)] = numbers.setdefault(kind, len(numbers))
    return list(numbers), array("l", [parse_count[id(launch)] for launch in launches])


def thinned(curve: list[Point], most: int) -> list[Point]:
    """Return at most `most` points: the highest of each section, so that no peak is lost."""
    size = -(-len(curve) // most)
    stretches = [curve[start : start + size] for start in range(0, len(curve), size)]
    return [max(stretch, key=lambda point: point.nbytes) for stretch in stretches]
