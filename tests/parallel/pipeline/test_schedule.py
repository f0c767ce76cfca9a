"""Every schedule, for all small p, m and v: complete, in order, no deadlock, transfers that meet, bounded
memory.
"""

import random
from collections import Counter, defaultdict, deque

import pytest

from parallel.pipeline.schedule import (
    COMPUTE_KINDS,
    END_OF_SEND,
    MATCHING_TRANSFER,
    SCHEDULES,
    Op,
    add_transfers,
    check_schedule,
    evaluation_order,
    gpipe,
    interleaved,
    loop_placement,
    make_schedule,
    matching_transfer,
    max_in_flight,
    one_f_one_b,
    simulate_order,
    single_op_steps,
    v_placement,
)
from plan.simulate import simulate_on_lanes

UNIT_TIMES = {"F": 1, "B": 1, "I": 1, "W": 1}


def every(kind, p_max=8, m_max=32):
    for p in range(1, p_max + 1):
        for m in range(p, m_max + 1, p) if kind == "interleaved" else range(1, m_max + 1):
            for v in (1, 2, 3) if kind == "interleaved" else (None,):
                yield make_schedule(kind, p, m, v)


def words(ops):
    return " ".join(map(str, ops))


@pytest.mark.slow(every=6)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_list_is_complete_and_can_finish(kind):
    for s in every(kind):
        check_schedule(s.order, s.n_stages, s.microbatches, s.rank_of_stage)
        assert sorted(s.rank_of_stage) == sorted(list(range(len(s.order))) * s.chunks)


@pytest.mark.slow(every=6)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_transfers_meet(kind):
    for s in every(kind, m_max=20):
        low = add_transfers(s.order, s.rank_of_stage)
        assert [[op for op in ops if op.kind in COMPUTE_KINDS] for ops in low] == s.order
        simulate_on_lanes(low, s.rank_of_stage, UNIT_TIMES)
        between = defaultdict(
            list
        )  # (rank, other rank) -> its transfers with that rank, each as its sender's op
        for r, ops in enumerate(low):
            for at, op in enumerate(ops):
                if op.kind in MATCHING_TRANSFER:
                    other = s.rank_of_stage[matching_transfer(op).stage]
                    assert other != r and matching_transfer(matching_transfer(op)) == op
                    between[r, other].append(op if op.kind[0] == "S" else matching_transfer(op))
                if op.kind in (
                    "SF",
                    "SB",
                ):  # right after its data is made; a receive, before its data is used
                    assert ops[at - 1] in [op._replace(kind=k) for k in ("F" if op.kind == "SF" else "BI")]
                elif op.kind in ("RF", "RB"):
                    assert any(op._replace(kind=k) in ops[at:] for k in ("F" if op.kind == "RF" else "BI"))
        assert all(mine == between[b, a] for (a, b), mine in between.items())  # one order at both ends
        cuts = sum(a != b for a, b in zip(s.rank_of_stage, s.rank_of_stage[1:]))
        assert sum(map(len, between.values())) == 2 * 2 * cuts * s.microbatches  # both ends, both directions


def most_sends_under_way(ops):
    """The most sends of a rank that have not ended; those without an end in its list last to its end."""
    under_way, most = set(), 0
    for op in ops:
        if op.kind in END_OF_SEND:
            under_way.add(op._replace(kind=END_OF_SEND[op.kind]))
        elif op.kind in END_OF_SEND.values():
            under_way.remove(op)
        most = max(most, len(under_way))
    return most


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_send_ends_long_before_the_step_does(kind):
    """A send keeps its tensor alive."""
    for ranks, microbatches in [(2, 16), (4, 32)]:
        s = make_schedule(kind, ranks, microbatches, 2 if kind == "interleaved" else None)
        for rank, ops in enumerate(add_transfers(s.order, s.rank_of_stage)):
            most = most_sends_under_way(ops)
            forwards_first = microbatches if kind == "gpipe" else 0
            assert most <= max(forwards_first, (2 * ranks + 2) * s.chunks), (ranks, rank, most)


class RankStreams:
    """A rank on a GPU: computation, transfers down and transfers up each run in order, in a separate stream.

    A transfer starts after the computation queued before it. The end of a send stops the computation until
    the send has met its receive.
    """

    def __init__(self, rank, ops, rank_of_stage):
        self.compute = deque(op for op in ops if op.kind in (*COMPUTE_KINDS, *END_OF_SEND.values()))
        self.down, self.up = deque(), deque()
        self.after = {}  # {transfer: the computation queued before it}
        self.done = set()
        before = None
        for op in ops:
            if op.kind in MATCHING_TRANSFER:
                other = rank_of_stage[matching_transfer(op).stage]
                is_down = other > rank if op.kind[0] == "S" else other < rank
                (self.down if is_down else self.up).append(op)
                self.after[op] = before
            elif op.kind in COMPUTE_KINDS:
                before = op

    def is_reached(self, transfer):
        return self.after[transfer] is None or self.after[transfer] in self.done

    def is_there(self, op):
        """Whether what a computation reads, or a send sends, is on this rank."""
        if op.kind[0] == "S":
            return any(op._replace(kind=kind) in self.done for kind in ("F" if op.kind == "SF" else "BI"))
        if op.kind in END_OF_SEND.values():
            return op._replace(kind="S" + op.kind[1]) in self.done
        needed = op._replace(kind="RF" if op.kind == "F" else "RB")
        return needed in self.done or needed not in (*self.down, *self.up)


def ends_on_gpus(lowered, rank_of_stage):
    """Whether all streams end, if a transfer runs when it is the first of its stream at both ends: NCCL."""
    ranks = [RankStreams(rank, ops, rank_of_stage) for rank, ops in enumerate(lowered)]
    has_moved = True
    while has_moved:
        has_moved = False
        for rank in ranks:
            while rank.compute and rank.is_there(rank.compute[0]):
                rank.done.add(rank.compute.popleft())
                has_moved = True
        for stream in ("down", "up"):
            queues = [(getattr(rank, stream), rank) for rank in ranks]
            first = {queue[0]: rank for queue, rank in queues if queue and rank.is_reached(queue[0])}
            for op, rank in first.items():
                other = first.get(matching_transfer(op))
                if op.kind[0] == "S" and other is not None and rank.is_there(op):
                    for end in (rank, other):
                        end.done.add(getattr(end, stream).popleft())
                    has_moved = True
    return not any(rank.compute or rank.down or rank.up for rank in ranks)


@pytest.mark.slow(every=6)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_list_ends_where_a_communicator_runs_in_order(kind):
    """Each transfer is posted alone, those down and those up in separate communicators."""
    lists = list(every(kind, m_max=20))
    for s in lists:
        lowered = add_transfers(s.order, s.rank_of_stage)
        assert ends_on_gpus(lowered, s.rank_of_stage), (s.kind, len(s.order), s.microbatches)
    assert len(lists) >= 130


def slots_of(order, n_stages):
    """Slots of time that forwards of one slot each take, if a rank waits for the input of its next one."""
    ends, clocks = {}, [0] * len(order)
    queues = [deque(ops) for ops in order]
    while any(queues):
        runnable = [
            rank for rank, ops in enumerate(queues)
            if ops and (ops[0].stage == 0 or (ops[0].stage - 1, ops[0].microbatch) in ends)
        ]
        assert runnable, "no rank can go on"
        for rank in runnable:
            op = queues[rank].popleft()
            begun = max(clocks[rank], ends.get((op.stage - 1, op.microbatch), 0))
            ends[op.stage, op.microbatch] = clocks[rank] = begun + 1
    return max(ends.values())


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("placement", ["loop 1", "loop 2", "loop 3", "v"])
def test_an_evaluation_is_complete_ends_everywhere_and_keeps_all_ranks_busy(placement, ranks):
    rank_of_stage = v_placement(ranks) if placement == "v" else loop_placement(ranks, int(placement[5:]))
    n_stages = len(rank_of_stage)
    for microbatches in (1, 2, 3, 5, 8, 16, 31):
        order = evaluation_order(rank_of_stage, microbatches)
        for rank, ops in enumerate(order):
            stages = [stage for stage, owner in enumerate(rank_of_stage) if owner == rank]
            assert Counter(ops) == Counter(Op("F", s, k) for s in stages for k in range(microbatches))
        last = [op.microbatch for op in order[rank_of_stage[-1]] if op.stage == n_stages - 1]
        assert last == list(range(microbatches))  # losses are added in one order, whatever the placement
        lowered = add_transfers(order, rank_of_stage)
        simulate_on_lanes(lowered, rank_of_stage, UNIT_TIMES)
        assert ends_on_gpus(lowered, rank_of_stage)
        # the work of a rank, and the way of one microbatch through the others
        assert slots_of(order, n_stages) <= microbatches * (n_stages // ranks) + n_stages - 1


def test_an_evaluation_in_the_order_of_microbatches_would_wait_for_each():
    """What slots_of is to see."""
    rank_of_stage = v_placement(4)
    in_order = [
        [Op("F", stage, k) for k in range(16) for stage, owner in enumerate(rank_of_stage) if owner == rank]
        for rank in range(4)
    ]
    assert slots_of(in_order, 8) == 16 * 8
    assert slots_of(evaluation_order(rank_of_stage, 16), 8) <= 16 * 2 + 7


def crossed_receives():
    """1F1B on two ranks, where rank 0 receives its first two gradients in the wrong order."""
    s = make_schedule("1f1b", 2, 2)
    low = add_transfers(s.order, s.rank_of_stage)
    first, second = (i for i, op in enumerate(low[0]) if op.kind == "RB")
    low[0][first], low[0][second] = low[0][second], low[0][first]
    return low, s.rank_of_stage


def test_both_models_of_gpus_see_a_cycle():
    """A rank that waits for a gradient in the stream from which it would receive the one before."""
    low, rank_of_stage = crossed_receives()
    assert not ends_on_gpus(low, rank_of_stage)
    with pytest.raises(ValueError, match="deadlock: rank 0 at 0B0 waits for 0RB0.*first in a lane of rank 1"):
        simulate_on_lanes(low, rank_of_stage, UNIT_TIMES)


@pytest.mark.parametrize(
    "kind,peak",
    [
        ("gpipe", lambda p, m, v, r: m),
        ("1f1b", lambda p, m, v, r: min(p - r, m)),
        (
            "interleaved",
            lambda p, m, v, r: min(2 * (p - 1 - r) + (v - 1) * p + 1, m * v) if v > 1 else min(p - r, m),
        ),
        ("zb-h1", lambda p, m, v, r: min(p, m)),  # what 1F1B's first rank holds
    ],
)
def test_memory(kind, peak):
    for s in every(kind):
        p = len(s.order)
        assert [max_in_flight(ops) for ops in s.order] == [
            peak(p, s.microbatches, s.chunks, r) for r in range(p)
        ]


@pytest.mark.parametrize("kind,more", [("zb-v", 0), ("dualpipe-v", 1)])
def test_memory_of_a_v(kind, more):
    """2p chunks are p whole stages, 1F1B's peak; DualPipe holds one chunk more, PP + 1 of PP = 2p in its
    README.
    """
    for s in every(kind):
        p, m = len(s.order), s.microbatches
        peaks = [max_in_flight(ops) for ops in s.order]
        assert max(peaks) <= min(2 * p + more, 2 * m)
        if m >= 2 * p:
            assert peaks == [2 * p + more] * p


def test_lists_by_hand():
    assert words(one_f_one_b(1, 3)[0]) == "0F0 0B0 0F1 0B1 0F2 0B2"  # accumulating gradients
    assert list(map(words, gpipe(2, 2))) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]
    assert list(map(words, one_f_one_b(2, 3))) == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]
    assert list(map(words, make_schedule("zb-h1", 2, 3).order)) == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ]
    assert words(interleaved(2, 2, 2)[0]) == "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1"
    assert words(interleaved(2, 2, 2)[1]) == "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"
    assert list(map(words, make_schedule("zb-v", 2, 3).order)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
    ]
    assert list(map(words, make_schedule("dualpipe-v", 2, 4).order)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 1F2 2I0 2W0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3",
    ]
    assert (loop_placement(2, 2), v_placement(3)) == ((0, 1, 0, 1), (0, 1, 2, 2, 1, 0))


def test_one_chunk_interleaved_is_1f1b():
    for p in range(1, 9):
        for m in range(p, 33, p):
            assert interleaved(p, m, 1) == one_f_one_b(p, m)
    assert make_schedule("interleaved", 4, 5, 1).order == one_f_one_b(4, 5)


@pytest.mark.parametrize(
    "args,says",
    [
        (("zbv", 4, 8), "did you mean zb-v"),
        (("?", 4, 8), "gpipe or 1f1b or"),
        (("interleaved", 4, 6), "use 4 or 8"),
        (("interleaved", 4, 3), "use 4$"),
        (("1f1b", 4, 4, 2), "1f1b has 1 chunk a rank, not 2"),
        (("zb-v", 4, 4, 3), "zb-v has 2 chunks a rank"),
        (("gpipe", 0, 1), "at least 1 rank"),
        (("gpipe", 1, 0), "at least"),
        (("interleaved", 1, 1, 0), "at least"),
    ],
)
def test_illegal_values_are_one_line_with_the_legal_ones(args, says):
    with pytest.raises(ValueError, match=says) as e:
        make_schedule(*args)
    assert "\n" not in str(e.value)


def broken(change):
    s = make_schedule("zb-v", 2, 3)
    order = [list(ops) for ops in s.order]
    change(order)
    check_schedule(order, s.n_stages, s.microbatches, s.rank_of_stage)


@pytest.mark.parametrize(
    "change,says",
    [
        (lambda o: None, None),
        (lambda o: o[0].remove(Op("W", 0, 1)), "stage 0 runs F I for microbatch 1"),
        (lambda o: o[0].append(Op("F", 0, 1)), "stage 0 runs F F I W"),
        (lambda o: o[0].append(Op("B", 0, 1)), "stage 0 runs B F I W"),
        (lambda o: o[1].append(o[0].pop(0)), "rank 1 runs 0F0, but stage 0 is rank 0's"),
        (lambda o: o[0].append(Op("F", 0, 3)), "rank 0 runs 0F3: no such op"),
        (lambda o: o[0].append(Op("F", 4, 0)), "rank 0 runs 4F0: no such op"),
        (lambda o: o[0].append(Op("F", -1, 0)), "no such op"),
        (lambda o: o[0].append(Op("SF", 0, 0)), "no such op"),
        (
            lambda o: o[1].sort(key=lambda op: -op.stage),
            "rank 0 at 3F0 waits for 2F0, rank 1 at 2F0 waits for 1F0",
        ),
        (
            lambda o: o[0].insert(0, o[0].pop(o[0].index(Op("W", 3, 0)))),
            "deadlock: rank 0 at 3W0 waits for 3I0, rank 1",
        ),
    ],
)
def test_broken_lists_are_refused(change, says):
    if says is None:
        return broken(change)
    with pytest.raises(ValueError, match=says):
        broken(change)


def test_the_place_of_a_stage_is_its_own_rank_unless_told():
    check_schedule(one_f_one_b(3, 4), 3, 4)
    with pytest.raises(ValueError, match="stage 3 is rank 3's"):
        check_schedule(make_schedule("zb-v", 2, 3).order, 4, 3)


def test_check_counts_what_a_run_would_do():
    """walk plays each op once, and after all that it needs: an independent replay agrees."""
    for kind in SCHEDULES:
        s = make_schedule(kind, 4, 8)
        clock, ended = Counter(), {}
        for r, (op,) in simulate_order(single_op_steps(s.order), s.n_stages):
            assert s.order[r][clock[r]] == op
            clock[r] += 1
            if op.kind == "F" and op.stage:
                assert ("F", op.stage - 1, op.microbatch) in ended
            if op.kind in "BI" and op.stage < s.n_stages - 1:
                assert ("B", op.stage + 1, op.microbatch) in ended or (
                    "I",
                    op.stage + 1,
                    op.microbatch,
                ) in ended
            ended[op] = True
        assert len(ended) == sum(map(len, s.order))


def test_any_legal_order_meets():
    """What lower() promises: shuffle lists at random; whatever check() still allows, meets."""
    rng, legal = random.Random(0), 0
    for _ in range(600):
        s = make_schedule(rng.choice(list(SCHEDULES)), p := rng.randint(2, 5), p * rng.randint(1, 3))
        for _ in range(rng.randint(1, 6)):
            ops = rng.choice(s.order)
            a = rng.randrange(len(ops) - 1)
            b = min(len(ops) - 1, a + rng.randint(1, 4))
            ops[a], ops[b] = ops[b], ops[a]
        try:
            check_schedule(s.order, s.n_stages, s.microbatches, s.rank_of_stage)
        except ValueError as e:
            assert str(e).startswith("deadlock: rank")
            continue
        legal += 1
        simulate_on_lanes(s.with_transfers, s.rank_of_stage, UNIT_TIMES)
    assert 100 < legal < 500


def is_refused(lowered, rank_of_stage):
    try:
        simulate_on_lanes(lowered, rank_of_stage, UNIT_TIMES)
    except ValueError as error:
        return str(error).startswith("deadlock: ")
    return False


def test_lanes_that_do_not_meet_are_refused():
    a = [Op("F", 0, 0), Op("SF", 0, 0), Op("RB", 0, 0), Op("B", 0, 0)]
    b = [Op("RF", 1, 0), Op("F", 1, 0), Op("B", 1, 0), Op("SB", 1, 0)]
    assert not is_refused([a, b], (0, 1))
    assert is_refused([a[:2] + a[3:], b], (0, 1))  # a send that nobody receives
    assert is_refused([a, b[:3]], (0, 1))  # a receive that nobody sends
    early = [Op("F", 0, 0), Op("RB", 0, 0), Op("B", 0, 0), Op("SF", 0, 0)]
    assert is_refused([early, b], (0, 1))  # rank 0 needs the gradient before it sends the activation
