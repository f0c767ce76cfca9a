"""Quantities by their definitions, written out by hand: learning rate, clipping, initial weights, dropout,
jitter, the loss and what is derived from it, who sees whom. Where a run decides, through train.train on
real files."""

import hashlib
import itertools
import math
import threading
import time
from dataclasses import replace
from unittest import mock

import pytest
import run_folder
import torch
from dense_mask import visible_keys
from program import Enough, corpus, settings, trained
from torch.nn.functional import cross_entropy

from build import build_run
from config import OptimConfig
from config.reading import resolve
from kernels.attention_mask import make_attention_mask
from model.flops import mean_keys
from model.norm import add_residual
from model.router import mixture
from model.sharding import parallel_dims
from optim.clip import clip_factor
from optim.lr import learning_rate
from parallel.rng import DropoutRng, dropout
from parallel.sharding import spec
from parallel.sharding.boxes import Box
from parallel.sharding.spec import INIT_BLOCK, ParameterSpec, draw_normal, initialize
from parallel.sharding.views import get_boxes
from parallel.topology.mesh import Mesh
from parallel.wire.world import World

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("definitions")


@pytest.fixture(scope="module")
def prefix(home):
    return corpus(home)


# ---- learning rate -----------------------------------------------------------------------------------------

PEAK, LOW = 3e-3, 2e-4


def rate_by_hand(shape: str, step: int, steps: int, warm: int, low: float) -> float:
    """Linear to PEAK at step `warm`; from there to `low` at the last step. wsd: constant but for the last
    0.3 of all steps."""
    if step <= warm:
        return PEAK * step / warm
    if shape == "constant":
        return PEAK
    if shape == "wsd":
        return min(PEAK, low + (PEAK - low) * (steps - step) / (0.3 * steps))
    left = (steps - step) / (steps - warm)  # 1 at the peak, 0 at the end
    return low + (PEAK - low) * (left if shape == "linear" else math.sin(math.pi / 2 * left) ** 2)


@pytest.mark.parametrize("shape", ["cosine", "wsd", "linear", "constant"])
@pytest.mark.parametrize("low", [None, LOW, 0.0])
def test_learning_rate_at_every_step(shape, low):
    """A horizon of ten warm-ups and longer keeps the warm-up; a shorter one has a tenth of itself, rounded
    down."""
    o = OptimConfig(lr=PEAK, min_lr=low, warmup=20, decay=shape, decay_fraction=0.3)
    for steps, warm in ((200, 20), (1000, 20), (199, 19), (150, 15), (19, 1), (10, 1), (9, 0), (1, 0)):
        least = PEAK / 10 if low is None else low
        want = [rate_by_hand(shape, step, steps, warm, least) for step in range(1, steps + 1)]
        found = [learning_rate(o, step, steps) for step in range(1, steps + 1)]
        assert found == pytest.approx(want, rel=1e-12, abs=1e-18), (steps, warm)
        assert max(found) <= PEAK * (1 + 1e-15)


@pytest.mark.parametrize("shape", ["cosine", "wsd", "linear", "constant"])
def test_learning_rate_at_its_corners(shape):
    o = OptimConfig(lr=PEAK, min_lr=LOW, warmup=20, decay=shape, decay_fraction=0.3)
    at = [None, *(learning_rate(o, step, 1000) for step in range(1, 1001))]
    assert at[1] == PEAK / 20 and at[20] == PEAK and at[19] < PEAK
    assert (at[21] < PEAK) == (shape in ("cosine", "linear"))  # the first step after the warm-up
    assert at[1000] == (PEAK if shape == "constant" else LOW)
    # a decay never begins within the warm-up
    assert learning_rate(replace(o, decay_fraction=1.0), 20, 1000) == PEAK
    assert (at[700] == PEAK) == (shape in ("wsd", "constant")) and (at[701] == PEAK) == (shape == "constant")
    assert all(a >= b for a, b in itertools.pairwise(at[20:]))
    no_warmup = replace(o, warmup=0)
    assert learning_rate(no_warmup, 1, 1000) == pytest.approx(rate_by_hand(shape, 1, 1000, 0, LOW), rel=1e-12)


def moved(cfg, folder) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(gradients, change of the weights, norm) of the first step."""
    seen = {}

    def watch(point, step=None, **what):
        if point == "run.built":
            seen["buckets"], seen["data"] = what["run"].buckets, what["data"]
            seen["before"] = [b.weights.master.clone() for b in seen["buckets"]]
        elif point == "step.backward":
            seen["grads"] = [b.grads.local.clone() for b in seen["buckets"]]
        elif point == "step.end":
            seen["data"].close()
            seen["after"] = [b.weights.master.clone() for b in seen["buckets"]]
            seen["norm"] = float(what["norm"])
            raise Enough

    with pytest.raises(Enough):
        trained(World(), cfg, str(folder), watch)
    return torch.cat(seen["grads"]), torch.cat(seen["after"]) - torch.cat(seen["before"]), seen["norm"]


@pytest.mark.slow
def test_sgd_moves_by_the_rate_times_the_clipped_gradient(home, prefix):
    """Below the limit the gradient's bits are the gradient's; above it, its norm is the limit. One step at
    the peak rate."""
    plain = {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0, "lr": 0.5, "warmup": 0, "decay": "constant"}
    (grads, free, norm), (_, loose, _), (same, tight, told) = (
        moved(settings(prefix, optim={**plain, "clip": clip}), home / f"clip-{clip}")
        for clip in (None, 100.0, 0.25)
    )
    assert torch.equal(grads, same)
    assert norm == told == pytest.approx(float(grads.double().norm()), rel=1e-12)
    assert 0.25 < norm < 100
    assert torch.equal(loose, free) and torch.allclose(free, -0.5 * grads, rtol=1e-9, atol=1e-15)
    assert float(tight.norm()) == pytest.approx(0.5 * 0.25, rel=1e-5)
    assert torch.allclose(tight, -0.5 * grads * 0.25 / norm, rtol=1e-5, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipping_scales_a_norm_above_the_limit_to_it(dtype):
    for norm in (0.0, 1e-30, 0.3, 0.999):
        assert float(clip_factor(torch.tensor(norm, dtype=dtype), 1.0)) == 1.0
    for norm in (1.5, 7.0, 1e20):
        clipped = float(clip_factor(torch.tensor(norm, dtype=dtype), 1.25)) * norm
        assert clipped == pytest.approx(1.25, rel=2e-6)
    assert float(clip_factor(torch.tensor(7.0, dtype=dtype), None)) == 1.0


# ---- initial weights ---------------------------------------------------------------------------------------

STD = 0.037
FAMILIES = (
    "gpt2-tiny", "llama3.2-tiny", "qwen3-tiny", "qwen2.5-tiny", "qwen2-moe-tiny", "dots1-tiny",
    "deepseek-v2-lite-tiny", "deepseek-v3-tiny",
)
LARGE = (
    f"--model.layers 2 --model.hidden 64 --model.mlp.width 96 --model.vocab 300 --model.context 32 "
    f"--model.init_std {STD} --train.seq_len 16 --train.micro_batch 1 --train.global_batch 4 --train.steps 2 "
    f"--train.dtype fp64"
).split()


def family(name: str, *args: str):
    return resolve(name, None, [*LARGE, *args])


def initial(world: World, cfg) -> list[tuple[Box, torch.Tensor]]:
    """This rank's masters: [(where it lies in which tensor, values)]."""
    mesh = Mesh.bind(parallel_dims(cfg, world.size), world)
    run = build_run(cfg, mesh, CPU, None, 2)
    for b in run.buckets:
        b.weights.wait_unshard()
    return [(box, part.clone()) for b in run.buckets for box, part in get_boxes(b, b.weights.master)]


def whole(cfg) -> dict[str, torch.Tensor]:
    return {box.key: values for box, values in initial(World(), cfg)}


def expected(key: str, layers: int) -> tuple[str, float]:
    """(kind, standard deviation): what the comments of config/schema.py say, read off the name."""
    last, kind = key.split(".")[-2:]
    if "norm" in last:
        return {"weight": ("ones", 0.0), "bias": ("zeros", 0.0)}[kind]
    if kind == "bias":
        return "zeros", 0.0
    return "normal", STD / math.sqrt(2 * layers) if last in ("o", "down") else STD


@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_starts_as_it_should(name):
    """Mean and standard deviation within five standard errors; no two tensors from the same numbers."""
    cfg, seen = family(name), {}
    for key, x in whole(cfg).items():
        kind, std = expected(key, cfg.model.layers)
        if kind != "normal":
            assert torch.equal(x, torch.full_like(x, {"ones": 1.0, "zeros": 0.0}[kind])), key
            continue
        n = x.numel()
        assert abs(float(x.mean())) < 5 * std / math.sqrt(n), key
        assert abs(float(x.std()) / std - 1) < 5 / math.sqrt(2 * n), key
        assert abs(float((x / std).pow(4).mean()) - 3) < 5 * math.sqrt(96 / n), key  # of a normal: 3
        first = tuple((x.flatten()[:8] / std).round(decimals=4).tolist())
        assert first not in seen, f"{key} starts like {seen.get(first)}"
        seen[first] = key
    parts = (
        {"attn.o", "down", "embed"}
        | ({"router"} if mixture(cfg.model) else set())
        | ({"kv_a", "kv_b"} if cfg.model.mixer.kind == "latent" else set())
    )
    assert all(any(part in key for key in seen.values()) for part in parts)


def test_a_large_tensor_is_drawn_block_by_block():
    """More than BLOCK numbers: the blocks have streams of their own, and a piece of it is the same
    numbers."""
    shape = (5, INIT_BLOCK // 2)
    x = torch.empty(shape, dtype=torch.float64)
    draw_normal(Box.whole("w", shape), x, 7, 2.0)
    assert len({tuple(row[:4].tolist()) for row in x}) == 5
    assert abs(float(x.std()) / 2.0 - 1) < 5 / math.sqrt(2 * x.numel())
    piece = torch.empty(3, 10, dtype=torch.float64)
    draw_normal(Box("w", shape, (1, 5), (3, 10)), piece, 7, 2.0)
    assert torch.equal(piece, x[1:4, 5:15])

    # the definition, which no version may change: two rows are a block, and each has its stream
    for block in range(3):
        seed = hashlib.sha256(f"7/w/{block}".encode()).digest()[:8]
        stream = torch.Generator().manual_seed(int.from_bytes(seed, "little") >> 1)
        mine = x[2 * block : 2 * block + 2]
        assert torch.equal(mine, 2.0 * torch.randn(mine.shape, generator=stream).double()), block


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_draw_what_one_draws(monkeypatch, threads):
    """As many blocks at a time as there are threads, more than are kept waiting, and parts of blocks."""
    monkeypatch.setattr(spec, "INIT_BLOCK", 1000)
    monkeypatch.setattr(spec, "DRAWN_AHEAD", 7)
    box = Box("w", (300, 64), (3, 5), (280, 40))
    drawn, used = [], []
    randn = torch.randn
    for count in (1, threads):
        used.append(set())
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)

        def seen(*args, **options):
            used[-1].add(threading.get_ident())
            time.sleep(1e-3)  # so that one thread cannot draw all
            return randn(*args, **options)

        monkeypatch.setattr(torch, "randn", seen)
        drawn.append(torch.empty(280, 40))
        draw_normal(box, drawn[-1], 3, 0.5)
    assert torch.equal(*drawn) and len(used[0]) == 1 and len(used[1]) == threads


@pytest.mark.parametrize("rows", [1, 3])
def test_only_what_is_needed_is_drawn(monkeypatch, rows):
    """Any range of elements of a merged parameter has the values of the whole, and no row is drawn
    that has none of them."""
    monkeypatch.setattr(spec, "INIT_BLOCK", 8 * rows)
    q, k = Box("q", (12, 8), (4, 0), (6, 8)), Box("k", (5, 8), (0, 0), (5, 8))
    merged = ParameterSpec((q, k), "hidden", std=0.5)
    whole_values = torch.empty(merged.shape)
    initialize(merged, whole_values, 3)
    randn = torch.randn
    for start, stop in itertools.combinations((-9, 0, 1, 8, 20, 47, 48, 49, 72, 88, 95), 2):
        sizes = []
        monkeypatch.setattr(torch, "randn", lambda size, **how: sizes.append(size[0]) or randn(size, **how))
        part = torch.full(merged.shape, 7.0)
        initialize(merged, part, 3, range(start, stop))
        monkeypatch.setattr(torch, "randn", randn)
        needed = slice(max(0, start), max(0, stop))
        assert torch.equal(part.flatten()[needed], whole_values.flatten()[needed])
        touched = len({element // 8 for element in range(88)[needed]})  # rows with a needed element
        assert (part != 7.0).all(1).sum() == touched
        assert touched <= sum(sizes) <= touched + 4 * (rows - 1)  # blocks that are cut at both ends, of each


def drawn_elements(world, cfg) -> int:
    """How many normal numbers a rank draws to build its run."""
    counts = []
    randn = torch.randn

    def counted(size, *args, **options):
        counts.append(math.prod(size))
        return randn(size, *args, **options)

    # blocks that are small beside a tensor, as they are in a large model
    with mock.patch.object(torch, "randn", counted), mock.patch.object(spec, "INIT_BLOCK", 256):
        mesh = Mesh.bind(parallel_dims(cfg, world.size), world)
        build_run(cfg, mesh, CPU, None, cfg.train.steps)
    return sum(counts)


@pytest.mark.slow
def test_ranks_that_share_weights_draw_their_own(ranks):
    """Under ZeRO-3. Rows that two shards cut are drawn twice."""
    cfg = family("llama3-tiny", "--parallel.bucket_mb", "64")
    alone = drawn_elements(World(), cfg)
    for zero, most in ((1, 1.0), (3, 0.35)):
        there = replace(cfg, parallel=replace(cfg.parallel, zero=zero))
        drawn = ranks(4).run(drawn_elements, there)
        assert sum(drawn) >= alone and max(drawn) <= most * alone, (zero, drawn, alone)


def test_initial_weights_change_with_the_seed_and_with_nothing_else():
    base = whole(family("dots1-tiny"))
    drawn = {key for key in base if expected(key, 4)[0] == "normal"}
    other = whole(family("dots1-tiny", "--train.seed", "1235"))
    assert {key for key in base if not torch.equal(base[key], other[key])} == drawn
    for words in (
        "--optim.name sgd --optim.lr 0.3", "--optim.name muon", "--parallel.bucket_mb 0.05",
        "--model.dropout 0.3", "--model.mlp.router.aux.weight 0.5", "--parallel.offload both",
        "--parallel.recompute full", "--train.micro_batch 4", "--train.steps 9", "--log.noise_scale true",
    ):
        same = whole(family("dots1-tiny", *words.split()))
        assert same.keys() == base.keys() and all(torch.equal(base[key], same[key]) for key in base), words
    for dtype in ("fp32", "bf16", "fp16"):  # masters are fp32
        same = whole(family("dots1-tiny", "--train.dtype", dtype))
        assert all(torch.equal(base[key].float(), same[key]) for key in base), dtype
        assert {x.dtype for x in same.values()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, parallel",
    [
        ("dots1-tiny", {"tp": 2}),
        ("dots1-tiny", {"ep": 2, "zero": 3}),
        ("dots1-tiny", {"etp": 2}),
        ("deepseek-v3-tiny", {"pp": 2}),
        ("deepseek-v3-tiny", {"zero": 1, "compress_weights": "int8"}),
    ],
    ids=str,
)
def test_initial_weights_do_not_depend_on_the_layout(ranks, name, parallel):
    """Every piece that a rank holds is that piece of the whole; all ranks together hold all of it."""
    cfg = family(name)
    base, covered = whole(cfg), {}
    for pieces in ranks(2).run(initial, replace(cfg, parallel=replace(cfg.parallel, **parallel))):
        for box, values in pieces:
            where = tuple(slice(a, a + n) for a, n in zip(box.start, box.size))
            assert torch.equal(base[box.key][where], values), box
            covered.setdefault(box.key, torch.zeros(box.shape, dtype=torch.bool))[where] = True
    assert covered.keys() == base.keys() and all(done.all() for done in covered.values())


# ---- dropout and jitter ------------------------------------------------------------------------------------

ROWS, COLUMNS, WIDTH = torch.arange(8), torch.arange(32), 128


def keep(rate: float, *, site=3, seed=1, step=5, rows=ROWS, columns=COLUMNS) -> torch.Tensor:
    return DropoutRng(seed, step, rows, columns).keep_mask(site, WIDTH, rate)


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.5, 0.9])
def test_dropout_drops_at_its_rate_and_keeps_the_mean(rate):
    """For n = 32768 elements, within five standard deviations of the binomial; the rest times 1 / (1 -
    rate) exactly."""
    kept = keep(rate)
    assert abs(int((~kept).sum()) - rate * kept.numel()) < 5 * math.sqrt(kept.numel() * rate * (1 - rate))
    for dim in ((0, 1), (0, 2), (1, 2)):  # no channel, row or column is favoured
        share = kept.double().mean(dim)
        each = kept.numel() // share.numel()
        assert (share - (1 - rate)).abs().max() < 5.5 * math.sqrt(rate * (1 - rate) / each)
    x = torch.randn(8, 32, WIDTH, dtype=torch.float64)
    y = dropout(x, rate, DropoutRng(1, 5, ROWS, COLUMNS), 3)
    assert torch.equal(y, torch.where(kept, x * (1 / (1 - rate)), torch.zeros(()).double()))
    assert dropout(x, rate, None, 3) is x and dropout(x, 0.0, DropoutRng(1, 5, ROWS, COLUMNS), 3) is x


@pytest.mark.parametrize(
    "what, other",
    [
        ("seed", dict(seed=2)),
        ("step", dict(step=6)),
        ("the layer's other branch", dict(site=4)),
        ("layer", dict(site=5)),
        ("embedding", dict(site=0)),
        ("row", dict(rows=ROWS + 8)),
        ("column", dict(columns=COLUMNS + 32)),
        ("row by one", dict(rows=ROWS + 1)),
        ("column by one", dict(columns=COLUMNS + 1)),
        ("row and column", dict(rows=ROWS + 1, columns=COLUMNS - 1)),
        ("step and site", dict(step=4, site=4)),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_dropout_masks_of_other_places_and_steps_are_independent(what, other):
    """Two masks agree where two independent ones do: in a share of p^2 + (1-p)^2."""
    p, a, b = 0.3, keep(0.3), keep(0.3, **other)
    agree = p**2 + (1 - p) ** 2
    assert abs(float((a == b).double().mean()) - agree) < 5 * math.sqrt(agree * (1 - agree) / a.numel())


def test_neighbours_within_a_dropout_mask_are_independent():
    p, a = 0.3, keep(0.3)
    agree = p**2 + (1 - p) ** 2
    for one, two in (
        (a[1:], a[:-1]), (a[:, 1:], a[:, :-1]), (a[..., 1:], a[..., :-1]), (a[1:, 1:], a[:-1, :-1]),
        (a[:, 1:, 1:], a[:, :-1, :-1]),
    ):
        error = math.sqrt(agree * (1 - agree) / one.numel())
        assert abs(float((one == two).double().mean()) - agree) < 5 * error


def test_a_rank_s_part_of_a_dropout_mask_is_a_part_of_the_whole():
    a = keep(0.3)
    assert torch.equal(keep(0.3, rows=ROWS[3:5], columns=COLUMNS[7:20]), a[3:5, 7:20])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_jitter_is_uniform_within_its_bounds(dtype):
    u = DropoutRng(1, 5, ROWS, COLUMNS).uniform(-1, WIDTH, 0.25, dtype)
    assert u.dtype == dtype and float(u.min()) >= 0.75 and float(u.max()) <= 1.25
    assert float(u.min()) < 0.7505 and float(u.max()) > 1.2495
    counts = torch.histc(u.double(), 16, 0.75, 1.25)
    chi = float(((counts - u.numel() / 16) ** 2 / (u.numel() / 16)).sum())
    assert chi < 44.3  # 15 degrees of freedom: one in ten thousand is above
    other = DropoutRng(1, 5, ROWS, COLUMNS).uniform(-2, WIDTH, 0.25, dtype)  # another layer's router
    correlation = torch.corrcoef(torch.stack((u.flatten(), other.flatten())).double())[0, 1]
    assert abs(float(correlation)) < 5 / math.sqrt(u.numel())


def test_where_noise_is_in_a_run(home, prefix):
    """In training: a mask for the embedding and for both branches of each layer, and a jitter a router,
    for each microbatch of each step, of the step's own rows and all columns. In validation and in
    generation: none."""
    cfg = settings(
        prefix, "--model.dropout", "0.2", "--model.mlp.router.jitter", "0.1", "--model.mlp", "experts",
        "--model.mlp.experts", "4", "--model.mlp.width", "16", "--eval.sample", "4", name="mixtral-tiny",
    )
    calls, evaluations, begun = [], [], []
    real = {name: getattr(DropoutRng, name) for name in ("keep_mask", "uniform")}

    def spy(name):
        def call(self, site, width, amount, *more):
            place = (tuple(self.sequence_ids.tolist()), tuple(self.positions.tolist()))
            calls.append((name, int(self.step), site, width, amount, *place))
            return real[name](self, site, width, amount, *more)

        return call

    def watch(point, step=None, **what):
        if point == "step.end":
            found, want = sorted(calls), []
            for row in range(4):
                place = (32, 0.2, (row,), tuple(range(16)))
                want += [("keep_mask", step - 1, site, *place) for site in (0, 1, 2, 3, 4)]
                want += [("uniform", step - 1, -1 - layer, 32, 0.1, *place[2:]) for layer in (0, 1)]
            assert found == sorted(want)
            begun.append(step)
            calls.clear()
        elif point == "eval.end":
            assert not calls and len(what["ids"]) > 0  # since the last step, or since the start
            evaluations.append(step)

    with (
        mock.patch.object(DropoutRng, "keep_mask", spy("keep_mask")),
        mock.patch.object(DropoutRng, "uniform", spy("uniform")),
    ):
        assert trained(World(), cfg, str(home / "noise"), watch) == 0
    assert begun == [1, 2] and evaluations == [0, 2]


def test_both_branches_and_the_embedding_are_dropped(prefix):
    """x + mask a / (1 - p), then + mask y / (1 - p), with the masks of their sites."""
    cfg = settings(prefix, model={"dropout": 0.25, "vocab": 257})
    run = build_run(cfg, Mesh.single(), CPU, None, 2)
    stage, seen = run.stages[0], {}
    stage.embedding.register_forward_hook(lambda module, args, out: seen.update(e=out))
    for i, block in enumerate(stage.blocks):
        block.register_forward_hook(
            lambda module, args, out, i=i: seen.update(
                {f"x{i}": add_residual(*args[:2]), f"out{i}": add_residual(*out[:2])}
            )
        )
        block.mixer.register_forward_hook(lambda module, args, out, i=i: seen.update({f"a{i}": out}))
        block.mlp.register_forward_hook(lambda module, args, out, i=i: seen.update({f"y{i}": out}))
    tokens, positions = torch.randint(257, (3, 16)), torch.arange(16).expand(3, 16)
    rows = torch.tensor([4, 0, 9])
    noise = DropoutRng(cfg.train.seed, 11, rows, torch.arange(16))
    for b in run.buckets:
        b.weights.wait_unshard()
    stage.hidden_states(tokens, positions, dropout_rng=noise)

    def dropped(x, site):
        return x * noise.keep_mask(site, 32, 0.25) / 0.75

    assert torch.allclose(seen["e"], dropped(stage.embedding.weight[tokens], 0), rtol=1e-12)
    for i in range(2):
        want = seen[f"x{i}"] + dropped(seen[f"a{i}"], 1 + 2 * i) + dropped(seen[f"y{i}"], 2 + 2 * i)
        assert torch.allclose(seen[f"out{i}"], want, rtol=1e-12)


# ---- loss and what comes of it -----------------------------------------------------------------------------


@pytest.mark.parametrize("docs", [False, True])
def test_loss_is_the_mean_cross_entropy_of_the_next_tokens(home, prefix, docs):
    """The first step and the first validation of a run, by torch's cross entropy from the logits; with
    documents, a token that ends one has no target. And what is told of the validation: perplexity, bits a
    byte of text."""
    cfg, seen = settings(prefix, data={"doc_mask": docs, "split": "50,50"}), {}
    folder = home / f"loss-{docs}"

    def by_hand(run, batches) -> float:
        """In nats a target that counts."""
        logits, targets = [], []
        for b in batches:
            stage = run.stages[0]
            with torch.no_grad():
                logits.append(stage.head.logits(stage.hidden_states(b.tokens, b.positions, b.documents)))
            following = torch.cat((b.tokens[:, 1:], torch.full_like(b.tokens[:, :1], -1)), 1)
            inside = following != -1  # the last target is the token after the window
            ends = (b.tokens == 256) if docs else torch.zeros_like(inside)
            assert torch.equal(b.targets[inside & ~ends], following[inside & ~ends])
            assert torch.equal(b.targets == -100, ends)
            targets.append(b.targets)
        logits, targets = torch.cat(logits).flatten(0, 1), torch.cat(targets).flatten()
        return float(cross_entropy(logits, targets, ignore_index=-100))

    def watch(point, step=None, **what):
        if point == "run.built":
            seen.update(what)
        elif point == "eval.end" and step == 0:
            batches = [b for i in range(cfg.eval.batches) for b in seen["valid"].microbatches(i)]
            assert what["loss"] == pytest.approx(by_hand(seen["run"], batches), rel=1e-12)
        elif point == "step.read" and step == 1:
            seen["want"] = by_hand(seen["run"], what["batches"])
        elif point == "step.end" and step == 1:
            assert float(what["loss"]) == pytest.approx(seen["want"], rel=1e-12)

    assert trained(World(), cfg, str(folder), watch) == 0
    told = run_folder.validations(folder)[0]
    read = [b for i in range(cfg.eval.batches) for b in seen["valid"].microbatches(i)]
    targets = torch.cat([b.targets for b in read])
    text = (targets >= 0) & (targets < 256)  # of the byte tokenizer: an end of a document has no byte
    bytes_a_token = float(text.sum() / (targets >= 0).sum())
    assert 0.9 < bytes_a_token < 0.99
    assert told["val_ppl"] == pytest.approx(math.exp(told["val_loss"]), rel=1e-12)
    assert told["val_bpb"] == pytest.approx(told["val_loss"] / math.log(2) / bytes_a_token, rel=1e-6)


# ---- who sees whom -----------------------------------------------------------------------------------------

S = 6
CUTS = torch.tensor(list(itertools.product((0, 1), repeat=S - 1)))  # each way in which documents can begin
DOCS = torch.cat((torch.zeros(len(CUTS), 1, dtype=torch.int64), CUTS.cumsum(1)), 1)


def visible(query: int, key: int, window: int | None, docs) -> bool:
    return (
        key <= query
        and (window is None or query - key < window)
        and (docs is None or bool(docs[query] == docs[key]))
    )


@pytest.mark.parametrize("window", [None, 1, 2, 3, S - 1, S, S + 1, 100])
def test_sight_is_the_brute_force_mask_for_every_way_to_cut_documents(window):
    want = torch.tensor(
        [[[visible(q, k, window, docs) for k in range(S)] for q in range(S)] for docs in DOCS]
    )
    see, place = make_attention_mask(0, S, 0, S, window, DOCS, CPU), torch.arange(S)
    assert torch.equal(see.dense_mask[:, 0], want)
    assert torch.equal(visible_keys(place, place, window, DOCS, DOCS)[:, 0], want)
    # the first key of each query, and one past the last query of each key
    assert torch.equal(see.first_key.long(), want.long().argmax(-1))
    assert torch.equal(see.query_end.long().clamp(max=S), S - want.flip(1).long().argmax(1))
    # parts, as in a ring and in generation
    for query, s_q, key, s_k in ((3, 3, 0, 6), (2, 2, 2, 2), (4, 2, 0, 4), (5, 1, 0, 6)):
        part = make_attention_mask(query, s_q, key, s_k, window, DOCS, CPU).dense_mask
        assert torch.equal(part[:, 0], want[:, query : query + s_q, key : key + s_k])
    alone = [[visible(q, k, window, None) for k in range(S)] for q in range(S)]
    without_documents = make_attention_mask(0, S, 0, S, window, None, CPU).dense_mask[0, 0]
    assert torch.equal(without_documents, torch.tensor(alone))
    assert mean_keys(S, window) == pytest.approx(sum(map(sum, alone)) / S, rel=1e-15)


@pytest.mark.parametrize("window", [None, 1, 4, 16, 40])
@pytest.mark.parametrize("cut", [False, True])
def test_a_layer_hears_of_the_tokens_that_it_sees_and_of_no_other(prefix, window, cut):
    """One block: another token at place k changes the output at place q exactly where q sees k. Documents
    begin at 5 and 7."""
    cfg = settings(prefix, model={"layers": 1, "mixer.window": window, "vocab": 257})
    run, s = build_run(cfg, Mesh.single(), CPU, None, 2), 16
    docs = (torch.arange(s) >= 5).int() + (torch.arange(s) >= 7).int() if cut else None
    positions = torch.arange(s) - (0 if docs is None else torch.tensor([0, 5, 7])[docs.long()])
    tokens = torch.arange(s).expand(s + 1, s).clone()
    tokens[torch.arange(s), torch.arange(s)] += 100  # row k differs from the last at place k alone
    for b in run.buckets:
        b.weights.wait_unshard()
    with torch.no_grad():
        rows = None if docs is None else docs.expand(s + 1, s)
        out = run.stages[0].hidden_states(tokens, positions.expand(s + 1, s), rows)
    heard = (out[:s] - out[s]).abs().amax(-1) > 1e-12  # [k, q]
    assert heard.tolist() == [[visible(q, k, window, docs) for q in range(s)] for k in range(s)]
