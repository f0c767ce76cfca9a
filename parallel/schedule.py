"""Pipeline schedules as data: pure functions from (ranks, microbatches) to instruction lists.

A schedule is `list[list[Op]]`: for each pipeline rank the ops that it runs, in order. Nothing here touches a tensor or a
process; the same lists are executed (parallel/pipeline.py), timed and drawn. Gradient accumulation is the pipeline of one.

    F  forward           B  whole backward        I  gradient of inputs only      W  gradient of weights only
"""
from dataclasses import dataclass
from typing import Callable, NamedTuple

Place = Callable[[int], int]


class Op(NamedTuple):
    kind: str
    stage: int
    mb: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.mb}"  # e.g. 2F0, as torch.distributed.pipelining prints it


Order = list[list[Op]]


@dataclass(frozen=True)
class Schedule:
    order: Order
    place: Callable[[int], int]  # stage -> rank
    n_stages: int


def one_f_one_b(p: int, m: int) -> Order:
    """1F1B (arXiv 1806.03377, 2104.04473 section 2.2): p ranks of one stage each, m microbatches."""
    def rank(r: int) -> list[Op]:
        warm = min(p - r - 1, m)
        fwd, bwd = [Op("F", r, i) for i in range(m)], [Op("B", r, i) for i in range(m)]
        steady = [op for pair in zip(fwd[warm:], bwd) for op in pair]
        return fwd[:warm] + steady + bwd[m - warm:]
    return [rank(r) for r in range(p)]


def needs(op: Op, n_stages: int) -> list[Op]:
    """The ops that must have finished, on any rank, before `op` may start."""
    s, i = op.stage, op.mb
    if op.kind == "F":
        return [Op("F", s - 1, i)] if s else []
    if op.kind in "BI":
        return [Op("F", s, i)] + ([Op("B", s + 1, i)] if s < n_stages - 1 else [])
    return [Op("I", s, i)] if op.kind == "W" else []


def check(order: Order, n_stages: int, m: int) -> None:
    """Raise ValueError unless every (stage, microbatch) runs once, after what it needs, and no rank waits for ever."""
    seen = [op for ops in order for op in ops]
    for s in range(n_stages):
        for i in range(m):
            kinds = sorted(o.kind for o in seen if o.stage == s and o.mb == i)
            if kinds not in (["B", "F"], ["F", "I", "W"]):
                raise ValueError(f"stage {s}, microbatch {i} runs {kinds}")
    done, at = set(), [0] * len(order)
    while any(a < len(ops) for a, ops in zip(at, order)):
        moved = False
        for r, ops in enumerate(order):
            while at[r] < len(ops) and all(n in done for n in needs(ops[at[r]], n_stages)):
                op = ops[at[r]]
                done.add(op)
                if op.kind == "I":
                    done.add(Op("B", op.stage, op.mb))  # whoever waits for B is served by I
                at[r] += 1
                moved = True
        if not moved:
            raise ValueError("deadlock: " + ", ".join(f"rank {r} at {ops[a]}" for r, (a, ops) in enumerate(zip(at, order))
                                                      if a < len(ops)))


def lower(order: Order, place: Place, n_stages: int) -> Order:
    """Add sends and receives. The SENDER places both ends, so that any two ranks meet in the same order."""
    out: Order = [[] for _ in order]
    at, have = [0] * len(order), set()
    while any(a < len(ops) for a, ops in zip(at, order)):
        for r, ops in enumerate(order):
            if at[r] == len(ops):
                continue
            op = ops[at[r]]
            way = {"F": 1, "B": -1, "I": -1}.get(op.kind, 0)
            source, target = op.stage - way, op.stage + way
            if way and 0 <= source < n_stages and (way, op.stage, op.mb) not in have:
                continue                                        # its input has not been sent yet
            out[r].append(op)
            at[r] += 1
            if way and 0 <= target < n_stages:
                have.add((way, target, op.mb))
                if place(target) != r:
                    letter = "F" if way > 0 else "B"
                    out[r].append(Op("S" + letter, op.stage, op.mb))
                    out[place(target)].append(Op("R" + letter, target, op.mb))
    return out
