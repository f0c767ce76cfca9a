"""The first gradient of a step overwrites what the step before left, the others are added, and what no kernel
wrote is zero.

Before each step all gradients are NaN here, and so is fresh memory: whatever is added to them, or is not
written, stays NaN.
"""

from dataclasses import replace

import pytest
import torch
from random_tokens import RandomTokens, begin

import kernels.grad
from build import build_run
from config.reading.tiny import tiny_config
from model.block import TransformerBlock
from parallel.sharding.gradients import find_padding
from parallel.sharding.views import get_boxes
from parallel.topology.mesh import Mesh
from parallel.wire.world import World
from train import train_step

STEPS = 3
LAYOUTS = {
    "zero 0": ("llama3-tiny", {}),
    "zero 1, a tied table": ("llama3.2-tiny", {"zero": 1}),
    "zero 2": ("gpt2-tiny", {"zero": 2}),
    "zero 3, W later": ("llama3-tiny", {"zero": 3, "schedule": "zb-h1"}),
    "experts": ("mixtral-tiny", {"zero": 1, "ep": 2}),
    "8 bits": ("llama3-tiny", {"zero": 2, "compress": "int8"}),
}


@pytest.fixture
def fresh_memory_is_nan():
    options = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), options.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    options.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    options.fill_uninitialized_memory = before[1]


def configured(name, parallel):
    cfg = tiny_config(name)
    return replace(
        cfg,
        model=replace(cfg.model, layers=2),
        parallel=replace(cfg.parallel, **parallel),
        train=replace(cfg.train, global_batch=4, micro_batch=1, dtype="fp32"),
        log=replace(cfg.log, noise_scale=True),
    )


def poison(buckets):
    for bucket in buckets:
        for grads in (bucket.grads.full, bucket.grads.local):
            if grads is not None:
                grads.fill_(float("nan"))


def trained(world, cfg, poisoned):
    """The gradients of the last of some steps, with the padding, and the loss of each step."""
    run, data = begin(world, cfg)
    losses = []
    for step in range(1, STEPS + 1):
        if poisoned:
            poison(run.buckets)
        result = train_step(run, step, data.microbatches(step - 1))
        losses += [float(result.loss), float(result.grad_norm), *run.noise_scale.latest.tolist()]
    return [bucket.grads.local.clone() for bucket in run.buckets], losses


def poisoned_and_plain(world, cfg):
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        poisoned = trained(world, cfg, True)
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(False)
    return poisoned, trained(world, cfg, False)


@pytest.mark.slow(every=3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_of_the_step_before_is_left(ranks, layout):
    name, parallel = LAYOUTS[layout]
    for (grads, losses), (plain_grads, plain_losses) in ranks(2).run(
        poisoned_and_plain, configured(name, parallel)
    ):
        assert losses == plain_losses
        assert all(torch.equal(a, b) for a, b in zip(grads, plain_grads))
        assert all(grad.isfinite().all() for grad in grads), "of the padding too"


@pytest.mark.parametrize("zero", [0, 2])
def test_a_gradient_that_no_kernel_writes_is_zero(monkeypatch, fresh_memory_is_nan, zero):
    """A block is left out of the model: its gradients are zero, not those of the step before."""
    cfg = configured("llama3-tiny", {"zero": zero})
    cfg = replace(cfg, log=replace(cfg.log, noise_scale=False))
    run = build_run(cfg, Mesh.single(), torch.device("cpu"), None, cfg.train.steps)
    data = RandomTokens(cfg, 0, 1)
    train_step(run, 1, data.microbatches(0))
    assert all(part.any() for box, part in gradients(run) if box.key.startswith("layers.1."))

    whole = TransformerBlock.forward

    def forward(self, x, *args):
        return whole(self, x, *args) if self.layer == 0 else (x.clone(), args[0], None)

    monkeypatch.setattr(TransformerBlock, "forward", forward)
    poison(run.buckets)
    train_step(run, 2, data.microbatches(1))
    for box, part in gradients(run):
        assert part.isfinite().all() and part.any() != box.key.startswith("layers.1."), box.key


def gradients(run):
    return [found for bucket in run.buckets for found in get_boxes(bucket, bucket.grads.local)]


def test_padding_is_what_no_parameter_has():
    run = build_run(configured("gpt2-tiny", {}), Mesh.single(), torch.device("cpu"), None, 4)
    for bucket in run.buckets:
        is_free = torch.ones(bucket.size, dtype=torch.bool)
        for slot in bucket.slots:
            slot.view_in(is_free).fill_(False)
        found = torch.zeros_like(is_free)
        for part in find_padding(bucket.slots, bucket.size):
            found[part] = True
        assert torch.equal(found, is_free)
    assert any(find_padding(bucket.slots, bucket.size) for bucket in run.buckets)


@pytest.mark.parametrize("bug", ["overwrites", "adds"])
def test_both_bugs_are_seen(monkeypatch, fresh_memory_is_nan, bug):
    """Planted: the second gradient overwrites the first; the first is added to that of the step before."""
    cfg = configured("llama3-tiny", {})
    world = World()
    plain = trained(world, cfg, True)

    def write_grad(weight, compute):
        compute(weight.main_grad, bug == "adds")
        weight.grad_is_written = True

    monkeypatch.setattr(kernels.grad, "write_grad", write_grad)
    broken = trained(world, cfg, True)
    assert not all(torch.equal(a, b) for a, b in zip(plain[0], broken[0]))
