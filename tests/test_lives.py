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
import shutil
from dataclasses import dataclass, field

import fake_wandb
import numpy as np
import pytest
import run_folder
from ranks import EOD, job, write_documents
from test_resume import run

from checkpoint import state
from checkpoint.disk import store
from data import loader
from data.remote import url_path

LETTERS = 6000  # of the train split, in which a few letters are at one place alone
RECIPE = ["llama3-tiny"]
BASE = {
    "model.layers": 1, "model.hidden": 16, "model.mixer.heads": 2, "model.mixer.kv_heads": 2,
    "model.mlp.width": 16, "train.steps": 24, "train.seq_len": 16, "train.micro_batch": 2,
    "train.global_batch": 4, "train.threads": 1, "checkpoint.every": "none",
    "checkpoint.keep_at": "2,3,4,5,6,8,9", "eval.every": 3, "eval.batches": 1, "eval.sample": 0,
    "optim.lr": 1e-3, "optim.min_lr": 1e-4, "optim.warmup": 2, "optim.decay": "cosine",
    "data.tokenizer": "bytes", "data.split": "80,20,0",
}


# ---- the calculator ----------------------------------------------------------------------------------------


SCHEDULE = ("optim.lr", "optim.min_lr", "optim.warmup", "optim.decay", "optim.decay_fraction",
            "optim.decay_steps")


@dataclass(frozen=True)
class Part:
    """The keys stated from a step on, and all keys there. ramp_seen: sequences of a ramp that continues."""

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
        return Plan(self.steps, (*self.parts, Part(after, stated, {**keys, **stated}, ramp_seen)), self.ends)

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
        """The rate of an update: a warmup of at most a tenth of the schedule, then the decay."""
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
        """The sequences of a step: Megatron's --rampup-batch-size, as test_ramp.py has it."""
        part = self.part_of(step)
        size = part.keys["train.global_batch"]
        if not part.keys.get("train.ramp"):
            return size
        start, more, samples = map(int, part.keys["train.ramp"].split(","))
        seen = part.ramp_seen + sum(self.sequences(before) for before in range(part.after + 1, step))
        rises = (size - start) // more
        return size if seen > samples else min(size, start + more * (seen * rises // samples))

    def tokens(self, step: int) -> int:
        """The tokens of the run after a step."""
        steps = range(1, step + 1)
        return sum(self.sequences(s) * self.part_of(s).keys["train.seq_len"] for s in steps)

    def flops(self, step: int) -> float:
        """The FLOPs of the run after a step."""
        steps = range(1, step + 1)
        lengths = [self.part_of(s).keys["train.seq_len"] for s in steps]
        return sum(self.sequences(s) * length * flops_of_token(length) for s, length in zip(steps, lengths))

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
        again = (*SCHEDULE, "train.global_batch", "train.ramp")  # these begin something, equal or not
        if not [key for key, value in changes.items() if key in again or here.keys.get(key) != value]:
            return plan
        seen = here.ramp_seen + sum(self.sequences(s) for s in range(here.after + 1, step + 1))
        is_continuation = here.keys.get("train.ramp") and not {"train.global_batch",
                                                               "train.ramp"} & set(changes)
        return plan.then(step, changes, seen if is_continuation else 0)


def flops_of_token(length: int) -> float:
    """Forward and backward: two for each weight of a matrix and its input, and of attention two products with
    the keys and the values that a token sees, half of the sequence."""
    hidden, ffn, vocab = BASE["model.hidden"], BASE["model.mlp.width"], 257
    weights = 4 * hidden * hidden + 3 * hidden * ffn + hidden * vocab
    return 3 * (2 * weights + 2 * 2 * hidden * (length + 1) / 2)


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
    world: its ranks.
    """

    name: str
    words: dict = field(default_factory=dict)
    begins: str = ""
    source: tuple[str, int] = ("", 0)
    phases: tuple[dict, ...] = ()
    stop: int | None = None
    world: int = 1


@dataclass
class Told:
    """The expected content of a folder: {step: rate}, {step: tokens}, steps of validations, the last step."""

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
        self.number = 0  # of the start
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
                    file.write(json.dumps([self.number, step + 1, texts]) + "\n")
            return batches

        monkeypatch.setattr(loader.BatchLoader, "microbatches", microbatches)

    def start(self, start: Start) -> None:
        """Runs it, and looks at all that it has written."""
        self.name = start.name
        self.number += 1
        fault = f"step.begin:step={start.stop}:act=SIGTERM" if start.stop else ""
        code = 75 if start.stop else 0
        if start.world == 1:
            found = run(self.home, start.name, fault, args=self.argv(start))
            assert found == code, (self.home / f"{start.name}.log").read_text()
        else:
            folder = ("--log.dir", str(self.home), "--log.name", start.name)
            end = job(self.home, start.world, [*self.argv(start), *folder], fault=fault)
            assert end.codes == [code] * start.world, end.logs
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
        """The expected content of the folder after this start."""
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
        steps, validations = run_folder.steps(folder), run_folder.validations(folder)
        assert [row["step"] for row in steps] == list(told.rates)
        assert [row["lr"] for row in steps] == pytest.approx(list(told.rates.values()), rel=1e-12)
        assert [row["tokens"] for row in steps] == list(told.tokens.values())
        of_token = [flops_of_token(told.plan.part_of(row["step"]).keys["train.seq_len"]) for row in steps]
        rates = [1e12 * row["tflops_per_gpu"] / row["tokens_per_s_per_gpu"] for row in steps]
        assert rates == pytest.approx(of_token, rel=1e-9)
        assert sorted(told.validations) == [row["step"] for row in validations]

        self.compare_samples(told, {row["step"] for row in steps})
        summary = run_folder.summary(folder)
        later = [row for row in validations if row["step"] > 0]
        best = min(later, key=lambda row: row["val_loss"], default=None)
        assert summary["step"] == told.last and summary["tokens"] == told.tokens[told.last]
        assert summary["flops"] == pytest.approx(told.plan.flops(told.last), rel=1e-9)
        assert summary["finished"] is (start.stop is None)
        assert summary["train_loss"] == steps[-1]["loss"]
        assert summary["validation"] == validations[-1]
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
        found: dict[int, tuple[int, dict]] = {}
        for line in (self.home / f"{name}.reads").read_text().splitlines():
            number, step, texts = json.loads(line)
            if found.get(step, (0, {}))[0] != number:
                found[step] = number, {}
            found[step][1].update(dict.fromkeys(texts))  # ranks of tp read the same, those of dp their part
        return {step: list(texts) for step, (_, texts) in found.items()}


def write_letters(folder: pathlib.Path) -> str:
    """A corpus of random letters, at folder/text -> its letters."""
    documents = np.random.default_rng(3).integers(97, 123, LETTERS).reshape(12, -1)[:, :-1]
    write_documents(folder / "text", documents)
    return "".join("".join(map(chr, [*ids, EOD])) for ids in documents)


# ---- the lives ---------------------------------------------------------------------------------------------


LOW = {"optim.lr": 5e-4, "optim.decay": "linear", "optim.min_lr": 0.0}
RAMP = {"train.global_batch": 8, "train.ramp": "2,2,15", "train.steps": 14}
TRUNK = Start("trunk")
LATER = ({"after_steps": 6, **LOW},)
ONE_RANK = ({"after_steps": 6, "parallel.tp": 1, **LOW},)
ELASTIC = {"parallel.elastic": "true", "train.steps": 12}
WIDER = ({"after_steps": 6, "train.global_batch": 6},)  # the first phase has no layout on three ranks
LIVES = {
    # at a step at which a validation is due, and at one at which none is
    "branch": (
        TRUNK,
        Start("linear", LOW, "branch", ("trunk", 6)),
        Start("again", {"optim.lr": 2e-4, "train.seq_len": 32}, "branch", ("linear", 8)),
    ),
    "branch in a ramp": (Start("trunk", RAMP), Start("rate", {"optim.lr": 5e-4}, "branch", ("trunk", 2))),
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
    "a branch that states what its source has": (
        TRUNK,
        Start("restarted", {"optim.lr": BASE["optim.lr"]}, "branch", ("trunk", 6)),
        Start("same", {"train.seq_len": BASE["train.seq_len"]}, "branch", ("trunk", 6)),
    ),
    "a branch that states the batch of its ramp": (
        Start("trunk", RAMP),
        Start("full", {"train.global_batch": RAMP["train.global_batch"]}, "branch", ("trunk", 2)),
        Start("again", {"train.ramp": RAMP["train.ramp"]}, "branch", ("trunk", 3)),
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
    "another horizon": (Start("run", {"train.steps": 12}), Start("run", {"train.steps": 21})),
    "a phase that is added": (
        Start("run", stop=4),
        Start("run", {"optim.decay_steps": 24}, phases=({"after_steps": 8, "optim.lr": 5e-4},)),
    ),
    "a phase that is added behind another": (
        Start("run", phases=LATER, stop=8),
        Start("run", phases=({**LATER[0], "optim.decay_steps": 24}, {"after_steps": 12, "optim.lr": 1e-4})),
    ),
    "a plan in other words": (
        Start("run", phases=LATER, stop=8),
        Start("run", phases=({"after_steps": 4, "train.global_batch": 4}, dict(reversed(LATER[0].items())))),
        Start("run", phases=LATER),
    ),
    "a phase that cuts a ramp off": (Start("run", RAMP, phases=({"after_steps": 3, "optim.lr": 5e-4},)),),
    "a first phase of two ranks, and one to go on": (
        Start("run", {"parallel.tp": 2}, phases=ONE_RANK, stop=8, world=2),
        Start("run", {"parallel.tp": 2}, phases=ONE_RANK),
    ),
    "a branch of a branch, of a run of two ranks": (
        Start("trunk", {"parallel.tp": 2}, world=2),
        Start("one", {"parallel.tp": 1, "train.global_batch": 2}, "branch", ("trunk", 6)),
        Start("again", {"train.seq_len": 32, "optim.lr": 5e-4}, "branch", ("one", 9)),
    ),
    "a boundary under elastic": (
        Start("run", ELASTIC, phases=WIDER, stop=5, world=2),
        Start("run", ELASTIC, phases=WIDER, stop=7),
        Start("run", ELASTIC, phases=WIDER, stop=8, world=3),
        Start("run", ELASTIC, phases=WIDER, world=2),
    ),
    "a horizon beyond the schedule": (Start("run", {"optim.decay_steps": 12, "train.steps": 15}),),
}
CORE = ["branch", "branch in a ramp", "stopped at a boundary with a validation due"]


@pytest.mark.slow(core=CORE)
@pytest.mark.parametrize("life", LIVES.values(), ids=LIVES)
def test_a_life_says_what_the_pages_say(tmp_path, monkeypatch, life):
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
    tokens = [row["tokens"] for row in run_folder.steps(tmp_path / "wider")]
    assert tokens[:2] == [4 * 64 + 128, 4 * 64 + 2 * 128]


def test_a_stopped_run_shows_no_text_of_the_untrained_model(tmp_path, monkeypatch):
    """A run that ends before its first validation has only that one: no best one, and no sample."""
    lives = Lives(tmp_path, monkeypatch)
    words = lives.argv(Start("short", {"eval.sample": 4, "eval.every": 100}))
    lives.name = "short"
    assert run(tmp_path, "short", "step.begin:step=2:act=SIGTERM", args=words) == 75
    (line,) = [line for line in (tmp_path / "short.log").read_text().splitlines() if "stopped after" in line]
    assert "sample" not in line
    assert run_folder.summary(tmp_path / "short")["best_validation"] is None

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


# ---- the past of another layout, or of data that is gone ---------------------------------------------------


TWO = ("--parallel.tp", "2")  # of the phases before step 4, which had two ranks
PAST_LAYOUT = json.dumps([{"after_steps": 4, "parallel.tp": 1, "optim.lr": 5e-4}])


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """`trunk`: its first phase ran with tp 2 on two ranks, and it was stopped after its step 5."""
    home = tmp_path_factory.mktemp("two")
    write_letters(home)
    end = job(home, 2, [*to_arguments(home, "trunk"), *TWO], fault="step.begin:step=5:act=SIGTERM")
    assert end.codes == [75, 75], end.logs
    return home


def to_arguments(home, name: str, phases: str | None = PAST_LAYOUT) -> list[str]:
    settings = {**BASE, "data.path": home / "text", "log.dir": home, "log.name": name, "train.steps": 7}
    words = [*RECIPE, *(word for key, value in settings.items() for word in (f"--{key}", str(value)))]
    return [*words, *(("--train.phases", phases) if phases else ())]


def test_a_resume_needs_no_ranks_of_a_phase_that_is_past(two_ranks, tmp_path):
    shutil.copytree(two_ranks / "trunk", tmp_path / "trunk")
    words = [*to_arguments(two_ranks, "trunk"), *TWO]
    assert run(tmp_path, "trunk", args=words) == 0, (tmp_path / "trunk.log").read_text()
    assert list(run_folder.losses(tmp_path / "trunk")) == list(range(1, 8))


def branch_of(home, name: str, *words: str) -> str:
    """Run a branch of trunk@3 on one rank to its end, and return its log."""
    settings = ("--checkpoint.branch", f"{home / 'trunk'}@3", *TWO[:1], "1", *words)
    assert run(home, name, args=settings) == 0, (home / f"{name}.log").read_text()
    return (home / f"{name}.log").read_text()


def test_a_branch_needs_no_ranks_of_its_source_and_makes_its_validation_in_the_new_layout(two_ranks):
    assert "left out" not in branch_of(two_ranks, "branch", "--optim.lr", "5e-4")
    assert list(run_folder.losses(two_ranks / "branch")) == [4, 5, 6, 7]
    of_step_3 = [row["val_loss"] for name in ("trunk", "branch")
                 for row in run_folder.validations(two_ranks / name) if row["step"] == 3]
    assert len(of_step_3) == 2 and of_step_3[0] == pytest.approx(of_step_3[1], rel=1e-6)


@pytest.mark.slow
def test_a_validation_that_no_layout_of_these_ranks_can_make_is_left_out_with_a_line(two_ranks):
    words = ("--train.micro_batch", "3", "--train.global_batch", "3")
    log = " ".join(branch_of(two_ranks, "threes", *words).split())
    assert "the validation of step 3 is left out: parallel.tp*pp*cp*dp_rep = 2*1*1*1" in log
    assert [row["step"] for row in run_folder.validations(two_ranks / "threes")] == [6, 7]


def test_data_that_only_a_past_phase_has_read_may_be_gone(tmp_path):
    (tmp_path / "first").mkdir()
    write_letters(tmp_path), write_letters(tmp_path / "first")
    phases = json.dumps([{"after_steps": 3, "data.path": str(tmp_path / "text")}])
    words = [*to_arguments(tmp_path, "run", phases), "--data.path", str(tmp_path / "first" / "text")]
    assert run(tmp_path, "run", "step.begin:step=5:act=SIGTERM", args=words) == 75
    shutil.rmtree(tmp_path / "first")
    assert run(tmp_path, "run", args=words) == 0, (tmp_path / "run.log").read_text()
    branch = ("--checkpoint.branch", f"{tmp_path / 'run'}@3", "--optim.lr", "5e-4")
    assert run(tmp_path, "branch", args=branch) == 2
    assert "first/text.idx: No such file" in (tmp_path / "branch.log").read_text()
    with_data = ("--data.path", str(tmp_path / "text"))
    assert run(tmp_path, "branch", args=(*branch, *with_data)) == 0
    assert "the validation of step 3 is left out" in (tmp_path / "branch.log").read_text()


DAMAGES = {  # of the newest checkpoint here
    "flipped": lambda shard: shard.write_bytes(shard.read_bytes()[:-1] + bytes([shard.read_bytes()[-1] ^ 1])),
    "cut": lambda shard: shard.write_bytes(shard.read_bytes()[:-1]),
    "absent": lambda shard: shard.unlink(),
}


def newest_shard(folder) -> pathlib.Path:
    path = store.newest_checkpoint(folder / "checkpoints", check=store.quick_check)
    return next(path.glob("*.safetensors"))


@pytest.mark.slow(core=["cut"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_shard_comes_again_from_the_mirror(tmp_path, monkeypatch, damage):
    """And the run is the one that nothing has happened to. One that both have lost leads back to the one
    before, with a line that says why."""
    lives = Lives(tmp_path, monkeypatch)
    mirror = {"checkpoint.mirror": f"file://{tmp_path / 'store'}"}
    lives.start(Start("run", {"train.steps": 9, **mirror}, stop=7))
    here = newest_shard(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "lost")
    shutil.copytree(tmp_path / "store" / "run", tmp_path / "store" / "lost")
    damage(here)
    lives.start(Start("run", {"train.steps": 9, **mirror}))
    log = " ".join((tmp_path / "run.log").read_text().split())
    assert f"1 file of {here.parent} fetched again from " in log and "is rejected" not in log

    damage(newest_shard(tmp_path / "lost")), damage(newest_shard(tmp_path / "store" / "lost"))
    words = lives.argv(Start("lost", {"train.steps": 9, **mirror}))
    assert run(tmp_path, "lost", args=words) == 0, (tmp_path / "lost.log").read_text()
    log = " ".join((tmp_path / "lost.log").read_text().split())
    assert "cannot be repaired from its store: " in log and "resumed from" in log and "at step 6" in log
    assert run_folder.losses(tmp_path / "run") == run_folder.losses(tmp_path / "lost")


def test_a_warmup_that_is_cut_is_said(tmp_path):
    """Whether the command line, a phase or a branch states it. A recipe's is for long runs."""
    write_letters(tmp_path)
    phases = json.dumps([{"after_steps": 4, "optim.lr": 5e-4, "optim.warmup": 3}])
    words = to_arguments(tmp_path, "run", phases)
    at = words.index("--optim.warmup")
    quiet = [*words[:at], *words[at + 2:]]
    assert run(tmp_path, "run", args=[*words, "--train.steps", "24"]) == 0, (tmp_path / "run.log").read_text()
    assert run(tmp_path, "quiet", args=quiet) == 0
    branch = ("--checkpoint.branch", f"{tmp_path / 'run'}@6", "--optim.warmup", "9")
    assert run(tmp_path, "branch", args=branch) == 0, (tmp_path / "branch.log").read_text()
    told = {name: " ".join((tmp_path / f"{name}.log").read_text().split())
            for name in ("run", "quiet", "branch")}
    for name, place, cut in (
        ("run", "", "2 steps are cut to 0, a tenth of the 4 of the schedule"),
        ("run", "phase 2: ", "3 steps are cut to 2, a tenth of the 20 of the schedule"),
        ("quiet", "phase 2: ", "3 steps are cut to 0, a tenth of the 3 of the schedule"),
        ("branch", "phase 3: ", "9 steps are cut to 1, a tenth of the 18 of the schedule"),
    ):
        assert f"warmup {place}optim.warmup: {cut}" in told[name]
    assert [told[name].count("are cut to") for name in told] == [2, 1, 1]


@pytest.mark.slow
def test_a_copied_folder_is_a_run_of_its_own_in_wandb(tmp_path, monkeypatch):
    """One that was moved is not, and neither is one that is started again."""
    (tmp_path / "fake").mkdir()
    write_letters(tmp_path)
    told = fake_wandb.install(tmp_path / "fake", monkeypatch)

    def start(name: str, steps: int) -> str:
        """-> its id in W&B"""
        words = [*to_arguments(tmp_path, name, None), "--log.wandb", "offline", "--train.steps", str(steps)]
        assert run(tmp_path, name, args=words) == 0, (tmp_path / f"{name}.log").read_text()
        return [words[1]["id"] for words in told() if words[0] == "init"][-1]

    first = start("first", 2)
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    assert start("copy", 3) != first and start("first", 3) == first
    own = start("copy", 4)
    (tmp_path / "first").rename(tmp_path / "moved")
    assert start("moved", 4) == first != own == start("copy", 5)
    log = " ".join((tmp_path / "copy.log").read_text().split())
    assert log.count(f"is a copy of {tmp_path / 'first'}, and a separate run in W&B") == 1


def test_a_damaged_copy_of_a_store_comes_again(tmp_path, monkeypatch):
    """For a run that took its weights from there, and for a script."""
    lives = Lives(tmp_path, monkeypatch)
    words = {"train.steps": 2, "checkpoint.mirror": f"file://{tmp_path / 'store'}"}
    lives.start(Start("trunk", words))
    url = f"file://{tmp_path / 'store' / 'trunk'}"
    argv = [*to_arguments(tmp_path, "tuned", None), "--train.steps", "1", "--checkpoint.init_from", url]
    lives.name = "tuned"
    assert run(tmp_path, "tuned", args=argv) == 0, (tmp_path / "tuned.log").read_text()
    shard = newest_shard(tmp_path / "remote" / url_path(url))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    assert run(tmp_path, "again", args=argv) == 0, (tmp_path / "again.log").read_text()
    assert shard.read_bytes() == whole and "fetched again" in (tmp_path / "again.log").read_text()

    monkeypatch.chdir(tmp_path)
    notes = []
    shard = next(state.find_index(url, notes).path.glob("*.safetensors"))
    assert shard.is_relative_to("runs/remote") and not notes
    shard.write_bytes(whole[:-1])
    state.find_index(url, notes)
    assert shard.read_bytes() == whole and "fetched again" in notes[0]


def test_a_fresh_machine_with_other_ranks_continues_from_a_mirror(two_ranks, tmp_path):
    shutil.copytree(two_ranks / "trunk", tmp_path / "store" / "trunk")
    mirror = ("--checkpoint.mirror", f"file://{tmp_path / 'store'}", "--parallel.elastic", "true")
    words = [*to_arguments(two_ranks, "trunk"), *TWO, *mirror]
    assert run(tmp_path, "trunk", args=words) == 0, (tmp_path / "trunk.log").read_text()
    assert list(run_folder.losses(tmp_path / "trunk")) == list(range(1, 8))


# ---- a start that is refused -------------------------------------------------------------------------------


REFUSED = {  # late: what only a look at data, a model or another run tells
    "data": ["--data.split", "100,0"],
    "weights": ["--checkpoint.init_from", "{trunk}", "--model.layers", "2"],
    "horizon": ["--checkpoint.resume", "{trunk}"],
    "tasks": ["--eval.tasks", "{tasks}", "--model.context", "16"],
    "early": ["--parallel.tp", "3"],
}


@pytest.fixture(scope="module")
def trunk(tmp_path_factory):
    home = tmp_path_factory.mktemp("trunk")
    write_letters(home)
    assert run(home, "trunk", args=[*to_arguments(home, "trunk", None), "--train.steps", "2"]) == 0
    row = {"prompt": "a" * 8, "choices": ["b" * 30, "c"], "answer": 0}
    (home / "tasks").mkdir()
    (home / "tasks" / "long.jsonl").write_text(json.dumps(row) + "\n")
    return home


@pytest.mark.slow(core=["data", "early"])
@pytest.mark.parametrize("words", REFUSED.values(), ids=REFUSED)
def test_a_refused_start_leaves_no_folder(trunk, tmp_path, words):
    places = {"trunk": trunk / "trunk", "tasks": trunk / "tasks" / "long.jsonl"}
    args = [*to_arguments(trunk, "new", None), "--train.steps", "2",
            *(word.format(**places) for word in words)]
    home = tmp_path / "runs"
    home.mkdir()
    inside = ("--log.dir", str(home / "deep" / "er"))
    assert run(home, "new", args=args, extra=inside) == 2, (home / "new.log").read_text()
    assert [path.name for path in home.iterdir() if path.name != "data"] == ["new.log"]

    # a folder that somebody has made, or in which a run has been, stays
    (home / "deep" / "er" / "new").mkdir(parents=True)
    assert run(home, "new", args=args, extra=inside) == 2
    assert list((home / "deep" / "er" / "new").iterdir()) == []
    shutil.copytree(trunk / "trunk", home / "deep" / "er" / "new", dirs_exist_ok=True)
    assert run(home, "new", args=[*args, "--train.seed", "9"], extra=inside) == 2
    reason = run_folder.exit_reason(home / "deep" / "er" / "new")
    assert reason["code"] == 2


def test_a_job_that_is_refused_leaves_no_folder(trunk, tmp_path):
    end = job(tmp_path, 2, [*to_arguments(trunk, "new", None), "--log.dir", str(tmp_path), *REFUSED["data"]])
    assert end.codes == [2, 2] and not (tmp_path / "new").exists(), (end.logs, list(tmp_path.rglob("*")))
