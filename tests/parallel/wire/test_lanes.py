"""The log of what a rank posts and awaits, and what NCCL's order makes of it."""
import time

import torch

from parallel.topology.dims import ParallelDims
from parallel.topology.mesh import Mesh
from parallel.wire import comm
from parallel.wire.lanes import LaneLog, PostedExchange
from plan.record.check import check


def logged(world, run):
    """The events of run(mesh) on this rank of two, which are stages of a pipeline."""
    mesh = Mesh.bind(ParallelDims(2, pp=2), world)
    world.activity.lanes = log = LaneLog()
    try:
        run(mesh)
    finally:
        world.activity.lanes = None
    return log.events


def each_kind(mesh):
    x = torch.ones(4)
    comm.all_reduce_sum(x, mesh.world)
    gathered = comm.start_all_gather(x, mesh.world, out=torch.empty(8))
    other = 1 - mesh.pp.index
    for transfer in comm.start_transfers([(x, other)], [(torch.empty(4), other)], mesh.pp):
        transfer.wait()
    gathered.wait()


def of_each_kind(world):
    return logged(world, each_kind)


def test_every_exchange_is_logged_where_it_is_posted_and_where_it_is_awaited(ranks):
    for rank, events in enumerate(ranks(2).run(of_each_kind)):
        said = [
            (event.verb, event.nbytes, event.peer, event.batch) if isinstance(event, PostedExchange)
            else f"wait {event.number}"
            for event in events
        ]
        assert said == [
            ("all_reduce", 16, None, 0), "wait 0",
            ("all_gather", 32, None, 1),
            ("send", 16, 1 - rank, 2), ("receive", 16, 1 - rank, 2), "wait 2", "wait 3",
            "wait 1",
        ]


def each_receives_before_it_sends(mesh):
    """Over gloo exchanges do not wait for each other."""
    x, other = torch.ones(4), 1 - mesh.pp.index
    (receive,) = comm.start_transfers([], [(torch.empty(4), other)], mesh.pp)
    (send,) = comm.start_transfers([(x, other)], [], mesh.pp)
    receive.wait()
    send.wait()


def of_crossed_transfers(world):
    return logged(world, each_receives_before_it_sends)


def test_an_order_that_ends_over_gloo_alone_is_named(ranks):
    events = dict(enumerate(ranks(2).run(of_crossed_transfers)))
    assert check(events, "gloo") == []
    assert check(events, "nccl") == [
        "rank 0 waits forever: receive of 16 bytes from rank 1 in group pp in ranks 0, 1",
        "rank 1 waits forever: receive of 16 bytes from rank 0 in group pp in ranks 0, 1",
    ]


def seconds_of_a_send(world) -> float:
    """Rank 1 receives half a second later."""
    mesh = Mesh.bind(ParallelDims(2, pp=2), world)
    x, other = torch.ones(4), 1 - mesh.pp.index
    comm.all_reduce_sum(x, mesh.world)
    begun = time.monotonic()
    if mesh.pp.index == 1:
        time.sleep(0.5)
    sends, receives = ([(x, other)], []) if mesh.pp.index == 0 else ([], [(x, other)])
    (transfer,) = comm.start_transfers(sends, receives, mesh.pp)
    transfer.wait()
    return time.monotonic() - begun


def test_a_send_over_gloo_ends_with_its_receive(ranks):
    assert min(ranks(2).run(seconds_of_a_send)) > 0.4
