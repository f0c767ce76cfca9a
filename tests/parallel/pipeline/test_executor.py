"""How a step posts its transfers: each alone, those to higher and to lower ranks in separate communicators.

NCCL pairs what is posted together with what the other side posts together: where the two sides group
differently, a run on GPUs hangs or is undefined.
"""

from dataclasses import replace
from unittest import mock

import pytest
import torch.distributed as dist
from random_tokens import begin

from config.reading.tiny import tiny_config
from train import train_step


def posted(world, cfg) -> list[str]:
    """The direction of each transfer of a step and an evaluation, each posted alone, in its communicator."""
    run, data = begin(world, cfg)
    mesh = run.mesh
    assert mesh.pp_up.handle not in (None, mesh.pp.handle)
    found = []
    post = dist.batch_isend_irecv

    def seen(ops):
        (op,) = ops
        goes_down = (op.group_peer > mesh.pp.index) == (op.op is dist.isend)
        assert (op.group is mesh.pp_up.handle) == (not goes_down)
        found.append("down" if goes_down else "up")
        return post(ops)

    with mock.patch.object(dist, "batch_isend_irecv", seen):
        train_step(run, 1, data.microbatches(0))
        run.pipeline.evaluate(data.microbatches(0))
    return found


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("schedule, vpp", [("1f1b", None), ("interleaved", 2), ("zb-v", None)])
def test_each_transfer_is_posted_alone_in_the_communicator_of_its_direction(ranks, schedule, vpp):
    cfg = tiny_config("llama3-tiny", 2)
    there = replace(cfg, parallel=replace(cfg.parallel, pp=2, schedule=schedule, vpp=vpp))
    for found in ranks(2).run(posted, there):
        assert set(found) == {"down", "up"}
