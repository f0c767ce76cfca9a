"""Which test sees a mutant: first the unit tests that run its line, the cheapest first, then scripts.verify
on layouts that use its file.
"""

import json
import re
import time
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

from scripts.mutate.control import (
    NO_TESTS,
    SLOWER,
    START_S,
    Controls,
    Proof,
    complaint,
    judged,
    run_proof,
    run_tests,
    sandbox,
)
from scripts.mutate.cover import Map
from scripts.mutate.draw import Mutant

EAGER = 2.0  # a test that killed one mutant is met before others of a third of its time
NOTHING_KILLED: Mapping[str, int] = MappingProxyType({})
BUDGET_S = 120.0  # of the tests that a mutant meets, as they took when they were measured

DENSE = (Proof("llama3-tiny", 2, "tp2 sp zero1"), Proof("llama3-tiny", 4, "pp2 dp2 zero3"))
PROOFS: tuple[tuple[str, tuple[Proof, ...]], ...] = (
    (
        "model/moe",
        (
            Proof("mixtral-tiny", 4, "dp2 tp2 ep4"),
            Proof("qwen2-moe-tiny", 4, "cp2 tp2 sp"),
            Proof("dots1-tiny", 2, "dp2 zero1"),
        ),
    ),
    (
        "parallel/expert",
        (Proof("mixtral-tiny", 4, "dp2 tp2 ep4"), Proof("qwen2-moe-tiny", 4, "tp2 ep2 etp2 padded")),
    ),
    (
        "parallel/packing",
        (Proof("mixtral-tiny", 4, "dp2 tp2 ep4"), Proof("qwen2-moe-tiny", 4, "tp2 ep2 etp2 padded")),
    ),
    (
        "model/mla",
        (Proof("deepseek-v3-tiny", 2, "tp2 sp zero2"), Proof("deepseek-v2-lite-tiny", 2, "cp2 zero1 docs")),
    ),
    ("model/mtp", (Proof("deepseek-v3-tiny", 2, "pp2 zero1"), Proof("deepseek-v3-tiny", 2, "tp2 sp zero2"))),
    ("parallel/ring", (Proof("llama3-tiny", 2, "cp2 cp-ring docs"), Proof("mistral-tiny", 4, "cp4 cp-ring"))),
    (
        "parallel/zigzag",
        (
            Proof("llama3-tiny", 2, "cp2 cp-ring docs"),
            Proof("mistral-tiny", 4, "cp4 cp-ring"),
            Proof("qwen3-tiny", 2, "cp2 cp-ulysses"),
        ),
    ),
    (
        "parallel/ulysses",
        (Proof("qwen3-tiny", 2, "cp2 cp-ulysses"), Proof("llama3-tiny", 4, "cp2 tp2 cp-ulysses docs")),
    ),
    (
        "parallel/pipeline",
        (
            Proof("llama3-tiny", 2, "pp2 1f1b zero2"),
            Proof("llama3.2-tiny", 2, "pp2 zb-v"),
            Proof("gpt2-tiny", 4, "pp2 dualpipe-v"),
        ),
    ),
    (
        "parallel/schedule",
        (
            Proof("llama3-tiny", 2, "pp2 zb-h1"),
            Proof("llama3.2-tiny", 2, "pp2 zb-v"),
            Proof("gpt2-tiny", 4, "pp4 interleaved"),
        ),
    ),
    (
        "parallel/offload",
        (Proof("llama3-tiny", 2, "dp2 offload zero1"), Proof("llama3-tiny", 2, "pp2 offload")),
    ),
    ("model/split", (Proof("llama3-tiny", 4, "pp4 1f1b"), Proof("llama3-tiny", 2, "pp2 uneven"))),
    ("model/recompute", (Proof("llama3-tiny", 2, "tp2 full"), Proof("qwen3-tiny", 2, "cp2 selective"))),
    ("parallel/zero", (Proof("llama3-tiny", 2, "dp2 zero3"), Proof("llama3.2-tiny", 4, "pp2 dp2 zero2"))),
    (
        "parallel/params",
        (
            Proof("llama3-tiny", 2, "dp2 zero3"),
            Proof("llama3.2-tiny", 4, "rep2 dp2 zero2"),
            Proof("llama3.2-tiny", 2, "pp2 1f1b"),  # a tied table on two stages
            Proof("mixtral-tiny", 2, "dp2 ep2 zero1"),
            Proof("mixtral-tiny", 4, "rep2 ep2 zero1"),
        ),
    ),
    (
        "parallel/reduce",
        (Proof("llama3-tiny", 4, "dp4 zero1 ring"), Proof("llama3-tiny", 4, "dp4 zero0 hierarchy")),
    ),
    ("optim/muon", (Proof("llama3-tiny", 2, "tp2 muon"), Proof("mixtral-tiny", 2, "dp2 ep2 muon"))),
    ("optim/lamb", (Proof("llama3-tiny", 2, "dp2 zero1 lamb"), Proof("llama3-tiny", 2, "tp2 lars"))),
    ("optim/lion", (Proof("llama3-tiny", 2, "dp2 zero1 lion"),)),
    ("optim/sgd", (Proof("llama3-tiny", 2, "dp2 zero1 sgd"),)),
    (
        "parallel/",
        (*DENSE, Proof("mixtral-tiny", 4, "dp2 tp2 ep4"), Proof("llama3-tiny", 4, "cp2 tp2 cp-ring")),
    ),
    ("data/", (Proof("llama3-tiny", 2, "dp2 docs no-wide"), Proof("llama3-tiny", 2, "dp2 wide"))),
    (
        "checkpoint/",
        (Proof("llama3-tiny", 4, "pp2 dp2 zero3 async"), Proof("mixtral-tiny", 2, "dp2 ep2 zero1 no-async")),
    ),
    ("", (*DENSE, Proof("llama3-tiny", 2, "dp2 docs no-wide"))),
)


def proofs(file: str) -> tuple[Proof, ...]:
    """The layouts that use a file."""
    return next(of for start, of in PROOFS if file.startswith(start))


@dataclass(frozen=True)
class Verdict:
    """stage: "test", "verify", or "" for a survivor; by: the test or layout that saw it; hung: it was
    stopped; ran: how many tests run the line; seconds: what the judgement took."""

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
    def key(self) -> tuple[str, int, str, str]:
        return self.file, self.line, self.before, self.after


def chosen(
    tests: Sequence[tuple[float, str]],
    budget_s: float,
    *,
    kills: Mapping[str, int] = NOTHING_KILLED,
    near: Container[str] = (),
) -> list[tuple[float, str]]:
    """The tests that a mutant meets: one case of every test function, the cheapest first, then a second
    case, while the budget lasts. (A function's cases often agree on what they do not see.)

    kills: {test function: how many mutants it killed}: one that has killed before comes sooner. near: files
    of tests that come before all others."""
    count: dict[str, int] = {}
    ranked = []
    for seconds, name in sorted(tests):
        function = name.split("[")[0]
        count[function] = count.get(function, 0) + 1
        far, eager = name.split("::")[0] not in near, 1 + EAGER * kills.get(function, 0)
        ranked.append((far, count[function], seconds / eager, seconds, name))
    kept, spent = [], 0.0
    for *_, seconds, name in sorted(ranked):
        if not kept or spent + seconds <= budget_s:
            kept.append((seconds, name))
            spent += seconds
    return kept


def about(file: str, root: Path) -> set[str]:
    """The files of tests that bear the name of a source, or import from it: parallel/zero.py has
    tests/parallel/test_zero.py."""
    module, stem = file.removesuffix(".py").replace("/", "."), Path(file).stem
    room, _, name = module.rpartition(".")
    words = [rf"from {re.escape(module)} import", rf"import {re.escape(module)}\b"]
    words += [rf"from {re.escape(room)} import .*\b{name}\b"] if room else []
    imports = re.compile("|".join(words))
    return {
        str(path.relative_to(root))
        for path in root.glob("tests/**/test_*.py")
        if path.stem.removeprefix("test_") == stem or imports.search(path.read_text())
    }


def judge(
    m: Mutant,
    controls: Controls,
    known: Map,
    *,
    budget_s: float = BUDGET_S,
    verify: bool = True,
    kills: Mapping[str, int] = NOTHING_KILLED,
) -> Verdict:
    """controls: of the compiled copy of the checkout in which the mutant is planted; the copy stays as it
    is. What a test says counts only where the test passes without the mutant. Raises ConfigError where a
    proof does not."""
    begun = time.perf_counter()
    text = (controls.base / "checkout" / m.file).read_text()
    tests = known.tests(m.file, text, m.line)

    def verdict(stage: str, by: str, hung: bool) -> Verdict:
        return Verdict(
            file=m.file,
            line=m.line,
            operator=m.operator,
            before=m.before,
            after=m.after,
            stage=stage,
            by=by,
            hung=hung,
            ran=len(tests),
            seconds=round(time.perf_counter() - begun, 1),
        )

    with sandbox(controls.base) as folder:
        planted = folder / "checkout" / m.file
        planted.unlink()
        planted.write_text(m.applied(text))

        # stage 1: the unit tests that run the line; one that fails without the mutant as well is left out
        near = about(m.file, controls.base / "checkout")
        meets = chosen(tests, budget_s, kills=kills, near=near)
        while meets:
            limit_s = START_S + SLOWER * sum(seconds for seconds, _ in meets)
            names = [name for _, name in meets]
            ran, last = run_tests(folder, names, limit_s)
            if ran.code in (0, NO_TESTS):
                break
            hung = ran.code is None
            suspects = [last] if last else sorted({name.split("::")[0] for name in names})
            if all(controls.passes(one, limit_s, anew=hung) for one in suspects):
                return verdict("test", last or "import", hung)
            flaky = {one for one in suspects if controls.kept[one] is None or hung}
            meets = [pair for pair in meets if not flaky & {pair[1], pair[1].split("::")[0]}]

        # stage 2: the proof. An error exit is no verdict: the next proof is asked
        silent = ""
        for p in proofs(m.file) if verify else ():
            ran = run_proof(folder, p, controls.limit_s(p))
            if ran.code is None:
                controls.limit_s(p, anew=True)
            if ran.code is None or ran.code == 1 and judged(ran):
                return verdict("verify", str(p), ran.code is None)
            if not judged(ran):
                silent = f"no verdict of scripts.verify {p}: {complaint(ran)}"
    return verdict("", silent, False)


def kills_of(verdicts: Iterable[Verdict]) -> Counter[str]:
    """{test function: how many mutants it killed}."""
    return Counter(v.by.split("[")[0] for v in verdicts if v.stage == "test")


# ---- the file of verdicts ----------------------------------------------------------------------------------


def read(path: Path) -> list[Verdict]:
    """What a JSON Lines file holds; none where there is no file. The last line may be half written."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(Verdict(**json.loads(line)))
        except json.JSONDecodeError:
            continue
    return found


def add(path: Path, v: Verdict) -> None:
    with open(path, "a") as out:
        print(json.dumps(asdict(v)), file=out, flush=True)
