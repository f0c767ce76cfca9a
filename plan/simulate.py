"""Time a pipeline schedule: an event simulation over the very lists that the runtime executes (parallel/schedule.py).

A rank computes one op at a time; transfers run beside the computation and delay only who waits for them. Times are in
any unit, and exact where they are given as ints or Fractions. The closed forms of the papers are here too, with their
sources (`closed_form`); tests hold that simulation and formula agree exactly.
"""
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from parallel.schedule import Op, Order, Schedule, needs, walk

Cost = Mapping[str, float | Sequence[float]]  # kind -> time of one op, or one time a stage


class Span(NamedTuple):
    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What ran when: ranks[r] is rank r's spans in order. Simulated here, or measured by a run."""
    ranks: list[list[Span]]

    @property
    def makespan(self) -> float:
        """From the first start on any rank to the last end: what a step with a barrier at its end takes."""
        spans = [s for spans in self.ranks for s in spans]
        return max(s.end for s in spans) - min(s.start for s in spans)

    def busy(self, r: int) -> float:
        """Time in which rank r computes. Overlapped ops count once."""
        ends = accumulate((s.end for s in self.ranks[r]), max, initial=self.ranks[r][0].start)
        return sum(max(0, s.end - max(s.start, end)) for s, end in zip(self.ranks[r], ends))

    def wall(self, r: int) -> float:
        """From rank r's first start to its last end."""
        return max(s.end for s in self.ranks[r]) - self.ranks[r][0].start

    @property
    def bubble(self) -> float:
        """The papers' bubble, in time: what the most idle rank waits between its first op and its last."""
        return max(self.wall(r) - self.busy(r) for r in range(len(self.ranks)))

    def idle(self, r: int) -> float:
        """Time of the whole step in which rank r computes nothing, its late start and early end included."""
        return self.makespan - self.busy(r)

    def memory(self, r: int) -> list[tuple[float, int]]:
        """[(time, chunks of activations held from then on)] of rank r: taken at the start of F, freed after B or W."""
        took = [(s.start, 1) for s in self.ranks[r] if s.op.kind == "F"]
        freed = [(s.end, -1) for s in self.ranks[r] if s.op.kind in "BW"]
        curve: dict[float, int] = {}
        for time, held in accumulate(sorted(took + freed), lambda a, b: (b[0], a[1] + b[1])):
            curve[time] = held  # at equal times the freed come first: the last entry stands
        return list(curve.items())


def simulate(order: Order, n_stages: int, cost: Cost, hop: float = 0, overlap: float | None = None) -> Timeline:
    """The timeline of `order`.

    cost: times of F, B, I and W; without B it is I + W. hop: time of one transfer between ranks. overlap: an F and a B
    of another chunk right after it start together and take this share of the sum of their times (DualPipe's F&B); none:
    one after the other. Raises ValueError for a list that cannot finish.
    """
    def time(op: Op) -> float:
        if op.kind == "B" and "B" not in cost:
            return time(op._replace(kind="I")) + time(op._replace(kind="W"))
        t = cost[op.kind]
        return t[op.stage] if isinstance(t, Sequence) else t

    steps = [[(op,) for op in ops] if overlap is None else paired(ops) for ops in order]
    home = {op.stage: r for r, ops in enumerate(order) for op in ops}
    end: dict[Op, float] = {}
    clock = [0] * len(order)
    ranks: list[list[Span]] = [[] for _ in order]
    for r, step in walk(steps, n_stages):
        ready = [end[n] + (hop if home[n.stage] != r else 0) for op in step for n in needs(op, n_stages)]
        start = max([clock[r], *ready])
        clock[r] = start + sum(map(time, step)) * (overlap if len(step) > 1 else 1)
        for op in step:
            ranks[r].append(Span(op, start, clock[r]))
            end[op] = clock[r]
            if op.kind == "I":
                end[op._replace(kind="B")] = clock[r]
    return Timeline(ranks)


def paired(ops: list[Op]) -> list[tuple[Op, ...]]:
    """One rank's ops as steps, in which an F and a B of another chunk right after it are one."""
    steps: list[tuple[Op, ...]] = []
    for op in ops:
        if op.kind == "B" and steps and steps[-1][-1].kind == "F" and steps[-1][-1].stage != op.stage:
            steps[-1] = (*steps[-1], op)
        else:
            steps.append((op,))
    return steps


def share(schedule: Schedule, f: float, i: float, w: float) -> dict[str, float]:
    """The cost of one op where F, I and W of all the chunks of a rank take f, i and w."""
    v = schedule.chunks
    return {"F": f / v, "I": i / v, "W": w / v, "B": (i + w) / v}


PEAKS = {  # the most activations that a rank holds, in microbatches of its whole share
    "gpipe": "m",
    "1f1b": "min(p-r, m) on rank r",
    "interleaved": "p+(p-1)/v",
    "zb-h1": "p",
    "zb-v": "p",
    "dualpipe-v": "p+1/2",
}


def closed_form(kind: str, p: int, m: int, v: int, f: float, i: float, w: float, overlap: float | None = None):
    """(formula, value) of `Timeline.bubble`, in the units of `share`, B = I + W; None where no exact one is known.

    gpipe, 1f1b, interleaved   arXiv 2104.04473, sections 2.2.1 and 2.2.2.
    zb-h1                      arXiv 2401.10241, table 2, for W <= F, I. With fewer microbatches than ranks fewer W
                               fill it.
    zb-v                       arXiv 2401.10241, section 6: zero for F = I = W. For W <= F <= I, and for fewer than
                               2p - 1 microbatches, it is what our simulation shows.
    dualpipe-v                 github.com/deepseek-ai/DualPipe, README: (PP/2-1)(F&B+B-3W) of chunks, PP = 2p of them,
                               for F = I >= W and B <= F&B <= F + B. It counts the idle time of the last rank, which
                               has the most pairs, in the whole step. Without overlap an F does not wait until the B
                               beside it can start: half of ZB-H1's (our simulation).
    """
    b = i + w
    if kind in ("gpipe", "1f1b"):
        return "(p-1)(F+B)", (p - 1) * (f + b)
    if kind == "interleaved":
        return "(p-1)(F+B)/v", (p - 1) * (f + b) / v
    if kind == "zb-h1" and w <= min(f, i):
        if m >= p:
            return "(p-1)(F+B-2W)", (p - 1) * (f + b - 2 * w)
        return "(p-1)(F+I)-(m-1)W", (p - 1) * (f + i) - (m - 1) * w
    if kind == "zb-v" and m >= 2 * p - 1 and w <= f <= i:
        return "(p-1)(I-W)", (p - 1) * (i - w)
    if kind == "zb-v" and f == i == w:
        return "(2p-1-m)F", (2 * p - 1 - m) * f
    if kind == "dualpipe-v" and m >= 2 * p and f == i >= w:
        if overlap is None:
            return "(p-1)(F+B-2W)/2", (p - 1) * (f + b - 2 * w) / 2
        if b <= overlap * (f + b) <= f + b:
            return "(p-1)(F&B+B-3W)/2", (p - 1) * (overlap * (f + b) + b - 3 * w) / 2
    return None
