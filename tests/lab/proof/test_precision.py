"""The precisions that people train in, through train.train: a fixed core of cells and a draw by commit, the
loss scale of fp16, and planted bugs, each of which must be seen."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import config
import train
from checkpoint import replicas
from config.reading.kinds import KINDS
from kernels import (
    adam,
    attention,
    cross_entropy,
    delta_rule,
    linear,
    norm,
    partial_attention,
    short_conv,
    state_space,
)
from kernels.segments import scan_segments
from lab.proof.precision import bounds, command
from lab.proof.precision.bounds import change_in_series, gradient_error, through_layers
from lab.proof.precision.cells import EXTRAS, LAYOUTS, Cell, choose_cells
from lab.proof.precision.errors import BoundedError
from lab.proof.precision.job import (
    DTYPES,
    LEARNING_RATES,
    SPOILT_STEP,
    precision_config,
    single_process,
    write_corpus,
)
from lab.proof.precision.kernel_statistics import kernel_errors
from lab.proof.precision.paper import has_decay
from lab.proof.precision.prover import Prover, judge
from lab.proof.precision.recorded_run import RecordedRun, read_run, train_and_record
from lab.proof.precision.recorder import LargestValue, record_run, same_bits
from lab.proof.precision.row_errors import error_of_rows, row_errors
from lab.proof.precision.single_run import unmoved_matrices
from lab.proof.precision.two_runs import NOT_COMPARED, compare_runs
from lab.proof.rounded_rows import rounded
from model import delta, mamba
from optim.adamw import AdamW
from optim.base import Optimizer
from optim.muon import Muon
from parallel.sharding import gradients
from parallel.sharding.weights import BucketWeights
from parallel.wire.world import World

LLAMA, MIXTURE = "llama3-tiny", "mixtral-tiny"
NVFP4, SELECTIVE, FULL, TOKENS = (
    EXTRAS.index({key: value})
    for key, value in (
        ("fp8", "nvfp4"),
        ("recompute", "selective"),
        ("recompute", "full"),
        ("compress_tokens", "fp8"),
    )
)
MTP = next(index for index, extra in enumerate(EXTRAS) if "mtp" in extra)
# (recipe, ranks, cell): with MORE every dtype, optimizer, ZeRO stage and kind of layout
CORE = [
    (LLAMA, 2, Cell("bf16", "sgd", 3, 0, 2)),
    (MIXTURE, 2, Cell("bf16", "adamw", 1, 5, 0)),
]
MORE = [
    (LLAMA, 2, Cell("bf16", "adamw-bf16", 3, 0, 1)),
    (LLAMA, 2, Cell("fp8", "muon", 3, 1, 0)),
    (LLAMA, 2, Cell("fp16", "lion", 2, 3, 0)),
    (LLAMA, 2, Cell("bf16", "adamw", 1, 0, 0)),
    (LLAMA, 2, Cell("fp32", "lars", 0, 4, 0)),
    (LLAMA, 4, Cell("bf16", "lamb", 2, 3, 0)),
    (LLAMA, 2, Cell("bf16", "adamw", 2, 6, SELECTIVE)),
    (LLAMA, 2, Cell("bf16", "lamb", 1, 7, FULL)),
    (LLAMA, 2, Cell("fp16", "muon", 0, 8, SELECTIVE)),
    (LLAMA, 2, Cell("bf16", "normuon", 1, 8, 0)),
    (LLAMA, 2, Cell("bf16", "dion", 1, 1, 0)),
    (MIXTURE, 2, Cell("bf16", "lion", 0, 9, FULL)),
    (MIXTURE, 2, Cell("bf16", "adamw", 1, 10, 0)),
    (LLAMA, 2, Cell("fp8", "lamb", 2, 6, MTP)),
    (LLAMA, 2, Cell("fp8", "adamw", 1, 1, NVFP4)),
    (MIXTURE, 2, Cell("bf16", "muon", 1, 5, TOKENS)),
    (MIXTURE, 2, Cell("fp16", "adamw", 2, 9, TOKENS)),
]
BY_HAND = [*CORE, *MORE]
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


@pytest.mark.slow(core=[cell.words(world) for _, world, cell in CORE])
@pytest.mark.parametrize("name, world, cell", BY_HAND, ids=[cell.words(world) for _, world, cell in BY_HAND])
def test_chosen_cells_hold(provers, name, world, cell):
    holds(provers(name, world), cell)


@pytest.mark.slow
@pytest.mark.parametrize("which", range(DRAWN))
def test_drawn_cells_hold(provers, which):
    every = choose_cells(LLAMA, 2)
    cell = every[which * len(every) // DRAWN]
    print(cell.words(2))
    holds(provers(LLAMA, 2), cell)


def test_rows_with_another_scale_or_a_hidden_infinity_are_seen():
    sent = torch.randn(4, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    arrived = rounded(sent)
    assert 0.5 < error_of_rows(sent, arrived) <= 1
    assert error_of_rows(sent, torch.cat([arrived[:, :128], 1.2 * arrived[:, 128:]], 1)) > 1
    sent[0, 0] = torch.inf
    assert error_of_rows(sent, arrived) == torch.inf
    assert row_errors({"tokens": 0.9})[1].share == torch.inf  # gradients that were never sent


@pytest.mark.slow
def test_the_draw_meets_every_dtype_optimizer_zero_and_layout():
    every = choose_cells(LLAMA, 2)
    assert {(c.dtype, c.optimizer, c.zero) for c in every} == {
        (d, o, z) for d in DTYPES for o in LEARNING_RATES for z in range(4)
    }
    of_mixtures = {place for place, keys in enumerate(LAYOUTS[2]) if keys.keys() & {"ep", "etp"}}
    assert {c.layout for c in every} == set(range(len(LAYOUTS[2]))) - of_mixtures and len(of_mixtures) == 3
    in_mixtures = {place for place, keys in enumerate(EXTRAS) if "compress_tokens" in keys}
    assert {c.extra for c in every} == set(range(len(EXTRAS))) - in_mixtures


def test_every_optimizer_is_proved_and_another_is_named(monkeypatch, capsys):
    assert set(LEARNING_RATES) == {*config.OPTIMIZERS, "adamw-bf16"}

    class NoRanks:
        def __init__(self, name, world, **settings):
            pass

        def close(self):
            pass

    monkeypatch.setattr(command, "Prover", NoRanks)
    monkeypatch.setattr(command, "make_rows", lambda cells, world: [])
    monkeypatch.setattr(command, "OPTIMIZERS", {**config.OPTIMIZERS, "another": None})
    command.check(LLAMA, 1, False, draw=1)
    assert capsys.readouterr().out.startswith("not proved: another; give it a rate in LEARNING_RATES")


def test_a_row_whose_rank_dies_does_not_spoil_the_next(monkeypatch, capsys):
    """The rows after it run on new ranks, and a message without words is replaced by its class."""
    made, asked = [], []

    class Ranks:
        """A Prover without ranks. The first one loses them in its first row."""

        def __init__(self, name: str, world: int, **settings) -> None:
            self.world, self.closed = world, False
            made.append(self)

        def close(self) -> None:
            self.closed = True

        def prove_sums(self, dtype: str, zero: int):
            asked.append(self)
            assert not self.closed
            if len(asked) == 1:
                raise RuntimeError
            return [], []

        def prove(self, cell: Cell):
            return self.prove_sums("", 0)

    monkeypatch.setattr(command, "Prover", Ranks)
    monkeypatch.setattr(command, "choose_cells", lambda *args: [Cell("bf16", "adamw", 0, 0, 0)])
    monkeypatch.setattr(command, "kernel_errors", lambda: [])
    assert command.check(LLAMA, 1, as_json=True) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["wrong"] for row in rows] == [[], ["died: RuntimeError"], *[[]] * 4]
    assert len(made) == 2 and made[0].closed and asked[0] is made[0] and set(asked[1:]) == {made[1]}


def test_statistics_of_kernels_are_in_fp32():
    seen = kernel_errors()
    assert len(seen) == 22 and all(s.share <= 1 for s in seen), max(seen, key=lambda s: s.share)


def carried_in_bf16(tokens: int):
    """scan_segments whose state is rounded to bf16 every `tokens` tokens."""
    def planted(step, state, tensors, length):
        def rounded(state, parts):
            out, state = step(state, parts)
            return out, state.bfloat16().to(state.dtype)

        return scan_segments(rounded, state, tensors, tokens)

    return planted


IN_FP32 = [  # (module, what is planted, what is then beyond its bound)
    (norm, "accumulation_dtype", "RMSNorm"),
    (norm, "accumulation_dtype", "LayerNorm"),
    (attention, "accumulation_dtype", "attention, blocks"),
    (partial_attention, "accumulation_dtype", "attention, a part of the ring"),
    (cross_entropy, "accumulation_dtype", "the loss of 4,096 tokens"),
    (delta_rule, "scan_segments", "gated delta rule"),
    (delta_rule, "scan_segments", "gated delta rule, backward"),
    (delta_rule, "scan_segments", "Kimi delta attention"),
    (state_space, "scan_segments", "state space"),
    (state_space, "scan_segments", "state space, backward"),
    (short_conv, "accumulation_dtype", "short convolution"),
    (short_conv, "accumulation_dtype", "convolution, SiLU, backward"),
    (delta, "accumulation_dtype", "unit length"),
    (mamba, "accumulation_dtype", "gated norm"),
]
CORE_IN_FP32 = [what for *_, what in IN_FP32 if what not in ("LayerNorm", "attention, a part of the ring")]


@pytest.mark.slow(core=CORE_IN_FP32)
@pytest.mark.parametrize("module, name, what", IN_FP32, ids=[what for *_, what in IN_FP32])
def test_statistics_states_and_sums_in_bf16_are_seen(monkeypatch, module, name, what):
    monkeypatch.setattr(module, name, carried_in_bf16(64) if name == "scan_segments" else lambda dtype: dtype)
    assert next(s for s in kernel_errors() if s.where == what).share > 1


def test_two_gradients_of_one_input_are_added_in_fp32(monkeypatch):
    """Those of Mamba: from the skip connection of a head, and through its state. Were each rounded, their sum
    would be off by more than one rounding.
    """
    segment = state_space.state_space_segment

    def planted(state, parts, *, chunk):
        x, *others = parts
        dt, log_decay, B, C, skip, starts = others
        out, last = segment(state, (x, dt, log_decay, B, C, None, starts), chunk=chunk)
        return out if skip is None else (out + skip[..., None] * x).to(x.dtype), last

    monkeypatch.setattr(state_space, "state_space_segment", planted)
    assert next(s for s in kernel_errors() if s.where == "state space, backward").share > 1


@pytest.mark.slow(core=["llama3-tiny-bf16-0"])
@pytest.mark.parametrize("name, dtype, zero", [
    (LLAMA, "bf16", 0),
    (LLAMA, "fp16", 1),
    (LLAMA, "bf16", 2),
    (LLAMA, "fp8", 3),
    ("kimi-delta-tiny", "bf16", 0),  # the biases of its router move between microbatches
])
def test_microbatches_are_summed_in_fp32(provers, name, dtype, zero):
    wrong, seen = provers(name, 2).prove_sums(dtype, zero)
    assert not wrong and len(seen) > 20 and all(s.share <= 1 for s in seen), max(seen, key=lambda s: s.share)


# ---- the loss scale ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_resumed_run_has_the_loss_scale_of_its_checkpoint(provers, ranks, tmp_path):
    """It starts too high, falls, and grows. A run that resumes from step 4 has the numbers of the unbroken
    run, bit for bit.
    """
    cfg = Cell("fp16", "adamw", 1, 0, 0).config(LLAMA, 2, provers(LLAMA, 2).data)
    cfg = replace(cfg, checkpoint=replace(cfg.checkpoint, every=4, keep=9))
    assert ranks(2).run(record_run, cfg, tmp_path / "whole", frozenset()) == [0, 0]
    whole = read_run(cfg, tmp_path / "whole", 2)
    saved = tmp_path / "whole" / "checkpoints" / "step_00000004"
    kept = json.loads((saved / "meta.json").read_text())["loss_scale"]
    assert kept == [whole.steps[4]["scale"], whole.steps[4]["good"]]
    shutil.copytree(saved, tmp_path / "again" / "checkpoints" / saved.name)
    shutil.copytree(tmp_path / "whole" / "tokenizer", tmp_path / "again" / "tokenizer")
    assert ranks(2).run(record_run, cfg, tmp_path / "again", frozenset()) == [0, 0]
    again = read_run(cfg, tmp_path / "again", 2)
    scales = [told["scale"] for told in whole.steps]
    assert scales[0] == 2.0**24 and min(scales) < 2.0**24, scales
    assert any(later > before for before, later in zip(scales, scales[1:])), scales
    assert not whole.wrong and not again.wrong and len(again.steps) == 7
    assert repr([told["scale"] for told in again.steps]) == repr(scales[4:])
    assert repr(again.steps[1:]) == repr(whole.steps[5:])
    assert all(same_bits(again.masters[-1][key], t) for key, t in whole.masters[-1].items())


# ---- planted bugs ------------------------------------------------------------------------------------------


def one(tmp_path, dtype: str, optimizer: str) -> tuple[list[str], list[BoundedError]]:
    """A run in this process, judged alone."""
    cfg = single_process(precision_config(LLAMA, write_corpus(tmp_path), dtype, optimizer))
    return judge(train_and_record(Here(), cfg, tmp_path / "run", frozenset({SPOILT_STEP})), None, "")


def beyond(seen: list[BoundedError]) -> set[str]:
    return {s.what for s in seen if s.share > 1}


def assert_says(wrong: list[str], *parts: str) -> None:
    assert all(any(part in line for line in wrong) for part in parts), wrong


@pytest.mark.slow
def test_a_run_in_this_process_holds(tmp_path):
    wrong, seen = one(tmp_path, "bf16", "lion")
    assert not wrong and not beyond(seen)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "lion", "lamb", "lars"])
def test_weights_without_masters_are_seen(monkeypatch, tmp_path, optimizer):
    step = Optimizer.step

    def planted(self, *args):
        before = [b.weights.master.clone() for b in self.buckets]
        step(self, *args)
        for b, old in zip(self.buckets, before):
            b.weights.master.copy_(old)

    monkeypatch.setattr(Optimizer, "step", planted)
    wrong, seen = one(tmp_path, "bf16", optimizer)
    assert_says(wrong, "are not their masters rounded", "no master of")
    assert "update" in beyond(seen)


@pytest.mark.slow(core=["lion-Optimizer"])
@pytest.mark.parametrize("optimizer, who", [("lion", Optimizer), ("muon", Muon)])
def test_masters_without_weights_are_seen(monkeypatch, tmp_path, optimizer, who):
    """copy_master_to_weights() forgotten in one optimizer."""
    step = who.step

    def planted(self, *args):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(BucketWeights, "copy_master_to_local", lambda bucket: None)
            step(self, *args)

    monkeypatch.setattr(who, "step", planted)
    wrong, _ = one(tmp_path, "bf16", optimizer)
    assert_says(wrong, "are not their masters rounded", "no weight of")


def masters_in_bf16(step):
    def planted(self, *args):
        step(self, *args)
        for b in self.buckets:
            b.weights.master.copy_(b.weights.master.bfloat16())

    return planted


def sums_in_bf16(write):
    def planted(into, dy, x, add):
        product = dy.t() @ x
        return into.copy_((into + product if add else product).bfloat16())

    return planted


# {bug: (module, name, what takes its place, dtype, optimizer, the error that is beyond its bound)}
PLANTED = {
    "masters in bf16": (Optimizer, "step", masters_in_bf16, "bf16", "lars", "update"),
    "rounding to nearest": (
        adam, "stochastic_round", lambda _: lambda x, bits: x.bfloat16(), "bf16", "adamw-bf16", "rounding",
    ),
    "a norm in bf16": (
        train,
        "grad_norm",
        lambda norm: lambda *args, **options: norm(*args, **options).bfloat16().float(),
        "bf16",
        "sgd",
        "norm",
    ),
    "sums in bf16": (linear, "write_wgrad", sums_in_bf16, "bf16", "sgd", "wide"),
    "a forgotten loss scale": (
        train, "clip_factor", lambda factor: lambda *args: factor(*args) * 2, "fp16", "sgd", "update",
    ),
}  # fmt: skip


@pytest.mark.slow(core=["masters in bf16", "rounding to nearest"])
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_beyond_a_bound(monkeypatch, tmp_path, bug):
    module, name, planted, dtype, optimizer, error = PLANTED[bug]
    monkeypatch.setattr(module, name, planted(getattr(module, name)))
    assert error in beyond(one(tmp_path, dtype, optimizer)[1])


@pytest.mark.slow
def test_a_skipped_step_that_decays_is_seen(monkeypatch, tmp_path):
    step = AdamW.step

    def planted(self, number, lr, factor, ok):
        step(self, number, lr, factor, ok)
        if not ok:
            for b in self.buckets:
                b.weights.master.mul_(1 - lr * self.cfg.weight_decay)
                b.weights.copy_master_to_local()

    monkeypatch.setattr(AdamW, "step", planted)
    wrong, _ = one(tmp_path, "bf16", "adamw")
    assert_says(wrong, f"step {SPOILT_STEP} was skipped and changed master")


def not_compared(*state: object) -> None:
    """Instead of check_replicas, which would end these runs with code 80 before the proof sees them."""


def stale(world: World, cfg, folder: Path, spoilt: frozenset[int]) -> int:
    """record_run(), on ranks that never send what they updated."""
    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(BucketWeights, "start_gather_updated", lambda bucket: None)
        inner.setattr(replicas, "check_replicas", not_compared)
        return record_run(world, cfg, folder, spoilt)


def narrowed(world: World, cfg, folder: Path, spoilt: frozenset[int]) -> int:
    """record_run(), on ranks that round their gradients to bf16 before they are summed."""
    reduce = gradients.start_scatter_sum
    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(gradients, "start_scatter_sum", lambda x, *how: reduce(x.bfloat16().to(x.dtype), *how))
        return record_run(world, cfg, folder, spoilt)


def diverging(world: World, cfg, folder: Path, spoilt: frozenset[int]) -> int:
    """record_run(), with a last rank whose gradients are a thousandth larger."""
    finish = train.finish_grad_reductions

    def planted(buckets, mesh) -> None:
        finish(buckets, mesh)
        for b in buckets if world.rank == world.size - 1 else ():
            b.grads.local.mul_(1.001)

    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(train, "finish_grad_reductions", planted)
        inner.setattr(replicas, "check_replicas", not_compared)
        return record_run(world, cfg, folder, spoilt)


@pytest.mark.slow
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
    cfg, spoilt = cell.config(LLAMA, 2, prover.data), frozenset({SPOILT_STEP})
    run = train_and_record(ranks(2), cfg, tmp_path / "run", spoilt, work)
    wrong, seen = judge(run, prover.single(cfg, spoilt), "layout")
    assert any(says in w for w in (*wrong, *beyond(seen))), (wrong[:3], beyond(seen))


def skipping(cfg, good: int | None, largest: float) -> RecordedRun:
    """A run of ten steps that skips all of them, but for one."""
    steps = [{"step": step, "ok": step == good} for step in range(11)]
    weights = [{"head.weight": torch.eye(2)}] * 11
    return RecordedRun(cfg, [{}] * 11, [], weights, [], steps, [largest] * 11)


@pytest.mark.parametrize("dtype, against", [("bf16", "layout"), ("fp16", "fp64"), ("fp16", "layout")])
@pytest.mark.parametrize("skipped", [1, 6, 7, 10, None])
def test_one_run_may_skip_a_late_step_alone_in_fp16_and_nowhere_else(tmp_path, skipped, dtype, against):
    cfg = precision_config(LLAMA, str(tmp_path), dtype, "sgd")
    seen = compare_runs(skipping(cfg, skipped, 65504.0), skipping(cfg, None, 0.0), against)
    if skipped is None:
        assert seen == []
        return
    close, late = seen
    may = (dtype, against) == ("fp16", "layout")
    assert close.error == 1 and (close.share <= 1) == may
    what = f"{against} steps from a skip of one run alone"
    assert late == BoundedError(what, f"step {skipped}", 11 - skipped, NOT_COMPARED)
    assert (late.share <= 1) == (skipped >= 7)


@pytest.mark.parametrize(
    "layout, good, largest, holds",
    [
        ({}, "layout", 65500, False),  # the same operations on the same weights
        ({}, "layout", 65504, True),
        ({"cp": 2}, "layout", 33000, True),  # one process adds two of its products in one
        ({"cp": 2}, "layout", 32000, False),
        ({"cp": 2}, "process", 33000, False),
        ({"tp": 2}, "layout", 33000, False),
        ({"tp": 2, "sp": True}, "layout", 33000, True),
        ({"ep": 2}, "layout", 33000, False),
        ({"ep": 2}, "process", 33000, True),
    ],
)
def test_who_skips_alone_was_close_to_the_end_of_the_range(tmp_path, layout, good, largest, holds):
    cfg = precision_config(LLAMA, str(tmp_path), "fp16", "sgd")
    cfg = replace(cfg, parallel=replace(cfg.parallel, **layout))
    run = skipping(cfg, 8 if good == "layout" else None, largest if good == "layout" else 0.0)
    reference = skipping(cfg, 8 if good == "process" else None, largest if good == "process" else 0.0)
    close, _ = compare_runs(run, reference, "layout")
    assert (close.share <= 1) == holds, close


def test_matrices_count_with_their_own_distance():
    """Ones of norms hide no change of a matrix; of a layer four count, and changes add up as squares."""
    model = precision_config(LLAMA, "none", "bf16", "sgd").model
    theirs = {f"layers.0.{n}.weight": torch.eye(4) for n in range(5)}
    theirs |= {"head.weight": torch.eye(4), "norm.weight": torch.ones(10_000)}
    ours = {key: tensor * (1 if tensor.dim() == 1 else 1.01) for key, tensor in theirs.items()}
    assert change_in_series(ours, theirs, model) == pytest.approx(2 * 0.01 * 5**0.5, rel=1e-5)
    ours["layers.0.0.weight"] = theirs["layers.0.0.weight"]
    assert change_in_series(ours, theirs, model) == pytest.approx(2 * 0.01 * 5**0.5, rel=1e-5)


@pytest.mark.parametrize("states", ["fp32", "bf16"])
def test_weights_that_never_move_are_named_but_those_of_short_convolutions(states):
    cfg = precision_config("short-conv-tiny", "none", "bf16", "sgd")
    cfg = replace(cfg, optim=replace(cfg.optim, states=states))
    still = {"layers.0.attn.q.weight": torch.ones(4, 4), "layers.0.attn.conv.weight": torch.ones(4, 3)}
    steps = [{"step": step, "ok": True} for step in range(2)]
    run = RecordedRun(cfg, [still] * 2, [], [still] * 2, [], steps, [0.0] * 2)
    masters = ["layers.0.attn.q.weight", "layers.0.attn.conv.weight"][: 2 if states == "fp32" else 1]
    wanted = [f"step 1: no master of {key} moved" for key in masters]
    assert unmoved_matrices(run) == [*wanted, "no weight of layers.0.attn.q.weight moved in 1 steps"]


@pytest.mark.parametrize("key, has", [("q", True), ("q_conv", False), ("conv", False)])
def test_short_convolutions_have_no_weight_decay(key, has):
    assert has_decay(f"layers.0.attn.{key}.weight", torch.ones(4, 3)) == has


def test_errors_grow_by_the_factors_of_mixers_with_a_state():
    """Two layers of Mamba, whose product has two factors, between none that has more than one."""
    model = precision_config("nemotron-h-tiny", "none", "bf16", "sgd").model
    # forward: 1, 2 + 1, 3, 6 + 1, 7; the backward has the error before either layer of Mamba once more
    assert through_layers(model, 1.0, [1.0, 0.0, 1.0, 0.0]) == 7 + 1 + 3
    theirs = {"layers.0.attn.o.weight": torch.eye(4), "layers.2.attn.o.weight": torch.eye(4)}
    for key, growth in (("layers.0.attn.o.weight", 3.0), ("layers.2.attn.o.weight", 1.0)):
        change = change_in_series({**theirs, key: 1.01 * torch.eye(4)}, theirs, model)
        assert change == pytest.approx(2 * 0.01 * growth**0.5, rel=1e-5)


@pytest.mark.parametrize("dtype, unit", [("bf16", 2.0**-8), ("fp32", 2.0**-24)])
def test_a_model_without_a_state_has_the_roundings_of_its_layers_twice(dtype, unit):
    cfg = precision_config(LLAMA, "none", dtype, "sgd")
    assert gradient_error(cfg) == pytest.approx(2 * unit * (2 * (13 * 4 + 4) / 6) ** 0.5, rel=1e-12)


def test_every_mixer_has_bounds_and_another_is_refused(monkeypatch):
    kinds = {kind.kind for kind in KINDS[config.TokenMixer]}
    assert kinds == set(bounds.MIXER_ERRORS)
    monkeypatch.setattr(bounds, "MIXER_ERRORS", {"attention": bounds.MIXER_ERRORS["attention"]})
    refusal = "model.mixer.kind: mamba has no bounds; count it in MIXER_ERRORS"
    with pytest.raises(config.ConfigError, match=refusal):
        command.check("mamba-tiny", 2, as_json=False)


def against_fp64(tmp_path, name: str) -> set[str]:
    """Errors beyond their bounds in a run of fp32 in this process."""
    cfg = single_process(precision_config(name, write_corpus(tmp_path), "fp32", "sgd"))
    exact = replace(cfg, train=replace(cfg.train, dtype="fp64"))
    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(delta_rule, "scan_segments", scan_segments)
        inner.setattr(state_space, "scan_segments", scan_segments)
        reference = train_and_record(Here(), exact, tmp_path / "exact")
    return beyond(judge(train_and_record(Here(), cfg, tmp_path / "run"), reference, "fp64")[1])


@pytest.mark.slow(core=["delta"])
@pytest.mark.parametrize(
    "name, module",
    [("delta-tiny", delta_rule), ("mamba-tiny", state_space), ("nemotron-h-tiny", state_space)],
    ids=["delta", "mamba", "nemotron-h"],
)
def test_a_state_in_bf16_is_seen_in_the_gradients_of_fp32(monkeypatch, tmp_path, name, module):
    assert not against_fp64(tmp_path, name)
    monkeypatch.setattr(module, "scan_segments", carried_in_bf16(8))
    assert "fp64 gradient" in against_fp64(tmp_path, name)


def test_the_largest_value_is_of_what_is_computed():
    with LargestValue(torch.float16) as values:
        torch.empty(4, dtype=torch.float16).fill_(7.0)
        assert values.take() == 7.0
        x = torch.tensor([[300.0, -200.0]], dtype=torch.float16)
        x.t() @ x  # 300 * 300 does not fit
        assert values.take() == 60_000.0 and values.take() == 0.0
        torch.full((2,), 9e4)
        assert values.take() == 0.0
