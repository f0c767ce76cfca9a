"""Judges a mutant: which test catches it?

The order is: core tests that run its function, cheapest first; the core's proofs of whole layouts (PROOFS);
slow tests; and scripts.verify on layouts that use its file.
"""

import json
import re
import time
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from lab.proof.mutate.control import (
    NO_TESTS,
    SLOWDOWN,
    START_S,
    Controls,
    VerifyRun,
    has_verdict,
    last_output_line,
    run_tests,
    run_verify,
    sandbox,
)
from lab.proof.mutate.cover import CoverageMap
from lab.proof.mutate.mutant import Key, Mutant, mutant_key, plant

KILL_BONUS = 2.0  # a test with one kill runs before tests that take a third of its time
NO_KILLS: Mapping[str, int] = MappingProxyType({})
TEST_STAGES = ("core", "slow")
PROOFS = "tests/test_two_steps.py"  # every case runs, since each is another layout
PROOF_S = 5.0  # of each case
BUDGET_S = 120.0  # of a mutant's tests, by their recorded durations

DENSE_RUNS = (VerifyRun("llama3-tiny", 2, "tp2 sp zero1"), VerifyRun("llama3-tiny", 4, "pp2 dp2 zero3"))
MIXTURE_RUNS = (
    VerifyRun("mixtral-tiny", 4, "dp2 tp2 ep4"),
    VerifyRun("qwen2-moe-tiny", 4, "cp2 tp2 sp"),
    VerifyRun("dots1-tiny", 2, "dp2 zero1"),
)

# (path prefix, runs on layouts that use these files): the first match counts.
VERIFY_RUNS: tuple[tuple[str, tuple[VerifyRun, ...]], ...] = (
    ("model/moe", MIXTURE_RUNS),
    ("model/router", MIXTURE_RUNS),
    (
        "parallel/expert",
        (
            VerifyRun("mixtral-tiny", 4, "dp2 tp2 ep4"),
            VerifyRun("qwen2-moe-tiny", 4, "tp2 ep2 etp2 padded"),
        ),
    ),
    (
        "parallel/sharding/packing",
        (
            VerifyRun("mixtral-tiny", 4, "dp2 tp2 ep4"),
            VerifyRun("qwen2-moe-tiny", 4, "tp2 ep2 etp2 padded"),
        ),
    ),
    (
        "model/mla",
        (
            VerifyRun("deepseek-v3-tiny", 2, "tp2 sp zero2"),
            VerifyRun("deepseek-v2-lite-tiny", 2, "cp2 zero1 docs"),
        ),
    ),
    (
        "model/mtp",
        (
            VerifyRun("deepseek-v3-tiny", 2, "pp2 zero1"),
            VerifyRun("deepseek-v3-tiny", 2, "tp2 sp zero2"),
        ),
    ),
    (
        "parallel/context/ring",
        (
            VerifyRun("llama3-tiny", 2, "cp2 cp-ring docs"),
            VerifyRun("mistral-tiny", 4, "cp4 cp-ring"),
        ),
    ),
    (
        "parallel/context/zigzag",
        (
            VerifyRun("llama3-tiny", 2, "cp2 cp-ring docs"),
            VerifyRun("mistral-tiny", 4, "cp4 cp-ring"),
            VerifyRun("qwen3-tiny", 2, "cp2 cp-ulysses"),
        ),
    ),
    (
        "parallel/context/ulysses",
        (
            VerifyRun("qwen3-tiny", 2, "cp2 cp-ulysses"),
            VerifyRun("llama3-tiny", 4, "cp2 tp2 cp-ulysses docs"),
        ),
    ),
    (
        "parallel/pipeline/executor",
        (
            VerifyRun("llama3-tiny", 2, "pp2 1f1b zero2"),
            VerifyRun("llama3.2-tiny", 2, "pp2 zb-v"),
            VerifyRun("gpt2-tiny", 4, "pp2 dualpipe-v"),
        ),
    ),
    (
        "parallel/pipeline/schedule",
        (
            VerifyRun("llama3-tiny", 2, "pp2 zb-h1"),
            VerifyRun("llama3.2-tiny", 2, "pp2 zb-v"),
            VerifyRun("gpt2-tiny", 4, "pp4 interleaved"),
        ),
    ),
    (
        "parallel/offload",
        (
            VerifyRun("llama3-tiny", 2, "dp2 offload zero1"),
            VerifyRun("llama3-tiny", 2, "pp2 offload"),
        ),
    ),
    (
        "model/split",
        (
            VerifyRun("llama3-tiny", 4, "pp4 1f1b"),
            VerifyRun("llama3-tiny", 2, "pp2 uneven"),
        ),
    ),
    (
        "model/recompute",
        (
            VerifyRun("llama3-tiny", 2, "tp2 full"),
            VerifyRun("qwen3-tiny", 2, "cp2 selective"),
        ),
    ),
    (
        "parallel/sharding/zero",
        (
            VerifyRun("llama3-tiny", 2, "dp2 zero3"),
            VerifyRun("llama3.2-tiny", 4, "pp2 dp2 zero2"),
        ),
    ),
    (
        "parallel/sharding/",
        (
            VerifyRun("llama3-tiny", 2, "dp2 zero3"),
            VerifyRun("llama3.2-tiny", 4, "rep2 dp2 zero2"),
            VerifyRun("llama3.2-tiny", 2, "pp2 1f1b"),  # a tied embedding on two stages
            VerifyRun("mixtral-tiny", 2, "dp2 ep2 zero1"),
            VerifyRun("mixtral-tiny", 4, "rep2 ep2 zero1"),
        ),
    ),
    (
        "parallel/wire/algorithms",
        (
            VerifyRun("llama3-tiny", 4, "dp4 zero1 reduce-ring"),
            VerifyRun("llama3-tiny", 4, "dp4 zero0 reduce-hierarchy"),
        ),
    ),
    (
        "optim/muon",
        (
            VerifyRun("llama3-tiny", 2, "tp2 muon"),
            VerifyRun("mixtral-tiny", 2, "dp2 ep2 muon"),
        ),
    ),
    (
        "optim/normuon",
        (
            VerifyRun("llama3-tiny", 2, "tp2 normuon"),
            VerifyRun("mixtral-tiny", 2, "dp2 ep2 normuon"),
        ),
    ),
    (
        "optim/dion",
        (
            VerifyRun("llama3-tiny", 2, "tp2 dion"),
            VerifyRun("mixtral-tiny", 2, "dp2 ep2 dion"),
        ),
    ),
    (
        "model/qk_clip",
        (
            VerifyRun("llama3-tiny", 4, "tp4 qk-clip"),
            VerifyRun("deepseek-v3-tiny", 2, "cp2 qk-clip"),
        ),
    ),
    ("kernels/distillation", (VerifyRun("llama3-tiny", 4, "tp2 distill"),)),
    ("model/distill", (VerifyRun("llama3-tiny", 4, "tp2 zero3 sp distill"),)),
    ("checkpoint/teacher", (VerifyRun("llama3-tiny", 4, "pp2 zero3 distill"),)),
    (
        "optim/lamb",
        (
            VerifyRun("llama3-tiny", 2, "dp2 zero1 lamb"),
            VerifyRun("llama3-tiny", 2, "tp2 lars"),
        ),
    ),
    ("optim/lion", (VerifyRun("llama3-tiny", 2, "dp2 zero1 lion"),)),
    ("optim/sgd", (VerifyRun("llama3-tiny", 2, "dp2 zero1 sgd"),)),
    (
        "parallel/",
        (
            *DENSE_RUNS,
            VerifyRun("mixtral-tiny", 4, "dp2 tp2 ep4"),
            VerifyRun("llama3-tiny", 4, "cp2 tp2 cp-ring"),
        ),
    ),
    (
        "data/",
        (
            VerifyRun("llama3-tiny", 2, "dp2 docs no-wide"),
            VerifyRun("llama3-tiny", 2, "dp2 wide"),
        ),
    ),
    (
        "checkpoint/",
        (
            VerifyRun("llama3-tiny", 4, "pp2 dp2 zero3 async"),
            VerifyRun("mixtral-tiny", 2, "dp2 ep2 zero1 no-async"),
        ),
    ),
    (
        "",
        (
            *DENSE_RUNS,
            VerifyRun("llama3-tiny", 2, "dp2 docs no-wide"),
        ),
    ),
)


def verify_runs(file: str) -> tuple[VerifyRun, ...]:
    """Return the runs of verify on layouts that use a file."""
    return next(runs for prefix, runs in VERIFY_RUNS if file.startswith(prefix))


@dataclass(frozen=True)
class Kill:
    """How a mutant was killed: `stage` is "core" or "slow" (tests) or "verify", "" if it survived.

    `by` names the test or layout that caught it, or for a survivor why verify gave no verdict ("" if it did).
    `hung` says that the run hit its time limit.
    """

    stage: str
    by: str
    hung: bool


@dataclass(frozen=True)
class Verdict:
    """A mutant and its outcome (see Kill): a line of the file of verdicts.

    `ran` counts the tests that run its function; `seconds` is how long judging took.
    """

    file: str
    line: int
    operator: str
    before: str
    after: str
    stage: str
    by: str
    hung: bool
    ran: int
    seconds: float

    @property
    def key(self) -> Key:
        """The key of the mutant: Mutant.key."""
        return mutant_key(self.file, self.line, self.operator, self.before, self.after)


# ---- which tests a mutant runs against ---------------------------------------------------------------------


def choose_tests(
    tests: Sequence[tuple[float, str]],
    budget_s: float,
    *,
    kills: Mapping[str, int] = NO_KILLS,
    related: Container[str] = (),
) -> list[tuple[float, str]]:
    """Return [(seconds, name)] of the tests to run against a mutant, in order.

    One case of every test function, cheapest first, then a second case, while the budget lasts: the cases of
    a function often miss the same mutants.

    `kills` maps test functions to how many mutants they killed; these run earlier.
    `related` test files run before all others.
    """
    num_cases: Counter[str] = Counter()
    ranked = []
    for seconds, name in sorted(tests):
        function = name.split("[")[0]
        num_cases[function] += 1
        is_unrelated = name.split("::")[0] not in related
        weighted_seconds = seconds / (1 + KILL_BONUS * kills.get(function, 0))
        ranked.append((is_unrelated, num_cases[function], weighted_seconds, seconds, name))

    chosen: list[tuple[float, str]] = []
    total_s = 0.0
    for *_, seconds, name in sorted(ranked):
        if not chosen or total_s + seconds <= budget_s:
            chosen.append((seconds, name))
            total_s += seconds
    return chosen


def related_test_files(file: str, root: Path) -> set[str]:
    """Return the test files that are named after a source or import from it.

    parallel/sharding/zero.py has tests/parallel/sharding/test_zero.py.
    """
    module = file.removesuffix(".py").replace("/", ".")
    package, _, name = module.rpartition(".")
    statements = [rf"from {re.escape(module)} import", rf"import {re.escape(module)}\b"]
    if package:
        statements.append(rf"from {re.escape(package)} import .*\b{name}\b")
    imports = re.compile("|".join(statements))

    related = set()
    for path in root.glob("tests/**/test_*.py"):
        has_its_name = path.stem.removeprefix("test_") == Path(file).stem
        if has_its_name or imports.search(path.read_text()):
            related.add(str(path.relative_to(root)))
    return related


# ---- judging -----------------------------------------------------------------------------------------------


def judge(
    mutant: Mutant,
    controls: Controls,
    coverage: CoverageMap,
    *,
    budget_s: float = BUDGET_S,
    verify: bool = True,
    kills: Mapping[str, int] = NO_KILLS,
) -> Verdict:
    """Plant the mutant in a copy of the checkout of `controls` and run what could catch it.

    A test counts only if it passes without the mutant. `budget_s` is for core tests, and again for slow ones.
    `verify` says whether scripts.verify runs after the tests. `kills` is as in choose_tests.
    Raises ConfigError if a run of verify fails without the mutant.
    """
    started = time.perf_counter()
    checkout = controls.base / "checkout"
    text = (checkout / mutant.file).read_text()
    tests = coverage.tests_of_line(mutant.file, text, mutant.line)
    related = related_test_files(mutant.file, checkout)
    core = [(seconds, name) for seconds, name in tests if name in coverage.core]
    slow = [(seconds, name) for seconds, name in tests if name not in coverage.core]
    proofs = [(PROOF_S, name) for name in sorted(coverage.core) if name.startswith(PROOFS)]

    with sandbox(controls.base) as folder:
        plant(mutant, folder / "checkout")
        choose = partial(choose_tests, budget_s=budget_s, kills=kills, related=related)
        kill = kill_by_tests("core", folder, choose(core), controls)
        kill = kill or kill_by_tests("core", folder, proofs, controls)
        kill = kill or kill_by_tests("slow", folder, choose(slow), controls)
        if kill is None:
            runs = verify_runs(mutant.file) if verify else ()
            kill = kill_by_verify(folder, runs, controls)

    return make_verdict(mutant, kill, started, num_tests=len(tests))


def make_verdict(mutant: Mutant, kill: Kill, started: float, num_tests: int = 0) -> Verdict:
    """Return the verdict of a mutant whose judging `started` at this time.perf_counter()."""
    return Verdict(
        file=mutant.file,
        line=mutant.line,
        operator=mutant.operator,
        before=mutant.before,
        after=mutant.after,
        stage=kill.stage,
        by=kill.by,
        hung=kill.hung,
        ran=num_tests,
        seconds=round(time.perf_counter() - started, 1),
    )


def kill_by_tests(
    stage: str, folder: Path, tests: list[tuple[float, str]], controls: Controls
) -> Kill | None:
    """Return how these tests catch the mutant in the sandbox, or None if they do not.

    A timeout may be due to a busy machine: the last test of the run is repeated alone. A test that also fails
    without the mutant is dropped, and the others run again.
    """
    while tests:
        names = [name for _, name in tests]
        limit_s = START_S + SLOWDOWN * sum(seconds for seconds, _ in tests)
        result, last_started = run_tests(controls.warm, folder, names, limit_s)
        if result.code in (0, NO_TESTS):
            return None

        if result.code is None and last_started:
            position = names.index(last_started)
            limit_s = START_S + SLOWDOWN * tests[position][0]
            result, _ = run_tests(controls.warm, folder, [last_started], limit_s)
            if result.code == 0:
                tests = tests[position + 1 :]
                continue

        # if no test started, an import failed in any of the files
        hung = result.code is None
        suspects = [last_started] if last_started else sorted({name.split("::")[0] for name in names})
        if all(controls.passes(suspect, limit_s, repeat=hung) for suspect in suspects):
            return Kill(stage, last_started or "import", hung)

        flaky = {suspect for suspect in suspects if controls.seconds[suspect] is None or hung}
        tests = [(seconds, name) for seconds, name in tests if not flaky & {name, name.split("::")[0]}]
    return None


def kill_by_verify(folder: Path, runs: Iterable[VerifyRun], controls: Controls) -> Kill:
    """Return how scripts.verify catches the mutant in the sandbox.

    An error exit gives no verdict, and the next run is tried.
    Raises ConfigError if a run fails without the mutant.
    """
    no_verdict = ""
    for run in runs:
        result = run_verify(folder, run, controls.limit_s(run))
        hung = result.code is None
        if hung:
            controls.limit_s(run, repeat=True)  # raises if the control is just as slow
        if hung or (result.code == 1 and has_verdict(result)):
            return Kill("verify", str(run), hung)
        if not has_verdict(result):
            no_verdict = f"no verdict of scripts.verify {run}: {last_output_line(result)}"
    return Kill("", no_verdict, False)


def count_kills(verdicts: Iterable[Verdict]) -> Counter[str]:
    """Return {test function: how many mutants it killed}."""
    return Counter(verdict.by.split("[")[0] for verdict in verdicts if verdict.stage in TEST_STAGES)


# ---- the file of verdicts ----------------------------------------------------------------------------------


def read_verdicts(path: Path) -> list[Verdict]:
    """Read a JSON Lines file, [] if there is none. A truncated line is dropped."""
    if not path.exists():
        return []
    verdicts = []
    for line in path.read_text().splitlines():
        try:
            verdicts.append(Verdict(**json.loads(line)))
        except json.JSONDecodeError:
            continue
    return verdicts


def append_verdict(path: Path, verdict: Verdict) -> None:
    with open(path, "a") as out:
        print(json.dumps(asdict(verdict)), file=out, flush=True)
