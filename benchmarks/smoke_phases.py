"""The phases of benchmarks/smoke.py: each yields its rows as they come.

A row is a dict: row (what was checked), ok (True, False, or None: not run), and what there is of result,
error, bound, problem, s (seconds).
"""

import argparse
import gzip
import importlib.util
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import card, smoke_models
from benchmarks.process import Outcome, Task, run_tasks
from benchmarks.shape import Shape

MEMORY_SHARE = 0.9  # of the GPU, for all of them
TEST_TIMEOUT_S = 60
TESTS = ("tests/kernels", "tests/runtime/test_graphs.py")
TINY_TESTS = ("tests/kernels/test_jit.py",)
SLOWEST_STEPS = 3  # first steps of train.py, which compile, are not in its tokens/s
# of a contestant that cannot be here
ABSENT = ("not installed", "needs a GPU", "has no graphs", "has no fp8", "no attention over packed")


@dataclass(frozen=True)
class SmokeRun:
    """What the phases need. only: see main. num_gpus: 0 on a CPU."""

    device: str
    is_tiny: bool
    only: tuple[str, ...]
    site: str
    out: Path
    scratch: Path  # run folders of train.py
    jobs: int
    num_gpus: int

    def takes(self, phase: str, name: str) -> bool:
        """Whether a task was asked for."""
        return not self.only or phase in self.only or f"{phase}/{name}" in self.only

    def takes_phase(self, phase: str) -> bool:
        return not self.only or any(word.split("/")[0] == phase for word in self.only)

    def command(self, module: str, *args: str) -> list[str]:
        """Runs a module of benchmarks; on a CPU with interpreted kernels."""
        tiny = ["--tiny"] if self.is_tiny else []
        interpreter = [] if self.device == "cuda" else ["-m", "benchmarks.interpreted"]
        name = [module] if interpreter else ["-m", module]
        return [sys.executable, *interpreter, *name, *args, "--device", self.device, *tiny]

    def env(self, flags: str = "") -> dict[str, str]:
        """flags: "graphs" where a step is recorded."""
        env = card.environment_of(f"ours+{flags}", self.site)
        return env if self.device == "cuda" else env | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}

    def memory_share(self) -> list[str]:
        return ["--share", f"{MEMORY_SHARE / self.jobs:.3f}"]


SecondsLeft = Callable[[], float]
Rows = Iterator[dict]
Phase = Callable[[SmokeRun, SecondsLeft], Rows]


# ---- the phases ------------------------------------------------------------------------------------------


def imports(run: SmokeRun, seconds_left: SecondsLeft) -> Rows:
    tasks = [
        card.import_task(run.site, seconds_left()),
        Task("corpus", run.command("benchmarks.smoke_models", "prepare"), run.env(), seconds_left()),
    ]
    for task, outcome in run_tasks(tasks, most=2, seconds_left=seconds_left):
        problem = outcome.problem()
        yield {"row": task.name, "ok": problem is None, "problem": problem, "s": round(outcome.seconds, 1)}


def models(run: SmokeRun, seconds_left: SecondsLeft) -> Rows:
    tasks = []
    for name in smoke_models.MODELS:
        if run.takes("models", name):
            folder = ["--folder", str(run.scratch)]
            command = run.command("benchmarks.smoke_models", name, *folder, *run.memory_share())
            tasks.append(Task(name, command, run.env(name), seconds_left()))
    yield from rows_of_tasks(tasks, run.jobs, seconds_left)


def training(run: SmokeRun, seconds_left: SecondsLeft) -> Rows:
    """One after another, alone on the machine: what they measure is their speed."""
    for deterministic in ("false", "true"):
        name = f"deterministic-{deterministic}"
        if not run.takes("train", name):
            continue
        left = seconds_left()
        limit_s = left / 2 if deterministic == "false" else left
        task = Task(name, training_command(run, name, deterministic), run.env(), max(limit_s, 1.0))
        for _, outcome in run_tasks([task], most=1, seconds_left=seconds_left):
            yield training_row(run, name, outcome)


def training_command(run: SmokeRun, name: str, deterministic: str) -> list[str]:
    if run.is_tiny:
        recipe, sizes = "llama3-tiny", "--train.steps 6 --profile.steps 5:5"
    else:
        recipe = "llama3.2-1b"
        sizes = """--model.layers 4 --model.vocab 32000 --data.path stdlib --train.tokens none
            --train.steps 24 --train.micro_batch 8 --train.global_batch 16 --profile.steps 20:21
            --checkpoint.every none --eval.every none"""
    keys = f"""{sizes} --train.device {run.device} --train.deterministic {deterministic} --eval.batches 1
        --eval.sample 0 --log.every 1 --log.dir {run.scratch} --log.name {name} --checkpoint.resume none"""
    return [sys.executable, "train.py", recipe, *keys.split()]


def training_row(run: SmokeRun, name: str, outcome: Outcome) -> dict:
    """Reads what train.py wrote; its trace and metrics go to OUT."""
    folder = run.scratch / name
    row = {"row": name, "ok": outcome.problem() is None, "problem": outcome.problem()}
    row["s"] = round(outcome.seconds, 1)
    if not row["ok"]:
        (run.out / f"{name}.log").write_text(outcome.output + outcome.errors)

    metrics = folder / "metrics.jsonl"
    if metrics.is_file():
        shutil.copy(metrics, run.out / f"{name}.metrics.jsonl")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        steps = [line for line in lines if "loss" in line][SLOWEST_STEPS:]
        if steps:
            row["tokens/s"] = statistics.median(step["tokens_per_s"] for step in steps)
            row["mfu"] = steps[-1]["mfu"]
            row["loss"] = steps[-1]["loss"]
    for trace in folder.glob("trace-rank*.json"):
        target = run.out / f"{name}.{trace.name}.gz"
        with trace.open("rb") as source, gzip.open(target, "wb", compresslevel=3) as file:
            shutil.copyfileobj(source, file)
        row["trace"] = target.name
    shutil.rmtree(folder, ignore_errors=True)
    if row["ok"] and "trace" not in row:
        row |= {"ok": False, "problem": "no profiler trace"}
    return row


def exchanges(run: SmokeRun, seconds_left: SecondsLeft) -> Rows:
    """A world of one, then a rank for each GPU; on a CPU, two ranks."""
    worlds = [1] + [world for world in (run.num_gpus or 2,) if world > 1]
    for world in worlds:
        name = "one-rank" if world == 1 else "ranks"
        if not run.takes("exchanges", name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            tasks = []
            for rank in range(world):
                args = ["--world", str(world), "--rank", str(rank), "--meet", f"{folder}/meet"]
                command = [sys.executable, "-m", "benchmarks.smoke_exchanges", "--device", run.device, *args]
                limit_s = max(seconds_left(), 1.0)
                tasks.append(Task(f"{counted(world)}, rank {rank}", command, run.env(), limit_s))
            for row in rows_of_tasks(tasks, world, seconds_left):
                is_first = row["task"].endswith("rank 0")
                if is_first or row["ok"] is False:
                    yield row


def counted(world: int) -> str:
    return "1 rank" if world == 1 else f"{world} ranks"


def contestants(run: SmokeRun, seconds_left: SecondsLeft) -> Rows:
    shapes = Shape.gpu_models(run.is_tiny)
    options = argparse.Namespace(device=run.device, site=run.site)
    tasks = card.start_tasks(list(card.PLAN), shapes, options, limit_s=max(seconds_left(), 1.0))
    tasks = [task for task in tasks if run.takes("contestants", task.name.replace(" ", "-"))]
    beside = min(run.jobs, card.WARM_UP_BESIDE)
    for task, outcome in run_tasks(tasks, most=beside, seconds_left=seconds_left):
        problem = card.problem_of(outcome)
        row: dict = {"row": task.name, "ok": problem is None, "problem": problem}
        row["s"] = round(outcome.seconds, 1)
        if problem is None:
            row["loss"] = outcome.messages[-1]["done"]["loss"]
        elif any(words in problem for words in ABSENT):
            row["ok"] = None
        yield row


def tests(run: SmokeRun, seconds_left: SecondsLeft) -> Rows:
    """pytest without -x; beside each other and with a limit for each test, where its plugins are there."""
    files = TINY_TESTS if run.is_tiny else TESTS
    command = [sys.executable, "-m", "pytest", "-v", "-o", "addopts=", "--color=no", *files]
    missing = []
    for plugin, options in (
        ("xdist", ["-n", str(max(1, min(12, (os.cpu_count() or 1) - 2)))]),
        ("pytest_timeout", ["--timeout", str(TEST_TIMEOUT_S)]),
    ):
        if importlib.util.find_spec(plugin):
            command += options
        else:
            missing.append(plugin)
    if missing:
        problem = f"not installed: {', '.join(missing)}; slower without"
        yield {"row": "plugins", "ok": None, "problem": problem}
    env = {name: value for name, value in run.env().items() if name != "TRITON_INTERPRET"}
    task = Task("pytest", command, env, max(seconds_left(), 1.0))
    for _, outcome in run_tasks([task], most=1, seconds_left=seconds_left):
        yield from test_rows(outcome)


def test_rows(outcome: Outcome) -> Rows:
    """A row for each test that failed, and one for all."""
    verdicts: dict[str, str] = {}
    for line in outcome.output.splitlines():
        words = re.search(r"(tests/\S+?::\S.*?) (PASSED|FAILED|ERROR|SKIPPED)", line) or re.search(
            r"(PASSED|FAILED|ERROR|SKIPPED) (?:\[.*?\] )?(tests/\S+::\S.*?)(?: - .*)?$", line
        )
        if words:
            verdict, name = sorted(words.groups(), key=lambda word: word.startswith("tests/"))
            verdicts[name.strip()] = verdict
    for name, verdict in verdicts.items():
        if verdict in ("FAILED", "ERROR"):
            problem = f"{verdict.lower()}: {reason_of(name, outcome.output)}"
            yield {"row": name, "ok": False, "problem": problem}

    count = Counter(verdicts.values())
    text = ", ".join(f"{number} {verdict.lower()}" for verdict, number in count.items()) or "none ran"
    is_good = bool(verdicts) and not outcome.timed_out and not count["FAILED"] and not count["ERROR"]
    problem = None if is_good else (outcome.problem() or "see above")
    seconds = round(outcome.seconds, 1)
    yield {"row": "all tests", "ok": is_good, "result": text, "problem": problem, "s": seconds}


def reason_of(test: str, output: str) -> str:
    """What pytest's summary says of a test that failed."""
    found = re.search(rf"^(?:FAILED|ERROR) {re.escape(test)} - (.*)$", output, re.MULTILINE)
    return found[1][:120] if found else "its output has more"


PHASES: dict[str, Phase] = {
    "imports": imports,
    "models": models,
    "train": training,
    "exchanges": exchanges,
    "contestants": contestants,
    "tests": tests,
}


def rows_of_tasks(tasks: list[Task], most: int, seconds_left: SecondsLeft) -> Rows:
    """The rows of tasks as each ends, and a row for what a task was doing when it crashed or hung."""
    for task, outcome in run_tasks(tasks, most, seconds_left):
        doing = "starting"
        for message in outcome.messages:
            doing = message.get("checking", doing)
            if "row" in message:
                yield {"task": task.name, **message}
                doing = f"what follows {message['row']}"
        if not any("complete" in message for message in outcome.messages):
            yield {"task": task.name, "row": doing, **unfinished(outcome)}


def unfinished(outcome: Outcome) -> dict:
    """What a row says of a task that did not come to its end."""
    if outcome.timed_out and outcome.seconds == 0:
        return {"ok": None, "problem": "no time left"}
    problem = outcome.problem() or "ended before its last check"
    return {"ok": False, "problem": problem, "s": round(outcome.seconds, 1)}
