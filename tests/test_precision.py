"""The precisions that people train in, through train.train: a fixed core of cells and a draw by commit, the
loss scale of fp16, and planted bugs, each of which must be seen."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draw import commit_seed

import train
from kernels import adam, attention, cross_entropy, linear, norm, partial_attention
from optim.adamw import AdamW
from optim.base import Optimizer
from optim.muon import Muon
from parallel import params
from parallel.comm import World
from parallel.params import Bucket
from scripts.verify import precision
from scripts.verify.precision import (
    NOT_COMPARED,
    SPOILT,
    Cell,
    Prover,
    Seen,
    Told,
    alone,
    compared,
    judge,
    record,
    subject,
    trained,
)

LLAMA, MIXTURE = "llama3-tiny", "mixtral-tiny"
# (recipe, ranks, cell): every dtype, optimizer, ZeRO stage and kind of layout once
CORE = [
    (LLAMA, 2, Cell("bf16", "adamw", 1, 0, 0)),
    (LLAMA, 2, Cell("fp16", "lion", 2, 3, 0)),
    (LLAMA, 2, Cell("fp8", "muon", 3, 1, 0)),
    (LLAMA, 2, Cell("bf16", "adamw-bf16", 3, 0, 1)),
    (LLAMA, 2, Cell("fp32", "lars", 0, 4, 0)),
    (LLAMA, 2, Cell("bf16", "sgd", 3, 0, 2)),
    (LLAMA, 4, Cell("bf16", "lamb", 2, 3, 0)),
    (MIXTURE, 2, Cell("bf16", "adamw", 1, 5, 0)),
]
DRAWN = 2


class Here:
    """A pool of one rank that is this process: what a test replaces in a module is replaced in the run."""

    size = 1

    def run(self, work, *args) -> list:
        return [work(World(), *args)]


@pytest.fixture(scope="module")
def provers(ranks):
    """prover(recipe, ranks), one each for the whole file."""
    made = {}

    def prover(name: str, world: int) -> Prover:
        if (name, world) not in made:
            made[name, world] = Prover(name, world, ranks(world))
        return made[name, world]

    yield prover
    for one in made.values():
        one.close()


def holds(prover: Prover, cell: Cell) -> None:
    wrong, seen = prover.prove(cell)
    assert not wrong and seen
    assert not [s for s in seen if s.share > 1], max(seen, key=lambda s: s.share)


@pytest.mark.parametrize("name, world, cell", CORE, ids=[cell.words(world) for _, world, cell in CORE])
def test_the_core(provers, name, world, cell):
    holds(provers(name, world), cell)


@pytest.mark.parametrize("which", range(DRAWN))
def test_a_draw(provers, which):
    every = precision.cells(LLAMA, 2)
    cell = every[(commit_seed() + which * len(every) // DRAWN) % len(every)]
    print(cell.words(2))
    holds(provers(LLAMA, 2), cell)


def test_every_cell_is_met_and_legal():
    every = precision.cells(LLAMA, 2)
    assert {(c.dtype, c.optimizer, c.zero) for c in every} == {
        (d, o, z) for d in precision.DTYPES for o in precision.RATES for z in range(4)
    }
    assert {c.layout for c in every} == set(range(5)) and {c.extra for c in every} == set(
        range(len(precision.WITH))
    )


def test_statistics_are_wide():
    seen = precision.statistics()
    assert len(seen) == 8 and all(s.share <= 1 for s in seen), max(seen, key=lambda s: s.share)


@pytest.mark.parametrize(
    "module, what",
    [
        (norm, "RMSNorm"),
        (norm, "LayerNorm"),
        (attention, "attention, blocks"),
        (partial_attention, "attention, a part of the ring"),
        (cross_entropy, "the loss of 4,096 tokens"),
    ],
)
def test_statistics_in_bf16_are_seen(monkeypatch, module, what):
    monkeypatch.setattr(module, "wide", lambda dtype: dtype)
    assert next(s for s in precision.statistics() if s.where == what).share > 1


@pytest.mark.parametrize("dtype, zero", [("bf16", 0), ("fp16", 1), ("bf16", 2), ("fp8", 3)])
def test_microbatches_are_summed_in_fp32(provers, dtype, zero):
    wrong, seen = precision.sums(provers(LLAMA, 2), dtype, zero)
    assert not wrong and len(seen) > 20 and all(s.share <= 1 for s in seen), max(seen, key=lambda s: s.share)


# ---- the loss scale ----------------------------------------------------------------------------------------


def test_a_loss_scale_goes_on_where_it_was(provers, ranks, tmp_path):
    """It starts too high, falls, and grows; a run that goes on from step 4 is told what the unbroken run
    was told, bit for bit."""
    cfg = Cell("fp16", "adamw", 1, 0, 0).config(LLAMA, 2, provers(LLAMA, 2).data)
    cfg = replace(cfg, checkpoint=replace(cfg.checkpoint, every=4, keep=9))
    assert ranks(2).run(record, cfg, tmp_path / "whole", frozenset()) == [0, 0]
    whole = precision.read(cfg, tmp_path / "whole", 2)
    saved = tmp_path / "whole" / "checkpoints" / "step_00000004"
    assert json.loads((saved / "meta.json").read_text())["loss_scale"] == [
        whole.told[4]["scale"],
        whole.told[4]["good"],
    ]
    shutil.copytree(saved, tmp_path / "again" / "checkpoints" / saved.name)
    shutil.copytree(tmp_path / "whole" / "tokenizer", tmp_path / "again" / "tokenizer")
    assert ranks(2).run(record, cfg, tmp_path / "again", frozenset()) == [0, 0]
    again = precision.read(cfg, tmp_path / "again", 2)
    scales = [told["scale"] for told in whole.told]
    assert (
        scales[0] == 2.0**24 and min(scales) < 2.0**24 and any(b > a for a, b in zip(scales, scales[1:]))
    ), scales
    assert not whole.wrong and not again.wrong and len(again.told) == 7
    assert repr([t["scale"] for t in again.told]) == repr(scales[4:]) and repr(again.told[1:]) == repr(
        whole.told[5:]
    )
    assert all(precision.same(again.masters[-1][key], t) for key, t in whole.masters[-1].items())


# ---- planted bugs ------------------------------------------------------------------------------------------


def one(tmp_path, dtype: str, optimizer: str) -> tuple[list[str], list[Seen]]:
    """A run in this process, judged alone."""
    cfg = subject(LLAMA, precision.corpus(tmp_path), dtype, optimizer)
    return judge(trained(Here(), alone(cfg), tmp_path / "run", frozenset({SPOILT})), None, "")


def beyond(seen: list[Seen]) -> set[str]:
    return {s.what for s in seen if s.share > 1}


def test_a_run_in_this_process_holds(tmp_path):
    wrong, seen = one(tmp_path, "bf16", "lion")
    assert not wrong and not beyond(seen)


@pytest.mark.parametrize("optimizer", ["sgd", "lion", "lamb", "lars"])
def test_weights_without_masters_are_seen(monkeypatch, tmp_path, optimizer):
    step = Optimizer.step

    def planted(self, *args):
        before = [b.master.clone() for b in self.buckets]
        step(self, *args)
        for b, old in zip(self.buckets, before):
            b.master.copy_(old)

    monkeypatch.setattr(Optimizer, "step", planted)
    wrong, seen = one(tmp_path, "bf16", optimizer)
    assert any("are not their masters rounded" in w for w in wrong) and any(
        "no master of" in w for w in wrong
    )
    assert "update" in beyond(seen)


@pytest.mark.parametrize("optimizer, who", [("lion", Optimizer), ("muon", Muon)])
def test_masters_without_weights_are_seen(monkeypatch, tmp_path, optimizer, who):
    """round() forgotten in one optimizer."""
    step = who.step

    def planted(self, *args):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Bucket, "round", lambda bucket: None)
            step(self, *args)

    monkeypatch.setattr(who, "step", planted)
    wrong, _ = one(tmp_path, "bf16", optimizer)
    assert any("are not their masters rounded" in w for w in wrong) and any(
        "no weight of" in w for w in wrong
    )


def test_masters_in_bf16_are_seen(monkeypatch, tmp_path):
    step = Optimizer.step

    def planted(self, *args):
        step(self, *args)
        for b in self.buckets:
            b.master.copy_(b.master.bfloat16())

    monkeypatch.setattr(Optimizer, "step", planted)
    assert "update" in beyond(one(tmp_path, "bf16", "lars")[1])


def test_rounding_to_nearest_is_seen(monkeypatch, tmp_path):
    monkeypatch.setattr(adam, "rounded", lambda x, bits: x.bfloat16())
    assert "rounding" in beyond(one(tmp_path, "bf16", "adamw-bf16")[1])


def test_a_norm_in_bf16_is_seen(monkeypatch, tmp_path):
    norm_of = train.grad_norm
    monkeypatch.setattr(train, "grad_norm", lambda *args: norm_of(*args).bfloat16().float())
    assert "norm" in beyond(one(tmp_path, "bf16", "sgd")[1])


def test_a_sum_in_bf16_is_seen(monkeypatch, tmp_path):
    monkeypatch.setattr(linear, "add_wgrad", lambda into, dy, x: into.copy_((into + dy.t() @ x).bfloat16()))
    assert "wide" in beyond(one(tmp_path, "bf16", "sgd")[1])


def test_a_forgotten_loss_scale_is_seen(monkeypatch, tmp_path):
    factor = train.clip_factor
    monkeypatch.setattr(train, "clip_factor", lambda *args: factor(*args) * 2)
    assert "update" in beyond(one(tmp_path, "fp16", "sgd")[1])


def test_a_skipped_step_that_decays_is_seen(monkeypatch, tmp_path):
    step = AdamW.step

    def planted(self, number, lr, factor, ok):
        step(self, number, lr, factor, ok)
        if not ok:
            for b in self.buckets:
                b.master.mul_(1 - lr * self.cfg.weight_decay)
                b.round()

    monkeypatch.setattr(AdamW, "step", planted)
    wrong, _ = one(tmp_path, "bf16", "adamw")
    assert any(f"step {SPOILT} was skipped and changed master" in w for w in wrong)


def stale(world: World, cfg, folder: Path, spoilt: frozenset[int]) -> int:
    """record(), on ranks that never send what they updated."""
    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(Bucket, "publish", lambda bucket: None)
        return record(world, cfg, folder, spoilt)


def narrowed(world: World, cfg, folder: Path, spoilt: frozenset[int]) -> int:
    """record(), on ranks that round their gradients to bf16 before they are summed."""
    reduce = params.start_scatter_sum
    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(params, "start_scatter_sum", lambda x, *how: reduce(x.bfloat16().to(x.dtype), *how))
        return record(world, cfg, folder, spoilt)


def diverging(world: World, cfg, folder: Path, spoilt: frozenset[int]) -> int:
    """record(), with a last rank whose gradients are a thousandth larger."""
    finish = train.finish

    def planted(buckets, mesh) -> None:
        finish(buckets, mesh)
        for b in buckets if world.rank == world.size - 1 else ():
            b.shard.mul_(1.001)

    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(train, "finish", planted)
        return record(world, cfg, folder, spoilt)


@pytest.mark.parametrize(
    "work, zero, says",
    [
        (stale, 1, "is not the shares of all ranks"),
        (narrowed, 1, "layout gradient"),
        (diverging, 0, "replicas of"),
    ],
)
def test_what_goes_wrong_between_ranks_is_seen(provers, ranks, tmp_path, work, zero, says):
    prover, cell = provers(LLAMA, 2), Cell("bf16", "sgd", zero, 0, 0)
    cfg, spoilt = cell.config(LLAMA, 2, prover.data), frozenset({SPOILT})
    run = trained(ranks(2), cfg, tmp_path / "run", spoilt, work)
    wrong, seen = judge(run, prover.single(cfg, spoilt), "layout")
    assert any(says in w for w in (*wrong, *beyond(seen))), (wrong[:3], beyond(seen))


@pytest.mark.parametrize("against", ["layout", "fp64"])
@pytest.mark.parametrize("weights", ["fp8", "none"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("skipped", [1, 6, 7, 10, None])
def test_one_run_may_skip_a_late_step_alone_in_fp16_with_quantized_weights_and_nowhere_else(
    tmp_path, skipped, dtype, weights, against
):
    cfg = subject(LLAMA, str(tmp_path), dtype, "sgd")
    cfg = replace(cfg, parallel=replace(cfg.parallel, compress_weights=weights))

    def run(good: int | None) -> Told:
        told = [{"step": step, "ok": step == good} for step in range(11)]
        return Told(cfg, [{}] * 11, [], [], [], told)

    seen = compared(run(skipped), run(None), against)
    if skipped is None:
        assert seen == []
        return
    bound = NOT_COMPARED if (dtype, weights, against) == ("fp16", "fp8", "layout") else 0
    what = f"{against} steps from a skip of one run alone"
    assert seen == [Seen(what, f"step {skipped}", 11 - skipped, bound)]
    assert (seen[0].share <= 1) == (bound > 0 and skipped >= 7)
