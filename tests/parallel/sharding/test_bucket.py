"""parallel/sharding/bucket.py and views.py: which ranks share a bucket, and what of it is stored."""

import pytest
import torch

from parallel.sharding.boxes import Box
from parallel.sharding.bucket import Bucket
from parallel.sharding.shares import write_shares
from parallel.sharding.slots import ShardingConfig
from parallel.sharding.spec import ParameterSpec, parameter
from parallel.sharding.views import state_flats
from parallel.topology.dims import ParallelDims
from parallel.topology.mesh import Mesh

# ranks 0 to 7: dp_replicate outermost, then dp_shard, then tp
DIMS = ParallelDims(8, tp=2, dp_replicate=2)


def bucket(zero, **spec):
    param = parameter(ParameterSpec((Box.whole("w", (4, 4)),), "hidden", **spec))
    mesh = Mesh.without_processes(DIMS, rank=0)
    return Bucket([param], mesh, ShardingConfig(zero=zero), dtype=torch.float32, device="cpu", seed=0)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_shard_is_owned_by_its_replicas(zero):
    assert bucket(zero).owners.ranks == (0, 4)


def test_without_zero_all_data_parallel_ranks_own_the_same():
    assert bucket(0).owners.ranks == (0, 2, 4, 6)


def test_experts_are_owned_over_the_axes_of_experts():
    assert bucket(1, is_expert=True).owners.ranks == (0, 4)
    assert bucket(0, is_expert=True).owners.ranks == (0, 1, 2, 3, 4, 5, 6, 7)


def test_a_state_is_the_master_and_the_moments_that_a_bucket_has():
    """Muon keeps no moment of AdamW for a hidden bucket, and no momentum for the others."""
    one, other = bucket(1), bucket(1)
    momentum, average = torch.ones(4), torch.zeros(4)
    moments = {"muon_m": [momentum, None], "v": [None, average]}
    assert list(state_flats(one, 0, moments)) == [("", one.weights.master), ("@muon_m", momentum)]
    assert list(state_flats(other, 1, moments)) == [("", other.weights.master), ("@v", average)]


def test_a_tied_table_is_counted_and_saved_at_the_first_end():
    """Of the two stages that hold it. What one stage alone holds is its own."""
    dims = ParallelDims(2, pp=2)
    for partial_over, owners in (("embedding_ends",), [True, False]), ((), [True, True]):
        param = parameter(ParameterSpec((Box.whole("w", (4, 4)),), "embedding", partial_over=partial_over))
        counted, saved = [], []
        for rank in range(2):
            mesh = Mesh.without_processes(dims, rank)
            one = Bucket([param], mesh, ShardingConfig(), dtype=torch.float32, device="cpu", seed=0)
            counted.append(one.slots[0].counted_in_norm)
            saved.append(bool(write_shares([one], mesh)[0].slots))
        assert counted == saved == owners
