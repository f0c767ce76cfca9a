"""Which process groups a job has, and what they are asked for on GPUs.

NCCL itself is not here: its groups are stand-ins. What they are made with is read.
"""

from collections import Counter
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from parallel.topology.dims import GROUP_AXES, ParallelDims
from parallel.topology.mesh import Mesh
from parallel.wire import world as module
from parallel.wire.comm import Activity, Group
from parallel.wire.device_waits import DeviceWaits
from parallel.wire.world import NCCL_MARGIN_S, World, exchange_with_neighbours, make_first_exchange

TIMEOUT_S = 30.0
GPU = torch.device("cuda", 0)


def made_groups(
    dims: ParallelDims, device: torch.device, rank: int = 0
) -> tuple[Mesh, mock.Mock, mock.Mock]:
    """(the mesh of the rank, dist.new_group's calls, the first exchanges)."""
    world = World(rank, dims.world, device, activity=Activity(timeout_s=TIMEOUT_S))

    def new_group(ranks, **_):
        return mock.Mock(ranks=ranks) if rank in ranks else -100  # a number: this rank is not in it

    groups = mock.patch.object(dist, "new_group", side_effect=new_group)
    exchanges = mock.patch.object(module, "make_first_exchange")
    neighbours = mock.patch.object(module, "exchange_with_neighbours")
    with groups as calls, exchanges as first_exchange, neighbours as meeting:
        mesh = Mesh.bind(dims, world)
    met = [call.args[0] for call in meeting.call_args_list]
    expected = [mesh.cp, mesh.pp, mesh.pp_up] if device.type == "cuda" else []
    assert [(group.ranks, group.handle) for group in met] == [
        (group.ranks, group.handle) for group in expected
    ]
    return mesh, calls, first_exchange


@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize("device, backend", [(torch.device("cpu"), "gloo"), (GPU, "nccl")])
def test_groups_have_the_backend_of_their_tensors(device, backend, rank):
    """gloo would connect each pair of ranks of each group with a socket; NCCL's watchdog must not come
    first."""
    mesh, new_group, first_exchange = made_groups(ParallelDims(8, tp=2, pp=2), device, rank)
    margin = NCCL_MARGIN_S if device.type == "cuda" else 0.0
    for call in new_group.call_args_list:
        assert call.kwargs == {"backend": backend, "timeout": timedelta(seconds=TIMEOUT_S + margin)}

    # a first exchange for each group that this rank is in, with what it will be used with
    exchanged = [call.args[0] for call in first_exchange.call_args_list]
    own = [call.args[0] for call in new_group.call_args_list if rank in call.args[0]]
    assert [list(group.ranks) for group in exchanged] == (own if device.type == "cuda" else [])
    for group in exchanged:
        assert group.handle.ranks == list(group.ranks)
        assert group.ranks[group.index] == rank


def test_the_whole_job_is_joined_once():
    mesh, new_group, _ = made_groups(ParallelDims(4, tp=2), GPU)
    assert mesh.world.handle is None and mesh.world.size == 4
    assert [0, 1, 2, 3] not in [call.args[0] for call in new_group.call_args_list]


def test_gradients_of_a_pipeline_have_a_communicator_of_their_own():
    for dims in (ParallelDims(4, pp=4), ParallelDims(8, tp=2, pp=2), ParallelDims(4, tp=2)):
        mesh, new_group, _ = made_groups(dims, GPU)
        assert (mesh.pp.name, mesh.pp.ranks) == (mesh.pp_up.name, mesh.pp_up.ranks)
        if dims.pp > 1:
            assert mesh.pp_up.handle is not None
            assert mesh.pp_up.handle is not mesh.pp.handle
        others = [getattr(mesh, name).handle for name in GROUP_AXES]
        assert dims.pp == 1 or mesh.pp_up.handle not in others


def test_nccl_waits_longer_than_we_do_and_connects_at_once():
    nccl = mock.Mock()
    whole_job = mock.Mock(_get_backend=lambda device: nccl)
    joined = mock.patch.object(dist, "init_process_group")
    default = mock.patch.object(dist, "group", mock.Mock(WORLD=whole_job))
    exchanges = mock.patch.object(module, "make_first_exchange")
    with joined as init, default, exchanges as first_exchange:
        world = module.join_job(GPU, 0, 4, TIMEOUT_S, store=mock.Mock())
    assert init.call_args.args == ("cpu:gloo,cuda:nccl",)
    assert init.call_args.kwargs["device_id"] == GPU
    assert init.call_args.kwargs["timeout"] == timedelta(seconds=TIMEOUT_S)
    nccl._set_default_timeout.assert_called_once_with(timedelta(seconds=TIMEOUT_S + NCCL_MARGIN_S))
    assert first_exchange.call_count == 1 and world.activity.clock.device == GPU


def exchanged(world: World) -> dict:
    """The ledger of two groups after their first exchange."""
    ledger = Counter()
    cases = {"all": [[0, 1, 2, 3]], "pairs": [[0, 2], [1, 3]], "alone": [[0], [1], [2], [3]]}
    for name, groups in cases.items():
        group = world.group_of_rank(name, groups, ledger)
        make_first_exchange(group, torch.device("cpu"))
        exchange_with_neighbours(group, torch.device("cpu"))
    return dict(ledger)


def test_a_first_exchange_reaches_every_neighbour_and_counts_nothing(ranks):
    assert ranks(4).run(exchanged) == [{}] * 4


# ---- in which exchange a GPU is ----------------------------------------------------------------------------


class Event:
    """An event on a stream; `now` is how far the stream has come."""

    now = 0

    def __init__(self, place):
        self.place = place

    def query(self):
        return Event.now >= self.place


def test_a_stream_is_in_the_first_wait_that_has_begun_and_not_ended(monkeypatch):
    clock = mock.Mock(side_effect=lambda: clock.seconds)
    monkeypatch.setattr("parallel.wire.device_waits.time.monotonic", clock)
    waits: DeviceWaits[str] = DeviceWaits()
    for number in range(100):
        waits.add(f"wait {number}", Event(10 * number + 1), Event(10 * number + 5))

    found = []
    for place, seconds in ((0, 0.0), (1, 1.0), (4, 3.5), (5, 4.0), (731, 5.0), (734, 9.0), (995, 10.0)):
        Event.now, clock.seconds = place, seconds
        found.append(waits.current())
    assert found == [
        None,  # the stream computes: it has not come to the first
        ("wait 0", 0.0),
        ("wait 0", 2.5),
        None,  # between two waits
        ("wait 73", 0.0),
        ("wait 73", 4.0),
        None,
    ]
    assert not waits.waits


def test_waits_that_nobody_asks_for_do_not_pile_up(monkeypatch):
    monkeypatch.setattr("parallel.wire.device_waits.MAX_WAITS", 10)
    waits: DeviceWaits[int] = DeviceWaits()
    Event.now = 0
    for number in range(25):
        waits.add(number, Event(number), Event(number + 1))
    assert [wait.what for wait in waits.waits] == list(range(15, 25))


def test_a_group_says_which_exchange_the_device_is_in():
    """The host is in none: its wait has returned."""
    activity = Activity(step=3)
    group = Group("dp", (0, 1), activity=activity)
    Event.now = 1
    exchange = module.comm.AwaitedExchange("all_reduce", group, 4096, None, 2)
    activity.device_waits.add(exchange, Event(1), Event(2))
    assert str(activity) == "all_reduce of 4,096 bytes in group dp (ranks 0, 1) at step 2"
    Event.now = 2
    assert str(activity) == "no exchange at step 3"
