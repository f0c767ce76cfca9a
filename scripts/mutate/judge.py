"""Which test sees a mutant: first the unit tests that run its line, the cheapest first, then scripts.verify
on layouts that use its file.
"""

import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.mutate.checkout import group_ends
from scripts.mutate.cover import Map, environment, pytest_command
from scripts.mutate.draw import Mutant

BUDGET_S = 60.0  # of the tests that a mutant meets, as they took when they were measured
START_S = 60.0  # that a run may take beside its tests before it counts as hung
SLOWER = 5.0  # a busy machine
LARGEST_FILE = 1 << 30
NO_TESTS = 5  # pytest's exit code


@dataclass(frozen=True)
class Proof:
    """A run of scripts.verify. Where: the start of a file's name."""

    name: str
    world: int
    words: str


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
            Proof("mixtral-tiny", 2, "dp2 ep2 zero1"),
        ),
    ),
    ("parallel/reduce", (Proof("llama3-tiny", 4, "dp4 zero1 p2p"),)),
    ("optim/muon", (Proof("llama3-tiny", 2, "tp2 muon"), Proof("mixtral-tiny", 2, "dp2 ep2 muon"))),
    ("optim/lamb", (Proof("llama3-tiny", 2, "dp2 zero1 lamb"), Proof("llama3-tiny", 2, "tp2 lars"))),
    ("optim/lion", (Proof("llama3-tiny", 2, "dp2 zero1 lion"),)),
    ("optim/sgd", (Proof("llama3-tiny", 2, "dp2 zero1 sgd"),)),
    (
        "parallel/",
        (*DENSE, Proof("mixtral-tiny", 4, "dp2 tp2 ep4"), Proof("llama3-tiny", 4, "cp2 tp2 cp-ring")),
    ),
    ("", DENSE),
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


def chosen(tests: Sequence[tuple[float, str]], budget_s: float) -> list[tuple[float, str]]:
    """The tests that a mutant meets: one case of every test function, the cheapest first, then a second
    case, while the budget lasts. (A function's cases often agree on what they do not see.)"""
    count: dict[str, int] = {}
    ranked = []
    for seconds, name in sorted(tests):
        function = name.split("[")[0]
        count[function] = count.get(function, 0) + 1
        ranked.append((count[function], seconds, name))
    kept, spent = [], 0.0
    for _, seconds, name in sorted(ranked):
        if not kept or spent + seconds <= budget_s:
            kept.append((seconds, name))
            spent += seconds
    return kept


def ends(command: list[str], cwd: Path, limit_s: float, log: Path, **env: str) -> int | None:
    """The exit code of a command, None where it hung. Its output goes to log; what it leaves running is
    ended."""
    with open(log, "wb") as out:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment(**env),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE)),
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            group_ends(process)


def judge(m: Mutant, base: Path, known: Map, budget_s: float = BUDGET_S, verify: bool = True) -> Verdict:
    """base: a compiled copy of the checkout (checkout.copied), which stays as it is."""
    begun = time.perf_counter()
    text = (base / "checkout" / m.file).read_text()
    tests = known.tests(m.file, text, m.line)

    def verdict(stage: str, by: str, hung: bool) -> Verdict:
        return Verdict(
            m.file,
            m.line,
            m.operator,
            m.before,
            m.after,
            stage,
            by,
            hung,
            len(tests),
            round(time.perf_counter() - begun, 1),
        )

    with tempfile.TemporaryDirectory(prefix="mutant-", dir=base, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        root = folder / "checkout"
        shutil.copytree(base / "checkout", root)
        (root / m.file).unlink()
        (root / m.file).write_text(m.applied(text))

        # stage 1: the unit tests that run the line
        meets = chosen(tests, budget_s)
        if meets:
            order = folder / "chosen.json"
            order.write_text(json.dumps([name for _, name in meets]))
            files = list(dict.fromkeys(name.split("::")[0] for _, name in meets))
            files = [file for file in files if (root / file).exists()]
            limit_s = START_S + SLOWER * sum(seconds for seconds, _ in meets)
            code = ends(
                pytest_command(folder, "-x", *files),
                root,
                limit_s,
                folder / "log",
                BEVATRON_CHOSEN=str(order),
            )
            if code not in (0, NO_TESTS):
                last = order.with_suffix(".last")
                return verdict("test", last.read_text() if last.exists() else "import", code is None)

        # stage 2: the proof
        for p in proofs(m.file) if verify else ():
            command = [
                sys.executable,
                "-m",
                "scripts.verify",
                p.name,
                "--world",
                str(p.world),
                "--layouts",
                "1",
                "--only",
                *p.words.split(),
            ]
            code = ends(command, root, 2 * START_S + 60, folder / "log")
            if code != 0:
                return verdict("verify", f"{p.name} --world {p.world} --only {p.words}", code is None)
    return verdict("", "", False)


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
