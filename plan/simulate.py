"""Simulate a pipeline schedule event by event, on the same op lists that the runtime executes
(parallel/pipeline/schedule.py).

A rank computes one op at a time. Transfers overlap compute. In `simulate` they only delay the op that waits
for them; in `simulate_on_lanes` they also wait for each other, as NCCL's do in a communicator. Times
are in any unit, and exact if given as ints or Fractions. The papers' closed forms are included with their
sources (`closed_form`); tests check that simulation and formula agree exactly.
"""
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from parallel.pipeline.schedule import (
    COMPUTE_KINDS,
    Op,
    Order,
    Schedule,
    StagePlacement,
    dependencies,
    goes_down,
    matching_transfer,
    simulate_order,
    transfers_of,
)

OpTimes = Mapping[str, float | Sequence[float]]  # kind -> time of one op, or one time for each stage


class Span(NamedTuple):
    """The time span of an op."""
    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of all ranks, simulated or measured. ranks[rank]: its spans in order, at least one."""
    ranks: list[list[Span]]

    @property
    def start(self) -> float:
        return min(spans[0].start for spans in self.ranks)

    @property
    def makespan(self) -> float:
        """From the first start on any rank to the last end: the time of a step with a barrier at its end."""
        return max(spans[-1].end for spans in self.ranks) - self.start

    def busy(self, rank: int) -> float:
        """Return the time in which the rank computes. Overlapping ops count once."""
        computed: float = 0
        computed_until = self.ranks[rank][0].start
        for span in self.ranks[rank]:
            computed += max(0, span.end - max(span.start, computed_until))
            computed_until = max(computed_until, span.end)
        return computed

    def wall(self, rank: int) -> float:
        """Return the time from the rank's first start to its last end."""
        spans = self.ranks[rank]
        return spans[-1].end - spans[0].start

    @property
    def bubble(self) -> float:
        """The papers' bubble as a time: the longest idle time of a rank between its first and its last op."""
        return max(self.wall(rank) - self.busy(rank) for rank in range(len(self.ranks)))

    def idle(self, rank: int) -> float:
        """Return the rank's idle time in the whole step, including its late start and early end."""
        return self.makespan - self.busy(rank)

    def memory(self, rank: int) -> list[tuple[float, int]]:
        """Return [(time, activation chunks held from then on)]: from the start of F to the end of B or W."""
        changes: list[tuple[float, int]] = []
        for span in self.ranks[rank]:
            if span.op.kind == "F":
                changes.append((span.start, 1))
            elif span.op.kind in "BW":
                changes.append((span.end, -1))

        changes.sort()  # at equal times, frees come first
        held = accumulate(change for _, change in changes)
        curve: dict[float, int] = {}
        for (time, _), chunks in zip(changes, held):
            curve[time] = chunks  # the last entry at a time wins
        return list(curve.items())


# ---- the simulation ----------------------------------------------------------------------------------------


def simulate(order: Order, n_stages: int, times: OpTimes, hop: float = 0,
             overlap: float | None = None) -> Timeline:
    """Return the timeline of `order`.

    times: of F, B, I and W; without B it is I + W. hop: time of one transfer between ranks. overlap: an F and
    a directly following B of another chunk start together and take this fraction of the sum of their times
    (DualPipe's F&B), or None to run them one after the other. Raises ValueError for a list that deadlocks.
    """
    steps = single_or_paired_steps(order, overlap is not None)
    rank_of_stage = {op.stage: rank for rank, ops in enumerate(order) for op in ops}
    end: dict[Op, float] = {}
    rank_is_free_at: list[float] = [0] * len(order)
    spans: list[list[Span]] = [[] for _ in order]

    for rank, step in simulate_order(steps, n_stages):
        start = rank_is_free_at[rank]
        for op in step:
            for needed in dependencies(op, n_stages):
                delay = hop if rank_of_stage[needed.stage] != rank else 0
                start = max(start, end[needed] + delay)

        seconds = sum(op_time(op, times) for op in step)
        if overlap is not None and len(step) > 1:
            seconds *= overlap
        rank_is_free_at[rank] = start + seconds

        for op in step:
            spans[rank].append(Span(op, start, start + seconds))
            end[op] = start + seconds
            if op.kind == "I":  # the previous stage only waits for this
                end[op._replace(kind="B")] = start + seconds
    return Timeline(spans)


class Posts(NamedTuple):
    """What a rank posts and waits for around an op.

    receives: posted before it. awaited: transfers that end before it starts. sends: posted after it.
    """
    receives: list[Op]
    awaited: list[Op]
    sends: list[Op]


def read_posts(lowered: Order, rank_of_stage: StagePlacement) -> dict[Op, Posts]:
    """Return {op: what its rank posts and waits for around it}."""
    posts: dict[Op, Posts] = {}
    for ops in lowered:
        receives: list[Op] = []
        awaited: list[Op] = []
        last: Op | None = None
        for op in ops:
            if op.kind in ("RF", "RB"):
                receives.append(op)
            elif op.kind in ("EF", "EB"):
                awaited.append(op._replace(kind=f"S{op.kind[1]}"))
            elif op.kind in ("SF", "SB"):
                assert last is not None  # a send follows its op
                posts[last].sends.append(op)
            else:
                own, _ = transfers_of(op, rank_of_stage)
                posts[op] = Posts(receives, [*awaited, *([own] if own else [])], [])
                receives, awaited, last = [], [], op
    return posts


class Lanes:
    """The transfers of a pipeline: on each rank a lane for those down and one for those up (goes_down).

    A transfer starts once it is the first of its lane on both ranks, the sender has computed what it sends,
    and the receiver has computed what was queued before it posted the receive.
    ended: {transfer, both its ends: the time}.
    """

    def __init__(self, rank_of_stage: StagePlacement, hop: float) -> None:
        self.rank_of_stage = rank_of_stage
        self.hop = hop
        self.ended: dict[Op, float] = {}
        self.queues: defaultdict[tuple[int, bool], deque[tuple[Op, float]]] = defaultdict(deque)
        self.free_at: defaultdict[tuple[int, bool], float] = defaultdict(float)

    def post(self, rank: int, transfers: Sequence[Op], time: float) -> None:
        for transfer in transfers:
            self.queues[rank, goes_down(transfer, self.rank_of_stage)].append((transfer, time))

    def run(self) -> bool:
        """Run the transfers that can start; return whether there were any."""
        num_ended = len(self.ended)
        for lane in list(self.queues):
            while self.run_first(lane):
                pass
        return len(self.ended) > num_ended

    def run_first(self, lane: tuple[int, bool]) -> bool:
        """Run the first transfer of a rank's lane if it is a send whose receive is first, too."""
        queue = self.queues[lane]
        if not queue or queue[0][0].kind[0] != "S":
            return False
        send, computed = queue[0]
        receive = matching_transfer(send)
        other_lane = self.rank_of_stage[receive.stage], lane[1]
        others = self.queues[other_lane]
        if not others or others[0][0] != receive:
            return False
        end = max(computed, others[0][1], self.free_at[lane], self.free_at[other_lane]) + self.hop
        self.free_at[lane] = self.free_at[other_lane] = self.ended[send] = self.ended[receive] = end
        queue.popleft()
        others.popleft()
        return True


def simulate_on_lanes(
    lowered: Order, rank_of_stage: StagePlacement, times: OpTimes, hop: float = 0,
    overlap: float | None = None,
) -> Timeline:
    """Return the timeline of ops with transfers (add_transfers), which run on lanes as a GPU runs them.

    The other arguments are those of `simulate`. Raises ValueError if the lists block. If they do not, they do
    not block with any times: nothing chooses.
    """
    posts = read_posts(lowered, rank_of_stage)
    order = [[op for op in ops if op.kind in COMPUTE_KINDS] for ops in lowered]
    waiting = [deque(steps) for steps in single_or_paired_steps(order, overlap is not None)]
    lanes = Lanes(rank_of_stage, hop)
    free_at: list[float] = [0] * len(order)
    spans: list[list[Span]] = [[] for _ in order]
    for rank, steps in enumerate(waiting):
        post_receives(lanes, rank, steps, posts, time=0)

    has_moved = True
    while has_moved:
        has_moved = lanes.run()
        for rank, steps in enumerate(waiting):
            while steps and not unfinished_transfers(steps[0], posts, lanes):
                step = steps.popleft()
                awaited = [lanes.ended[transfer] for op in step for transfer in posts[op].awaited]
                start = max([free_at[rank], *awaited])
                seconds = sum(op_time(op, times) for op in step)
                if overlap is not None and len(step) > 1:
                    seconds *= overlap
                free_at[rank] = start + seconds
                spans[rank] += [Span(op, start, start + seconds) for op in step]
                lanes.post(rank, [send for op in step for send in posts[op].sends], free_at[rank])
                post_receives(lanes, rank, steps, posts, time=free_at[rank])
                has_moved = True

    waits: list[str] = []
    for rank, steps in enumerate(waiting):
        if steps:
            missing = unfinished_transfers(steps[0], posts, lanes)
            waits.append(f"rank {rank} at {steps[0][0]} waits for {missing[0]}")
    for (rank, _), queue in lanes.queues.items():
        if queue:
            waits.append(f"{queue[0][0]} is first in a lane of rank {rank}")
    if waits:
        raise ValueError("deadlock: " + ", ".join(waits))
    return Timeline(spans)


def post_receives(
    lanes: Lanes, rank: int, steps: deque[tuple[Op, ...]], posts: Mapping[Op, Posts], *, time: float
) -> None:
    """Post the receives of the rank's next step."""
    if steps:
        lanes.post(rank, [receive for op in steps[0] for receive in posts[op].receives], time)


def unfinished_transfers(step: tuple[Op, ...], posts: Mapping[Op, Posts], lanes: Lanes) -> list[Op]:
    """Return the transfers that a step waits for."""
    awaited = [transfer for op in step for transfer in posts[op].awaited]
    return [transfer for transfer in awaited if transfer not in lanes.ended]


def op_time(op: Op, times: OpTimes) -> float:
    """Return the time of one op alone."""
    if op.kind == "B" and "B" not in times:
        parts = (op._replace(kind="I"), op._replace(kind="W"))
        return sum(op_time(part, times) for part in parts)
    time = times[op.kind]
    return time[op.stage] if isinstance(time, Sequence) else time


def single_or_paired_steps(order: Order, overlaps: bool) -> list[list[tuple[Op, ...]]]:
    """Return the steps of each rank: ops that start together."""
    if overlaps:
        return [paired(ops) for ops in order]
    return [[(op,) for op in ops] for ops in order]


def paired(ops: list[Op]) -> list[tuple[Op, ...]]:
    """Group a rank's ops into steps: an F and a directly following B of another chunk form one."""
    steps: list[tuple[Op, ...]] = []
    before: Op | None = None
    for op in ops:
        is_pair = before is not None and before.stage != op.stage and before.kind + op.kind == "FB"
        if is_pair:
            steps[-1] = (*steps[-1], op)
        else:
            steps.append((op,))
        before = op
    return steps


def share(schedule: Schedule, f: float, i: float, w: float) -> dict[str, float]:
    """Return the time of one op, if F, I and W of all the chunks of a rank take f, i and w."""
    chunks = schedule.chunks
    return {"F": f / chunks, "I": i / chunks, "W": w / chunks, "B": (i + w) / chunks}


# ---- closed forms ------------------------------------------------------------------------------------------

PEAKS = {  # peak activations of a rank, in microbatches of its whole share
    "gpipe": "m",
    "1f1b": "min(p-r, m) on rank r",
    "interleaved": "p+(p-1)/v",
    "zb-h1": "p",
    "zb-v": "p",
    "dualpipe-v": "p+1/2",
}


def closed_form(
    kind: str,
    p: int,
    m: int,
    v: int,
    f: float,
    i: float,
    w: float,
    overlap: float | None = None,
) -> tuple[str, float] | None:
    """Return (formula, value) of `Timeline.bubble`, in the units of `share`, or None if no exact one is
    known.

    p: ranks; m: microbatches; v: chunks of a rank; f, i, w: of all its chunks; B = I + W.

    gpipe, 1f1b, interleaved   arXiv 2104.04473, sections 2.2.1 and 2.2.2.
    zb-h1                      arXiv 2401.10241, table 2, for W <= F, I. With fewer microbatches than ranks
                               fewer W fill it.
    zb-v                       arXiv 2401.10241, section 6: zero for F = I = W. For W <= F <= I, and for fewer
                               than 2p - 1 microbatches, it is the result of our simulation.
    dualpipe-v                 github.com/deepseek-ai/DualPipe, README: (PP/2-1)(F&B+B-3W) of chunks, PP = 2p
                               of them, for F = I >= W and B <= F&B <= F + B. It counts the idle time of the
                               last rank, which has the most pairs, in the whole step. Without overlap an F
                               does not wait until its paired B can start: half of ZB-H1's (our
                               simulation).
    """
    b = i + w
    both = f + b
    if kind in ("gpipe", "1f1b"):
        return "(p-1)(F+B)", (p - 1) * both
    if kind == "interleaved":
        return "(p-1)(F+B)/v", (p - 1) * both / v

    if kind == "zb-h1" and w <= min(f, i):
        if m >= p:
            return "(p-1)(F+B-2W)", (p - 1) * (both - 2 * w)
        waits = (p - 1) * (f + i)
        return "(p-1)(F+I)-(m-1)W", waits - (m - 1) * w

    if kind == "zb-v":
        missing = 2 * p - 1 - m  # missing microbatches
        if missing <= 0 and w <= f <= i:
            return "(p-1)(I-W)", (p - 1) * (i - w)
        if f == i == w:
            return "(2p-1-m)F", missing * f

    if kind == "dualpipe-v" and m >= 2 * p and f == i >= w:
        if overlap is None:
            return "(p-1)(F+B-2W)/2", (p - 1) * (both - 2 * w) / 2
        pair = overlap * both  # F&B
        if b <= pair <= both:
            return "(p-1)(F&B+B-3W)/2", (p - 1) * (pair + b - 3 * w) / 2
    return None
