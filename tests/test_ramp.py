"""The batch-size ramp: steps <-> sequences against Megatron's loop, every sample once, the gradients of a run
with that batch, and a resume in its middle, bit for bit and under another dp. That no layout changes it is
verify's (`--only ramp`).
"""

import bisect
import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
from random_tokens import RandomTokens
from ranks import MODEL, job

from build import build_run, total_steps
from config import TrainConfig, global_batch_at, global_batch_sizes, sequences_seen, steps_to_see
from config.reading.schedules import make_schedules, plan_pipeline
from config.reading.tiny import tiny_config
from data import loader
from parallel.topology.mesh import Mesh
from train import train_step


def megatron(t: TrainConfig, steps: int) -> list[int]:
    """The batches of the first steps, by the words of --rampup-batch-size: one more increment each time
    another equal share of the samples is consumed.
    """
    start, more, samples = map(int, t.ramp.split(","))
    rises, seen, out = (t.global_batch - start) // more, 0, []
    for _ in range(steps):
        out.append(
            t.global_batch
            if seen > samples
            else min(t.global_batch, start + more * (seen * rises // samples))
        )
        seen += out[-1]
    return out


@pytest.mark.parametrize(
    "ramp, size",
    [("4,4,100", 16), ("4,4,3", 32), ("1,1,400", 9), ("8,8,1", 64), ("6,2,77", 12), ("2,14,50", 16)],
)
def test_steps_and_sequences_are_megatron_s(ramp, size):
    t = TrainConfig(global_batch=size, ramp=ramp)
    want = megatron(t, 300)
    assert [global_batch_at(t, s) for s in range(300)] == want and set(want) == set(global_batch_sizes(t))
    seen = [0, *itertools.accumulate(want)]
    assert [sequences_seen(t, s) for s in range(301)] == seen
    assert all(steps_to_see(t, n) == bisect.bisect_left(seen, n) for n in range(0, seen[-1], 3))


def test_a_horizon_in_tokens_counts_the_ramp():
    cfg = tiny_config("llama3-tiny")
    cfg = dataclasses.replace(
        cfg,
        train=dataclasses.replace(
            cfg.train, global_batch=16, ramp="4,4,40", steps=None, tokens=100.0 * cfg.train.seq_len
        ),
    )
    assert (
        total_steps(cfg, 1.0) == steps_to_see(cfg.train, 100) == 11
    )  # 4 4 4 4 | 8 8 | 12 | 16 ...: 10 steps are 92 sequences
    assert total_steps(dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, ramp=None)), 1.0) == 7


def test_a_schedule_for_each_number_of_microbatches():
    cfg = tiny_config("llama3-tiny")
    cfg = dataclasses.replace(
        cfg, train=dataclasses.replace(cfg.train, global_batch=16, ramp="4,4,40"),
        parallel=dataclasses.replace(cfg.parallel, pp=2),
    )
    assert [s.microbatches for s in make_schedules(cfg, 4)] == [2, 4, 6, 8]
    assert plan_pipeline(cfg, 4).microbatches == 8


# ---- samples -----------------------------------------------------------------------------------------------


def settings(prefix, ramp="4,4,40"):
    cfg = tiny_config("llama3-tiny")
    return dataclasses.replace(
        cfg, model=dataclasses.replace(cfg.model, vocab=None),
        train=dataclasses.replace(cfg.train, global_batch=16, ramp=ramp, seq_len=8),
        data=dataclasses.replace(cfg.data, path=prefix, tokenizer=None),
    )


def read(prefix, world: int, steps, ramp="4,4,40", split="train") -> list[list]:
    """[the sequences of each step, over all ranks]"""
    ranks = [loader.open_loader(settings(prefix, ramp), split, r, world) for r in range(world)]
    out = [[row for d in ranks for b in d.microbatches(s) for row in b.tokens.tolist()] for s in steps]
    [d.close() for d in ranks]
    return out


def test_a_ramp_reads_the_samples_of_a_plain_run_in_their_order(prefix):
    plain = sum(read(prefix, 1, range(8), None), [])
    for world in (1, 2, 4):
        steps = read(prefix, world, range(12))
        assert [len(s) for s in steps] == megatron(settings(prefix).train, 12)
        assert sum(steps, [])[:128] == plain[: sum(map(len, steps))]
        assert read(prefix, world, [9, 3]) == [steps[9], steps[3]]  # a resume begins anywhere
    assert read(prefix, 2, [0, 1], split="valid") == read(prefix, 2, [0, 1], None, "valid")


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("sequences_seen", lambda t, step: step * t.global_batch),
        ("sequences_seen", lambda t, step: step * global_batch_at(t, step)),
        ("global_batch_at", lambda t, step: t.global_batch),
    ],
)
def test_a_planted_bug_of_the_samples_is_seen(prefix, monkeypatch, name, wrong):
    """Samples that the short steps left out, samples that are read twice, steps that take too many."""
    monkeypatch.setattr(loader, name, wrong)
    with pytest.raises(AssertionError):
        test_a_ramp_reads_the_samples_of_a_plain_run_in_their_order(prefix)


# ---- training ----------------------------------------------------------------------------------------------


def gradients(cfg) -> list[torch.Tensor]:
    run = build_run(cfg, Mesh.single(), torch.device("cpu"), None, 10)
    train_step(run, 1, RandomTokens(cfg, 0, 1).microbatches(0))
    return [b.grads.local.clone() for b in run.buckets]


def test_a_short_step_is_that_of_a_run_with_that_batch():
    cfg = tiny_config("llama3-tiny")
    short, ramped = (
        dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, micro_batch=2, **t))
        for t in (dict(global_batch=4), dict(ramp="4,4,4"))
    )
    assert all(map(torch.equal, gradients(short), gradients(ramped)))


def rows(folder) -> list[dict]:
    return [r for r in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if "loss" in r]


@pytest.mark.slow
def test_a_resume_in_the_middle_bit_for_bit_and_under_another_dp(tmp_path, prefix):
    args = [
        "llama3-tiny", *MODEL, "--data.path", prefix, "--train.dtype", "fp64", "--log.dir", str(tmp_path),
        "--model.dropout", "0.1", "--train.global_batch", "12", "--train.ramp", "4,4,20",
        "--train.steps", "7", "--checkpoint.every", "2",
    ]
    for name, first in (("one", None), ("same", 1), ("more", 2)):
        if first:  # stopped in the ramp, at a step of 4 or 8 sequences
            end = job(
                tmp_path / f"{name}-1", first, [*args, "--log.name", name],
                fault="step.begin:step=5:act=SIGKILL",
            )
            assert set(end.codes) <= {-9, -15}, end.logs
        end = job(tmp_path / name, 1 if name != "more" else 4, [*args, "--log.name", name], fault="")
        assert set(end.codes) == {0}, end.logs
    one, same, more = (rows(tmp_path / name) for name in ("one", "same", "more"))
    assert [r["tokens"] for r in one] == [16 * n for n in itertools.accumulate([4, 4, 4, 8, 12, 12, 12])]
    assert [r["loss"] for r in same] == [r["loss"] for r in one]
    assert [r["grad_norm"] for r in same] == [r["grad_norm"] for r in one]
    assert [r["tokens"] for r in more] == [r["tokens"] for r in one]
    assert [r["lr"] for r in more] == [r["lr"] for r in one]
    np.testing.assert_allclose([r["loss"] for r in more], [r["loss"] for r in one], rtol=1e-9)
    end = job(tmp_path / "other", 1, [*args, "--log.name", "same", "--train.ramp", "4,4,24"])
    assert end.codes == [2] and "train.ramp" in end.errors()[0]
