"""What a record of one rank says, in numbers: FLOPs, bytes over time, exchanges."""

from collections import Counter
from dataclasses import dataclass

from plan.record.memory import Point
from plan.record.role import RoleRecord
from plan.record.wire import Event
from plan.record.work import Facts, judge

MAX_POINTS = 2000  # of the curve that is kept: the highest of each stretch of the step


@dataclass(frozen=True)
class Exchanged:
    """calls: of one verb in one group. nbytes: of the larger side, all together."""

    group: str
    verb: str
    calls: int
    nbytes: int


@dataclass(frozen=True)
class HeldAtPeak:
    """Bytes of the peak that one place of the code asked for."""

    phase: str
    place: str
    nbytes: int


@dataclass(frozen=True)
class RoleSummary:
    """flops: of all products and attention. launches: kernels that start. unknown: {kernel: bytes that it
    moves} of kernels without a formula. waits: {place: how often the host waits for the device there}. The
    others as in RoleRecord.
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
    events: list[Event]
    seconds: float


def summarize(record: RoleRecord, facts: Facts) -> RoleSummary:
    judged = [judge(launch, facts) for launch in record.launches]
    unknown: Counter[str] = Counter()
    for one in judged:
        if one.part == "unknown":
            unknown[one.launch.kernel] += int(one.nbytes)
    calls = {key: count for key, count in record.ledger.items() if key[2] == "calls"}
    exchanges = [
        Exchanged(group, verb, count, record.ledger[group, verb, "bytes"])
        for (group, verb, _), count in calls.items()
    ]
    return RoleSummary(
        record.rank,
        flops=sum(one.flops for one in judged),
        launches=sum(launch.launches for launch in record.launches),
        unknown=dict(unknown),
        exchanges=sorted(exchanges, key=lambda one: -one.nbytes),
        state=record.state,
        peak=record.peak,
        host=record.host,
        held=[HeldAtPeak(*holder, nbytes) for holder, nbytes in record.at_peak.most_common()],
        curve=thinned(record.curve, MAX_POINTS),
        waits=dict(Counter(f"{file}:{function}" for file, function in record.host_reads)),
        events=record.events,
        seconds=record.seconds,
    )


def thinned(curve: list[Point], most: int) -> list[Point]:
    """At most `most` points: the highest of each stretch, so that no peak is lost."""
    size = -(-len(curve) // most)
    stretches = [curve[start : start + size] for start in range(0, len(curve), size)]
    return [max(stretch, key=lambda point: point.nbytes) for stretch in stretches]
