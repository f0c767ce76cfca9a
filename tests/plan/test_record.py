"""What is recorded of a rank without a job, beside the same rank of a real one: FLOPs, exchanges and bytes."""

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="no Triton for this platform")

import torch

import config
from build import build_run
from config import Config
from model.sharding import parallel_dims
from parallel.topology.mesh import Mesh
from parallel.wire.world import World
from plan.record.launches import Launch, Recorder
from plan.record.role import Program, RoleRecord, assumed_batch, record_role, record_steps
from plan.record.work import Facts, judge
from runtime.guard import NonFiniteGuard
from train import train_step

SIZE = (
    "--model.vocab 288 --model.layers 4 --model.hidden 32 --model.heads 4 --model.kv_heads 2 --model.ffn 48 "
    "--train.seq_len 32 --train.micro_batch 2 --train.global_batch 8 --model.vocab_multiple 32"
)


def tiny(name: str, words: str) -> Config:
    cfg = config.resolve(name, None, [*SIZE.split(), *words.split()])
    assert cfg.model.vocab is not None
    return cfg


def program_of(cfg: Config) -> Program:
    guard = NonFiniteGuard()

    def build(mesh, device):
        return build_run(cfg, mesh, device, None, 10)

    def step(run, number, microbatches, grads_ready):
        train_step(run, number, microbatches, guard, grads_ready=grads_ready)

    return Program(build, step)


def real_role(world, cfg: Config) -> tuple[dict, dict, int, int, list]:
    """On a rank of a job: what its step does."""
    dims = parallel_dims(cfg, world.size)
    mesh = Mesh.bind(dims, world)
    device = torch.device("cpu")
    recorder = Recorder(executes=True)
    recorder.counts_host = True
    record = record_steps(
        program_of(cfg), recorder, mesh, device, lambda step: assumed_batch(cfg, dims, device, step)
    )
    return facts_of(record)


def facts_of(record: RoleRecord) -> tuple:
    return flops_of(record.launches), dict(record.ledger), record.state, record.peak, record.at_peak


def flops_of(launches: list[Launch]) -> float:
    return sum(judge(launch, Facts(1.0)).flops for launch in launches)


LAYOUTS = [
    (1, ""),
    (2, "--parallel.tp 2"),
    (2, "--parallel.tp 2 --parallel.sp true --parallel.async_tp true"),
    (2, "--parallel.cp 2"),
    (2, "--parallel.cp 2 --parallel.cp_kind ulysses"),
    (2, "--parallel.pp 2"),
    (2, "--parallel.pp 2 --parallel.schedule zb-v"),
    (2, "--parallel.zero 1"),
    (2, "--parallel.zero 3 --parallel.recompute full"),
    (4, "--parallel.tp 2 --parallel.pp 2 --parallel.zero 0"),
]


@pytest.mark.parametrize("world, words", LAYOUTS, ids=[words or "one" for _, words in LAYOUTS])
def test_a_record_is_the_run(ranks, world, words):
    cfg = tiny("llama3-tiny", words)
    dims = parallel_dims(cfg, world)
    found = ranks(world).run(real_role, cfg) if world > 1 else [real_role(World(), cfg)]
    for rank, (flops, ledger, state, peak, at_peak) in enumerate(found):
        record = record_role(cfg, dims, rank, None, program_of(cfg))
        assert dict(record.ledger) == ledger
        assert flops_of(record.launches) == flops
        print(words, rank, record.state, state, record.peak, peak)
        if record.peak != peak or record.state != state:
            for holder in sorted(record.at_peak.keys() | at_peak.keys()):
                if record.at_peak[holder] != at_peak[holder]:
                    print("   ", *holder, record.at_peak[holder], at_peak[holder])
