"""Lives of a run: fresh, resumed, resumed from another folder, a branch, a branch of a branch, with the
weights of another; each with the boundary of a phase, a validation that is due, a ramp or another horizon in
its way.

A life is a table of starts of train.py, with the words of the command line. What each folder must then say
(rates, tokens, validations, samples, the summary) is what a calculator here makes of docs/phases.md and
docs/training.md; it knows nothing of the code.
"""

import json
import math
import pathlib
import re
from dataclasses import dataclass, field

import numpy as np
import pytest
from test_resume import run

from data import loader, tokenizer
from data.indexed import IndexedDatasetWriter

LETTERS = 6000  # of the train split, in which a few letters are at one place alone
RECIPE = ["llama3-tiny"]
BASE = {
    "model.layers": 1,
    "model.hidden": 16,
    "model.heads": 2,
    "model.kv_heads": 2,
    "model.ffn": 16,
    "train.steps": 24,
    "train.seq_len": 16,
    "train.micro_batch": 2,
    "train.global_batch": 4,
    "train.threads": 1,
    "checkpoint.every": "none",
    "checkpoint.keep_at": "2,3,4,5,6,8,9",
    "eval.every": 3,
    "eval.batches": 1,
    "eval.sample": 0,
    "optim.lr": 1e-3,
    "optim.min_lr": 1e-4,
    "optim.warmup": 2,
    "optim.decay": "cosine",
    "data.tokenizer": "bytes",
    "data.split": "80,20,0",
}


# ---- the calculator ----------------------------------------------------------------------------------------


SCHEDULE = ("optim.lr", "optim.min_lr", "optim.warmup", "optim.decay", "optim.decay_fraction",
            "optim.decay_steps")


@dataclass(frozen=True)
class Part:
    """What is stated from a step on, and what holds there. ramp_seen: sequences of a ramp that goes on."""

    after: int
    stated: dict
    keys: dict
    ramp_seen: int = 0

    @property
    def begins_schedule(self) -> bool:
        return self.after == 0 or any(key in SCHEDULE for key in self.stated)


@dataclass(frozen=True)
class Plan:
    """A run by the pages. ends: {the step at which a schedule begins: the one at which it ends}, of schedules
    that end neither where the next begins nor with the run."""

    steps: int
    parts: tuple[Part, ...]
    ends: dict = field(default_factory=dict)

    def then(self, after: int, stated: dict, ramp_seen: int = 0) -> "Plan":
        """With another part: a ramp ends with its phase, and decay_steps with its schedule."""
        keys = {**self.parts[-1].keys, **({} if ramp_seen else {"train.ramp": None})}
        if any(key in SCHEDULE for key in stated):
            keys["optim.decay_steps"] = None
        return Plan(
            self.steps, (*self.parts, Part(after, stated, {**keys, **stated}, ramp_seen)), self.ends
        )

    def part_of(self, step: int) -> Part:
        return [part for part in self.parts if part.after < step][-1]

    def longest(self) -> int:
        """The longest sequence: the span of a run that states none."""
        return max(part.keys["train.seq_len"] for part in self.parts)

    def schedules(self) -> list[Part]:
        return [part for part in self.parts if part.begins_schedule]

    def end_of(self, schedule: Part) -> int:
        later = [part.after for part in self.schedules() if part.after > schedule.after]
        stated = schedule.keys.get("optim.decay_steps")
        return stated or self.ends.get(schedule.after) or (later or [self.steps])[0]

    def rate(self, step: int) -> float:
        """Of an update: a warmup of at most a tenth of the schedule, from the rate before; then the decay."""
        schedule = [part for part in self.schedules() if part.after < step][-1]
        keys, length, now = schedule.keys, self.end_of(schedule) - schedule.after, step - schedule.after
        warmup, peak, low = min(keys["optim.warmup"], length // 10), keys["optim.lr"], keys["optim.min_lr"]
        if now <= warmup:
            before = self.rate(schedule.after) if schedule.after else 0.0
            return before + (peak - before) * now / warmup
        kind = keys["optim.decay"]
        share = {
            "constant": 0.0,
            "linear": (now - warmup) / (length - warmup),
            "cosine": 0.5 - 0.5 * math.cos(math.pi * min(1.0, (now - warmup) / (length - warmup))),
            "wsd": 1 - (length - now) / (keys.get("optim.decay_fraction", 0.2) * length),
        }[kind]
        return peak + (low - peak) * min(1.0, max(0.0, share))

    def sequences(self, step: int) -> int:
        """Of a step: Megatron's --rampup-batch-size, as test_ramp.py has it."""
        part = self.part_of(step)
        size = part.keys["train.global_batch"]
        if not part.keys.get("train.ramp"):
            return size
        start, more, samples = map(int, part.keys["train.ramp"].split(","))
        seen = part.ramp_seen + sum(self.sequences(before) for before in range(part.after + 1, step))
        rises = (size - start) // more
        return size if seen > samples else min(size, start + more * (seen * rises // samples))

    def tokens(self, step: int) -> int:
        """Of the run, after a step."""
        steps = range(1, step + 1)
        return sum(self.sequences(s) * self.part_of(s).keys["train.seq_len"] for s in steps)

    def branch(self, step: int, stated: dict) -> "Plan":
        """A branch after a step: its horizon is its own, and what has begun keeps its rates and its ramp."""
        changes = {key: value for key, value in stated.items() if key != "train.steps"}
        parts = tuple(part for part in self.parts if part.after < step)
        here = parts[-1]
        began = [part for part in parts if part.begins_schedule][-1]
        later = [part for part in self.schedules() if part.after > began.after]
        ends = dict(self.ends)
        if later or any(key in SCHEDULE for key in changes):
            ends[began.after] = self.end_of(began)
        plan = Plan(stated.get("train.steps", self.steps), parts, ends)
        if not changes:
            return plan
        seen = here.ramp_seen + sum(self.sequences(s) for s in range(here.after + 1, step + 1))
        goes_on = here.keys.get("train.ramp") and "train.global_batch" not in changes
        return plan.then(step, changes, seen if goes_on else 0)


def plan_of(words: dict, phases: list[dict] = ()) -> Plan:
    """The plan of a run that begins with these words."""
    keys = {**BASE, **words}
    plan = Plan(keys["train.steps"], (Part(0, {}, keys),))
    for phase in phases:
        plan = plan.then(phase["after_steps"], {key: value for key, value in phase.items() if "." in key})
    return plan


# ---- a start -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """A start of train.py.

    name: its folder. words: of the command line. begins: "", or the key that names another run (branch,
    resume, init_from), with `source`, its folder and step. stop: the step in which it is told to stop.
    """

    name: str
    words: dict = field(default_factory=dict)
    begins: str = ""
    source: tuple[str, int] = ("", 0)
    phases: tuple[dict, ...] = ()
    stop: int | None = None


@dataclass
class Told:
    """What a folder must say: {step: rate}, {step: tokens}, steps of validations; how far it is."""

    plan: Plan
    rates: dict
    tokens: dict
    validations: set
    last: int
    past: "Told | None"  # of the run whose samples come before those of this one


class Lives:
    """The starts of a test, and what the calculator expects of each folder."""

    def __init__(self, home: pathlib.Path, monkeypatch) -> None:
        self.home = home
        self.told: dict[str, Told] = {}
        self.letters = write_letters(home)
        self.watch_reads(monkeypatch)

    def watch_reads(self, monkeypatch) -> None:
        """Each step of the train split leaves the samples that it has read in a file."""
        read = loader.BatchLoader.microbatches

        def microbatches(data, step: int):
            batches = read(data, step)
            if data.split == "train":
                rows = [row for batch in batches for row in batch.tokens.tolist()]
                texts = ["".join(map(chr, row)) for row in rows]
                with open(self.home / f"{self.name}.reads", "a") as file:
                    file.write(json.dumps([step + 1, texts]) + "\n")
            return batches

        monkeypatch.setattr(loader.BatchLoader, "microbatches", microbatches)

    def start(self, start: Start) -> None:
        """Runs it, and looks at all that it has written."""
        self.name = start.name
        fault = f"step.begin:step={start.stop}:act=SIGTERM" if start.stop else ""
        code = run(self.home, start.name, fault, args=self.argv(start))
        assert code == (75 if start.stop else 0), (self.home / f"{start.name}.log").read_text()
        self.told[start.name] = self.expected(start)
        self.compare(start)

    def argv(self, start: Start) -> list[str]:
        folder, step = start.source
        words = dict(start.words)
        if start.begins != "branch":
            words = {**BASE, **words, "data.path": self.home / "text"}
        if start.begins:
            checkpoint = f"{self.home / folder}/checkpoints/step_{step:08d}"
            named = f"{self.home / folder}@{step}" if start.begins == "branch" else checkpoint
            words[f"checkpoint.{start.begins}"] = named
        if start.phases:
            words["train.phases"] = json.dumps(start.phases)
        recipe = [] if start.begins == "branch" else RECIPE
        return [*recipe, *(word for key, value in words.items() for word in (f"--{key}", str(value)))]

    def expected(self, start: Start) -> Told:
        """What the folder must say after this start."""
        own = self.told.get(start.name)
        folder, step = start.source
        source = self.told.get(folder)
        if start.begins == "branch":
            plan = source.plan.branch(step, start.words)
        else:
            plan = plan_of(start.words, start.phases)

        # where it begins, and what the folder says of steps before
        began = own.last if own else step if start.begins in ("branch", "resume") else 0
        rates, tokens = (dict(own.rates), dict(own.tokens)) if own else ({}, {})
        validations = set(own.validations) if own else set()
        past = own.past if own else source if began else None
        if start.begins == "branch" and plan.longest() > source.plan.longest():
            past = None  # sequences longer than the span of the source begin a new epoch

        # what is added to that
        last = start.stop or plan.steps
        every = BASE["eval.every"]
        for now in range(began + 1, last + 1):
            rates[now], tokens[now] = plan.rate(now), plan.tokens(now)
        is_due = began % every == 0  # of step 0, or left out by a stop, or not in this folder yet
        if is_due and not (own and began in own.validations):
            validations.add(began)
        validations |= {now for now in range(began + 1, last + 1) if now % every == 0 or now == plan.steps}
        if start.stop:
            validations.discard(start.stop)  # the next start makes it up
        return Told(plan, rates, tokens, validations, last, past)

    def compare(self, start: Start) -> None:
        told, folder = self.told[start.name], self.home / start.name
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        steps = [row for row in rows if "loss" in row]
        assert [row["step"] for row in steps] == list(told.rates)
        assert [row["lr"] for row in steps] == pytest.approx(list(told.rates.values()), rel=1e-12)
        assert [row["tokens"] for row in steps] == list(told.tokens.values())
        validated = [row["step"] for row in rows if "val_loss" in row]
        assert sorted(told.validations) == validated

        self.compare_samples(told, {row["step"] for row in steps})
        summary = json.loads((folder / "summary.json").read_text())
        later = [row for row in rows if "val_loss" in row and row["step"] > 0]
        best = min(later, key=lambda row: row["val_loss"], default=None)
        assert summary["step"] == told.last and summary["tokens"] == told.tokens[told.last]
        assert summary["finished"] is (start.stop is None)
        assert summary["train_loss"] == steps[-1]["loss"]
        assert summary["validation"] == [row for row in rows if "val_loss" in row][-1]
        assert summary["best_validation"] == best
        assert ("branch" in summary) and bool(summary["branch"]) == (start.begins == "branch")

    def compare_samples(self, told: Told, steps: set[int]) -> None:
        """Every step has read its sequences, at their length, and no letter twice over all runs of the life:
        they are less than an epoch."""
        read = self.reads(self.name)
        assert set(read) == steps
        for step, texts in read.items():
            length = told.plan.part_of(step).keys["train.seq_len"]
            assert [len(text) for text in texts] == [length] * told.plan.sequences(step)
        if told.past is not None:
            source = next(name for name, other in self.told.items() if other is told.past)
            read = {**{s: t for s, t in self.reads(source).items() if s < min(steps)}, **read}
        counts = np.zeros(len(self.letters), int)
        for texts in read.values():
            for text in texts:
                first = self.letters.index(text)
                counts[first:first + len(text)] += 1
        assert counts.max() == 1

    def reads(self, name: str) -> dict[int, list[str]]:
        """{step: its samples}, as the last start that made the step has read them."""
        lines = (self.home / f"{name}.reads").read_text().splitlines()
        return dict(map(json.loads, lines))


def write_letters(folder: pathlib.Path) -> str:
    """A corpus of random letters, at folder/text -> its letters."""
    tok = tokenizer.load_tokenizer("bytes")
    ids = np.random.default_rng(3).integers(97, 123, LETTERS)
    with IndexedDatasetWriter(folder / "text", tok.vocab) as writer:
        for part in ids.reshape(12, -1):
            writer.add([*part[:-1], tok.eod])
        writer.finish(tok, 1)
    return "".join("".join(map(chr, [*part[:-1], tok.eod])) for part in ids.reshape(12, -1))


# ---- the lives ---------------------------------------------------------------------------------------------


LOW = {"optim.lr": 5e-4, "optim.decay": "linear", "optim.min_lr": 0.0}
RAMP = {"train.global_batch": 8, "train.ramp": "2,2,15", "train.steps": 14}
TRUNK = Start("trunk")
LATER = ({"after_steps": 6, **LOW},)
LIVES = {
    # at a step at which a validation is due, and at one at which none is
    "branch": (
        TRUNK,
        Start("linear", LOW, "branch", ("trunk", 6)),
        Start("again", {"optim.lr": 2e-4, "train.seq_len": 32}, "branch", ("linear", 8)),
    ),
    "branch in a ramp": (
        Start("trunk", RAMP),
        Start("rate", {"optim.lr": 5e-4}, "branch", ("trunk", 2)),
    ),
    "stopped at a boundary with a validation due": (
        Start("phased", phases=LATER, stop=6),
        Start("phased", phases=LATER),
    ),
    "resumed from another folder, at a boundary with a validation due": (
        TRUNK,
        Start("other", {"optim.decay_steps": 24}, "resume", ("trunk", 6), phases=LATER),
    ),
    "a branch of a plateau": (
        Start("trunk", {"optim.decay": "wsd", "optim.decay_fraction": 0.5}),
        Start("decayed", {"optim.decay": "linear", "train.steps": 30}, "branch", ("trunk", 9)),
    ),
    "a branch that changes nothing, with another horizon": (
        TRUNK,
        Start("longer", {"train.steps": 30}, "branch", ("trunk", 6)),
    ),
    "a branch that leaves a phase out": (
        Start("phased", phases=LATER),
        Start("early", {"train.seq_len": 32}, "branch", ("phased", 3)),
        Start("late", {"train.global_batch": 2}, "branch", ("phased", 9)),
    ),
    "a branch of a branch in a ramp": (
        Start("trunk", {**RAMP, "train.ramp": "2,2,30"}),
        Start("rate", {"optim.lr": 5e-4}, "branch", ("trunk", 2)),
        Start("rates", {"optim.lr": 2e-4}, "branch", ("rate", 5)),
        Start("batch", {"train.global_batch": 4}, "branch", ("rate", 4)),
    ),
    "a branch that is stopped where it begins": (
        TRUNK,
        Start("linear", LOW, "branch", ("trunk", 6), stop=7),
        Start("linear", LOW, "branch", ("trunk", 6)),
    ),
    "the weights of another": (
        TRUNK,
        Start("tuned", {**LOW, "train.steps": 5}, "init_from", ("trunk", 9), stop=3),
        Start("tuned", {**LOW, "train.steps": 5}),
    ),
    "another horizon": (
        Start("run", {"train.steps": 12}),
        Start("run", {"train.steps": 21}),
    ),
    "a phase that is added": (
        Start("run", stop=4),
        Start("run", {"optim.decay_steps": 24}, phases=({"after_steps": 8, "optim.lr": 5e-4},)),
    ),
    "a phase that is added behind another": (
        Start("run", phases=LATER, stop=8),
        Start("run", phases=({**LATER[0], "optim.decay_steps": 24}, {"after_steps": 12, "optim.lr": 1e-4})),
    ),
    "a phase that cuts a ramp off": (
        Start("run", RAMP, phases=({"after_steps": 3, "optim.lr": 5e-4},)),
    ),
    "a horizon beyond the schedule": (
        Start("run", {"optim.decay_steps": 12, "train.steps": 15}),
    ),
}
CORE = ["branch", "branch in a ramp", "stopped at a boundary with a validation due"]


@pytest.mark.slow(core=CORE)
@pytest.mark.parametrize("life", LIVES.values(), ids=LIVES)
def test_a_life(tmp_path, monkeypatch, life):
    lives = Lives(tmp_path, monkeypatch)
    for start in life:
        lives.start(start)


# ---- what the words of a start say -------------------------------------------------------------------------


def test_a_batch_that_is_refused_at_a_resume_names_the_branch_that_changes_it(tmp_path, monkeypatch):
    """The advice is run as it is printed, but for the name."""
    lives = Lives(tmp_path, monkeypatch)
    lives.start(Start("trunk", stop=4))
    words = lives.argv(Start("trunk", {"train.global_batch": 8}))
    lives.name = "trunk"
    assert run(tmp_path, "trunk", args=words) == 2
    line = (tmp_path / "trunk.log").read_text().splitlines()[-1]
    advice = re.search(r"train\.py --log\.name OTHER (--checkpoint\.branch .*?);", line)[1].split()
    lives.name = "wider"
    assert run(tmp_path, "wider", args=advice) == 0, (tmp_path / "wider.log").read_text()
    rows = [json.loads(line) for line in (tmp_path / "wider" / "metrics.jsonl").read_text().splitlines()]
    assert [row["tokens"] for row in rows if "loss" in row][:2] == [4 * 64 + 128, 4 * 64 + 2 * 128]


def test_a_stopped_run_shows_no_text_of_the_untrained_model(tmp_path, monkeypatch):
    """A run that ends before its first validation has only that one: no best one, and no sample."""
    lives = Lives(tmp_path, monkeypatch)
    words = lives.argv(Start("short", {"eval.sample": 4, "eval.every": 100}))
    lives.name = "short"
    assert run(tmp_path, "short", "step.begin:step=2:act=SIGTERM", args=words) == 75
    (line,) = [line for line in (tmp_path / "short.log").read_text().splitlines() if "stopped after" in line]
    assert "sample" not in line
    assert json.loads((tmp_path / "short" / "summary.json").read_text())["best_validation"] is None

    lives.name = "short"
    assert run(tmp_path, "short", args=words) == 0
    (line,) = [line for line in (tmp_path / "short.log").read_text().splitlines() if "done in" in line]
    assert "   sample: " in line


@pytest.mark.slow
def test_a_ramp_that_is_cut_off_is_said(tmp_path, monkeypatch):
    lives = Lives(tmp_path, monkeypatch)
    lives.start(Start("trunk", RAMP))
    lives.start(Start("batch", {"train.global_batch": 4}, "branch", ("trunk", 3)))
    log = (tmp_path / "batch.log").read_text()
    assert "train.global_batch 8 -> 4, train.ramp 2,2,15 -> None" in log
    lives.start(Start("rate", {"optim.lr": 5e-4}, "branch", ("trunk", 3)))
    assert "optim.lr 0.001 -> 0.0005, train.ramp 2,2,15 -> 2,2,15,6" in (tmp_path / "rate.log").read_text()


@pytest.mark.slow
def test_a_jump_of_the_rate_is_said(tmp_path, monkeypatch):
    """Another horizon moves the schedule that ends with the run; a branch of another schedule does not."""
    lives = Lives(tmp_path, monkeypatch)
    lives.start(Start("run", {"train.steps": 12}))
    lives.start(Start("run", {"train.steps": 24}))
    rates = [lives.told["run"].rates[step] for step in (12, 13)]
    log = (tmp_path / "run.log").read_text()
    assert f"the learning rate jumps from {rates[0]:.2e} to {rates[1]:.2e}" in log
    lives.start(TRUNK)
    lives.start(Start("low", LOW, "branch", ("trunk", 6)))
    assert "the learning rate jumps" not in (tmp_path / "low.log").read_text()
