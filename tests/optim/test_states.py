"""AdamW's masters and moments in bf16: what nearest rounding loses is kept on average, every layout rounds
alike, a resume goes on as if nothing had happened, and the other setting's checkpoint is converted and said
so.
"""

import zlib
from dataclasses import replace

import pytest
import torch
from random_tokens import begin

from checkpoint import state
from checkpoint.disk import store
from checkpoint.disk.saver import CheckpointSaver
from config.reading.tiny import tiny_config
from kernels.adam import AdamWStep, adamw, adamw_reference
from kernels.rounding import ElementIndex, salt
from parallel.sharding.views import get_boxes, tensor_ranges
from parallel.wire.world import World
from train import train_step

YES, ONE = torch.tensor(True), torch.tensor(1.0)
HOW = dict(lr=5e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_scale=ONE, is_good=YES)


def error(form: str) -> float:
    """The mean square distance from numbers in 0.5 .. 1.5 after 1500 steps of 5e-4 from 1; a step of bf16 is
    0.004 to 0.008.
    """
    n = 1000
    target = 0.5 + torch.rand(n, generator=torch.Generator().manual_seed(0))
    p, m, v = (
        torch.full((n,), x, dtype=torch.float32 if form == "fp32" else torch.bfloat16)
        for x in (1.0, 0.0, 0.0)
    )
    for step in range(1, 1501):
        grad = p.float() - target
        if form == "nearest":
            wide = [t.float() for t in (p, m, v)]
            adamw_reference(wide[0], grad, *wide[1:], AdamWStep(step=step, **HOW))
            for t, w in zip((p, m, v), wide):
                t.copy_(w)
        else:
            adamw(
                p,
                grad,
                m,
                v,
                AdamWStep(step=step, **HOW),
                element_index=None if form == "fp32" else ElementIndex(salt(0, step, "w"), 0, n, n),
            )
    return float((p.float() - target).square().mean())


def test_small_updates_are_not_lost():
    start = 1 / 12
    assert error("nearest") > 0.95 * start  # it never leaves
    assert error("fp32") < 1e-3 * start and error("stochastic") < 1e-3 * start


def made(name: str, dtype: str, states: str = "bf16", **parallel):
    cfg = tiny_config(name)
    return replace(
        cfg,
        model=replace(cfg.model, layers=4),
        optim=replace(cfg.optim, states=states, lr=1e-2),
        train=replace(cfg.train, dtype=dtype),
        parallel=replace(cfg.parallel, **parallel),
    )


def updated(world: World, cfg, chunk: int = 0) -> list:
    """Three updates with gradients that are a function of (name, place) -> [(box, its values)] of masters and
    moments.
    """
    run, _ = begin(world, cfg)
    if chunk:  # as from host memory, in pieces
        run.optim.chunks = lambda kept, device: [
            (slice(a, a + chunk), [t[a : a + chunk] for t in kept]) for a in range(0, len(kept[0]), chunk)
        ]
    for step in (1, 2, 3):
        for b in run.buckets:
            for box, part in get_boxes(b, b.grads.local):
                whole = torch.randn(
                    box.shape,
                    generator=torch.Generator().manual_seed(zlib.crc32(f"{step}{box.key}".encode())),
                )
                part.copy_(whole[tuple(slice(a, a + n) for a, n in zip(box.start, box.size))])
        run.optim.step(step, 1e-2, torch.tensor(0.5), YES)
    assert all(torch.equal(b.weights.local, b.weights.master.to(b.weights.local.dtype)) for b in run.buckets)
    boxes = state.state_boxes(run.buckets, run.optim.state()) + run.optim.boxes()
    return [(box, part.clone()) for box, part in boxes]


@pytest.mark.slow(every=16)
@pytest.mark.parametrize(
    "name, parallel",
    [
        ("llama3.2-tiny", p)
        for p in (
            dict(tp=2),
            dict(zero=1),
            dict(zero=3),
            dict(pp=2),
            dict(pp=2, tp=2, schedule="zb-v"),
            dict(tp=2, sp=True, zero=2),
            dict(dp_rep=2, zero=1, offload="optimizer"),
        )
    ]
    + [("mixtral-tiny", dict(tp=2, ep=2, etp=2, zero=1))],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_layout_rounds_alike(ranks, name, parallel, dtype):
    truth = {box.key: part for box, part in updated(World(), made(name, dtype))}
    assert len(truth) % 3 == 0 and all(t.dtype == torch.bfloat16 for t in truth.values())
    for pieces in ranks(4).run(updated, made(name, dtype, **parallel)):
        for box, part in pieces:
            assert torch.equal(
                part, truth[box.key][tuple(slice(a, a + n) for a, n in zip(box.start, box.size))]
            ), box


def test_chunks_round_alike_and_another_seed_or_step_does_not():
    cfg = made("llama3-tiny", "bf16")
    one = dict((box.key, part) for box, part in updated(World(), cfg))
    for box, part in updated(World(), cfg, chunk=777):
        assert torch.equal(part, one[box.key]), box.key
    run, _ = begin(World(), cfg)
    b = run.buckets[0]
    keys = {key for *_, key, _ in tensor_ranges(b)}
    assert len({salt(s, step, key) for s in (1, 2) for step in (1, 2) for key in keys}) == 4 * len(keys)


def test_the_masters_are_the_weights():
    run, _ = begin(World(), made("llama3-tiny", "bf16"))
    assert all(
        b.weights.master is b.weights.local and b.weights.master.data_ptr() == b.weights.full.data_ptr()
        for b in run.buckets
    )
    run, _ = begin(World(), made("llama3-tiny", "fp32"))  # the weights start as what the masters are
    assert all(
        b.weights.master.dtype == torch.bfloat16 and torch.equal(b.weights.local, b.weights.master.float())
        for b in run.buckets
    )


def steps(run, data, first: int, last: int) -> list[float]:
    return [
        train_step(run, s, data.microbatches(s - 1))[0].item()
        for s in range(first, last + 1)
    ]


def saved(world: World, cfg, root) -> list[float]:
    run, data = begin(world, cfg)
    steps(run, data, 1, 2)
    saver = CheckpointSaver(False)
    state.save_run(run, saver, root, 2, fault_point=lambda point: None)
    saver.wait()
    return steps(run, data, 3, 5)


def loaded(world: World, cfg, path) -> tuple[list[str], list[float]]:
    run, data = begin(world, cfg)
    for b in run.buckets:
        b.weights.master.fill_(7.0)
    notes = state.load(run, store.quick_check(path))
    return notes, steps(run, data, 3, 5)


@pytest.mark.slow
def test_a_resume_goes_on_bit_for_bit(tmp_path):
    cfg = made("llama3-tiny", "bf16")
    then = saved(World(), cfg, tmp_path)
    ((_, path),) = store.committed_checkpoints(tmp_path)
    assert {p["dtype"] for p in store.read_index(path)["pieces"]} == {"BF16"}
    notes, again = loaded(World(), cfg, path)
    assert again == then and not notes


@pytest.mark.slow
def test_another_layout_goes_on_the_same(ranks, tmp_path):
    """The arithmetic in fp64: what differs between layouts is far below what turns a rounding."""
    then = ranks(2).run(saved, made("llama3.2-tiny", "fp64", tp=2), tmp_path)[0]
    ((_, path),) = store.committed_checkpoints(tmp_path)
    for world, parallel in ((2, dict(zero=3)), (4, dict(pp=2, zero=1))):
        for _, again in ranks(world).run(loaded, made("llama3.2-tiny", "fp64", **parallel), path):
            assert again == pytest.approx(then, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("was, now", [("fp32", "bf16"), ("bf16", "fp32")])
def test_the_other_setting_is_converted_and_said(tmp_path, was, now):
    saved(World(), made("llama3-tiny", "bf16", was), tmp_path)
    ((_, path),) = store.committed_checkpoints(tmp_path)
    run, _ = begin(World(), made("llama3-tiny", "bf16", now))
    notes = state.load(run, store.quick_check(path))
    assert any(
        line.startswith("optim.states: ") and f"converted from {was} to {now}" in line for line in notes
    ), notes
    old, _ = begin(World(), made("llama3-tiny", "bf16", was))
    state.load(old, store.quick_check(path))
    for (box, a), (_, b) in zip(*(state.state_boxes(r.buckets, r.optim.state()) for r in (run, old))):
        assert torch.equal(a, b.to(a.dtype)) and a.any(), box
    fresh, _ = begin(World(), made("llama3-tiny", "bf16", now))
    state.load_weights(fresh.buckets, path)  # checkpoint.init_from
    assert all(torch.equal(a.weights.master, b.weights.master) for a, b in zip(fresh.buckets, run.buckets))
