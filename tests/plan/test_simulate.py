"""Simulated bubbles equal the papers' formulas, exactly, for every schedule and all p <= 8, m <= 32."""

from fractions import Fraction

import pytest

from parallel.pipeline.schedule import SCHEDULES, Op, make_schedule, max_in_flight, one_f_one_b
from plan.simulate import Span, Timeline, closed_form, paired, share, simulate, simulate_on_lanes

# F, I, W of a chunk: equal; half a W; as measured. Integers: sums are exact
COSTS = [(1, 1, 1), (2, 2, 1), (10, 12, 7)]


def every(kind):
    for p in range(1, 9):
        for m in range(p, 33, p) if kind == "interleaved" else range(1, 33):
            for v in (1, 2, 4) if kind == "interleaved" else (None,):
                yield p, m, make_schedule(kind, p, m, v)


def run(s, f, i, w, hop=0, overlap=None):
    return simulate(s.order, s.n_stages, {"F": f, "I": i, "W": w}, hop, overlap)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind,applies,bubble",
    [
        ("gpipe", lambda p, m: True, lambda p, f, b, w, v: (p - 1) * (f + b)),
        ("1f1b", lambda p, m: True, lambda p, f, b, w, v: (p - 1) * (f + b)),
        ("interleaved", lambda p, m: True, lambda p, f, b, w, v: (p - 1) * (f + b) / v),
        ("zb-h1", lambda p, m: m >= p, lambda p, f, b, w, v: (p - 1) * (f + b - 2 * w)),
        # zero where F = I = W
        ("zb-v", lambda p, m: m >= 2 * p - 1, lambda p, f, b, w, v: (p - 1) * (b - 2 * w)),
        ("dualpipe-v", lambda p, m: m >= 2 * p, lambda p, f, b, w, v: (p - 1) * (f + b - 2 * w) / 2),
    ],
)
def test_bubbles_are_those_of_the_papers(kind, applies, bubble):
    """The formulas stand here once more, so that closed_form cannot be bent to a wrong simulation."""
    for p, m, s in every(kind):
        v = s.chunks
        for f, i, w in COSTS:
            t = run(s, f, i, w)
            f, i, w = v * f, v * i, v * w  # of a rank's share
            known = closed_form(kind, p, m, v, f, i, w)
            assert all(t.busy(r) == m * (f + i + w) for r in range(p))
            if kind == "dualpipe-v" and f != i:
                assert known is None  # DeepSeek's is for F = I
                continue
            if applies(p, m):
                assert known and t.bubble == bubble(p, f, i + w, w, v), (p, m, v, f, i, w)
            if known:
                assert t.bubble == known[1], (p, m, v, f, i, w)
            if kind != "zb-v":  # the first rank starts first and ends last: its bubble is the step's
                assert t.makespan == m * (f + i + w) + t.bubble


@pytest.mark.slow
def test_zb_v_has_no_bubble_where_f_i_and_w_are_equal():
    """No rank waits from its first op to its last; each starts one F later, a parallelogram."""
    for p, m, s in every("zb-v"):
        t = run(s, 1, 1, 1)
        if m >= 2 * p - 1:
            assert [t.wall(r) - t.busy(r) for r in range(p)] == [0] * p
            assert [rank[0].start for rank in t.ranks] == list(range(p))
            assert t.makespan == 2 * 3 * m + p - 1
        else:
            assert t.bubble == 2 * (2 * p - 1 - m)


@pytest.mark.slow
def test_dualpipe_overlapped_is_deepseeks_formula():
    """(PP/2-1)(F&B+B-3W) with PP = 2p chunks; F&B from B (F hidden entirely) to F+B."""
    for p, m, s in every("dualpipe-v"):
        for f, w, overlaps in ((5, 5, (1, 0.8, 10 / 15)), (10, 5, (1, 0.8, 0.6))):
            for overlap in overlaps if m >= 2 * p else ():
                t, b = run(s, f, f, w, overlap=overlap), f + w
                bubble = (p - 1) * (overlap * (f + b) + b - 3 * w)
                known = closed_form("dualpipe-v", p, m, 2, 2 * f, 2 * f, 2 * w, overlap)[1]
                for found in (max(t.idle(r) for r in range(p)), t.idle(p - 1), known):
                    assert found == pytest.approx(bubble)
    pairs = [sum(len(step) == 2 for step in paired(ops)) for ops in make_schedule("dualpipe-v", 4, 10).order]
    assert pairs == [9, 10, 11, 11]


@pytest.mark.slow
def test_newer_schedules_have_smaller_bubbles():
    for p in range(2, 9):
        for m in range(2 * p, 33, p):
            made = [make_schedule(k, p, m) for k in SCHEDULES]
            b = {s.kind: simulate(s.order, s.n_stages, share(s, 2, 2, 2)).bubble for s in made}
            assert b["zb-v"] == 0 < b["dualpipe-v"] < b["zb-h1"] < b["interleaved"] < b["1f1b"] == b["gpipe"]


def test_formulas_are_silent_where_they_do_not_hold():
    assert closed_form("zb-h1", 4, 8, 1, 1, 1, 2) is None
    assert closed_form("zb-v", 4, 8, 2, 2, 1, 1) is None
    assert closed_form("dualpipe-v", 4, 7, 2, 1, 1, 1) is None
    assert closed_form("dualpipe-v", 4, 8, 2, 1, 1, 1, Fraction(1, 2)) is None


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_memory_curve_peaks_where_the_list_says(kind):
    for _, m, s in every(kind):
        if m <= 12:
            for overlap in (None, Fraction(4, 5)) if kind == "dualpipe-v" else (None,):
                t = run(s, 10, 11, 7, 3, overlap)
                for r, ops in enumerate(s.order):
                    curve = t.memory(r)
                    assert max(held for _, held in curve) == max_in_flight(ops)
                    assert curve[-1] == (t.ranks[r][-1].end, 0) and curve == sorted(curve)


def test_two_ranks_and_one_microbatch_by_hand():
    """Two ranks, one microbatch: F, hop, F, B, hop, B."""
    t = simulate(one_f_one_b(2, 1), 2, {"F": 1, "B": 2}, hop=3)
    assert t.ranks[0] == [Span(Op("F", 0, 0), 0, 1), Span(Op("B", 0, 0), 10, 12)]
    assert t.ranks[1] == [Span(Op("F", 1, 0), 4, 5), Span(Op("B", 1, 0), 5, 7)]
    assert (t.makespan, t.bubble, t.busy(0), t.wall(1), t.idle(1)) == (12, 9, 3, 3, 9)
    assert t.memory(0) == [(0, 1), (12, 0)]


def test_costs_may_differ_by_stage_and_a_v_turns_without_a_hop():
    t = simulate(one_f_one_b(2, 1), 2, {"F": [1, 5], "I": [1, 1], "W": [0, 3]})
    assert t.ranks[1] == [Span(Op("F", 1, 0), 1, 6), Span(Op("B", 1, 0), 6, 10)] and t.makespan == 11
    v = make_schedule("zb-v", 1, 1)
    assert simulate(v.order, 2, {"F": 1, "I": 1, "W": 1}, hop=100).makespan == 6


def test_a_longer_hop_only_delays():
    for kind in SCHEDULES:
        s = make_schedule(kind, 4, 8)
        times = [run(s, 1, 1, 1, hop).makespan for hop in (0, Fraction(1, 10), 1)]
        assert times == sorted(times) and times[0] < times[2]


def test_overlapped_ops_count_once():
    f, b = Op("F", 0, 1), Op("B", 1, 0)
    t = Timeline([[Span(f, 1, 4), Span(b, 1, 4), Span(f, 6, 7)]])
    assert (t.busy(0), t.wall(0), t.bubble, t.start) == (4, 6, 2, 1)


# ---- transfers on lanes ------------------------------------------------------------------------------------


def run_on_lanes(schedule, times, hop=0):
    return simulate_on_lanes(schedule.with_transfers, schedule.rank_of_stage, times, hop)


def test_a_transfer_waits_for_the_one_before_it_in_its_lane():
    """Three ranks down a line, F takes 2 and a transfer 3: rank 1 sends only after it has received again."""
    schedule = make_schedule("gpipe", 3, 2)
    on_lanes = run_on_lanes(schedule, {"F": 2, "B": 1}, hop=3)
    forwards = [[span for span in spans if span.op.kind == "F"] for spans in on_lanes.ranks]
    assert [(span.start, span.end) for span in forwards[0]] == [(0, 2), (2, 4)]
    # the second arrives at 8, the lane of rank 1 is free then, and its first output follows
    assert [(span.start, span.end) for span in forwards[1]] == [(5, 7), (8, 10)]
    assert [(span.start, span.end) for span in forwards[2]] == [(11, 13), (14, 16)]
    free = simulate(schedule.order, schedule.n_stages, {"F": 2, "B": 1}, hop=3)
    assert [(span.start, span.end) for span in free.ranks[2]][:2] == [(10, 12), (12, 14)]


def test_without_a_hop_lanes_cost_nothing():
    for kind in SCHEDULES:
        s = make_schedule(kind, 4, 8)
        assert run_on_lanes(s, share(s, 1, 1, 1)) == simulate(s.order, s.n_stages, share(s, 1, 1, 1))


@pytest.mark.slow(core=["8"])
@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 12, 16])
def test_lanes_cost_at_most_one_percent(ranks):
    """A transfer takes 5 to 10 % of a forward; backwards are as long as measured ones, or equally long."""
    for kind in SCHEDULES:
        for microbatches in sorted({2, ranks, 2 * ranks, 64 - 64 % ranks}):
            if kind == "interleaved" and microbatches % ranks:
                continue
            for chunks in (2, 3) if kind == "interleaved" else (None,):
                s = make_schedule(kind, ranks, microbatches, chunks)
                for f, i, w, hop in [(1, 1, 1, 0.05), (1, 1.4, 0.8, 0.1)]:
                    times = share(s, f * s.chunks, i * s.chunks, w * s.chunks)
                    free = simulate(s.order, s.n_stages, times, hop).makespan
                    on_lanes = run_on_lanes(s, times, hop).makespan
                    assert free * (1 - 1e-9) <= on_lanes <= 1.01 * free, (kind, ranks, microbatches, f, hop)


def test_a_receive_one_op_too_early_is_seen():
    """It is in front of the send of that op, and waits for an op of another rank."""
    s = make_schedule("gpipe", 4, 16)
    too_early = make_schedule("gpipe", 4, 16)
    for rank, ops in enumerate(too_early.with_transfers[1:], 1):
        for at in [at for at, op in enumerate(ops) if op.kind == "RF" and op.microbatch > 0]:
            before = [i for i in range(at) if ops[i].kind == "F"]
            if before:
                ops.insert(before[-1], ops.pop(at))
    times = share(s, 1, 1, 1)
    as_placed, early = (run_on_lanes(each, times, 0.05).makespan for each in (s, too_early))
    assert early > 1.03 * as_placed
