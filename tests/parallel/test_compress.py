"""Lossy sums and gathers: how far off they may be, that no two ranks see different values, that nothing sick vanishes, and that
models still learn. Planted bugs must be seen by the same checks."""
import hashlib
import pathlib
from collections import Counter, defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import config
import rules
from build import build
from checkpoint import state, store
from checkpoint.saver import Saver
from data.batch import Batch
from parallel import compress, powersgd
from parallel.boxes import Box
from parallel.comm import World
from parallel.layout import Layout
from parallel.mesh import Mesh
from parallel.params import Bucket, Slot
from parallel.reduce import start_gather, start_scatter_sum, start_sum
from parallel.spec import Spec, parameter
from plan import lattice
from runtime.guard import Guard
from scripts.verify import Tokens, subject
from train import train_step

KINDS = ("int8", "fp8")
BLOCK, SIZE = 64, 64 * 48
SLACK = 1 + 1e-5  # fp32 rounds the scale, the quotient and the product


def gradient(name: str, rank: int = 0, dtype=torch.float32) -> torch.Tensor:
    x = torch.randn(SIZE, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    if name == "outliers":
        x[rank::97] *= 1e6
    elif name == "zeros":
        x[: SIZE // 2] = 0
    elif name == "tiny":
        x *= 1e-40
    elif name == "huge":
        x *= 1e30
    elif name == "opposite":  # the ranks all but cancel
        x = torch.full_like(x, 3.0) * (1 if rank % 2 else -1) + x * 1e-3
    elif name == "equal":
        x = torch.ones_like(x)
    return x.to(dtype)


GRADIENTS = ("normal", "outliers", "zeros", "tiny", "huge", "opposite", "equal")


# ---- codes -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_code_is_as_near_as_it_says(kind, name):
    for block in (64, 256):
        x = gradient(name).view(4, -1)
        message = compress.encode(x, kind, block)
        assert message.dtype == torch.uint8 and message.shape == (4, x.shape[1] * (block + 4) // block)
        back, limit = compress.decode(message, kind, block, torch.float64), compress.bound(x.double(), kind, block)
        assert ((back - x.double()).abs() <= limit * SLACK).all()
        assert not back[x == 0].any()
        top = x.double().abs().unflatten(1, (-1, block)).amax(2, keepdim=True)
        assert (limit.unflatten(1, (-1, block)) <= top.clamp(min=compress.FLOOR) / (254 if kind == "int8" else 16) * SLACK).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sick", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so(kind, sick):
    x = gradient("normal").view(1, -1)
    x[0, 70] = sick
    back = compress.decode(compress.encode(x, kind, BLOCK), kind, BLOCK, torch.float32)
    assert back[0, 64:128].isnan().all() and back[0, :64].isfinite().all() and back[0, 128:].isfinite().all()
    with_overflow = compress.encode(torch.full((1, BLOCK), 1e300, dtype=torch.float64), kind, BLOCK)
    assert compress.decode(with_overflow, kind, BLOCK, torch.float64).isnan().all()


# ---- sums and gathers ------------------------------------------------------------------------------------------------

def neighbours_scale(message, kind, block, dtype):
    """Planted: the scale of the block before."""
    n = message.shape[1] // (block + 4) * block
    codes, scale = message[:, :n].view(compress.CODES[kind]), message[:, n:].view(torch.float32).roll(1, 1)
    return (codes.to(dtype).unflatten(1, (-1, block)) * scale.to(dtype)[..., None]).flatten(1)


class KeepsItsOwn(compress.Gather):
    """Planted: a rank keeps its own share as it was, the others see it quantized."""

    def __init__(self, x, group, out, kind, block):
        super().__init__(x, group, out, kind, block)
        self.own, self.at = x.clone(), group.index

    def wait(self):
        super().wait().view(self.rows, -1)[self.at] = self.own
        return self.out


def sums(world: World, kind: str, name: str, planted: str = ""):
    """(sum, share of it, what gather makes of that share, what is on the wire), and a gradient with one NaN, summed."""
    before = compress.decode, compress.Gather
    if planted == "scale":
        compress.decode = neighbours_scale
    elif planted == "own":
        compress.Gather = KeepsItsOwn
    try:
        ledger = Counter()
        group = world.groups("loss", [list(range(world.size))], ledger)
        x = gradient(name, world.rank)
        whole = start_sum(x.clone(), group, kind, None, BLOCK).wait()
        sent = {verb: ledger["loss", verb, "bytes"] for verb in ("all_to_all", "all_gather", "all_reduce", "send")}
        share = start_scatter_sum(x.clone(), group, kind, BLOCK).wait()
        gathered = start_gather(share, group, torch.empty_like(x), kind, BLOCK).wait()
        if world.rank == 1:
            x[700] = float("nan")
        return whole, share, gathered, sent, start_sum(x, group, kind, None, BLOCK).wait()
    finally:
        compress.decode, compress.Gather = before


def wrong(found, kind: str, name: str) -> list[str]:
    """What is wrong with them."""
    N, xs = len(found), [gradient(name, r).view(1, -1) for r in range(len(found))]
    true = sum(x.double() for x in xs)
    limit = sum(compress.bound(x.double(), kind, BLOCK) for x in xs)
    added = sum(compress.decode(compress.encode(x, kind, BLOCK), kind, BLOCK, torch.float32) for x in xs)  # what is rounded again
    both = limit + compress.bound(added.double(), kind, BLOCK)
    fp32 = sum(x.double().abs() for x in xs) * N * 2.0**-23
    says = []
    for rank, (whole, share, gathered, sent, sick) in enumerate(found):
        part = slice(rank * SIZE // N, (rank + 1) * SIZE // N)
        says += [f"sum of rank {rank}"] * (not ((whole - true[0]).abs() <= both[0] * SLACK + fp32[0]).all())
        says += [f"share of rank {rank}"] * (not ((share - true[0, part]).abs() <= (limit[0] * SLACK + fp32[0])[part]).all())
        says += [f"another sum on rank {rank}"] * (not torch.equal(whole, found[0][0]))
        says += [f"another gather on rank {rank}"] * (not torch.equal(gathered, found[0][2]))
        says += [f"NaN lost on rank {rank}"] * (not sick[700].isnan())
        wire = SIZE + SIZE // BLOCK * 4
        assert sent == {"all_to_all": wire, "all_gather": wire, "all_reduce": 0, "send": 0}
    return says


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GRADIENTS)
def test_sums_are_within_their_bound_and_the_same_everywhere(ranks, kind, name):
    for world in (2, 4):
        found = ranks(world).run(sums, kind, name)
        assert not wrong(found, kind, name)
        assert all(torch.equal(a, b) for a, b in zip(found[0][:3], ranks(world).run(sums, kind, name)[0][:3])), "twice the same bits"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("planted, sees", [("scale", "sum of rank 0"), ("own", "another gather on rank 1")])
def test_planted_in_sums(ranks, kind, planted, sees):
    assert sees in wrong(ranks(2).run(sums, kind, "outliers", planted), kind, "outliers")


# ---- PowerSGD --------------------------------------------------------------------------------------------------------

SHAPES = ((24, 10), (7, 64), (30,), (12, 12))


class ForgetsErrors(powersgd.PowerSGD):
    """Planted: what was not sent is lost."""

    def turn(self):
        super().turn()
        self.error.zero_()


def factored(world: World, rank: int, steps: int, planted: str = "", sick: int = 0):
    """Of each step, for all ranks together: (gradients, what was sent, errors before, errors after)."""
    group = world.groups("loss", [list(range(world.size))], Counter())
    slots, at = [], 0
    for i, shape in enumerate(SHAPES):
        slots.append(Slot(parameter(Spec((Box.whole(f"w{i}", shape),), "normal", decay=len(shape) > 1)), at, True))
        at += 64 * (-(-slots[-1].numel // 64))
    kind = ForgetsErrors if planted == "errors" else powersgd.PowerSGD
    power = kind(tuple(slots), at, group, rank, 1, torch.zeros(at, dtype=torch.float64))
    out, stream = [], torch.Generator().manual_seed(world.rank)
    for step in range(1, steps + 1):
        grad = torch.zeros(at, dtype=torch.float64)
        for slot in slots:
            slot.of(grad).copy_(torch.randn(slot.param.spec.shape, generator=stream, dtype=torch.float64))
        mine, before = grad.clone(), power.error.clone()
        if step == sick and world.rank == 1:
            grad[3] = float("inf")
        sent = power.start(grad).wait().clone()
        out.append((mine, sent, before, power.error.clone()))
        power.settle(sent.isfinite().all())
    return out, [q.clone() for q in power.bases]


def total(found, step: int, which: int) -> torch.Tensor:
    return sum(steps[step][which] for steps, _ in found)


def identity(found, step: int) -> float:
    """How far sent + errors after is from gradients + errors before."""
    return float((found[0][0][step][1] + total(found, step, 3) - total(found, step, 0) - total(found, step, 2)).abs().max())


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("rank", [1, 4, 64])
def test_what_is_not_sent_stays_behind(ranks, world, rank):
    found = ranks(world).run(factored, rank, 4)
    for step in range(4):
        assert identity(found, step) < 1e-12
        assert all(torch.equal(steps[step][1], found[0][0][step][1]) for steps, _ in found), "every rank has the same sum"
        error = total(found, step, 3).abs().max()
        assert error < 1e-12 if rank == 64 else error > 0.1
        left, asked = total(found, step, 3), total(found, step, 0) + total(found, step, 2)
        assert left.norm() <= asked.norm() * SLACK  # a projection: what is left is no longer than what there was
        assert torch.allclose(found[0][0][step][1][704:734], total(found, step, 0)[704:734], rtol=0, atol=1e-12)  # a vector travels whole
    assert all(torch.equal(a, b) for _, bases in found for a, b in zip(bases, found[0][1]))


def test_planted_lost_errors(ranks):
    found = ranks(2).run(factored, 2, 2, "errors")
    assert identity(found, 0) > 0.1


def test_a_skipped_step_leaves_nothing_behind(ranks):
    found = ranks(2).run(factored, 2, 3, "", 2)
    assert not found[0][0][1][1][:240].isfinite().any() and not found[1][0][1][1][:240].isfinite().any()  # on every rank
    assert all(not steps[2][2].any() and steps[2][1].isfinite().all() for steps, _ in found)
    assert identity(found, 2) < 1e-12


# ---- training --------------------------------------------------------------------------------------------------------

def laid(dtype: str = "fp64", steps: int = 50, **parallel) -> config.Config:
    cfg = subject("llama3-tiny")
    return replace(cfg, model=replace(cfg.model, layers=2, dropout=0.0), train=replace(cfg.train, dtype=dtype, steps=steps, global_batch=4),
                   parallel=replace(cfg.parallel, compress_block=64, **parallel))


def begin(world: World, cfg):
    p = cfg.parallel
    mesh = Mesh.bind(Layout(world.size, p.tp, p.cp, p.pp, p.dp_rep, p.ep, p.etp), world)
    mesh.ledger.clear()
    run = build(cfg, mesh, torch.device("cpu"), SimpleNamespace(tokenizer=SimpleNamespace(fingerprint="t"), fingerprint="d"), cfg.train.steps)
    return run, Tokens(cfg, mesh.data.index, mesh.data.size)


def go(run, data, first: int, last: int) -> list[float]:
    return [float(train_step(run, s, data.microbatches(s - 1), Guard(), lambda *point: None)[0]) for s in range(first, last + 1)]


def digests(world: World, cfg) -> tuple[dict, list[float]]:
    """After three steps: {(what, which elements): digest}, of masters and of the weights that compute sees; the losses."""
    run, data = begin(world, cfg)
    losses, out = go(run, data, 1, 3), {}
    for b in run.buckets:
        b.need()
        for box, x in b.boxes(b.master):
            out["master", str(box)] = hashlib.sha256(x.numpy().tobytes()).hexdigest()
        for slot in b.slots:
            for box, x in slot.param.spec.split(slot.of(b.weights)):
                out["weights", str(box)] = hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()
    return out, losses


ALIKE = [dict(compress="int8", tp=2), dict(compress="fp8", tp=2, sp=True), dict(compress="int8", compress_weights="int8", zero=1, tp=2),
         dict(compress="fp8", compress_weights="fp8", zero=2, dp_rep=2), dict(compress="int8", compress_weights="fp8", zero=3, tp=2),
         dict(compress="powersgd", tp=2), dict(compress="powersgd", cp=2), dict(compress="int8", pp=2)]


@pytest.mark.parametrize("parallel", ALIKE, ids=str)
def test_replicas_never_drift(ranks, parallel):
    """What several ranks hold of a parameter is the same bit for bit, over data ranks, replicas and tp ranks."""
    every, losses = defaultdict(set), []
    for found, loss in ranks(4).run(digests, laid(**parallel)):
        losses.append(loss)
        for key, digest in found.items():
            every[key].add(digest)
    assert len(every) > 20 and [key for key, values in every.items() if len(values) > 1] == []
    assert all(loss == losses[0] for loss in losses)


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
        b.need()
    return [(b.weights[b.lo:b.hi].clone(), b.master.clone()) for b in run.buckets]


def test_masters_stay_exact(ranks):
    for pairs in ranks(2).run(masters, laid("fp32", compress_weights="int8", zero=1)):
        for seen, exact in pairs:
            limit = compress.bound(exact.double()[None], "int8", 64)[0]
            assert ((seen.double() - exact.double()).abs() <= limit * SLACK).all() and not torch.equal(seen, exact)


@pytest.mark.parametrize("kind", ["none", "int8", "fp8", "powersgd"])
def test_one_rank_has_nothing_to_compress(kind):
    cfg = laid(compress=kind)
    plain, other = digests(World(), replace(cfg, parallel=config.Parallel(bucket_mb=cfg.parallel.bucket_mb))), digests(World(), cfg)
    assert plain == other


def poisoned(world: World, cfg):
    """Rank 1 has a NaN in the second step's gradients: (ok of each step, did the weights stay, are they finite in the end)."""
    run, data = begin(world, cfg)
    said, kept, reduce = [], None, Bucket.reduce
    for step in (1, 2, 3, 4):
        def sick(self, last, bad=step == 2 and world.rank == 1):
            if bad and self is run.buckets[1]:
                self.grad[5] = float("nan")
            reduce(self, last)
        Bucket.reduce = sick
        before = [b.master.clone() for b in run.buckets]
        try:
            said.append(bool(train_step(run, step, data.microbatches(step - 1), Guard(), lambda *point: None)[2]))
        finally:
            Bucket.reduce = reduce
        if step == 2:
            kept = all(torch.equal(b.master, x) for b, x in zip(run.buckets, before))
    for b in run.buckets:
        b.need()
    return said, kept, all(bool(b.master.isfinite().all()) for b in run.buckets)


@pytest.mark.parametrize("parallel", [dict(compress=k) for k in (*KINDS, "powersgd")] + [dict(compress="int8", zero=z, compress_weights="int8") for z in (1, 3)], ids=str)
def test_a_nan_reaches_every_guard_and_does_no_harm(ranks, parallel):
    for said, kept, finite in ranks(2).run(poisoned, laid(**parallel)):
        assert said == [True, False, True, True] and kept and finite


def text(cfg, step: int, rank: int, world: int) -> list[Batch]:
    """A rank's sequences of a step: places in the licence, letter by letter."""
    letters = torch.tensor([ord(c) % cfg.model.vocab for c in (pathlib.Path(config.__file__).parent / "LICENSE").read_text()])
    t = cfg.train
    starts = torch.randint(len(letters) - t.seq_len, (t.global_batch,), generator=torch.Generator().manual_seed(step)).tolist()
    mine = range(rank, t.global_batch, world)
    rows = torch.stack([letters[starts[i]:starts[i] + t.seq_len + 1] for i in mine])
    return [Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), torch.arange(t.seq_len).expand(len(rows), -1), None, torch.tensor(list(mine)), step)]


def learned(world: World, cfg):
    """(mean loss of the last ten steps, bytes of gradients and weights on the wire in a step, as all-reduces count twice, the first loss)."""
    run, _ = begin(world, cfg)
    losses = []
    for step in range(1, cfg.train.steps + 1):
        run.mesh.ledger.clear()
        losses.append(float(train_step(run, step, text(cfg, step, world.rank, world.size), Guard(), lambda *point: None)[0]))
    wire = {verb: run.mesh.ledger[group, verb, "bytes"] for group in ("loss", "shard") for verb in ("all_reduce", "all_to_all", "reduce_scatter", "all_gather")
            if run.mesh.ledger[group, verb, "bytes"] > 64}
    for b in run.buckets:
        b.need()
    return sum(losses[-10:]) / 10, sum(n * (2 if verb == "all_reduce" else 1) for verb, n in wire.items()), losses[0]


EIGHT = dict(compress="int8", compress_weights="int8"), dict(compress="fp8", compress_weights="fp8")
LEARN = [(dict(), 0.0), (dict(compress="int8"), 0.02), (dict(compress="fp8"), 0.02), (dict(compress="powersgd", powersgd_rank=4), 0.15),
         (dict(compress="powersgd", powersgd_rank=16), 0.05), (dict(zero=1), 0.01), (dict(zero=1, **EIGHT[0]), 0.02), (dict(zero=1, **EIGHT[1]), 0.05),
         (dict(zero=3), 0.01), (dict(zero=3, **EIGHT[0]), 0.02)]


def test_models_learn_all_the_same(ranks, capsys):
    """60 steps of two ranks in fp32: the mean of the last ten losses is within the margin of plain data parallelism's, as a share of what
    that learned. The README's table is what this prints."""
    plain = sent = None
    with capsys.disabled():
        for parallel, margin in LEARN:
            cfg = laid("fp32", 60, **(parallel | dict(bucket_mb=64.0)))
            cfg = replace(cfg, parallel=replace(cfg.parallel, compress_block=256), model=replace(cfg.model, hidden=64, ffn=128),
                          optim=replace(cfg.optim, lr=3e-3), train=replace(cfg.train, micro_batch=8, global_batch=16))
            loss, wire, begun = ranks(2).run(learned, cfg)[0]
            plain, sent = (plain, sent) if plain else (loss, wire)
            name = " ".join(f"{k} {v}" for k, v in parallel.items()) or "none"
            print(f"\n{name:<48} {wire:>9,} bytes {wire / sent:.3f}   loss {loss:.4f} {loss - plain:+.4f}", end="")
            assert loss < 0.7 * begun and abs(loss - plain) <= margin * (begun - plain), (parallel, loss, plain)


# ---- checkpoints -----------------------------------------------------------------------------------------------------

def saved(world: World, cfg, root):
    run, data = begin(world, cfg)
    go(run, data, 1, 3)
    saver = Saver(False)
    state.save(run, saver, root, 3, lambda point: None)
    saver.wait()
    return go(run, data, 4, 6)


def resumed(world: World, cfg, path):
    run, data = begin(world, cfg)
    state.load(run, path)
    left = max([float(b.power.error.abs().max()) for b in run.buckets if b.power], default=0.0)
    return go(run, data, 4, 6), left


def test_errors_outlive_the_run_whatever_ranks_go_on(ranks, tmp_path):
    """The same ranks: bit for bit. Another number of ranks: to 1e-9 in fp64. Without PowerSGD: they are left out."""
    cfg = laid(compress="powersgd", powersgd_rank=2)
    losses = ranks(2).run(saved, cfg, tmp_path)[0]
    (_, path), = store.committed(tmp_path)
    keys = {p["key"] for p in store.index(path)["pieces"]}
    assert sum(powersgd.ERROR in k for k in keys) > 5 and sum(powersgd.BASIS in k for k in keys) > 5
    for found, left in ranks(2).run(resumed, cfg, path):
        assert found == losses and left > 0
    for found, left in ranks(4).run(resumed, cfg, path):
        assert found == pytest.approx(losses, rel=1e-9) and left > 0
    (found, _), *_ = ranks(2).run(resumed, replace(cfg, parallel=replace(cfg.parallel, powersgd_rank=3)), path)
    assert found[0] == losses[0] and found != losses  # other bases, drawn anew
    (found, _), *_ = ranks(2).run(resumed, replace(cfg, parallel=replace(cfg.parallel, compress="none")), path)
    assert found[0] == losses[0] and found != losses


def test_errors_begin_anew_where_there_were_none(ranks, tmp_path):
    cfg = laid(compress="powersgd", powersgd_rank=2)
    losses = ranks(2).run(saved, replace(cfg, parallel=replace(cfg.parallel, compress="none")), tmp_path)[0]
    (_, path), = store.committed(tmp_path)
    assert all(found[0] == losses[0] and left == 0 for found, left in ranks(2).run(resumed, cfg, path))


@pytest.mark.parametrize("parallel", [dict(compress="int8"), dict(compress="fp8", compress_weights="int8", zero=1), dict(compress_weights="fp8", zero=3)], ids=str)
def test_quantized_runs_resume_bit_for_bit(ranks, tmp_path, parallel):
    cfg = laid("bf16", **parallel)
    losses = ranks(2).run(saved, cfg, tmp_path)
    (_, path), = store.committed(tmp_path)
    assert [found for found, _ in ranks(2).run(resumed, cfg, path)] == losses


# ---- refusals --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("parallel, key, says", [
    (dict(compress="int8", reduce="ring"), "parallel.compress", "use one of them"), (dict(compress="powersgd", reduce="hierarchy"), "parallel.compress", "use one"),
    (dict(compress="powersgd", zero=1), "parallel.compress", "int8 or fp8, or parallel.zero 0"),
    (dict(compress_weights="int8"), "parallel.compress_weights", "parallel.zero to 1, 2 or 3"),
    (dict(compress="int8", compress_block=96), "parallel.compress_block", "not a multiple of 64"), (dict(compress_block=0), "parallel.compress_block", "above 0"),
    (dict(powersgd_rank=0), "parallel.powersgd_rank", "above 0")])
def test_refused(parallel, key, says):
    cfg = laid()
    with pytest.raises(config.ConfigError, match=f"^{key}: ") as e:
        rules.validate(replace(cfg, parallel=replace(cfg.parallel, **parallel)), 4)
    assert says in str(e.value) and "\n" not in str(e.value)


def test_a_loss_scale_and_errors_do_not_go_together():
    with pytest.raises(config.ConfigError, match="^parallel.compress: powersgd .* fp16"):
        rules.validate(laid("fp16", compress="powersgd"), 2)


@pytest.mark.parametrize("parallel", [dict(compress="int8"), dict(compress_weights="fp8", zero=1)])
def test_verify_says_why_it_does_not_prove_the_lossy(parallel):
    with pytest.raises(config.ConfigError, match="8 bits lose the rest"):
        lattice.provable(laid(**parallel))
