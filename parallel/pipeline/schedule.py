"""Pipeline schedules as data: pure functions from (ranks, microbatches, chunks) to lists of ops.

A schedule is list[list[Op]]: for each pipeline rank, the ops that it runs, in order. Nothing here touches a
tensor or a process. The same lists are validated (check_schedule), lowered to include transfers
(add_transfers), run (executor.py), timed (plan/simulate.py) and drawn (plan/plot.py).

    F      forward                                   SF, RF   send, receive an activation
    B      backward                                  SB, RB   send, receive a gradient
    I, W   a split backward: gradients of            EF, EB   the end of a send, whose tensor is free then
           the inputs, gradients of the weights

A stage is a slice of the model; stages are numbered along its depth. A chunk is one of a rank's stages,
numbered from 0. rank_of_stage[stage] is the rank of a stage.

A function writes the program of a rank in words, each a letter and a chunk: "F0 B1" is the next forward of
chunk 0, then the next backward of chunk 1. "W" alone is the oldest weight gradient that an I deferred. A
rank's program depends on how many ranks are above it (nearer the data) and below it.
"""
import difflib
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

COMPUTE_KINDS = ("F", "B", "I", "W")

# The peer of a transfer: its kind, and its distance in stages.
MATCHING_TRANSFER = {"SF": ("RF", 1), "RF": ("SF", -1), "SB": ("RB", -1), "RB": ("SB", 1)}
END_OF_SEND = {"SF": "EF", "SB": "EB"}

# Relative times for which receives are placed (add_transfers). Other times cannot deadlock, only wait.
PLACING_TIMES = {"F": 20, "B": 40, "I": 20, "W": 20}
PLACING_HOP = 1  # of a transfer


class Op(NamedTuple):
    """An entry of a schedule."""
    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        """Format as 2F0, like torch.distributed.pipelining."""
        return f"{self.stage}{self.kind}{self.microbatch}"


Order = list[list[Op]]  # for each rank
StagePlacement = tuple[int, ...]  # stage -> rank


@dataclass(frozen=True)
class Schedule:
    """The ops of all ranks for a step of `microbatches`."""
    kind: str  # a key of SCHEDULES
    order: Order  # the ops of each rank
    rank_of_stage: StagePlacement  # rank_of_stage[stage]: the rank that owns it
    microbatches: int

    @property
    def n_stages(self) -> int:
        return len(self.rank_of_stage)

    @property
    def chunks(self) -> int:
        """Return the number of stages per rank."""
        return len(self.rank_of_stage) // len(self.order)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether some backward is split into an I, and a W for the weight gradients."""
        return any(op.kind == "W" for op in self.order[0])

    @cached_property
    def with_transfers(self) -> Order:
        """Return the ops of each rank including transfers."""
        return add_transfers(self.order, self.rank_of_stage)


# ---- the schedules -----------------------------------------------------------------------------------------


def loop_placement(ranks: int, chunks: int = 1) -> StagePlacement:
    """Assign stages to ranks round-robin: 0 1 2 3 0 1 2 3."""
    return tuple(range(ranks)) * chunks


def v_placement(ranks: int, chunks: int = 2) -> StagePlacement:
    """Assign stages down the ranks and back up: 0 1 2 3 3 2 1 0.

    The first rank holds both the first stage and the loss.
    """
    return (*range(ranks), *reversed(range(ranks)))


def ops_of_words(words: str, stages: Sequence[int], microbatches: int) -> list[Op]:
    """Parse the program of a rank into ops. stages[chunk] are the rank's stages.

    Words for more microbatches than there are yield no op.
    """
    next_microbatch: Counter[tuple[int, bool]] = Counter()  # by (chunk, is forward)
    without_weight_grads: deque[Op] = deque()  # each I whose W is pending
    ops: list[Op] = []
    for word in words.split():
        kind = word[0]
        if kind == "W":
            ops.append(without_weight_grads.popleft()._replace(kind="W"))
            continue
        chunk = int(word[1:] or 0)
        counter = (chunk, kind == "F")
        op = Op(kind, stages[chunk], next_microbatch[counter])
        next_microbatch[counter] += 1
        ops.append(op)
        if kind == "I":
            without_weight_grads.append(op)
    return [op for op in ops if op.microbatch < microbatches]


def orders_of_words(
    words: Callable[[int, int], str], rank_of_stage: StagePlacement, microbatches: int
) -> Order:
    """Return the ops of all ranks.

    words(above, below) is the program of a rank with `above` ranks above it and `below` ranks below.
    """
    ranks = max(rank_of_stage) + 1
    order: Order = []
    for rank in range(ranks):
        stages = [stage for stage, owner in enumerate(rank_of_stage) if owner == rank]
        program = words(rank, ranks - 1 - rank)
        order.append(ops_of_words(program, stages, microbatches))
    return order


def gpipe(ranks: int, microbatches: int) -> Order:
    """GPipe (arXiv 1811.06965): all forwards, then all backwards.

    Each rank holds all microbatches at once.
    """
    def words(above: int, below: int) -> str:
        return "F " * microbatches + "B " * microbatches

    return orders_of_words(words, loop_placement(ranks), microbatches)


def one_f_one_b(ranks: int, microbatches: int) -> Order:
    """1F1B (arXiv 1806.03377; 2104.04473, section 2.2): the bubble of GPipe with less memory.

    Rank r holds at most ranks - r microbatches.
    """
    n = max(microbatches, ranks)

    def words(above: int, below: int) -> str:
        return "F " * below + "F B " * (n - below) + "B " * below

    return orders_of_words(words, loop_placement(ranks), microbatches)


def interleaved(ranks: int, microbatches: int, chunks: int) -> Order:
    """Interleaved 1F1B (arXiv 2104.04473, section 2.2): `chunks` stages per rank.

    The bubble is divided by `chunks`, and the transfers are multiplied by it. Microbatches go in groups of
    `ranks` through chunk 0, then the same group through chunk 1, and so on.
    Raises ValueError if the number of microbatches is not a multiple of the ranks.
    """
    if chunks == 1:
        return one_f_one_b(ranks, microbatches)
    if microbatches % ranks:
        below = microbatches // ranks * ranks
        near = " or ".join(str(n) for n in (below, below + ranks) if n)
        raise ValueError(
            f"interleaved needs a multiple of its {ranks} ranks as microbatches, "
            f"not {microbatches}; use {near}"
        )

    total = microbatches * chunks
    chunk_order = [i // ranks % chunks for i in range(total)]
    forwards = [f"F{chunk}" for chunk in chunk_order]
    backwards = [f"B{chunks - 1 - chunk}" for chunk in chunk_order]

    def words(above: int, below: int) -> str:
        warm_up = min(2 * below + (chunks - 1) * ranks, total)
        steady = chain(*zip(forwards[warm_up:], backwards))
        cool_down = backwards[total - warm_up:]
        return " ".join([*forwards[:warm_up], *steady, *cool_down])

    return orders_of_words(words, loop_placement(ranks, chunks), microbatches)


def zero_bubble_h1(ranks: int, microbatches: int) -> Order:
    """ZB-H1 (arXiv 2401.10241, section 2.2): 1F1B with each backward split in two.

    The rank above waits for I; no rank waits for W. On rank r, a W runs r microbatches after its I, so that
    every rank holds at most `ranks` microbatches: the peak of 1F1B's first rank.
    """
    n = max(microbatches, ranks)

    def words(above: int, below: int) -> str:
        fill = "F " * below + "F I " * above
        steady = "F I W " * (n - below - above)
        drain = "I W " * below + "W " * above
        return fill + steady + drain

    return orders_of_words(words, loop_placement(ranks), microbatches)


def zero_bubble_v(ranks: int, microbatches: int) -> Order:
    """ZB-V (arXiv 2401.10241, section 6; 2405.15362): two chunks per rank, down the ranks and back up.

    If F, I and W take equally long and there are at least 2 * ranks - 1 microbatches, no rank is idle
    between its first op and its last. Each holds at most 2 * ranks chunks, as much as 1F1B's first rank.
    """
    n = max(microbatches, 2 * ranks - 1)

    def words(above: int, below: int) -> str:
        fill = "F0 " * (2 * below + 1) + "F1 F0 " * above + "F1 I1 W " * (below + 1)
        steady = "F0 I0 W F1 I1 W " * (n - 2 * ranks + 1 + above)  # one of each, for both chunks
        drain = "I0 W F1 I1 W " * below + "I0 I1 " * above + "I0 W " * (below + 1) + "W " * 2 * above
        return fill + steady + drain

    return orders_of_words(words, v_placement(ranks), microbatches)


def dualpipe_v(ranks: int, microbatches: int) -> Order:
    """DualPipe-V (DeepSeek-V3, arXiv 2412.19437; one half of it, github.com/deepseek-ai/DualPipe).

    Most backwards follow a forward of the other chunk (F0 B1), so that the computation of one hides the
    transfers of the other. A backward is split where another rank waits for it: in the fill, and in the
    second half of the drain. Each rank holds at most 2 * ranks + 1 chunks.
    """
    n = max(microbatches, 2 * ranks)

    def words(above: int, below: int) -> str:
        turns = above + 1
        fill = "F0 " * 2 * below + "F0 F1 " * turns + "I1 W F1 " * below

        steady = "F0 B1 F1 B0 " * (n - 2 * ranks + 1 + above)
        if not below:  # the bottom of the V: all other ranks wait for its first gradient
            steady = steady.replace("B1", "I1 W", 1)

        backwards = [f"{'B' if i < turns else 'I'}{1 - i % 2}" for i in range(2 * turns)]
        drain = "B1 F1 B0 " * below + " ".join(backwards) + " W I0" * below + " W" * turns
        return fill + steady + drain

    return orders_of_words(words, v_placement(ranks), microbatches)


class ScheduleKind(NamedTuple):
    """How to build a kind of schedule."""
    make: Callable[..., Order]  # of (ranks, microbatches), and of chunks if their number is configurable
    placement: Callable[[int, int], StagePlacement]  # of (ranks, chunks)
    chunks: int | None  # stages per rank; None if configurable


SCHEDULES = {
    "gpipe": ScheduleKind(gpipe, loop_placement, 1),
    "1f1b": ScheduleKind(one_f_one_b, loop_placement, 1),
    "interleaved": ScheduleKind(interleaved, loop_placement, None),
    "zb-h1": ScheduleKind(zero_bubble_h1, loop_placement, 1),
    "zb-v": ScheduleKind(zero_bubble_v, v_placement, 2),
    "dualpipe-v": ScheduleKind(dualpipe_v, v_placement, 2),
}


def make_schedule(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """Build the schedule `name`, a key of SCHEDULES, with `chunks` stages per rank.

    chunks defaults to the fixed number of the kind, and to 2 for interleaved. Raises ValueError,
    one line with the legal values.
    """
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name, SCHEDULES, 1, 0.4) or [" or ".join(SCHEDULES)]
        raise ValueError(f"no schedule {name!r}; did you mean {near[0]}?")
    if ranks < 1 or microbatches < 1 or (chunks is not None and chunks < 1):
        raise ValueError(
            "a schedule needs at least 1 rank, 1 microbatch and 1 chunk, "
            f"not {ranks}, {microbatches} and {chunks or 1}"
        )

    kind = SCHEDULES[name]
    if kind.chunks is None:
        chunks = 2 if chunks is None else chunks
        order = kind.make(ranks, microbatches, chunks)
        return Schedule(name, order, kind.placement(ranks, chunks), microbatches)
    if chunks not in (None, kind.chunks):
        plural = "s" if kind.chunks > 1 else ""
        raise ValueError(
            f"{name} has {kind.chunks} chunk{plural} a rank, not {chunks}; interleaved takes any number"
        )
    order = kind.make(ranks, microbatches)
    return Schedule(name, order, kind.placement(ranks, kind.chunks), microbatches)


# ---- checks ------------------------------------------------------------------------------------------------


def dependencies(op: Op, n_stages: int) -> list[Op]:
    """Return the ops that must have finished, on any rank, before a computation may start.

    Where it names a B, an I suffices.
    """
    stage = op.stage
    microbatch = op.microbatch
    if op.kind == "F":
        return [Op("F", stage - 1, microbatch)] if stage else []
    if op.kind == "W":
        return [Op("I", stage, microbatch)]
    needed = [Op("F", stage, microbatch)]
    if stage < n_stages - 1:
        needed.append(Op("B", stage + 1, microbatch))
    return needed


def simulate_order(steps: list[list[tuple[Op, ...]]], n_stages: int) -> Iterator[tuple[int, tuple[Op, ...]]]:
    """Yield (rank, step) in an order that a run could have: the ranks alternate, one step each.

    steps are by rank; a step is the ops that start together, most often one. Raises ValueError naming the op
    of each rank if all ranks wait.
    """
    done: set[Op] = set()
    position = [0] * len(steps)  # next step of each rank
    while True:
        unfinished = [rank for rank, index in enumerate(position) if index < len(steps[rank])]
        if not unfinished:
            return
        has_moved = False
        for rank in unfinished:
            step = steps[rank][position[rank]]
            if missing_dependencies(step, n_stages, done):
                continue
            yield rank, step
            done.update(step)
            done.update(op._replace(kind="B") for op in step if op.kind == "I")
            position[rank] += 1
            has_moved = True
        if not has_moved:
            waits: list[str] = []
            for rank in unfinished:
                for op, needed in missing_dependencies(steps[rank][position[rank]], n_stages, done):
                    waits.append(f"rank {rank} at {op} waits for {needed}")
            raise ValueError("deadlock: " + ", ".join(waits))


def missing_dependencies(step: tuple[Op, ...], n_stages: int, done: set[Op]) -> list[tuple[Op, Op]]:
    """Return [(op of the step, an op that it depends on and that has not finished)]."""
    missing: list[tuple[Op, Op]] = []
    for op in step:
        missing += [(op, needed) for needed in dependencies(op, n_stages) if needed not in done]
    return missing


def single_op_steps(order: Order) -> list[list[tuple[Op, ...]]]:
    """Make each op a separate step."""
    return [[(op,) for op in ops] for ops in order]


def check_schedule(
    order: Order, n_stages: int, microbatches: int, rank_of_stage: StagePlacement | None = None
) -> None:
    """Raise ValueError unless every stage runs every microbatch once, on its rank, and without deadlock.

    rank_of_stage defaults to one stage per rank.
    """
    rank_of_stage = loop_placement(n_stages) if rank_of_stage is None else rank_of_stage

    # every op is valid and on the right rank
    kinds_run: defaultdict[tuple[int, int], list[str]] = defaultdict(list)  # by (stage, microbatch)
    for rank, ops in enumerate(order):
        for op in ops:
            is_inside = 0 <= op.stage < n_stages and 0 <= op.microbatch < microbatches
            if not is_inside or op.kind not in COMPUTE_KINDS:
                raise ValueError(
                    f"rank {rank} runs {op}: no such op among {n_stages} stages "
                    f"and {microbatches} microbatches"
                )
            if rank_of_stage[op.stage] != rank:
                owner = rank_of_stage[op.stage]
                raise ValueError(f"rank {rank} runs {op}, but stage {op.stage} is rank {owner}'s")
            kinds_run[op.stage, op.microbatch].append(op.kind)

    # every stage runs every microbatch forward and backward
    for stage in range(n_stages):
        for microbatch in range(microbatches):
            kinds = " ".join(sorted(kinds_run[stage, microbatch]))
            if kinds not in ("B F", "F I W"):
                raise ValueError(
                    f"stage {stage} runs {kinds or 'nothing'} for microbatch {microbatch}, "
                    "not F and B, or F, I and W"
                )

    for _ in simulate_order(single_op_steps(order), n_stages):
        pass  # raises where all ranks wait


# ---- transfers ---------------------------------------------------------------------------------------------


def goes_down(transfer: Op, rank_of_stage: StagePlacement) -> bool:
    """Return whether a transfer goes to a higher rank. It is the same for both of its ends.

    Transfers down and transfers up are the two lanes of the pipeline: communicators, whose transfers a GPU
    runs one after the other, in the order in which the rank posted them.
    """
    here = rank_of_stage[transfer.stage]
    there = rank_of_stage[matching_transfer(transfer).stage]
    return here < there if transfer.kind[0] == "S" else there < here


def add_transfers(order: Order, rank_of_stage: StagePlacement) -> Order:
    """Add transfers to the ops: a send right after its op, a receive before the op that runs on the receiver
    when the send is ready, if all ops take PLACING_TIMES.

    Posted there, a receive is ready when its send is. Posted earlier, it would block its lane (goes_down) for
    the sends behind it. Any two ranks list the transfers of a lane in the same order, that in which the
    sender computes them. plan/simulate.py runs the lanes: a list that ends there ends whatever its ops take,
    since nothing chooses.
    Consecutive stages on one rank, at the bottom of a V, need no transfer. Raises ValueError for an
    order that cannot finish.

    The end of a send is placed where waiting for it costs nothing: before the first op whose input comes from
    the receiver and was computed after the receiver had used the sent tensor. The last sends have no end op.
    """
    ends = placing_ends(order, rank_of_stage)
    receives = receives_by_op(order, rank_of_stage, ends)
    lowered: Order = [[] for _ in order]
    used: defaultdict[tuple[int, int], list[Op]] = defaultdict(list)  # {(sender, receiver): sends}
    ended_before: dict[Op, list[Op]] = {}  # {send: sends that its receiver had finished with by then}
    for rank, (op,) in simulate_order(single_op_steps(order), len(rank_of_stage)):
        lowered[rank] += receives.get(op, [])
        arrived, send = transfers_of(op, rank_of_stage)
        if arrived is not None:
            for before in ended_before.pop(matching_transfer(arrived)):
                lowered[rank].append(before._replace(kind=END_OF_SEND[before.kind]))
            source = rank_of_stage[matching_transfer(arrived).stage]
            used[source, rank].append(matching_transfer(arrived))
        lowered[rank].append(op)
        if send is not None:
            lowered[rank].append(send)
            target = rank_of_stage[matching_transfer(send).stage]
            ended_before[send] = used.pop((target, rank), [])
    return lowered


def transfers_of(op: Op, rank_of_stage: StagePlacement) -> tuple[Op | None, Op | None]:
    """Return (the receive of an op's input, the send of its output), None where there is no transfer."""
    if op.kind == "W":
        return None, None
    letter, step = ("F", 1) if op.kind == "F" else ("B", -1)
    rank = rank_of_stage[op.stage]

    def is_elsewhere(stage: int) -> bool:
        return 0 <= stage < len(rank_of_stage) and rank_of_stage[stage] != rank

    receive = Op(f"R{letter}", op.stage, op.microbatch) if is_elsewhere(op.stage - step) else None
    send = Op(f"S{letter}", op.stage, op.microbatch) if is_elsewhere(op.stage + step) else None
    return receive, send


def placing_ends(order: Order, rank_of_stage: StagePlacement) -> dict[Op, int]:
    """Return when each op ends, if ops and transfers take PLACING_TIMES and PLACING_HOP."""
    end: dict[Op, int] = {}
    free_at = [0] * len(order)
    for rank, (op,) in simulate_order(single_op_steps(order), len(rank_of_stage)):
        start = free_at[rank]
        for needed in dependencies(op, len(rank_of_stage)):
            hop = PLACING_HOP if rank_of_stage[needed.stage] != rank else 0
            start = max(start, end[needed] + hop)
        end[op] = free_at[rank] = start + PLACING_TIMES[op.kind]
        if op.kind == "I":  # the stage before waits for this only
            end[op._replace(kind="B")] = end[op]
    return end


def receives_by_op(
    order: Order, rank_of_stage: StagePlacement, ends: Mapping[Op, int]
) -> dict[Op, list[Op]]:
    """Return {op: the receives right before it}, in the order in which their senders compute them."""
    ready: list[tuple[int, int, Op]] = []  # (when its send is ready, the receiving rank, receive)
    for op in chain(*order):
        _, send = transfers_of(op, rank_of_stage)
        if send is not None:
            receive = matching_transfer(send)
            ready.append((ends[op], rank_of_stage[receive.stage], receive))

    ends_of_rank = [[ends[op] for op in ops] for ops in order]
    found: defaultdict[Op, list[Op]] = defaultdict(list)
    for time, rank, receive in sorted(ready):
        running = bisect_right(ends_of_rank[rank], time)  # the first op that ends later
        found[order[rank][running]].append(receive)
    return found


def evaluation_order(rank_of_stage: StagePlacement, microbatches: int) -> Order:
    """Return the forwards of an evaluation, for each rank.

    In each time slot, a rank runs the deepest of its stages whose next microbatch is ready: all ranks are
    busy soon, and few hidden states wait. In microbatch order, a rank with several stages would wait for each
    microbatch to come round.
    """
    n_stages = len(rank_of_stage)
    order: Order = [[] for _ in range(max(rank_of_stage) + 1)]
    n_done = [0] * n_stages  # microbatches done, by stage
    while n_done[-1] < microbatches:
        n_ready = [microbatches, *n_done[:-1]]  # at the start of this slot
        busy: set[int] = set()
        for stage in reversed(range(n_stages)):
            rank = rank_of_stage[stage]
            if rank not in busy and n_done[stage] < n_ready[stage]:
                order[rank].append(Op("F", stage, n_done[stage]))
                n_done[stage] += 1
                busy.add(rank)
    return order


def matching_transfer(op: Op) -> Op:
    """Return the other end of a transfer."""
    kind, distance = MATCHING_TRANSFER[op.kind]
    return Op(kind, op.stage + distance, op.microbatch)


def max_in_flight(ops: list[Op]) -> int:
    """Return the peak number of activations, in chunks, that a rank holds. F adds one; B or W frees it."""
    held = 0
    peak = 0
    for op in ops:
        held += {"F": 1, "B": -1, "W": -1}.get(op.kind, 0)
        peak = max(peak, held)
    return peak
