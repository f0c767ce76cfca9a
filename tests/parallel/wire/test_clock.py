"""Exposed and hidden time of exchanges: a peer that comes late is waited for, a sum under a computation is
not.
"""

import time
from unittest import mock

import pytest
import torch

from parallel.wire import clock, comm
from parallel.wire.clock import CommunicationClock, PendingSpan, StepTimes, union_length
from parallel.wire.world import World

LATE, LONG = 0.3, 1.2  # seconds: how late the peer comes, how long the computation takes


def test_spans_that_overlap_count_once():
    assert union_length([(3, 4), (0, 1), (0.5, 2), (1, 1.5)]) == 3 and union_length([]) == 0
    flights, waits = [(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)], [(2.5, 4.0), (5.0, 6.0)]
    assert StepTimes(waits, flights).read() == (2500, 2500)  # 0 .. 2.5 is hidden; what was waited for is not
    assert StepTimes([], []).read() == (0, 0)


class Event:
    """As torch.cuda.Event of a step that has ended."""

    def __init__(self, ms):
        self.ms = ms

    def elapsed_time(self, other):
        return other.ms - self.ms


def test_a_gpu_knows_its_waits_alone():
    """No stream waits for the end of each exchange: what ran beside the computation is not made up."""
    a, b, c, d = map(Event, (10.0, 17.0, 15.0, 18.0))
    assert StepTimes([(a, b), (c, d)], None).read() == (8.0, None)
    assert StepTimes([], None).read() == (0.0, None)
    gpu = CommunicationClock(torch.device("cuda"))
    assert gpu.record_start(mock.Mock(spec=[])) is None  # nothing is asked of the exchange
    assert gpu.collect().exchanges is None


def ends_late(self, work):
    return PendingSpan(time.monotonic(), time.monotonic() + LONG)


BUGS = {
    "waiting is not counted": (CommunicationClock, "record_wait", lambda self, start, group: None),
    "what has long arrived counts until it is used": (CommunicationClock, "record_start", ends_late),
    "a started exchange is not counted": (
        CommunicationClock,
        "record_arrival",
        lambda self, flight, work: None,
    ),
    None: (clock, "union_length", union_length),
}


def measured(world, bug=None) -> dict[str, tuple[float, float]]:
    """{what: (exposed, hidden) ms} of this rank; rank 1 comes late to every exchange."""
    group, x, out = world.all_ranks(), torch.ones(1000), {}
    with mock.patch.object(*BUGS[bug]):
        for what in ("blocking", "started", "scattered", "gathered"):
            comm.all_reduce_sum(x, group)  # together
            world.activity.clock.collect()
            time.sleep(LATE * world.rank)
            if what == "blocking":
                comm.all_reduce_sum(x, group)
            elif what == "gathered":
                work = comm.start_all_gather(x, group, torch.empty(2000))
            else:
                work = (comm.start_all_reduce if what == "started" else comm.start_reduce_scatter)(
                    x.clone(), group
                )
            if what in ("started", "gathered"):
                time.sleep(LONG)  # the computation
            if what != "blocking":
                work.wait()
            out[what] = world.activity.clock.collect().read()
    return out


def as_it_should(found: dict[str, tuple[float, float]]) -> bool:
    late, long = 800 * LATE, 1000 * LONG
    names = ("blocking", "started", "gathered", "scattered")
    (exposed, hidden), (waited, under), (gather_waited, gather_under), (at_once, none) = (
        found[k] for k in names
    )
    return (
        exposed > late
        and hidden == 0
        and at_once > late
        and none < late
        and waited < late < under < 0.8 * long
        and gather_waited < late < gather_under < 0.8 * long
    )


@pytest.mark.slow
def test_a_late_peer_is_exposed_and_a_sum_under_a_computation_is_hidden(ranks):
    found, late = ranks(2).run(measured)
    assert as_it_should(found), found
    assert late["blocking"][0] < 800 * LATE  # nobody let the late one wait


@pytest.mark.slow
@pytest.mark.parametrize("bug", [b for b in BUGS if b])
def test_planted_bugs_are_seen(ranks, bug):
    assert not as_it_should(ranks(2).run(measured, bug)[0])


def test_a_group_of_one_takes_no_time():
    group = World().all_ranks()
    comm.all_reduce_sum(torch.ones(2), group), comm.start_all_reduce(torch.ones(2), group).wait()
    assert group.activity.clock.collect().read() == (0, 0)


def sent_and_received(world) -> int:
    """How many flights the clock has after a transfer each way."""
    group, other = world.all_ranks(), 1 - world.rank
    world.activity.clock.collect()
    for work in comm.start_transfers([(torch.ones(9), other)], [(torch.empty(9), other)], group):
        work.wait()
    return len(world.activity.clock.exchanges)


def test_transfers_over_gloo_have_no_flights(ranks):
    """gloo does not tell when they arrive: their waits count, and nothing is made up of how long they
    travelled.
    """
    assert ranks(2).run(sent_and_received) == [0, 0]
