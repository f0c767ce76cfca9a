"""Bytes of communicators: the groups are those that a job connects, the bytes those of NCCL's own log."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from config.reading import resolve
from parallel.topology.dims import ParallelDims, connections_of_rank
from parallel.topology.mesh import Mesh
from parallel.wire import world as wire
from parallel.wire.comm import Activity
from plan.communicators import (
    MIB,
    Gpu,
    Placement,
    communicator_bytes,
    communicator_nbytes,
    num_peers,
    reserved_bytes,
)
from plan.job import make_rank_job

H100 = Gpu("h100", node=8)
RING = 24 * 12  # MiB: 24 channels in a node, each 10 MiB to receive and 2 MiB to send
PEER = 32 * 12  # of every rank that one sends to in the node


@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(8, tp=2, pp=2),
        ParallelDims(8, tp=2, cp=2, ep=4),
        ParallelDims(16, pp=4, dp_replicate=2, ep=2),
        ParallelDims(8, pp=8),
        ParallelDims(4, tp=4, ep=2, etp=2),
        ParallelDims(1),
    ],
    ids=str,
)
def test_counted_are_the_groups_that_are_connected(dims):
    """Every rank binds its mesh, as on GPUs; NCCL's groups are stand-ins."""
    for rank in range(dims.world):
        world = wire.World(rank, dims.world, torch.device("cuda", 0), activity=Activity(timeout_s=1.0))

        def new_group(ranks, rank=rank, **_):
            return mock.Mock(ranks=ranks) if rank in ranks else -100

        with (
            mock.patch.object(dist, "new_group", side_effect=new_group),
            mock.patch.object(wire, "make_first_exchange"),
            mock.patch.object(wire, "exchange_with_neighbours"),
        ):
            Mesh.bind(dims, world)
        connected = [key for key, handle in world.handles.items() if handle is not None]
        joined = [("", tuple(range(dims.world)))] if dims.world > 1 else []  # by join_job
        assert set(connections_of_rank(dims, rank)) == {*connected, *joined}
        assert len(connected) == len(set(connected))


def test_a_communicator_in_a_node():
    assert communicator_nbytes(Placement(2, 2), 0, H100) == RING * MIB
    sharp = 4 * 16 * 2  # NVLink SHARP: of each rank, 16 channels both ways of 8 steps x 128 KiB
    assert communicator_nbytes(Placement(4, 4), 0, H100) == (RING + sharp) * MIB
    assert communicator_nbytes(Placement(4, 4), 0, Gpu("nvidia a100-sxm4-80gb")) == RING * MIB
    assert communicator_nbytes(Placement(2, 2), 1, H100) == (RING + PEER) * MIB


def test_a_communicator_over_several_nodes():
    """16 channels; the card of each reads and writes GPUs: 10 MiB to send, too."""
    assert communicator_nbytes(Placement(4, 1), 0, H100) == 16 * 20 * MIB
    assert communicator_nbytes(Placement(8, 2), 0, H100) == 16 * (10 + 2 + 8 / 2) * MIB
    both_ways = 2 * 32  # 16 channels x 16 steps x 128 KiB, whatever the number of peers
    for peers in (1, 3):
        assert communicator_nbytes(Placement(4, 1), peers, H100) == (16 * 20 + both_ways) * MIB
    with_node = 16 * 16 + both_ways + 1 * 2 * 12  # two channels to the other rank of the node
    assert communicator_nbytes(Placement(8, 2), 7, H100) == with_node * MIB


def job(name, world, *settings):
    words = ["--train.dtype", "bf16", "--train.global_batch", "64", *settings]
    return make_rank_job(resolve(name, None, words), world, rank=0)


@pytest.mark.parametrize(
    "world, settings, by_hand",
    [
        (1, (), 0),
        # the job, and nothing else: all its groups are of all ranks, or of one
        (8, (), RING + 8 * 32),
        # the job, pairs of tp, fours of dp
        (8, ("--parallel.tp", "2"), (RING + 8 * 32) + RING + (RING + 4 * 32)),
        # the job is the pipeline: both neighbours; and once more for gradients; its two ends
        (4, ("--parallel.pp", "4"), (RING + 4 * 32 + 2 * PEER) * 2 + RING),
        # ... whose ends are all of it
        (2, ("--parallel.pp", "2"), (RING + PEER) * 2),
        # a ring of gradients: both neighbours
        (8, ("--parallel.reduce", "ring"), RING + 8 * 32 + 2 * PEER),
        # a sequence over all ranks: to all others
        (8, ("--parallel.cp", "8", "--parallel.cp_kind", "ulysses"), RING + 8 * 32 + 7 * PEER),
    ],
)
def test_of_a_job_by_hand(world, settings, by_hand):
    assert communicator_bytes(job("llama3-8b", world, *settings), H100) == by_hand * MIB


def test_rows_of_experts_go_to_every_rank():
    held = communicator_bytes(job("qwen3-30b-a3b", 8, "--parallel.ep", "8"), H100)
    assert held == (RING + 8 * 32 + 7 * PEER) * MIB  # NVIDIA/nccl#1685 measures 3.28 GB more after one
    assert 0.8 * 3.28e9 < 7 * PEER * MIB < 3.28e9


def test_only_the_layers_of_a_region_send_to_all_of_it():
    cfg = job("llama3-8b", 8, "--parallel.tp", "8").cfg
    assert num_peers(cfg, "tp", {"send"}, 8) == 7
    assert num_peers(cfg, "tp", {"all_reduce"}, 8) == 0
    assert num_peers(cfg, "pp", set(), 8) == 2 and num_peers(cfg, "pp", set(), 2) == 1


def test_what_a_gpu_holds_before_any_tensor():
    newer, older = reserved_bytes(H100), reserved_bytes(Gpu("nvidia a10g"))
    assert newer - older == 2 * (32 * MIB - 8_519_680)
    assert reserved_bytes(Gpu()) == newer == 1_060_000_000 + 64 * MIB + 500_000_000
