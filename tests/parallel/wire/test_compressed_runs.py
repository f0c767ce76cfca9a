"""Runs that compress what they send: replicas never drift, models still learn, what stayed behind outlives
the run; what is refused.
"""

import hashlib
import pathlib
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from random_tokens import begin

import config
from checkpoint import state
from checkpoint.disk import store
from checkpoint.disk.saver import CheckpointSaver
from config.reading.suggestions import check_rules
from config.reading.tiny import tiny_config
from lab.proof import lattice
from model.mlp import MLPConfig
from parallel.microbatch import Microbatch
from parallel.sharding import powersgd
from parallel.sharding.gradients import BucketGrads
from parallel.sharding.views import get_boxes
from parallel.wire import compress
from parallel.wire.world import World
from train import train_step

KINDS = ("int8", "fp8")
SLACK = 1 + 1e-5  # fp32 rounds the scale, the quotient and the product


def laid(dtype: str = "fp64", steps: int = 50, **parallel) -> config.Config:
    cfg = tiny_config("llama3-tiny")
    return replace(
        cfg,
        model=replace(cfg.model, layers=2, dropout=0.0),
        train=replace(cfg.train, dtype=dtype, steps=steps, global_batch=4),
        parallel=replace(cfg.parallel, compress_block=64, **parallel),
    )


def go(run, data, first: int, last: int) -> list[float]:
    return [
        float(train_step(run, s, data.microbatches(s - 1))[0])
        for s in range(first, last + 1)
    ]


def digests(world: World, cfg) -> tuple[dict, list[float]]:
    """After three steps: {(what, which elements): digest}, of masters and of the weights that compute sees;
    the losses.
    """
    run, data = begin(world, cfg)
    losses, out = go(run, data, 1, 3), {}
    for b in run.buckets:
        b.weights.wait_unshard()
        for box, x in get_boxes(b, b.weights.master):
            out["master", str(box)] = hashlib.sha256(x.numpy().tobytes()).hexdigest()
        for slot in b.slots:
            for box, x in slot.param.spec.split(slot.view_in(b.weights.full)):
                out["weights", str(box)] = hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()
    return out, losses


ALIKE = [
    dict(compress="int8", tp=2),
    dict(compress="fp8", tp=2, sp=True),
    dict(compress="int8", compress_weights="int8", zero=1, tp=2),
    dict(compress="fp8", compress_weights="fp8", zero=2, dp_rep=2),
    dict(compress="int8", compress_weights="fp8", zero=3, tp=2),
    dict(compress="powersgd", tp=2),
    dict(compress="powersgd", cp=2),
    dict(compress="int8", pp=2),
]


@pytest.mark.slow(every=3)
@pytest.mark.parametrize("parallel", ALIKE, ids=str)
def test_replicas_never_drift(ranks, parallel):
    """What several ranks hold of a parameter is the same bit for bit, over data ranks, replicas and tp
    ranks.
    """
    every, losses = defaultdict(set), []
    for found, loss in ranks(4).run(digests, laid(**parallel)):
        losses.append(loss)
        for key, digest in found.items():
            every[key].add(digest)
    assert len(every) > 20 and [key for key, values in every.items() if len(values) > 1] == []
    assert all(loss == losses[0] for loss in losses)


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("weights", KINDS)
def test_the_same_weights_under_every_zero(ranks, weights):
    """Which of the weights are gathered when makes no difference to what is seen of them."""
    losses = [ranks(2).run(digests, laid(compress_weights=weights, zero=z))[0][1] for z in (1, 2, 3)]
    plain = ranks(2).run(digests, laid(zero=1))[0][1]
    assert losses[1] == pytest.approx(losses[0], rel=1e-9) and losses[2] == pytest.approx(losses[0], rel=1e-9)
    assert losses[0] != plain and losses[0] == pytest.approx(plain, rel=0.01)


def masters(world: World, cfg):
    """How far the weights that compute sees are from the exact masters, against the bound."""
    run, data = begin(world, cfg)
    go(run, data, 1, 2)
    for b in run.buckets:
        b.weights.wait_unshard()
    return [
        (b.weights.full[b.shard_start : b.shard_end].clone(), b.weights.master.clone()) for b in run.buckets
    ]


def test_masters_stay_exact(ranks):
    for pairs in ranks(2).run(masters, laid("fp32", compress_weights="int8", zero=1)):
        for seen, exact in pairs:
            limit = compress.error_bound(exact.double()[None], "int8", 64)[0]
            assert ((seen.double() - exact.double()).abs() <= limit * SLACK).all()
            assert (
                not torch.equal(seen, exact) or not exact.any()
            )  # a rank's share of a small bucket may be padding alone


@pytest.mark.parametrize("kind", ["none", "int8", "fp8", "powersgd"])
def test_one_rank_has_nothing_to_compress(kind):
    cfg = laid(compress=kind)
    plain, other = (
        digests(World(), replace(cfg, parallel=config.ParallelConfig(bucket_mb=cfg.parallel.bucket_mb))),
        digests(World(), cfg),
    )
    assert plain == other


def poisoned(world: World, cfg):
    """Rank 1 has a NaN in the second step's gradients: (ok of each step, did the weights stay, are they
    finite in the end).
    """
    run, data = begin(world, cfg)
    said, kept, reduce = [], None, BucketGrads.start_reduce
    for step in (1, 2, 3, 4):

        def sick(self, is_last, bad=step == 2 and world.rank == 1):
            if bad and self is run.buckets[1].grads:
                self.full[5] = float("nan")
            reduce(self, is_last)

        BucketGrads.start_reduce = sick
        before = [b.weights.master.clone() for b in run.buckets]
        try:
            said.append(bool(train_step(run, step, data.microbatches(step - 1))[2]))
        finally:
            BucketGrads.start_reduce = reduce
        if step == 2:
            kept = all(torch.equal(b.weights.master, x) for b, x in zip(run.buckets, before))
    for b in run.buckets:
        b.weights.wait_unshard()
    return said, kept, all(bool(b.weights.master.isfinite().all()) for b in run.buckets)


@pytest.mark.parametrize(
    "parallel",
    [dict(compress=k) for k in (*KINDS, "powersgd")]
    + [dict(compress="int8", zero=z, compress_weights="int8") for z in (1, 3)],
    ids=str,
)
def test_a_nan_reaches_every_guard_and_does_no_harm(ranks, parallel):
    for said, kept, finite in ranks(2).run(poisoned, laid(**parallel)):
        assert said == [True, False, True, True] and kept and finite


def text(cfg, step: int, rank: int, world: int) -> list[Microbatch]:
    """A rank's sequences of a step: places in the licence, letter by letter."""
    letters = torch.tensor(
        [
            ord(c) % cfg.model.vocab
            for c in (pathlib.Path(config.__file__).parent.parent / "LICENSE").read_text()
        ]
    )
    t = cfg.train
    starts = torch.randint(
        len(letters) - t.seq_len, (t.global_batch,), generator=torch.Generator().manual_seed(step)
    ).tolist()
    mine = range(rank, t.global_batch, world)
    rows = torch.stack([letters[starts[i] : starts[i] + t.seq_len + 1] for i in mine])
    places = torch.arange(t.seq_len).expand(len(rows), -1)
    return [
        Microbatch(
            rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), places, None, torch.tensor(list(mine)), step
        )
    ]


def learned(world: World, cfg):
    """(mean loss of the last ten steps, bytes of gradients and weights on the wire in a step, as all-reduces
    count twice, the first loss).
    """
    run, _ = begin(world, cfg)
    losses = []
    for step in range(1, cfg.train.steps + 1):
        run.mesh.ledger.clear()
        losses.append(
            float(train_step(run, step, text(cfg, step, world.rank, world.size))[0])
        )
    wire = {
        verb: run.mesh.ledger[group, verb, "bytes"]
        for group in ("dp_cp", "fsdp")
        for verb in ("all_reduce", "all_to_all", "reduce_scatter", "all_gather")
        if run.mesh.ledger[group, verb, "bytes"] > 64
    }
    for b in run.buckets:
        b.weights.wait_unshard()
    return (
        sum(losses[-10:]) / 10,
        sum(n * (2 if verb == "all_reduce" else 1) for verb, n in wire.items()),
        losses[0],
    )


EIGHT = dict(compress="int8", compress_weights="int8"), dict(compress="fp8", compress_weights="fp8")
LEARN = [
    (dict(), 0.0),
    (dict(compress="int8"), 0.02),
    (dict(compress="fp8"), 0.02),
    (dict(compress="powersgd", powersgd_rank=4), 0.15),
    (dict(compress="powersgd", powersgd_rank=16), 0.05),
    (dict(zero=1), 0.01),
    (dict(zero=1, **EIGHT[0]), 0.02),
    (dict(zero=1, **EIGHT[1]), 0.05),
    (dict(zero=3), 0.01),
    (dict(zero=3, **EIGHT[0]), 0.02),
]


@pytest.mark.slow
def test_models_learn_all_the_same(ranks, capsys):
    """60 steps of two ranks in fp32: the mean of the last ten losses is within the margin of plain data
    parallelism's, as a share of what that learned. The README's table is what this prints.
    """
    plain = sent = None
    with capsys.disabled():
        for parallel, margin in LEARN:
            cfg = laid("fp32", 60, **(parallel | dict(bucket_mb=64.0)))
            cfg = replace(
                cfg,
                parallel=replace(cfg.parallel, compress_block=256),
                model=replace(cfg.model, hidden=64, mlp=MLPConfig(width=128)),
                optim=replace(cfg.optim, lr=3e-3),
                train=replace(cfg.train, micro_batch=8, global_batch=16),
            )
            loss, wire, begun = ranks(2).run(learned, cfg)[0]
            plain, sent = (plain, sent) if plain else (loss, wire)
            name = " ".join(f"{k} {v}" for k, v in parallel.items()) or "none"
            print(
                f"\n{name:<48} {wire:>9,} bytes {wire / sent:.3f}   loss {loss:.4f} {loss - plain:+.4f}",
                end="",
            )
            assert loss < 0.7 * begun and abs(loss - plain) <= margin * (begun - plain), (
                parallel,
                loss,
                plain,
            )


# ---- checkpoints -------------------------------------------------------------------------------------------


def saved(world: World, cfg, root):
    run, data = begin(world, cfg)
    go(run, data, 1, 3)
    saver = CheckpointSaver(False)
    state.save_run(run, saver, root, 3, fault_point=lambda point: None)
    saver.wait()
    return go(run, data, 4, 6)


def resumed(world: World, cfg, path):
    run, data = begin(world, cfg)
    state.load(run, store.quick_check(path))
    left = max(
        [float(b.grads.powersgd.error.abs().max()) for b in run.buckets if b.grads.powersgd], default=0.0
    )
    return go(run, data, 4, 6), left


def test_errors_outlive_the_run_whatever_ranks_go_on(ranks, tmp_path):
    """The same ranks: bit for bit. Another number of ranks: to 1e-9 in fp64. Without PowerSGD: they are left
    out.
    """
    cfg = laid(compress="powersgd", powersgd_rank=2)
    losses = ranks(2).run(saved, cfg, tmp_path)[0]
    ((_, path),) = store.committed_checkpoints(tmp_path)
    keys = {p["key"] for p in store.read_index(path)["pieces"]}
    assert (
        sum(powersgd.ERROR_SUFFIX in k for k in keys) > 5 and sum(powersgd.BASIS_MARK in k for k in keys) > 5
    )
    for found, left in ranks(2).run(resumed, cfg, path):
        assert found == losses and left > 0
    for found, left in ranks(4).run(resumed, cfg, path):
        assert found == pytest.approx(losses, rel=1e-9) and left > 0
    (found, _), *_ = ranks(2).run(
        resumed, replace(cfg, parallel=replace(cfg.parallel, powersgd_rank=3)), path
    )
    assert found[0] == losses[0] and found != losses  # other bases, drawn anew
    (found, _), *_ = ranks(2).run(
        resumed, replace(cfg, parallel=replace(cfg.parallel, compress="none")), path
    )
    assert found[0] == losses[0] and found != losses


def test_errors_begin_anew_where_there_were_none(ranks, tmp_path):
    cfg = laid(compress="powersgd", powersgd_rank=2)
    losses = ranks(2).run(saved, replace(cfg, parallel=replace(cfg.parallel, compress="none")), tmp_path)[0]
    ((_, path),) = store.committed_checkpoints(tmp_path)
    assert all(found[0] == losses[0] and left == 0 for found, left in ranks(2).run(resumed, cfg, path))


@pytest.mark.slow(every=2)
@pytest.mark.parametrize(
    "parallel",
    [
        dict(compress="int8"),
        dict(compress="fp8", compress_weights="int8", zero=1),
        dict(compress_weights="fp8", zero=3),
    ],
    ids=str,
)
def test_quantized_runs_resume_bit_for_bit(ranks, tmp_path, parallel):
    cfg = laid("bf16", **parallel)
    losses = ranks(2).run(saved, cfg, tmp_path)
    ((_, path),) = store.committed_checkpoints(tmp_path)
    assert [found for found, _ in ranks(2).run(resumed, cfg, path)] == losses


# ---- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parallel, key, says",
    [
        (dict(compress="int8", reduce="ring"), "parallel.compress", "use one of them"),
        (dict(compress="powersgd", reduce="hierarchy"), "parallel.compress", "use one"),
        (dict(compress="powersgd", zero=1), "parallel.compress", "int8 or fp8, or parallel.zero 0"),
        (dict(compress_weights="int8"), "parallel.compress_weights", "parallel.zero to 1, 2 or 3"),
        (dict(compress="int8", compress_block=96), "parallel.compress_block", "not a multiple of 64"),
        (dict(compress_block=0), "parallel.compress_block", "above 0"),
        (dict(powersgd_rank=0), "parallel.powersgd_rank", "above 0"),
    ],
)
def test_refused(parallel, key, says):
    cfg = laid()
    with pytest.raises(config.ConfigError, match=f"^{key}: ") as e:
        check_rules(replace(cfg, parallel=replace(cfg.parallel, **parallel)), 4)
    assert says in str(e.value) and "\n" not in str(e.value)


def test_a_loss_scale_and_errors_do_not_go_together():
    with pytest.raises(config.ConfigError, match="^parallel.compress: powersgd .*fp16"):
        check_rules(laid("fp16", compress="powersgd"), 2)


@pytest.mark.parametrize("parallel", [dict(compress="int8"), dict(compress_weights="fp8", zero=1)])
def test_verify_says_why_it_does_not_prove_the_lossy(parallel):
    with pytest.raises(config.ConfigError, match="8 bits are not exact"):
        lattice.check_provable(laid(**parallel))
