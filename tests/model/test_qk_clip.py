"""optim.qk_clip: what a step changes besides, and what it leaves alone. tests/oracle/test_oracle_qk_clip.py
has the rule of the paper, lab/proof/lattice.py the layouts."""

from types import SimpleNamespace

import pytest
import torch
from random_tokens import RandomTokens
from ranks import corpus, job

from build import build_run
from config.reading.tiny import tiny_config
from config.tree import with_values
from model.inside import Statistic, statistics_of
from model.watching import LargestScores
from parallel.extras import StepExtra
from parallel.sharding.views import get_boxes
from parallel.topology.mesh import Mesh
from train import compute_gradients, train_step

STILL = {"optim.lr": 1e-30, "optim.min_lr": 1e-30}  # what moves is moved by the clip
CLIPPED = {
    "llama3-tiny": ("attn.q.weight", "attn.k.weight"),
    "gpt2-tiny": ("attn.q.weight", "attn.k.weight", "attn.q.bias", "attn.k.bias"),
    "deepseek-v2-lite-tiny": ("attn.q.weight", "attn.kv_b.weight"),
    "deepseek-v3-tiny": ("attn.q_b.weight", "attn.kv_b.weight"),
}
DATA = SimpleNamespace(
    tokenizer=SimpleNamespace(fingerprint="t"), fingerprint="d", is_chat=False, has_start=False
)


def made(name, **keys):
    """(run, its microbatches) of a tiny model in one process; biases and norms are not what they begin
    with."""
    keys = {key.replace("__", "."): value for key, value in keys.items()}
    usual = {"optim.qk_clip": 1e-3, "train.dtype": "fp64", "model.init_std": 0.1, "model.layers": 2}
    keys = {**usual, **STILL, **keys}
    cfg = with_values(tiny_config(name), keys)
    run = build_run(cfg, Mesh.single(), torch.device("cpu"), DATA, cfg.train.steps)
    stream = torch.Generator().manual_seed(1)
    for bucket in run.buckets:
        master = bucket.weights.master
        master.add_(0.05 * torch.randn(len(master), generator=stream).to(master))
        bucket.weights.copy_master_to_local()
    return run, RandomTokens(cfg, 0, 1).microbatches(0)


class Skipped(StepExtra):
    """Makes the step one that is not applied."""

    def judge(self, run, step, gradients, *, good, again):
        return good & False


def scores(run, batches) -> torch.Tensor:
    """[layers, heads] of a forward, as the weights are now."""
    watch = LargestScores(run.cfg.model, run.stages.values(), run.mesh, run.device, torch.float64)
    with watch.watching():
        compute_gradients(run, 1, batches)
    return watch.of_heads


def masters(run) -> dict[str, torch.Tensor]:
    return {box.key: part.clone() for b in run.buckets for box, part in get_boxes(b, b.weights.master)}


def changed(before, after) -> set[str]:
    return {key.split(".", 2)[2] for key, w in after.items() if not torch.equal(w, before[key])}


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("name", CLIPPED)
def test_the_same_forward_has_no_larger_scores_then(name, window):
    """Of the first layer, whose inputs stay: those over tau are tau, the others what they were."""
    run, batches = made(name, model__mixer__window=window)
    before, first = masters(run), scores(run, batches)
    tau = float(first[0].median())
    run.extras[0].tau = tau
    assert bool(train_step(run, 1, batches).is_good)
    assert changed(before, masters(run)) == set(CLIPPED[name])
    second = scores(run, batches)
    torch.testing.assert_close(second[0], first[0].clamp(max=tau), rtol=1e-12, atol=0)
    assert (first[0] > tau).any() and (first[0] < tau).any()


@pytest.mark.parametrize("name", CLIPPED)
def test_scores_below_tau_change_no_bit(name):
    run, batches = made(name, optim__qk_clip=1e6, optim__weight_decay=0.0)
    before = masters(run)
    compute_gradients(run, 1, batches)
    run.extras.weights_updated(run, 1, torch.tensor(True))
    assert changed(before, masters(run)) == set()


def test_a_skipped_step_clips_nothing():
    run, batches = made("llama3-tiny")
    before = masters(run)
    assert not bool(train_step(run.with_extras(Skipped()), 1, batches).is_good)
    assert changed(before, masters(run)) == set()
    assert bool(train_step(run, 1, batches).is_good)
    assert changed(before, masters(run)) == set(CLIPPED["llama3-tiny"])


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp64"])
def test_what_is_computed_with_and_averaged_is_clipped_too(dtype, zero):
    """Masters in host memory as on the device."""
    for offload in ("none", "optimizer"):
        run, batches = made(
            "llama3-tiny", train__dtype=dtype, train__ema=0.5, parallel__zero=zero, parallel__offload=offload
        )
        run.ema.decay = 0.0
        before = masters(run)
        assert bool(train_step(run, 1, batches).is_good)
        assert changed(before, masters(run)) == set(CLIPPED["llama3-tiny"])
        for bucket, average in zip(run.buckets, run.ema.averages):
            assert torch.equal(bucket.weights.local, bucket.weights.master.to(bucket.weights.local.dtype))
            assert torch.equal(average, bucket.weights.master)


def test_statistics_of_a_step_see_what_the_clip_leaves():
    """log.inside_every: the update is the optimizer's and the clip's; scores are those that are clipped."""
    run, batches = made("llama3-tiny", log__inside_every=1)
    before, first = masters(run), scores(run, batches)
    train_step(run, 1, batches)
    names = statistics_of(run.cfg.model)
    told = dict(zip(names, run.inside.latest.tolist()))
    after = masters(run)
    for layer in range(run.cfg.model.layers):
        key = f"layers.{layer}.attn.q.weight"
        moved = float((after[key] - before[key]).norm())
        assert moved > 0 and told[Statistic("update_norm", layer, "attn.q")] == pytest.approx(moved, rel=1e-9)
        largest = float(first[layer].max())
        assert told[Statistic("largest_logit", layer, "")] == pytest.approx(largest, rel=1e-12)


def test_keys_of_other_layers_are_refused(tmp_path):
    words = ["shared-keys-tiny", "--data.path", corpus(tmp_path), "--log.dir", str(tmp_path)]
    words += ["--model.mixer.qk_norm", "none", "--optim.qk_clip", "100"]
    end = job(tmp_path / "j", 1, words)
    assert end.codes == [2] and not (tmp_path / "runs").exists()
    (line,) = end.errors()
    assert line.startswith("error: optim.qk_clip: not possible with model.mixer.keys_of")
