"""Phases of a run: the same losses bit for bit whatever kills it at a boundary, no sample twice, the rates by
hand, the same training under every layout, and what is refused.
"""

import dataclasses
import json

import numpy as np
import pytest
import run_folder
import torch
from program import settings, trained
from ranks import EOD, MODEL, corpus, job, write_documents
from test_resume import STEPS, run, same_as_clean, story, weights

import config
import train
from build import build_run, total_steps
from checkpoint.disk import store
from config import ConfigError
from config.reading import get_phases, resolve
from config.reading.phases import check_same_past, first_difference, same_plan
from config.reading.schedules import plan_pipeline
from config.reading.tiny import tiny_config
from config.tree import with_values
from data.loader import open_loader
from durable.advice import advised_on_memory
from lab.proof.verify.trial import prove
from parallel.topology.mesh import Mesh
from parallel.wire.world import World
from plan.advice import holdings
from scripts.plan import phase_to_plan

ENDS = (3, 6)  # the last steps of the first two phases


def write_phases(folder, text: str):
    path = folder / f"phases{len(list(folder.glob('*.yaml')))}.yaml"
    path.write_text(text)
    return str(path)


# ---- killed and started again ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """In `clean` the run of three phases that was never killed: another length, blend and RoPE, then another
    batch and learning rate.
    """
    home = tmp_path_factory.mktemp("phases")
    (home / "a").mkdir(), (home / "b").mkdir()
    a, b = corpus(home / "a"), corpus(home / "b")
    # 3 steps of 4 x 16 tokens, then 3 of 4 x 32
    text = f"""
- after_steps: 3
  train.seq_len: 32
  train.micro_batch: 1
  model.mixer.rope.base: 2e5
  data.path: 0.4 {b} 0.6 {a}
- after_tokens: {3 * 4 * 16 + 3 * 4 * 32}
  train.global_batch: 8
  optim.lr: 5e-4
  optim.decay: linear
  optim.warmup: 1
"""
    extra = ("--data.path", a, "--data.tokenizer", "bytes", "--train.phases", write_phases(home, text))
    home = Home(home, extra)
    assert home.run("clean") == 0, (home.folder / "clean.log").read_text()
    return home


@dataclasses.dataclass(frozen=True)
class Home:
    folder: object
    extra: tuple

    def run(self, name: str, fault: str = "", more: tuple = ()) -> int:
        return run(self.folder, name, fault, (*self.extra, *more))


def test_a_run_says_where_its_phases_begin(home):
    rows = [dict(row) for row in story(home.folder / "clean")]
    steps = [row for row in rows if "loss" in row]
    assert [row["phase"] for row in steps] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    sizes = [4 * 16] * 3 + [4 * 32] * 3 + [8 * 32] * 3
    assert [row["tokens"] for row in steps] == np.cumsum(sizes).tolist()
    log = (home.folder / "clean.log").read_text()
    assert log.count("phase 2 after step 3 (192 tokens): train.seq_len 16 -> 32") == 2  # header, and then
    assert log.count("phase 3 after step 6 (576 tokens): train.global_batch 4 -> 8") == 2
    kept = store.read_meta(home.folder / "clean" / "checkpoints" / "step_00000009")
    assert kept["tokens"] == sum(sizes)
    again = config.read_yaml(home.folder / "clean" / "config.yaml")
    assert [row["train.seq_len"] for row in again["train"]["phases"][:1]] == [32]


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("point, later", [
    ("step.end", 0), ("ckpt.pre_rename", 0), ("ckpt.post_rename", 0), ("run.built", 0), ("step.begin", 1),
    ("step.end", 1),
])
def test_a_run_killed_around_a_boundary_continues_bit_for_bit(home, point, later, end):
    name = f"{point}-{later}-{end}"
    assert home.run(name, f"{point}:step={end + later}:act=SIGKILL") == -9
    assert home.run(name) == 0, (home.folder / f"{name}.log").read_text()
    same_as_clean(home.folder, name)


@pytest.mark.slow
def test_a_run_that_is_stopped_at_a_boundary_makes_its_validation_in_the_phase_before(home):
    more = ("--eval.every", "3")
    assert home.run("whole", more=more) == 0
    assert home.run("stopped", "step.begin:step=3:act=SIGTERM", more) == 75
    assert home.run("stopped", more=more) == 0
    assert story(home.folder / "stopped") == story(home.folder / "whole")
    assert weights(home.folder / "stopped") == weights(home.folder / "whole")


@pytest.mark.slow
def test_a_damaged_checkpoint_of_a_boundary_leads_back_to_the_phase_before(home):
    assert home.run("back", "step.begin:step=4:act=SIGKILL", ("--checkpoint.every", "2")) == -9
    bad = home.folder / "back" / "checkpoints" / "step_00000003"
    shard = next(bad.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert home.run("back", more=("--checkpoint.every", "2")) == 0
    assert "step_00000003 is rejected" in (home.folder / "back.log").read_text()
    assert story(home.folder / "back") == story(home.folder / "clean")


# ---- what a phase trains with ------------------------------------------------------------------------------


def test_each_phase_trains_with_its_own_values(tmp_path):
    """Its sequences, its rates, and its model: at its beginning, the logits are those of a model that was
    built from its values alone, with the weights of the phase before; other values give other logits.
    """
    cpu, tokens = torch.device("cpu"), torch.arange(97, 113)[None]
    positions = torch.arange(16)[None]
    rows = [
        {"after_steps": 2, "model.mixer.rope.base": 100.0, "train.global_batch": 8, "train.micro_batch": 4},
        {"after_steps": 4, "train.seq_len": 32, "optim.lr": 5e-2, "optim.decay": "constant"},
    ]
    train = {"steps": 6, "phases": json.dumps(rows)}
    cfg = settings(corpus(tmp_path), train=train, model={"vocab": 257})
    phases = get_phases(cfg).all
    shapes, rates, compared = [], [], []

    def logits_of(number: int, weights) -> torch.Tensor:
        alone = build_run(phases[number - 1].cfg, Mesh.single(), cpu, None, 6)
        for bucket, master in zip(alone.buckets, weights):
            bucket.weights.master.copy_(master)
        return alone.logits(tokens, positions, None, 15)

    def watch(point, step=None, **shown):
        if point == "run.built" and step:
            made = shown["run"]
            masters = [bucket.weights.master for bucket in made.buckets]
            found = made.logits(tokens, positions, None, 15)
            before, present = (logits_of(number, masters) for number in (made.phase.number - 1,
                                                                         made.phase.number))
            assert torch.equal(found, present)
            compared.append(bool(torch.equal(found, before)))
            step_of = made.optim.step

            def stepped(step, rate, *rest):
                rates.append((step, rate))
                return step_of(step, rate, *rest)

            made.optim.step = stepped
        if point == "step.read":
            shapes.append([tuple(batch.tokens.shape) for batch in shown["batches"]])
        return None

    assert trained(World(), cfg, str(tmp_path / "run"), watch) == 0
    assert compared == [False, True]  # RoPE's base changes at the first boundary alone
    assert shapes == [[(1, 16)] * 4] * 2 + [[(4, 16)] * 2] * 2 + [[(4, 32)] * 2] * 2
    assert [rate for step, rate in rates if step > 4] == [5e-2] * 2  # two steps have no warmup
    assert all(rate < 1e-2 for step, rate in rates if step <= 4)


# ---- samples -----------------------------------------------------------------------------------------------


def write_tokens(folder, name: str, count: int) -> str:
    ids = np.random.default_rng(1).integers(97, 123, count - 1)
    return write_documents(folder / name, (ids, [EOD] * 599))  # the second for the valid split


def windows_read(cfg) -> dict[tuple[int, str], list[tuple[int, int]]]:
    """{(phase, path): [(first token, length)] of every sample in the order of the steps}."""
    phases, found = get_phases(cfg), {}
    steps = total_steps(cfg, 1.0)
    for phase in phases.all:
        data = open_loader(cfg, "train", 0, 1, phase=phase.number)
        for step in range(phase.steps_before, phases.last_step(phase, steps)):
            count, seq_len = phase.cfg.train.global_batch, phase.cfg.train.seq_len
            located = data._locate_samples(data._first_sequence(step), count)
            read = [row for batch in data.microbatches(step) for row in batch.tokens.tolist()]
            for place, tokens in zip(located, read):
                dataset = data.datasets[place.dataset]
                want = dataset.index.read(place.first_token, place.first_token + seq_len)
                assert tokens == want.tolist()
                found.setdefault((phase.number, dataset.name), []).append((place.first_token, seq_len))
        data.close()
    return found


def times_read(windows, size: int) -> np.ndarray:
    counts = np.zeros(size, int)
    for first, length in windows:
        counts[first:first + length] += 1
    return counts


def tokens_left_out(counts: np.ndarray, span: int, shift: int) -> int:
    """Unread tokens in the spans that were touched, if spans begin at `shift`."""
    read = counts[shift:shift + (len(counts) - shift) // span * span].reshape(-1, span).sum(1)
    return int(span * (read > 0).sum() - read.sum())


@pytest.fixture
def sources(tmp_path):
    return write_tokens(tmp_path, "a", 4097), write_tokens(tmp_path, "b", 4097)


def phased(path: str, rows: list[dict], **train):
    train = {"steps": 20, "seq_len": 16, **train, "phases": json.dumps(rows)}
    return settings(path, data={"split": "50,50"}, train=train)


def test_the_epochs_of_a_phase_are_those_of_its_own_length(sources):
    a, _ = sources
    cfg = phased(a, [{"after_steps": 12, "train.seq_len": 64}], global_batch=4, micro_batch=4, steps=15)
    for number, tokens in ((1, 12 * 4 * 16), (2, 3 * 4 * 64)):
        data = open_loader(cfg, "train", 0, 1, phase=number)
        ((_, epochs),) = data.passes((12, 15)[number - 1])
        assert epochs == pytest.approx(tokens / data.tokens, rel=0.05)


@pytest.mark.parametrize("lengths", [(16, 32, 64), (16, 64, 32), (64, 16, 32), (32, 32, 16)])
def test_a_change_of_length_repeats_nothing_and_leaves_out_less_than_a_span(sources, lengths):
    a, b = sources
    first, second, third = lengths
    rows = [
        {"after_steps": 7, "train.seq_len": second, "data.path": f"0.5 {b} 0.5 {a}"},
        {"after_steps": 12, "train.seq_len": third, "data.path": a},
    ]
    cfg = phased(f"0.7 {a} 0.3 {b}", rows, seq_len=first, global_batch=3, micro_batch=3, steps=15)
    read = windows_read(cfg)
    span = max(lengths)
    for path in sources:
        of_phases = {phase: windows for (phase, name), windows in read.items() if name == path}
        assert times_read(sum(of_phases.values(), []), 5000).max() == 1  # this is less than an epoch
        # of the spans that phases took which are over: fewer tokens than a span are left out for each
        ended = [windows for phase, windows in of_phases.items() if phase < 3]
        counts = times_read(sum(ended, []), 5000)
        left_out = min(tokens_left_out(counts, span, shift) for shift in range(span))  # where the spans begin
        assert left_out < span * max(1, len(ended))


def test_without_a_change_of_length_the_samples_are_those_of_a_plain_run(sources):
    """A phase of another rate and batch, and one that brings a source in, do not move a source's order."""
    a, b = sources
    plain = windows_read(phased(a, [{"after_steps": 99, "optim.lr": 1e-4}], global_batch=2, micro_batch=1))
    rows = [
        {"after_steps": 5, "optim.lr": 1e-4, "train.global_batch": 4},
        {"after_steps": 8, "data.path": f"0.5 {b} 0.5 {a}"},
    ]
    read = windows_read(phased(a, rows, global_batch=2, micro_batch=1, steps=12))
    got = [window for (_, name), windows in sorted(read.items()) if name == a for window in windows]
    assert len(got) == 5 * 2 + 3 * 4 + 4 * 4 // 2
    assert got == plain[1, a][:len(got)]


def test_neighbours_in_a_batch_come_from_different_spans(sources):
    a, _ = sources
    cfg = phased(a, [{"after_steps": 15, "train.seq_len": 128}], global_batch=4, micro_batch=4, steps=16)
    windows = windows_read(cfg)[1, a]
    adjacent = sum(abs(left - right) == 16 for (left, _), (right, _) in zip(windows, windows[1:]))
    assert adjacent <= 6  # of 59 pairs; 52 if a span were read in its order


def test_another_span_begins_a_new_epoch(sources):
    a, _ = sources
    cfg = phased(a, [{"after_steps": 10, "train.seq_len": 64}], global_batch=4, micro_batch=4, steps=12)
    late, plain = with_values(cfg, {"data.span": 16}), with_values(cfg, {"train.phases": None})
    assert windows_read(late)[1, a] == windows_read(plain)[1, a][:40]  # the past is that of a run without it
    assert times_read(windows_read(late)[2, a], 5000).max() == 1


READ = 8  # steps of the checkpoint at which plans are compared


def samples_of(cfg) -> list:
    """The first READ steps of a run: [(path, first token, length) of each sample]."""
    phases, found = get_phases(cfg), []
    for phase in phases.all:
        data = open_loader(cfg, "train", 0, 1, phase=phase.number)
        for step in range(phase.steps_before, min(READ, phases.last_step(phase, 20))):
            located = data._locate_samples(data._first_sequence(step), data._global_batch(step))
            rows = [(data.datasets[one.dataset].name, one.first_token) for one in located]
            found.append([(*row, phase.cfg.train.seq_len) for row in rows])
        data.close()
    return found


def another_plan(rng, rows: list[dict], values: dict) -> list[dict]:
    """The plan in other words, or another plan: one change."""
    rows = [dict(row) for row in rows]
    kind = rng.choice(["order", "equal", "split", "move", "drop", "value", "late"])
    at = int(rng.integers(len(rows)))
    if kind == "order":
        return [dict(reversed(row.items())) for row in rows]
    if kind == "equal":  # what it has anyway
        before = {**{key: options[0] for key, options in values.items()}, **rows[0]}
        stated = {key: value for row in rows[:at + 1] for key, value in {**before, **row}.items()}
        rows[at] = {**stated, **rows[at]}
    if kind == "split":
        rows.insert(at + 1, {"after_steps": rows[at]["after_steps"] + 1, "optim.clip": 3.0})
    if kind == "move":
        rows[at]["after_steps"] += 1
    if kind == "drop":
        del rows[at]
    if kind in ("value", "late"):
        key = rng.choice(list(values))
        rows[-1 if kind == "late" else at][key] = values[key][int(rng.integers(len(values[key])))]
    return [row for number, row in enumerate(rows)
            if number == 0 or row["after_steps"] > rows[number - 1]["after_steps"]]


@pytest.mark.slow
def test_plans_continue_each_other_where_they_have_read_the_same(sources):
    """In random pairs: what is accepted has read the same samples. What is refused either has read others,
    or differs in what has begun, or is still to be read of an order that has begun."""
    a, b = sources
    values = {"train.seq_len": [16, 32, 64], "train.global_batch": [4, 2, 8],
              "data.path": [a, b, f"0.5 {a} 0.5 {b}"]}
    rng, counts = np.random.default_rng(3), {}
    for _ in range(60):
        keys = rng.choice(list(values), size=3)
        starts = (2, 5, 11)
        rows = [{"after_steps": int(start), str(key): values[key][int(rng.integers(3))]}
                for start, key in zip(starts, keys)]
        other = another_plan(rng, rows, values)
        ramp = "2,2,9" if rng.integers(3) == 0 else None
        plans = [phased(a, plan, ramp=ramp, global_batch=4, micro_batch=1) for plan in (rows, other)]
        plans = [with_values(cfg, {"data.span": 64}) for cfg in plans]
        is_same = samples_of(plans[0]) == samples_of(plans[1])
        difference = first_difference(*map(get_phases, plans), READ)
        counts[is_same, difference is None] = counts.get((is_same, difference is None), 0) + 1
        assert is_same or difference is not None, (rows, other)
    assert counts[True, True] > 20 and counts[False, False] > 10, counts


CONTINUED = [{"after_steps": 4, "train.global_batch": 8}, {"after_steps": 9, "train.seq_len": 64}]


@pytest.mark.parametrize(
    "rows, told",
    [
        # the same, in other words
        ([{"train.global_batch": 8, "after_steps": 4, "train.seq_len": 16}, CONTINUED[1]], ""),
        ([{"after_steps": 2, "train.global_batch": 4}, *CONTINUED], ""),
        ([{"after_steps": 2, "parallel.recompute": "full"}, *CONTINUED], ""),
        ([CONTINUED[0], {"after_steps": 7, "optim.clip": 2.0}, CONTINUED[1]], ""),
        ([{"after_tokens": 4 * 4 * 16, "train.global_batch": 8}, CONTINUED[1]], ""),
        # others
        ([{"after_steps": 3, "train.global_batch": 8}, CONTINUED[1]], "phase 2: train.global_batch 4, not 8"),
        ([{**CONTINUED[0], "optim.lr": 1e-2}, CONTINUED[1]], "phase 2: optim.lr as before, not 0.01"),
        ([{**CONTINUED[0], "model.mixer.window": 8}, CONTINUED[1]],
         "phase 2: model.mixer.window None, not 8"),
        ([CONTINUED[0]], "phase 1: data.span 64, not 16"),
        ([CONTINUED[0], {"after_steps": 10, "train.seq_len": 64}],
         "phase 2: the length or blend changes after step 9 (to another train.seq_len), not after step 10"),
        ([CONTINUED[0], {"after_steps": 7, "train.global_batch": 2}, CONTINUED[1]],
         "phase 3: train.global_batch 8, not 2 (from step 8 on)"),
    ],
)
def test_what_counts_as_another_past(rows, told):
    """Both at step 6, in phase 2."""
    old, new = (get_phases(phased("x", plan, global_batch=4, micro_batch=1)) for plan in (CONTINUED, rows))
    if not told:
        notes = check_same_past(old, new, 6, "CHECKPOINT")
        assert ["optim.clip" in note for note in notes] == [True for row in rows if "optim.clip" in row]
        assert same_plan(old.whole, new.whole, ("parallel.", "optim.")) is True
        return
    with pytest.raises(ConfigError) as caught:
        check_same_past(old, new, 6, "CHECKPOINT")
    assert f"CHECKPOINT is at step 6, with {told}" in str(caught.value)


# ---- the learning rate -------------------------------------------------------------------------------------


def test_the_rates_of_phases_are_those_computed_by_hand(tmp_path):
    rows = [
        {"after_steps": 40, "train.global_batch": 4},  # the schedule continues
        {"after_steps": 100, "optim.lr": 2e-3, "optim.warmup": 5, "optim.decay": "linear", "optim.min_lr": 0},
    ]
    schedule = {"optim.lr": 1e-2, "optim.warmup": 10, "optim.decay": "cosine", "optim.min_lr": 1e-3}
    length = {"train.steps": 160, "train.phases": json.dumps(rows)}
    cfg = with_values(tiny_config("llama3-tiny"), {**schedule, **length})
    run = build_run(cfg, Mesh.single(), torch.device("cpu"), None, 160)

    def by_hand(step: int) -> float:
        if step <= 10:
            return 1e-2 * step / 10
        if step <= 100:
            return 1e-3 + 9e-3 * 0.5 * (1 + np.cos(np.pi * (step - 10) / 90))
        if step <= 105:
            return 1e-3 + 1e-3 * (step - 100) / 5
        return 2e-3 * (160 - step) / 55

    found = [run.learning_rate(step) for step in range(1, 161)]
    np.testing.assert_allclose(found, [by_hand(step) for step in range(1, 161)], rtol=1e-12, atol=1e-18)


# ---- layouts -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, parallel, changed",
    [
        ("llama3-tiny", {"zero": 1}, {}),
        ("llama3-tiny", {"tp": 2}, {"parallel.tp": 1, "parallel.cp": 2, "parallel.recompute": "full"}),
        ("llama3-tiny", {"pp": 2}, {"parallel.pp": 1, "parallel.zero": 3}),
        ("mixtral-tiny", {"ep": 2}, {"model.mlp.router.aux.weight": 0.0, "parallel.ep": 1}),
    ],
    ids=["zero1", "tp2-cp2", "pp2-zero3", "moe"],
)
def test_every_layout_runs_the_same_phases(ranks, tmp_path, name, parallel, changed):
    """Step 2 is the skipped one, and after step 3 the run is stopped and started again."""
    rows = [
        {"after_steps": 1, "train.seq_len": 16, "optim.lr": 2e-3, "optim.decay": "linear", **changed},
        {"after_steps": 3, "train.seq_len": 32, "train.global_batch": 4, "model.mixer.rope.base": 3e4},
    ]
    keys = {"train.phases": json.dumps(rows), **{f"parallel.{key}": to for key, to in parallel.items()}}
    first, _ = prove(ranks(2), with_values(tiny_config(name, 2), keys), tmp_path)
    assert not first.is_wrong, first


# ---- the planner -------------------------------------------------------------------------------------------


def test_the_planner_plans_the_phase_that_needs_most():
    rows = [{"after_steps": 2, "train.seq_len": 64}, {"after_steps": 9, "train.seq_len": 32}]
    cfg = with_values(tiny_config("llama3-tiny"), {"train.phases": json.dumps(rows)})
    plain = [phase.cfg for phase in get_phases(cfg).all]
    assert holdings(cfg, 1, None) == holdings(plain[1], 1, None) != holdings(plain[0], 1, None)
    longest, line = phase_to_plan(cfg)
    assert longest == plain[1] and line.startswith("phase 2 of 3") and "64 tokens" in line
    assert phase_to_plan(plain[0]) == (plain[0], "")


# ---- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, words",
    [
        ("- {after_steps: 3, model.hidden: 64}", "{file}: phase 2: model.hidden: cannot change in a phase"),
        ("- {after_steps: 3, optim.name: lion}", "{file}: phase 2: optim.name: cannot change in a phase"),
        ("- {after_steps: 3, train.seqlen: 64}", "{file}: phase 2: train.seqlen: no such key; did you mean"),
        ("- {after_steps: 3, train.seq_len: x}", "{file}: phase 2: train.seq_len: expected a whole number"),
        ("- {train.seq_len: 64}", "{file}: phase 2: give exactly one of after_steps and after_tokens"),
        ("- {after_steps: 3, after_tokens: 3, optim.lr: 1}", "{file}: phase 2: give exactly one of"),
        ("- {after_steps: 3}", "{file}: phase 2: changes nothing"),
        ("- {after_steps: 0, optim.lr: 1}", "{file}: phase 2: after_steps: 0 must be a whole number above 0"),
        ("after_steps: 3", "{file}: expected a list of phases"),
        ("- {after_steps: 5, optim.lr: 1}\n- {after_steps: 4, optim.lr: 2}", "{file}: phase 3: after_steps"),
        ("- {after_steps: 5, optim.lr: 1}\n- {after_tokens: 9, optim.lr: 2}", "{file}: phase 3: after_tok"),
        ("- {after_steps: 5, train.seq_len: 24}", "{file}: phase 1: train.seq_len: 16 does not divide 24"),
        ("- {after_steps: 2, optim.lr: 1e-3}", "train.steps: the run ends after 2 steps, and phase 2"),
        ("- {after_steps: 1, train.global_batch: 3, train.micro_batch: 2}", "train.phases: phase 2: train"),
        ("- {after_steps: 1, optim.min_lr: 9}", "train.phases: phase 2: optim.min_lr: 9"),
        ("- {after_steps: 3, optim.decay_steps: 3}", "{file}: phase 2: optim.decay_steps: 3 is a step"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_in_one_line_that_names_its_phase(tmp_path, text, words):
    file = write_phases(tmp_path, text)
    argv = ["--train.phases", file, "--train.steps", "2", "--train.seq_len", "16"]
    with pytest.raises(ConfigError) as caught:
        plan_pipeline(resolve("llama3-tiny", None, argv), 1)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(words.format(file=file))


@pytest.mark.slow
def test_a_phase_keeps_the_number_of_learned_positions(tmp_path):
    """Refused before the first step, and not where the phase begins, where the checkpoint would not fit."""
    path = write_phases(tmp_path, "- after_steps: 3\n  model.context: 64\n")
    learned = "--model.positions learned --model.mixer.rope none --model.context 32"
    more = ("--data.path", corpus(tmp_path), *learned.split())
    assert run(tmp_path, "learned", "", (*more, "--train.phases", path)) == 2
    told = (tmp_path / "learned.log").read_text().splitlines()
    assert told[-1].startswith("error: train.phases: phase 2: model.context: 32 -> 64 "), told[-1]
    assert not (tmp_path / "learned" / "metrics.jsonl").exists()


def test_data_and_a_past_that_do_not_fit_are_refused_before_a_step(home):
    """Before any step: exit code 2 and one line."""
    text = "- {after_steps: 4, optim.lr: 1e-3}\n- {after_steps: 5, data.path: %s}"
    short = write_tokens(home.folder, "short", 3)
    for path, what in (("nowhere", "data.path: nowhere.idx"), (short, "data.split")):
        file = write_phases(home.folder, text % path)
        assert home.run("data", more=("--train.phases", file)) == 2
        line = (home.folder / "data.log").read_text().splitlines()[-1]
        assert line.startswith(f"error: train.phases: phase 3: {what}"), line

    assert home.run("past", "step.begin:step=8:act=SIGKILL") == -9
    file = write_phases(home.folder, "- {after_steps: 3, train.seq_len: 32, optim.lr: 1e-4}")
    assert home.run("past", more=("--train.phases", file)) == 2
    line = (home.folder / "past.log").read_text().splitlines()[-1]
    assert "error: train.phases: " in line and "is at step 6, with phase 2: " in line, line
    # the first phase's data are past, too: the sources would be counted otherwise
    assert home.run("past", more=("--data.path", str(home.folder / "b" / "text"))) == 2
    line = (home.folder / "past.log").read_text().splitlines()[-1]
    assert "is at step 6, with phase 1: data.path " in line, line
    assert STEPS == 9


@pytest.mark.slow
def test_a_phase_that_is_added_to_a_run_that_had_none(home):
    """With data.span as the run had it, a later phase may read longer sequences."""
    plain = ("--data.path", str(home.folder / "a" / "text"), "--data.tokenizer", "bytes")
    assert run(home.folder, "added", "step.begin:step=5:act=SIGKILL", plain) == -9
    file = write_phases(home.folder, "- {after_steps: 5, train.seq_len: 32, optim.lr: 1e-4}")
    more = (*plain, "--train.phases", file)
    assert run(home.folder, "added", extra=more) == 2
    line = (home.folder / "added.log").read_text().splitlines()[-1]
    assert "set --data.span 16" in line, line
    more = (*more, "--data.span", "16")
    assert run(home.folder, "added", extra=more) == 2
    line = (home.folder / "added.log").read_text().splitlines()[-1]
    assert "ends at step 9, and with these phases it would end at step 5; set optim.decay_steps 9" in line
    assert run(home.folder, "added", extra=(*more, "--optim.decay_steps", "9")) == 0
    steps = [dict(row) for row in story(home.folder / "added") if "loss" in dict(row)]
    assert [row["phase"] for row in steps[3:]] == [1, 1, 2, 2, 2, 2]
    assert "new: phase 2 after step 5" in (home.folder / "added.log").read_text()


def test_a_failure_while_a_phase_begins_leaves_a_summary(tmp_path):
    """No session exists then that could write it; advice on memory is given once."""

    def fail(rank):
        def begin_phase(services, *_, **__):
            with advised_on_memory(services.cfg, services.world):
                raise MemoryError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

        train.begin_phase = begin_phase

    words = ["llama3-tiny", *MODEL, "--data.path", corpus(tmp_path), "--train.steps", "6"]
    words += ["--train.phases", write_phases(tmp_path, "- {after_steps: 3, optim.lr: 1e-4}")]
    end = job(tmp_path, 1, [*words, "--log.dir", str(tmp_path), "--log.name", "r"], before=fail)
    assert end.codes == [81], end.logs
    (line,) = end.errors()
    assert line.count("out of memory") == 1, line
    summary = run_folder.summary(tmp_path / "r")
    assert summary["finished"] is False and summary["step"] == 3
    assert summary["reason"] == "ended as the phase after step 3 began"


LOOKS = (
    "check_free_space", "quick_check", "newest_checkpoint", "committed_checkpoints", "remove_leftovers",
    "commit", "publish",
)


@pytest.mark.slow
def test_rank_0_alone_looks_at_the_folder_of_checkpoints(tmp_path):
    """At saves, between phases, at a resume, and where another run begins: two ranks may see a folder
    otherwise, and go the same way."""

    def refuse(*args, **more):
        raise AssertionError("another rank than 0 looks")

    def blind(rank):
        for name in LOOKS if rank else ():
            assert hasattr(store, name)
            setattr(store, name, refuse)

    words = ["llama3-tiny", *MODEL, "--parallel.pp", "2", "--parallel.zero", "1", "--checkpoint.every", "1"]
    words += ["--data.path", corpus(tmp_path)]
    words += ["--train.phases", write_phases(tmp_path, "- {after_steps: 2, optim.lr: 1e-4}")]
    words += ["--log.dir", str(tmp_path)]
    begun = ["--checkpoint.init_from", str(tmp_path / "r")]
    for name, more in (("r", ["--train.steps", "3"]), ("r", ["--train.steps", "4"]),
                       ("n", ["--train.steps", "3", *begun])):
        end = job(tmp_path / "logs", 4, [*words, "--log.name", name, *more], before=blind)
        assert end.codes == [0] * 4, end.logs
