"""Check that the ranks' exchanges match, before any of them starts.

`check` runs everything that each rank posts and awaits under the rules of a transport, without time:

    nccl    exchanges of a lane (parallel/wire/lanes.py) run one after the other, in the order in which a rank
            posted them; those posted together run together
    gloo    exchanges of a lane run side by side; those of one kind between two ranks in order

On both, a send ends with its receive, a collective needs all ranks of its lane, and a wait blocks whatever
the rank does after it. A GPU's host does not block there, but anything it posts is queued behind the wait on
the compute stream.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from parallel.wire.connection import Connection
from parallel.wire.lanes import PostedExchange, Wait
from plan.record.events import Event, without_collection

TRANSPORTS = ("nccl", "gloo")
TRANSFERS = ("send", "receive")
MAX_NAMED = 8  # ranks named in a message


@without_collection()
def check(events: Mapping[int, Sequence[Event]], transport: str) -> list[str]:
    """Return the errors in the exchanges of these ranks, [] if all complete.

    `events` holds those of each checked rank. Missing ranks are assumed to do what is expected of them.
    """
    job = Exchanges({rank: deque(own) for rank, own in events.items()}, transport)
    while job.advance():
        pass
    return job.findings or job.stuck()


@dataclass
class Exchanges:
    """events: of each rank, not reached yet. under_way: for each lane and rank, unfinished batches that were
    posted there."""

    events: dict[int, deque[Event]]
    transport: str
    under_way: dict[Connection, dict[int, deque[list[PostedExchange]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(deque))
    )
    pending: set[tuple[int, int]] = field(default_factory=set)  # unfinished (rank, number)
    findings: list[str] = field(default_factory=list)

    def advance(self) -> bool:
        """Advance whatever can proceed now. Return whether anything did."""
        if self.findings:
            return False
        moved = [self.advance_rank(rank) for rank in self.events]
        moved += [self.advance_lane(lane) for lane in list(self.under_way)]
        return any(moved)

    def advance_rank(self, rank: int) -> bool:
        """Post up to the first wait for something unfinished."""
        own = self.events[rank]
        before = len(own)
        while own:
            event = own[0]
            if isinstance(event, Wait) and (rank, event.number) in self.pending:
                break
            own.popleft()
            if isinstance(event, PostedExchange):
                self.post(rank, event)
        return len(own) < before

    def post(self, rank: int, exchange: PostedExchange) -> None:
        self.pending.add((rank, exchange.number))
        batches = self.under_way[exchange.lane][rank]
        if batches and batches[-1][-1].batch == exchange.batch:
            batches[-1].append(exchange)
        else:
            batches.append([exchange])

    # ---- a lane

    def advance_lane(self, lane: Connection) -> bool:
        queues = self.under_way[lane]
        moved = self.meet_collectives(lane, queues)
        for rank, batches in queues.items():
            for batch in self.running(batches):
                for exchange in list(batch):
                    if exchange.verb in TRANSFERS and self.meets(lane, rank, exchange):
                        moved = True
        return moved

    def running(self, batches: deque[list[PostedExchange]]) -> list[list[PostedExchange]]:
        """Return the batches of a rank in a lane that the transport runs now."""
        return list(batches) if self.transport == "gloo" else list(batches)[:1]

    def meet_collectives(self, lane: Connection, queues: dict[int, deque[list[PostedExchange]]]) -> bool:
        """End a collective that every rank of the lane has reached."""
        _, ranks = lane
        members = [rank for rank in ranks if rank in self.events]
        firsts = {rank: self.first_collective(queues[rank]) for rank in members}
        if not all(firsts.values()):
            return False
        one = firsts[members[0]]
        for rank, other in firsts.items():
            assert one is not None and other is not None
            if (one.verb, one.dtype) != (other.verb, other.dtype) or not same_size(one, other):
                self.findings.append(
                    f"{to_text(lane)}: rank {members[0]} runs {one}, where rank {rank} runs {other}"
                )
                return False
        for rank, exchange in firsts.items():
            assert exchange is not None
            self.end(rank, exchange)
        return True

    def first_collective(self, batches: deque[list[PostedExchange]]) -> PostedExchange | None:
        """Return the next collective on a rank, or None if it is preceded by a transfer (which gloo may
        allow)."""
        for batch in batches:
            if batch[0].verb not in TRANSFERS:
                return batch[0]
            if self.transport == "nccl":
                return None
        return None

    def meets(self, lane: Connection, rank: int, exchange: PostedExchange) -> bool:
        """End a transfer if its other side has been posted."""
        peer = exchange.peer
        if peer not in self.events:
            self.end(rank, exchange)
            return True
        other = self.other_side(lane, rank, exchange)
        if other is None:
            return False
        if other.nbytes != exchange.nbytes or other.dtype != exchange.dtype:
            self.findings.append(f"{to_text(lane)}: rank {rank} has {exchange}, and rank {peer} {other}")
        assert peer is not None
        self.end(rank, exchange)
        self.end(peer, other)
        return True

    def other_side(self, lane: Connection, rank: int, exchange: PostedExchange) -> PostedExchange | None:
        """Return the other end of a transfer if both are the first of their kind between these ranks."""
        peer = exchange.peer
        assert peer is not None
        verb = "receive" if exchange.verb == "send" else "send"
        is_first = self.first_transfer(lane, rank, exchange.verb, peer) is exchange
        return self.first_transfer(lane, peer, verb, rank) if is_first else None

    def first_transfer(self, lane: Connection, rank: int, verb: str, peer: int) -> PostedExchange | None:
        for batch in self.running(self.under_way[lane][rank]):
            for exchange in batch:
                if exchange.verb == verb and exchange.peer == peer:
                    return exchange
        return None

    def end(self, rank: int, exchange: PostedExchange) -> None:
        self.pending.discard((rank, exchange.number))
        batches = self.under_way[exchange.lane][rank]
        batch = next(batch for batch in batches if exchange in batch)
        batch.remove(exchange)
        if not batch:
            batches.remove(batch)

    # ---- deadlocks

    def stuck(self) -> list[str]:
        """Return where each unfinished rank is stuck, and which exchanges nobody meets."""
        lines: list[str] = []
        for rank, own in self.events.items():
            if own:
                lines.append(f"rank {rank} waits forever: {self.why(rank, own[0])}")
        if lines:
            return lines[:MAX_NAMED] + ([f"and {len(lines) - MAX_NAMED} more"] if lines[MAX_NAMED:] else [])
        for lane, queues in self.under_way.items():
            for rank, batches in queues.items():
                for exchange in (exchange for batch in batches for exchange in batch):
                    lines.append(f"{to_text(lane)}: rank {rank} posts {exchange}, which nobody meets")
        return lines[:MAX_NAMED]

    def why(self, rank: int, event: Event) -> str:
        """Explain what blocks the exchange that a rank waits for."""
        for lane, queues in self.under_way.items():
            for place, batch in enumerate(queues[rank]):
                for exchange in batch:
                    if exchange.number == event.number:
                        before = queues[rank][0][0]
                        behind = f", behind {before}" if place else ""
                        return f"{exchange} in {to_text(lane)}{behind}"
        return str(event)


def same_size(one: PostedExchange, other: PostedExchange) -> bool:
    """Return whether two sizes match. The ranks of an all-to-all have different message sizes."""
    return one.verb == "all_to_all" or one.nbytes == other.nbytes


def to_text(lane: Connection) -> str:
    """Format as "ranks 0, 1 (backward)"."""
    channel, ranks = lane
    shown = [*ranks[:4], "..."] if len(ranks) > 5 else ranks
    return f"ranks {', '.join(map(str, shown))}" + (f" ({channel})" if channel else "")
