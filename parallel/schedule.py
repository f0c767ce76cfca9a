"""Pipeline schedules as data: pure functions from (ranks, microbatches, chunks) to lists of ops.

A schedule is `list[list[Op]]`: for each pipeline rank the ops that it runs, in order. Nothing here touches a tensor or
a process; the same lists are checked (`check`), given their transfers (`lower`), executed (parallel/pipeline.py), timed
(plan/simulate.py) and drawn (plan/plot.py). Gradient accumulation is the pipeline of one.

    F  forward     B  whole backward     I  gradient of the inputs only     W  gradient of the weights only (B = I + W)
    SF/RF  send / receive an activation     SB/RB  send / receive a gradient

A *stage* is a slice of the model, numbered along its depth; a *chunk* is one of the v stages that a rank owns, numbered
from 0; `place[stage]` is the rank of a stage. Each generator writes a rank's program in words, a letter and a chunk:
`F0 B1` is the next forward of chunk 0, then the next backward of chunk 1, and `W` alone the oldest weight gradient that
an I left behind. A rank's words depend on how many ranks are above it (nearer the data) and below it.
"""
import difflib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import NamedTuple

COMPUTE = ("F", "B", "I", "W")
MATES = {"SF": ("RF", 1), "RF": ("SF", -1), "SB": ("RB", -1), "RB": ("SB", 1)}  # a transfer's other end, stages away


class Op(NamedTuple):
    kind: str
    stage: int
    mb: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.mb}"  # e.g. 2F0, as torch.distributed.pipelining prints it


Order = list[list[Op]]
Place = tuple[int, ...]  # stage -> rank


@dataclass(frozen=True)
class Schedule:
    """order: each rank's ops; place[stage]: the rank that owns a stage."""
    kind: str
    order: Order
    place: Place
    microbatches: int

    @property
    def n_stages(self) -> int:
        return len(self.place)

    @property
    def chunks(self) -> int:
        return len(self.place) // len(self.order)


# ---- the schedules ---------------------------------------------------------------------------------------------------

def loop(p: int, v: int = 1) -> Place:
    """Stages go round the ranks: 0 1 2 3 0 1 2 3."""
    return tuple(range(p)) * v


def vee(p: int, v: int = 2) -> Place:
    """Stages go down the ranks and back up: 0 1 2 3 3 2 1 0. The first rank has both the first stage and the loss."""
    return (*range(p), *reversed(range(p)))


def spell(words: str, stages: Sequence[int], m: int) -> list[Op]:
    """One rank's words as ops; stages[chunk]. Words may run past m: ops of microbatches that do not exist fall out."""
    turn, owed, ops = Counter(), deque(), []
    for word in words.split():
        if word == "W":
            ops.append(owed.popleft()._replace(kind="W"))
            continue
        chunk = int(word[1:] or 0)
        count = (chunk, word[0] == "F")
        ops.append(Op(word[0], stages[chunk], turn[count]))
        turn[count] += 1
        if word[0] == "I":
            owed.append(ops[-1])
    return [op for op in ops if op.mb < m]


def write(words: Callable[[int, int], str], place: Place, m: int) -> Order:
    """The lists of all ranks from words(above, below)."""
    p = max(place) + 1
    return [spell(words(r, p - 1 - r), [s for s, rank in enumerate(place) if rank == r], m) for r in range(p)]


def gpipe(p: int, m: int) -> Order:
    """GPipe (arXiv 1811.06965): all forwards, then all backwards. Holds all m microbatches at once."""
    return write(lambda above, below: "F " * m + "B " * m, loop(p), m)


def one_f_one_b(p: int, m: int) -> Order:
    """1F1B (arXiv 1806.03377, 2104.04473 section 2.2): GPipe's bubble, but rank r holds p - r microbatches at most."""
    n = max(m, p)
    return write(lambda above, below: "F " * below + "F B " * (n - below) + "B " * below, loop(p), m)


def interleaved(p: int, m: int, v: int) -> Order:
    """Interleaved 1F1B (arXiv 2104.04473 section 2.2): v chunks a rank cut the bubble by v, for v times the transfers.

    Microbatches go in groups of p through chunk 0, then the same group through chunk 1, ...; m must be a multiple of p.
    """
    if v == 1:
        return one_f_one_b(p, m)
    if m % p:
        near = " or ".join(str(n) for n in (m // p * p, m // p * p + p) if n)
        raise ValueError(f"interleaved needs a multiple of its {p} ranks as microbatches, not {m}; take {near}")
    fwd = [f"F{k // p % v}" for k in range(m * v)]
    bwd = [f"B{v - 1 - k // p % v}" for k in range(m * v)]

    def words(above: int, below: int) -> str:
        warm = min(2 * below + (v - 1) * p, m * v)
        return " ".join([*fwd[:warm], *chain(*zip(fwd[warm:], bwd)), *bwd[m * v - warm:]])
    return write(words, loop(p, v), m)


def zero_bubble_h1(p: int, m: int) -> Order:
    """ZB-H1 (arXiv 2401.10241 section 2.2): 1F1B with B cut into I, which others wait for, and W, which nobody does.

    The W of rank r lag r behind, so that every rank holds p microbatches at most: the peak of 1F1B's first rank.
    """
    n = max(m, p)
    return write(lambda above, below: "F " * below + "F I " * above + "F I W " * (n - below - above)
                 + "I W " * below + "W " * above, loop(p), m)


def zero_bubble_v(p: int, m: int) -> Order:
    """ZB-V (arXiv 2401.10241 section 6, 2405.15362): two chunks a rank, down and back up.

    Where F = I = W and m >= 2p - 1 no rank is idle between its first op and its last. Each holds 2p chunks at most,
    which is 1F1B's peak of p whole stages.
    """
    n = max(m, 2 * p - 1)

    def words(above: int, below: int) -> str:
        return ("F0 " * (2 * below + 1) + "F1 F0 " * above + "F1 I1 W " * (below + 1)  # fill
                + "F0 I0 W F1 I1 W " * (n - 2 * p + 1 + above)  # steady: one of each, for both chunks
                + "I0 W F1 I1 W " * below + "I0 I1 " * above + "I0 W " * (below + 1) + "W " * 2 * above)  # drain
    return write(words, vee(p), m)


def dualpipe_v(p: int, m: int) -> Order:
    """DualPipe-V (DeepSeek-V3, arXiv 2412.19437, cut in half: github.com/deepseek-ai/DualPipe): a V of whole backwards.

    Most stand beside a forward of the other chunk (`F0 B1`), so that one's transfers hide behind the other's work. B is
    cut where someone waits for it: in the fill, and in the second half of the drain. Holds 2p + 1 chunks at most.
    """
    n = max(m, 2 * p)

    def words(above: int, below: int) -> str:
        steady = "F0 B1 F1 B0 " * (n - 2 * p + 1 + above)
        if not below:  # the turn of the V: its first gradient is what all others wait for
            steady = steady.replace("B1", "I1 W", 1)
        turns = above + 1
        drain = " ".join(f"{'B' if k < turns else 'I'}{1 - k % 2}" for k in range(2 * turns))
        return ("F0 " * 2 * below + "F0 F1 " * turns + "I1 W F1 " * below  # fill
                + steady + "B1 F1 B0 " * below
                + drain + " W I0" * below + " W" * turns)
    return write(words, vee(p), m)


class Kind(NamedTuple):
    make: Callable[..., Order]  # (p, m), or (p, m, v) where the chunks are the user's choice
    place: Callable[[int, int], Place]
    chunks: int | None  # stages a rank; None: any


SCHEDULES = {
    "gpipe": Kind(gpipe, loop, 1),
    "1f1b": Kind(one_f_one_b, loop, 1),
    "interleaved": Kind(interleaved, loop, None),
    "zb-h1": Kind(zero_bubble_h1, loop, 1),
    "zb-v": Kind(zero_bubble_v, vee, 2),
    "dualpipe-v": Kind(dualpipe_v, vee, 2),
}


def make(kind: str, p: int, m: int, v: int | None = None) -> Schedule:
    """The schedule `kind` on p ranks for m microbatches; v: chunks a rank (none: what the kind has; interleaved: 2).

    Raises ValueError, one line with the legal values.
    """
    if kind not in SCHEDULES:
        near = difflib.get_close_matches(kind, SCHEDULES, 1, 0.4) or [" or ".join(SCHEDULES)]
        raise ValueError(f"no schedule {kind!r}; did you mean {near[0]}?")
    if p < 1 or m < 1 or (v is not None and v < 1):
        raise ValueError(f"a schedule needs at least 1 rank, 1 microbatch and 1 chunk, not {p}, {m} and {v or 1}")
    generate, place, chunks = SCHEDULES[kind]
    if chunks is None:
        v = 2 if v is None else v
        return Schedule(kind, generate(p, m, v), place(p, v), m)
    if v not in (None, chunks):
        raise ValueError(f"{kind} has {chunks} chunk{'s' * (chunks > 1)} a rank, not {v}; interleaved takes any number")
    return Schedule(kind, generate(p, m), place(p, chunks), m)


# ---- what is true of a list ------------------------------------------------------------------------------------------

def needs(op: Op, n_stages: int) -> list[Op]:
    """The ops that must have finished, on any rank, before `op` may start; whoever needs a B is served by the I too."""
    s, i = op.stage, op.mb
    if op.kind == "F":
        return [Op("F", s - 1, i)] if s else []
    if op.kind in "BI":
        return [Op("F", s, i)] + ([Op("B", s + 1, i)] if s < n_stages - 1 else [])
    return [Op("I", s, i)]


def walk(steps: list[list[tuple[Op, ...]]], n_stages: int) -> Iterator[tuple[int, tuple[Op, ...]]]:
    """Play the lists: yields (rank, step) in an order that a run could have, the ranks taking turns, one step each.

    A step is the ops that start together: most often one. Raises ValueError naming each rank's op if all ranks wait.
    """
    done, at = set(), [0] * len(steps)
    while live := [r for r, a in enumerate(at) if a < len(steps[r])]:
        moved = False
        for r in live:
            step = steps[r][at[r]]
            if all(n in done for op in step for n in needs(op, n_stages)):
                yield r, step
                done.update(step, (op._replace(kind="B") for op in step if op.kind == "I"))
                at[r] += 1
                moved = True
        if not moved:
            lacks = [(r, op, n) for r in live for op in steps[r][at[r]] for n in needs(op, n_stages) if n not in done]
            raise ValueError("deadlock: " + ", ".join(f"rank {r} at {op} waits for {n}" for r, op, n in lacks))


def alone(order: Order) -> list[list[tuple[Op, ...]]]:
    """Each op as a step of its own."""
    return [[(op,) for op in ops] for ops in order]


def check(order: Order, n_stages: int, m: int, place: Place | None = None) -> None:
    """Raise ValueError unless every (stage, microbatch) runs once, on the rank that owns it, after what it needs, and
    no rank waits for ever. place: none for one stage a rank."""
    place = loop(n_stages) if place is None else place
    runs = defaultdict(list)
    for r, op in ((r, op) for r, ops in enumerate(order) for op in ops):
        if not (0 <= op.stage < n_stages and 0 <= op.mb < m and op.kind in COMPUTE):
            raise ValueError(f"rank {r} runs {op}: no such op among {n_stages} stages and {m} microbatches")
        if place[op.stage] != r:
            raise ValueError(f"rank {r} runs {op}, but stage {op.stage} is rank {place[op.stage]}'s")
        runs[op.stage, op.mb].append(op.kind)
    for s, i in ((s, i) for s in range(n_stages) for i in range(m)):
        kinds = " ".join(sorted(runs[s, i]))
        if kinds not in ("B F", "F I W"):
            raise ValueError(f"stage {s} runs {kinds or 'nothing'} for microbatch {i}, not F and B, or F, I and W")
    deque(walk(alone(order), n_stages), maxlen=0)


def lower(order: Order, place: Place) -> Order:
    """Add the transfers: a send right after the op that makes its data, and the receive in the other rank's list.

    The SENDER places both ends, at one moment of a run that exists: so any two ranks meet in the same order, and the
    lists of every legal schedule meet. A receive placed where it is used would be simpler, and deadlocks two thirds of
    the interleaved schedules on a transport without buffers. Stages that neighbour on one rank (the turn of a V) need
    no transfer. Raises ValueError for an order that cannot finish.
    """
    out: Order = [[] for _ in order]
    for r, (op,) in walk(alone(order), len(place)):
        out[r].append(op)
        to = op.stage + (1 if op.kind == "F" else -1)
        if op.kind != "W" and 0 <= to < len(place) and place[to] != r:
            letter = "F" if op.kind == "F" else "B"
            out[r].append(Op("S" + letter, op.stage, op.mb))
            out[place[to]].append(Op("R" + letter, to, op.mb))
    return out


def mate(op: Op) -> Op:
    """The other end of a transfer."""
    kind, by = MATES[op.kind]
    return Op(kind, op.stage + by, op.mb)


def meets(lowered: Order) -> bool:
    """True if the lists finish on the strictest transport: nothing is buffered, and the transfers between two
    computations are one batch, which ends only when the other end of each has been posted."""
    batches = [[list(run) for moves, run in groupby(ops, lambda op: op.kind in MATES) if moves] for ops in lowered]
    posted, at, moved = set(), [0] * len(batches), True
    while moved:
        live = [r for r, a in enumerate(at) if a < len(batches[r])]
        posted.update(op for r in live for op in batches[r][at[r]])
        ready = [r for r in live if all(mate(op) in posted for op in batches[r][at[r]])]
        for r in ready:
            at[r] += 1
        moved = bool(ready)
    return not live


def in_flight(ops: list[Op]) -> int:
    """The most activations, in chunks, that a rank holds at once: what its peak memory is made of. Freed by B or W."""
    held = peak = 0
    for op in ops:
        held += {"F": 1, "B": -1, "W": -1}.get(op.kind, 0)
        peak = max(peak, held)
    return peak
