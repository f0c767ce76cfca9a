"""A teacher (distill.teacher) in the planner and in the dry run: the bytes of its weights against a real
rank's, its products against the FLOPs of its parameters.
"""

import json
from dataclasses import replace

import pytest
import torch
from program import settings, trained
from ranks import corpus

from build import build_run, make_buckets
from checkpoint.teacher import place_teacher, read_model
from config import ConfigError
from config.reading import resolve, split_argv
from config.reading.teacher import teacher_config
from config.reading.tiny import tiny_config
from config.tree import with_values
from model.flops import flops_of_parts
from model.sharding import parallel_dims
from parallel.topology.mesh import Mesh
from parallel.wire.world import World
from plan import memory, teacher
from plan.cost import Efficiency, cluster, stage_times
from plan.job import make_rank_job
from scripts import dry_run, plan

LAYOUTS = {  # of four ranks
    "zero 0": dict(zero=0),
    "zero 3 over tp": dict(zero=3, tp=2, sp=True),
    "the last of two stages": dict(pp=2, zero=1, tp=2),
    "both ends of a pipeline": dict(pp=2, schedule="zb-v", zero=3),
}


def job_of(layout, name="llama3-tiny"):
    """A student, and as its teacher a model of the same recipe with more layers, or with experts."""
    cfg = tiny_config("llama3-tiny")
    cfg = replace(cfg, parallel=replace(cfg.parallel, **layout))
    cfg = with_values(cfg, {"train.dtype": "bf16", "model.layers": 4, "distill.teacher": "elsewhere"})
    return cfg, replace(tiny_config(name).model, layers=6)


def held(world, cfg, model):
    """Bytes of the weights of a rank: of all, and of its teacher."""
    mesh = Mesh.bind(parallel_dims(cfg, world.size), world)
    run = build_run(cfg, mesh, torch.device("cpu"), None, 4)
    own = teacher_config(cfg, model, "elsewhere", world.size)
    buckets, _ = place_teacher(run, own, make_buckets)
    sizes = [
        sum((b.weights.local if b.weights.full is None else b.weights.full).nbytes for b in some)
        for some in (run.buckets, buckets)
    ]
    has_head = any(stage.head is not None for stage in run.stages.values())
    assert bool(buckets) == has_head
    return sum(sizes), sizes[1]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", ["llama3.2-tiny", "mixtral-tiny"])
def test_the_weights_are_those_of_a_real_rank(ranks, name, layout):
    """Of a tied model, and of one with experts."""
    cfg, model = job_of(layout, name)
    for rank, (whole, alone) in enumerate(ranks(4).run(held, cfg, model)):
        job = make_rank_job(cfg, 4, rank, teacher=model)
        assert memory.state_bytes(job)["weights"] == whole
        assert teacher.weight_bytes(job) == alone
        assert (teacher.passing_bytes(job) > 0) == (layout["zero"] == 3 and alone > 0)
        assert memory.peak_activation_bytes(job) >= memory.peak_activation_bytes(make_rank_job(cfg, 4, rank))


def test_its_forward_takes_the_flops_of_its_matrices():
    cfg, model = job_of({})
    cfg = with_values(cfg, {"train.global_batch": 4})
    job, plain = (make_rank_job(cfg, 1, 0, teacher=one) for one in (model, None))
    train = cfg.train
    records = teacher.blocks_of(job.teacher, train.micro_batch)
    product = teacher.head_product(job.teacher, train.micro_batch).products
    found = sum(record.forward.work.products for record in records) + product
    parts = flops_of_parts(job.teacher.model, (1,), train.seq_len)  # a token sees itself alone
    assert found == pytest.approx(train.micro_batch * train.seq_len * sum(parts), rel=0.1)

    machine = cluster("h100-ib"), Efficiency()
    with_it, without = (stage_times(each, 0, 4, *machine) for each in (job, plain))
    assert with_it.f > without.f and (with_it.i, with_it.w) == (without.i, without.w)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of ours that can teach."""
    home = tmp_path_factory.mktemp("teacher")
    cfg = settings(corpus(home), name="llama3-tiny", checkpoint={"every": 2})
    cfg = replace(cfg, log=replace(cfg.log, dir=str(home), name="teacher"))
    assert trained(World(), cfg, str(home / "teacher"), lambda *_, **__: None) == 0
    return home / "teacher"


def test_the_planner_and_the_dry_run_count_it(folder, tmp_path, capsys):
    words = "llama3-tiny --model.vocab 257 --train.global_batch 16 --train.dtype bf16 --train.micro_batch 4"
    layout = "--parallel.tp 2 --parallel.zero 0 --parallel.pp 1 --parallel.recompute none"
    words = [*words.split(), *layout.split()]

    def planned(*more):
        assert plan.main([*words, "--gpus", "2", "--cluster", "h100-ib", "--json", *more]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[0])

    def recorded(*more):
        file = tmp_path / "recorded.json"
        assert dry_run.main([*words, "--world", "2", "--json", str(file), *more]) == 0
        capsys.readouterr()
        return json.loads(file.read_text())["roles"][0]

    own = ("--distill.teacher", str(folder))
    cfg = with_values(resolve(*split_argv(words)), {"distill.teacher": str(folder)})
    nbytes = teacher.weight_bytes(make_rank_job(cfg, 2, 0, teacher=read_model(cfg)))
    before, after = recorded(), recorded(*own)
    terms = 2 * 4  # of the loss, which are logged
    assert after["state"] - before["state"] - terms == nbytes > 0
    assert after["peak"] >= before["peak"] + nbytes and after["flops"] > before["flops"]

    before, after = planned(), planned(*own)
    assert after["step_s"] > before["step_s"] and after["memory"] > before["memory"]
    with pytest.raises(ConfigError, match="^distill.teacher: .* has 257 token ids, and model.vocab is 300"):
        planned(*own, "--model.vocab", "300")
