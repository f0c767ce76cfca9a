"""The planner's buckets are the run's: those that build.py makes, on a mesh of made-up groups, slot by
slot.
"""

from dataclasses import replace

import pytest
import torch

import config
from build import make_buckets
from config import MupConfig
from config.reading import resolve
from config.reading.schedules import plan_pipeline
from config.reading.tiny import tiny_config
from model.sharding import parallel_dims
from model.stages import make_stages
from parallel.topology.mesh import Mesh
from plan.buckets import buckets, unique_buckets
from plan.job import make_rank_job

LAYOUTS = [
    dict(zero=1),
    dict(tp=2, sp=True),
    dict(pp=2, zero=2),
    dict(pp=2, schedule="zb-v", zero=3, bucket_mb=0.01),
    dict(tp=2, dp_rep=2, zero=3),
    dict(compress="int8", bucket_mb=0.02),
]


def compared(cfg: config.Config, world: int, rank: int):
    """(the run's, the planner's): size, shard, users, hidden matrices, and each slot with its rate."""
    schedule = plan_pipeline(cfg, world)
    dims = parallel_dims(cfg, world)
    mesh = Mesh.without_processes(dims, rank)
    made = make_buckets(cfg, mesh, torch.device("cpu"), make_stages(cfg, mesh, schedule.rank_of_stage))
    planned = unique_buckets(buckets(make_rank_job(cfg, world, rank)))

    def facts(bucket, slots):
        of_slots = [(at, s.shape, s.lr_factor, s.has_decay, s.partial_over) for s, at in slots]
        b = bucket
        return b.size, b.shard_start, b.shard_end, b.num_users, b.is_hidden, of_slots

    real = [facts(b, [(slot.param.spec, slot.offset) for slot in b.slots]) for b in made.buckets]
    return real, [facts(b, zip(b.specs, b.offsets)) for b in planned]


@pytest.mark.slow(every=32)
@pytest.mark.parametrize("name", ["deepseek-v3-tiny", "qwen2-moe-tiny", "gpt2-tiny", "olmoe-tiny"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("mup", [False, True])
@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_the_planned_buckets_are_the_runs(name, optimizer, mup, parallel):
    cfg = tiny_config(name)
    model = replace(cfg.model, mup=MupConfig(base=cfg.model.hidden // 2) if mup else None, dropout=0.0)
    if optimizer == "muon" and parallel.get("compress"):
        parallel = dict(zero=1)
    cfg = replace(
        cfg, model=model, optim=replace(cfg.optim, name=optimizer), parallel=replace(cfg.parallel, **parallel)
    )
    for rank in (0, 3):
        real, ours = compared(cfg, 4, rank)
        assert real == ours and len(real) > 4, rank


def test_matrices_with_other_rates_under_mup_have_other_buckets():
    """A matrix of another rate lies elsewhere: deepseek-v3-tiny had 47 buckets in the run and 46 in the
    planner.
    """
    words = ["--model.mup.base", "32", "--parallel.bucket_mb", "0.05", "--model.vocab", "512"]
    cfg = resolve("deepseek-v3-tiny", None, words)
    mup, ours = compared(cfg, 1, 0)
    plain, _ = compared(replace(cfg, model=replace(cfg.model, mup=None)), 1, 0)
    assert mup == ours and [bucket[-1] for bucket in mup] != [bucket[-1] for bucket in plain]
    assert len({rate for bucket in mup for _, _, rate, *_ in bucket[-1]}) > 1
