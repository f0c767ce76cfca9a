"""Loss scaling: exact where nothing overflows, and a step that overflows is skipped and heeded."""

import dataclasses

import pytest
import torch
from random_tokens import RandomTokens
from ranks import MODEL, corpus

import train
from build import build_run
from checkpoint.disk import store
from config.reading.tiny import tiny_config
from optim.scaler import LossScaler
from parallel.topology.mesh import Mesh
from train import train_step


def forecast_run(name, dtype):
    cfg = tiny_config(name)
    cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, dtype=dtype))
    return build_run(cfg, Mesh.single(), torch.device("cpu"), None, 50), RandomTokens(cfg, 0, 1)


def steps(run, data, n):
    return [train_step(run, i, data.microbatches(i - 1))[:3] for i in range(1, n + 1)]


@pytest.mark.parametrize("name", ["llama3-tiny", "mixtral-tiny"])
def test_a_loss_scale_of_a_power_of_two_changes_nothing(name):
    (a, data), (b, _) = forecast_run(name, "fp64"), forecast_run(name, "fp64")
    b.scaler.scale.fill_(2.0**16)
    assert steps(a, data, 2) == steps(b, data, 2)
    for x, y in zip(a.buckets, b.buckets):
        assert torch.equal(x.weights.master, y.weights.master)
    if a.routers.stats is not None:
        assert torch.equal(a.routers.stats, b.routers.stats)


@pytest.mark.slow
def test_fp16_trains_like_fp32_and_halves_its_scale_on_overflow():
    (a, data), (b, _) = forecast_run("llama3-tiny", "fp32"), forecast_run("llama3-tiny", "fp16")
    b.scaler.scale.fill_(2.0**40)  # far too large: it must come down by itself
    skipped = 0
    while b.scaler.scale > 2.0**20:
        ok = steps(b, data, 1)[0][2]
        skipped += int(not ok)
        if ok:
            break
    assert skipped > 3 and b.scaler.scale == 2.0 ** (40 - skipped)
    (c, _) = forecast_run("llama3-tiny", "fp16")
    ours, theirs = steps(c, data, 4), steps(a, data, 4)
    assert all(ok for _, _, ok in ours)
    for (loss, norm, _), (want_loss, want_norm, _) in zip(ours, theirs):
        assert float(loss) == pytest.approx(float(want_loss), rel=3e-3)
        assert float(norm) == pytest.approx(float(want_norm), rel=3e-2)


def test_a_scale_doubles_after_its_window_up_to_the_largest_and_is_saved():
    s = LossScaler(torch.float16, torch.device("cpu"))
    for _ in range(1000):
        s.adapt(torch.tensor(True), torch.tensor(True))
    assert s.state() == [2 * 65536.0, 0.0]
    s.adapt(torch.tensor(True), torch.tensor(True))
    other = LossScaler(torch.float16, torch.device("cpu"))
    other.load(s.state())
    assert other.state() == s.state() == [2 * 65536.0, 1.0]
    quick = LossScaler(torch.float16, torch.device("cpu"), first=2.0**23, window=2)
    for _ in range(6):
        quick.adapt(torch.tensor(True), torch.tensor(True))
    assert quick.state() == [2.0**24, 0.0]  # the largest
    plain = LossScaler(torch.bfloat16, torch.device("cpu"))
    plain.load([8.0, 1.0])
    assert plain.state() == [1.0, 0.0] and not plain.dynamic  # train.train_step then leaves it alone


def test_a_run_that_resumes_in_fp16_begins_with_the_first_scale(tmp_path):
    """A run without scaling saves a scale of 1: gradients of fp16 would vanish under it."""
    words = ["llama3-tiny", *MODEL, "--data.path", corpus(tmp_path), "--log.dir", str(tmp_path)]
    words += ["--log.name", "r"]
    assert train.main([*words, "--train.steps", "2"]) == 0
    assert train.main([*words, "--train.steps", "4", "--train.dtype", "fp16"]) == 0
    meta = store.read_meta(tmp_path / "r" / "checkpoints" / "step_00000004")
    assert meta["loss_scale"] == [2.0**16, 2.0]
    # then it resumes with its own
    assert train.main([*words, "--train.steps", "5", "--train.dtype", "fp16"]) == 0
    meta = store.read_meta(tmp_path / "r" / "checkpoints" / "step_00000005")
    assert meta["loss_scale"] == [2.0**16, 3.0]
