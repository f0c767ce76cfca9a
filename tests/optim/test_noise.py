"""The gradient noise scale: right on gradients of known covariance, and under layouts what one process makes
of the same small batches.
"""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from random_tokens import RandomTokens, begin

from build import build_run
from config import ParallelConfig
from config.reading.tiny import tiny_config
from optim import noise
from optim.noise import noise_scale_estimate
from parallel.pipeline.schedule import SCHEDULES, make_schedule
from parallel.sharding.bucket import Bucket
from parallel.sharding.gradients import BucketGrads
from parallel.sharding.views import get_boxes
from parallel.topology.mesh import Mesh
from parallel.wire.world import World
from train import train_step


def test_the_estimates_of_gradients_of_known_covariance_are_right_on_average():
    """G ~ N(mu, diag(var) / n): the means over many steps are S = sum(var) and |mu|^2, within five standard
    errors.
    """
    stream, d, draws = torch.Generator().manual_seed(0), 40, 4000
    mu = torch.randn(d, generator=stream, dtype=torch.float64) * 0.3
    var = torch.rand(d, generator=stream, dtype=torch.float64) * 50
    n = torch.tensor([3.0, 8.0, 0.0, 5.0])  # tokens of the small batches, one of them empty
    told = []

    def gradient(tokens):
        if not tokens:
            return torch.zeros(d).double()
        return mu + (var / tokens).sqrt() * torch.randn(d, generator=stream, dtype=torch.float64)

    for _ in range(draws):
        *grads, rest = [gradient(k) for k in (*n, 24.0)]
        whole = (sum(k * g for k, g in zip(n, grads)) + 24 * rest) / 40  # the small ones are a part of it
        told.append(noise_scale_estimate(
            small=sum(k * g.square().sum() for k, g in zip(n, grads)),
            small_tokens=n.sum(),
            small_batches=(n > 0).sum(),
            big=whole.square().sum(),
            big_tokens=torch.tensor(40),
        ))
    told = torch.stack(told)
    error = 5 * told.std(0) / draws**0.5
    assert ((told.mean(0) - torch.stack([var.sum(), mu.square().sum()])).abs() < error).all()
    assert error[0] < 0.05 * var.sum() and error[1] < 0.3 * mu.square().sum()


@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_schedule_ends_the_first_microbatch_first(kind):
    """Whose tokens GradientNoiseScale divides by; a W where the backward was cut."""
    for m in (4, 8):
        order = make_schedule(kind, 4, m).order
        for ops in order:
            ended = {}
            for op in ops:
                if op.kind in "BW":
                    ended.setdefault(op.stage, op.microbatch)
            assert set(ended.values()) == {0}


# ---- under layouts -----------------------------------------------------------------------------------------


def settings(name="llama3-tiny", **parallel):
    cfg = tiny_config(name, 4)
    return replace(
        cfg,
        model=replace(cfg.model, layers=4),
        log=replace(cfg.log, noise_scale=True),
        parallel=replace(cfg.parallel, **parallel),
    )


def each_step(self):
    self.first_microbatch_squares = self.squared_norm_of_hidden(self.full, 0, self.layout.size)


def one_batch_more(**parts):
    return noise_scale_estimate(**parts | {"small_batches": parts["small_batches"] + 1})


BUGS = {
    "the last microbatch is looked at": (BucketGrads, "record_first_microbatch", each_step),
    "replicas count twice": (Bucket, "owners", SimpleNamespace(size=1)),
    "empty microbatches count": (noise, "noise_scale_estimate", one_batch_more),
    None: (Bucket, "owners", Bucket.owners),
}


def told(world, cfg, bug=None):
    """[S, |G|^2] of the first step."""
    run, data = begin(world, cfg, 9)
    with mock.patch.object(*BUGS[bug]):
        train_step(run, 1, data.microbatches(0))
    for b in run.buckets:
        b.weights.wait_unshard()
    return run.noise_scale.latest if run.noise_scale.latest is None else run.noise_scale.latest.tolist()


def by_hand(cfg, dp: int) -> list[float]:
    """The same from the gradients of one process: of each small batch alone, and of the whole step."""

    def squares(batches) -> tuple[float, float]:
        one = replace(
            cfg,
            parallel=ParallelConfig(),
            log=replace(cfg.log, noise_scale=False),
            train=replace(cfg.train, global_batch=len(batches) * cfg.train.micro_batch),
        )
        run = build_run(one, Mesh.single(), torch.device("cpu"), None, 9)
        n = float(sum(b.num_counted() for b in batches))
        run.pipeline.run(run.schedules[len(batches)], batches, 1.0)
        gradients = [(box.key, g) for b in run.buckets for box, g in get_boxes(b, b.grads.local)]
        hidden = [g for key, g in gradients if g.dim() == 2 and (".attn." in key or ".mlp." in key)]
        return n, float(sum((g / n).square().sum() for g in hidden))

    batches = [RandomTokens(cfg, r, dp).microbatches(0) for r in range(dp)]
    small, (whole, big) = [squares(b[:1]) for b in batches], squares(sum(batches, []))
    n = sum(k for k, _ in small)
    s = (sum(k * g for k, g in small) / n - big) / (len(small) / n - 1 / whole)
    return [s, big - s / whole]


LAYOUTS = [dict(zero=z) for z in range(4)] + [
    dict(tp=2, zero=0),
    dict(tp=2, sp=True, zero=3),
    dict(dp_rep=2, zero=1),
    dict(tp=2, pp=2, schedule="gpipe"),
    dict(pp=2, zero=2),
    dict(pp=2, schedule="zb-h1"),
    dict(pp=2, zero=3, schedule="zb-v"),
    dict(pp=2, zero=1, schedule="interleaved"),
]


@pytest.mark.slow(every=6)
@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_layouts_tell_what_one_process_tells_of_the_same_batches(ranks, parallel):
    cfg = settings("llama3.2-tiny" if parallel.get("pp") else "llama3-tiny", **parallel)
    want = by_hand(cfg, 4 // (parallel.get("tp", 1) * parallel.get("pp", 1)))
    for found in ranks(4).run(told, cfg):
        assert found == pytest.approx(want, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("bug", [b for b in BUGS if b])
def test_planted_bugs_are_seen(ranks, bug):
    cfg = settings()
    assert ranks(2).run(told, cfg)[0] == pytest.approx(by_hand(cfg, 2), rel=1e-9)
    assert ranks(2).run(told, cfg, bug)[0] != pytest.approx(by_hand(cfg, 2), rel=1e-4)


def test_a_step_of_one_microbatch_tells_nothing():
    cfg = settings()
    one = replace(cfg, train=replace(cfg.train, micro_batch=cfg.train.global_batch))
    assert told(World(), one) is None and told(World(), cfg) == pytest.approx(by_hand(cfg, 1), rel=1e-9)
