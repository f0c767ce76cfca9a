"""Simulate the recorded ranks of a job on one clock, with a time for each launch and exchange.

    a stream     runs its queue in order, each launch after the host has started it
    the host     takes time to start launches and to post exchanges, runs ahead of the device, and waits for
                 it when it reads a value
    a lane       (a communicator) runs exchanges in the order in which a rank posted them, each after the
                 compute queued before it; among those posted together, sends overlap receives. A collective
                 starts when all of its recorded ranks are ready, a send together with its receive
    a wait       blocks the compute queued after it

The step is one of many alike: the exchanges that it posts and the next step awaits (ZeRO's gathers of updated
weights) are in flight when it begins, and do not prolong its end.

Ranks that are not recorded are always ready. Exchanges do not compete for links, and do not slow down
compute.
"""

from array import array
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from parallel.wire.connection import Connection
from parallel.wire.lanes import PostedExchange, Wait
from plan.record.events import Event, HostRead, OpBegins, OpEnds, StreamWait, without_collection
from plan.record.streams import COMPUTE, HOST
from plan.record.summary import LaunchKind, RankSteps

BUBBLE, BY_HOST, COPIES = "bubble", "host", "copies"  # causes of waiting, other than groups


class Costs(NamedTuple):
    """Seconds: launch(kind) on its stream, host(kind) to start it; exchange(rank, exchange); post: host time
    to post one;
    read: until the device resumes after the host has waited for it."""

    launch: Callable[[LaunchKind], float]
    host: Callable[[LaunchKind], float]
    exchange: Callable[[int, PostedExchange], float]
    post: float
    read: float


class ExchangeSpan(NamedTuple):
    """others: when the last of the other ranks was ready. sender: for a transfer between recorded ranks,
    (rank, number of the send)."""

    exchange: PostedExchange
    start: float
    end: float
    others: float
    sender: tuple[int, int] | None


class OpSpan(NamedTuple):
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class RankTimeline:
    """starts, seconds: of each launch in the rank's steps. exchanges: in order of posting. busy: seconds of
    compute. waits: {cause: seconds}, not overlapped: the name of a group for an exposed exchange, BUBBLE for
    other ranks, BY_HOST, COPIES. Together they add up to the step."""

    steps: RankSteps
    starts: array
    seconds: list[float]  # of each kind
    exchanges: list[ExchangeSpan]
    ops: list[OpSpan]
    busy: float
    waits: dict[str, float]


@dataclass(frozen=True)
class JobTimeline:
    """step: seconds until the last rank has ended."""

    step: float
    ranks: dict[int, RankTimeline]


@without_collection()
def timeline(ranks: Mapping[int, RankSteps], costs: Costs) -> JobTimeline:
    """Simulate a step of these ranks. Raises ValueError on a deadlock (plan/record/check.py explains it)."""
    job = Clock(costs, {rank: RankClock(rank, steps, costs) for rank, steps in ranks.items()})
    job.start_carried()
    left = deque(ranks)
    while left:
        moved = job.advance(left.popleft())
        left.extend(rank for rank in moved if not job.ranks[rank].has_ended and rank not in left)
    if any(not state.has_ended for state in job.ranks.values()):
        raise ValueError("the exchanges of these ranks do not meet")
    step = max(state.end() for state in job.ranks.values())
    return JobTimeline(step, {rank: state.result(step) for rank, state in job.ranks.items()})


class Posted(NamedTuple):
    """An exchange that has not started. ready: when its rank is ready."""

    exchange: PostedExchange
    ready: float


@dataclass
class RankClock:
    """host: when it is free. free: when each stream is free. past: for each stream, (launches, ends). lanes:
    when each lane is free; batch_ends: including its current batch; ports: for each verb there. spans: of
    exchanges, by number. carried: exchanges of the step before that this one awaits. own: those that this one
    posts and ends."""

    rank: int
    steps: RankSteps
    costs: Costs
    host: float = 0.0
    free: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    past: defaultdict[str, tuple[list[int], list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: ([], []))
    )
    lanes: defaultdict[Connection, float] = field(default_factory=lambda: defaultdict(float))
    batch_ends: defaultdict[Connection, float] = field(default_factory=lambda: defaultdict(float))
    ports: defaultdict[tuple[Connection, str], float] = field(default_factory=lambda: defaultdict(float))
    spans: dict[int, ExchangeSpan] = field(default_factory=dict)
    waits: Counter[str] = field(default_factory=Counter)
    num_launched: int = 0
    num_events: int = 0
    has_ended: bool = False

    def __post_init__(self) -> None:
        kinds = self.steps.kinds
        self.seconds = [self.costs.launch(kind) for kind in kinds]
        self.host_seconds = [self.costs.host(kind) for kind in kinds]
        self.starts = array("d", bytes(8 * len(self.steps.order)))
        posted = {event.number: event for event in self.steps.events if isinstance(event, PostedExchange)}
        awaited = {event.number for event in self.steps.events if isinstance(event, Wait)}

        # an exchange of the step before has the place in its step that its number says, counted from the end
        self.carried: list[PostedExchange] = []
        for number in sorted(awaited - posted.keys()):
            same = posted.get(number + len(posted))
            if same is not None:
                self.carried.append(same._replace(number=number, batch=same.batch - len(posted)))
        self.own = posted.keys() - {exchange.number + len(posted) for exchange in self.carried}
        self.known = posted.keys() | {exchange.number for exchange in self.carried}
        self.posted_numbers = sorted(posted)
        self.ops: list[OpSpan] = []
        self.open_ops: list[tuple[str, int]] = []
        self.keeps_past = any(isinstance(event, StreamWait) for event in self.steps.events)

    # ---- launches

    def launch_until(self, count: int) -> None:
        """Run the launches before number `count`."""
        kinds, order, free = self.steps.kinds, self.steps.order, self.free
        for number in range(self.num_launched, count):
            index = order[number]
            kind = kinds[index]
            self.host += self.host_seconds[index]
            before = free[kind.stream]
            start = before if before > self.host or not kind.work.launches else self.host
            self.starts[number] = start
            if kind.work.launches:
                if start > before and kind.stream == COMPUTE:
                    self.waits[BY_HOST] += start - before
                free[kind.stream] = start + self.seconds[index]
            if self.keeps_past:
                launches, ends = self.past[kind.stream]
                launches.append(number)
                ends.append(free[kind.stream])
        self.num_launched = max(self.num_launched, count)

    def hold_back(self, until: float, cause: str) -> None:
        """Block compute before `until`."""
        now = self.free[COMPUTE]
        if until > now:
            self.waits[cause] += until - now
            self.free[COMPUTE] = until

    # ---- events

    def do(self, event: Event) -> None:
        """Process an event that does not depend on other ranks."""
        if isinstance(event, Wait):
            self.await_exchange(event.number)
        elif isinstance(event, HostRead):
            self.host = max(self.host, self.free[COMPUTE] + self.costs.read)
        elif isinstance(event, StreamWait):
            self.await_stream(event)
        elif isinstance(event, OpBegins):
            self.open_ops.append((event.name, self.num_launched))
        elif isinstance(event, OpEnds):
            self.end_op()

    def await_exchange(self, number: int) -> None:
        span = self.spans.get(number)
        if span is None:  # of an earlier step, without a like in this one
            return
        now = self.free[COMPUTE]
        self.hold_back(min(span.end, max(now, span.others)), BUBBLE)
        self.hold_back(span.end, span.exchange.group)

    def await_stream(self, event: StreamWait) -> None:
        until = self.free[event.other]
        if event.until < self.num_launched:
            launches, ends = self.past[event.other]
            before = bisect_left(launches, event.until)
            until = ends[before - 1] if before else 0.0
        if event.stream == HOST:
            self.host = max(self.host, until)
        elif event.stream == COMPUTE:
            self.hold_back(until, COPIES)
        else:
            self.free[event.stream] = max(self.free[event.stream], until)

    def end_op(self) -> None:
        name, first = self.open_ops.pop()
        kinds, order = self.steps.kinds, self.steps.order
        own = (number for number in range(first, self.num_launched) if kinds[order[number]].stream == COMPUTE)
        begun = next(own, None)
        if begun is not None:
            self.ops.append(OpSpan(name, self.starts[begun], self.free[COMPUTE]))

    # ---- exchanges

    def posted(self, exchange: PostedExchange) -> Posted:
        self.host += self.costs.post
        return Posted(exchange, max(self.host, self.free[COMPUTE]))

    def there(self, posted: Posted) -> float:
        """Return when this rank can take part."""
        exchange = posted.exchange
        return max(posted.ready, self.lanes[exchange.lane], self.ports[exchange.lane, exchange.verb])

    def end_exchange(self, span: ExchangeSpan, is_last: bool) -> None:
        """Record the end of an exchange. `is_last` says whether it is the last of its batch."""
        lane = span.exchange.lane
        self.spans[span.exchange.number] = span
        self.batch_ends[lane] = max(self.batch_ends[lane], span.end)
        self.ports[lane, span.exchange.verb] = span.end
        if is_last:
            self.lanes[lane] = self.batch_ends[lane]

    # ---- the end

    def end(self) -> float:
        return max([0.0, *self.free.values(), *(self.spans[number].end for number in self.own)])

    def result(self, step: float) -> RankTimeline:
        """Return the rank's timeline, given the job's step in seconds."""
        while self.open_ops:
            self.end_op()
        for number in self.own:
            self.await_exchange(number)
        self.hold_back(max(self.free.values(), default=0.0), COPIES)
        self.hold_back(step, BUBBLE)
        counts = Counter(self.steps.order)
        computing = [i for i, kind in enumerate(self.steps.kinds) if kind.stream == COMPUTE]
        return RankTimeline(
            self.steps,
            starts=self.starts,
            seconds=self.seconds,
            exchanges=[self.spans[number] for number in self.posted_numbers],
            ops=sorted(self.ops, key=lambda op: op.start),
            busy=sum(self.seconds[i] * counts[i] for i in computing if self.steps.kinds[i].work.launches),
            waits=dict(self.waits),
        )


@dataclass
class SharedLane:
    """The exchanges of a communicator that its recorded ranks have posted and not started, in batches."""

    connection: Connection
    batches: dict[int, deque[list[Posted]]]

    def post(self, rank: int, posted: Posted) -> None:
        own = self.batches[rank]
        if own and own[-1][-1].exchange.batch == posted.exchange.batch:
            own[-1].append(posted)
        else:
            own.append([posted])

    def next(self) -> dict[int, Posted] | None:
        """Return the exchange that can start now as {rank: its side}, or None."""
        firsts = {rank: own[0] for rank, own in self.batches.items() if own}
        are_collectives = all(batch[0].exchange.peer is None for batch in firsts.values())
        if len(firsts) == len(self.batches) and are_collectives:
            return {rank: batch[0] for rank, batch in firsts.items()}
        for rank, batch in firsts.items():
            for posted in batch:
                peer = posted.exchange.peer
                if peer is None:
                    continue
                if peer not in self.batches:
                    return {rank: posted}
                for other in firsts.get(peer, []):
                    if other.exchange.peer == rank and other.exchange.verb != posted.exchange.verb:
                        return {rank: posted, peer: other}
        return None

    def take(self, rank: int, posted: Posted) -> bool:
        """Remove an exchange. Return whether it was the last of its batch."""
        batch = self.batches[rank][0]
        batch.remove(posted)
        if not batch:
            self.batches[rank].popleft()
        return not batch


@dataclass
class Clock:
    """ranks: by number. lanes: those that they have posted in."""

    costs: Costs
    ranks: dict[int, RankClock]
    lanes: dict[Connection, SharedLane] = field(default_factory=dict)

    def start_carried(self) -> None:
        """Start the exchanges that are in flight when the step begins."""
        touched: dict[Connection, SharedLane] = {}
        for rank, state in self.ranks.items():
            for exchange in state.carried:
                lane = touched[exchange.lane] = self.lane(exchange.lane)
                lane.post(rank, Posted(exchange, ready=0.0))
        self.start_all(touched)

    def advance(self, rank: int) -> set[int]:
        """Run a rank until it waits for an exchange that cannot start.
        Return the ranks whose exchanges have started."""
        state = self.ranks[rank]
        events = state.steps.events
        touched: dict[Connection, SharedLane] = {}
        moved: set[int] = set()
        while state.num_events < len(events):
            event = events[state.num_events]
            state.launch_until(event.time)
            if isinstance(event, Wait) and event.number in state.known and event.number not in state.spans:
                moved |= self.start_all(touched)
                if event.number not in state.spans:
                    return moved
            state.num_events += 1
            if isinstance(event, PostedExchange):
                lane = touched[event.lane] = self.lane(event.lane)
                lane.post(rank, state.posted(event))
            else:
                state.do(event)
        state.launch_until(len(state.steps.order))
        state.has_ended = True
        return moved | self.start_all(touched)

    def lane(self, connection: Connection) -> SharedLane:
        if connection not in self.lanes:
            members = [rank for rank in connection[1] if rank in self.ranks]
            self.lanes[connection] = SharedLane(connection, {rank: deque() for rank in members})
        return self.lanes[connection]

    def start_all(self, touched: dict[Connection, SharedLane]) -> set[int]:
        """Start everything that can start in these lanes, and clear them."""
        moved: set[int] = set()
        for lane in touched.values():
            while (sides := lane.next()) is not None:
                self.start(lane, sides)
                moved |= set(sides)
        touched.clear()
        return moved

    def start(self, lane: SharedLane, sides: dict[int, Posted]) -> None:
        there = {rank: self.ranks[rank].there(side) for rank, side in sides.items()}
        start = max(there.values())
        end = start + max(self.costs.exchange(rank, side.exchange) for rank, side in sides.items())
        sends = [(rank, side.exchange.number) for rank, side in sides.items() if side.exchange.verb == "send"]
        sender = sends[0] if sends and len(sides) == 2 else None
        for rank, side in sides.items():
            others = max((time for other, time in there.items() if other != rank), default=0.0)
            is_last = lane.take(rank, side)
            span = ExchangeSpan(side.exchange, start, end, others, sender)
            self.ranks[rank].end_exchange(span, is_last)
