"""Which tests run a line? Measured once for each file of tests, and kept in .cache/mutate.

A measurement is kept with the text of the sources that it saw: a line that has moved since is still
found, and a new line has the tests of the line that it replaced. Only tests that passed count.
"""

import ast
import difflib
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.mutate.checkout import ROOT, copied, group_ends
from scripts.mutate.hooks import mutate_trace

HOOKS = Path(__file__).parent / "hooks"
KEPT = ROOT / ".cache" / "mutate"
LIMIT_S = 1800.0
IMPORT = 0  # the row of what runs before the first test
NO_MAP = (
    "tests/kernels/",
    "tests/plan/",
    "tests/test_house.py",
    "tests/test_invariance.py",
    "tests/scripts/test_mutate.py",
    "tests/scripts/test_bench",
)  # kernels, forecasts, texts, and what is stage 2 itself


def test_files(root: Path = ROOT) -> list[str]:
    """The files of tests that a mutant of the core can meet, relative to root."""
    found = sorted(str(path.relative_to(root)) for path in root.glob("tests/**/test_*.py"))
    return [name for name in found if not name.startswith(NO_MAP)]


# ---- measuring ---------------------------------------------------------------------------------------------


def environment(**more: str) -> dict[str, str]:
    """For a run of tests: one thread, no bytecode left behind, the hooks on the path, no long wait for a rank
    that a mutant has lost."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "BEVATRON_POOL_TIMEOUT_S": "20",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(HOOKS),
        **more,
    }


def pytest_command(folder: Path, *words: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "mutate_pytest",
        "-o",
        "addopts=",
        "--tb",
        "line",
        "--basetemp",
        str(folder / "tmp"),
        *words,
    ]


def measure(tests: str, sources: list[str], limit_s: float = LIMIT_S) -> dict:
    """Run one file of tests in a copy of the checkout; returns {"sources": {file: hash of its text},
    "tests": [[name, seconds]], "lines": {file: {line: [places in tests]}}}; place -1 is the import. Tests
    that have not ended after limit_s are left out."""
    with copied(ROOT) as folder:
        root, trace = folder / "checkout", folder / "trace"
        trace.mkdir()

        # where each source's lines lie in a row
        first, width = {}, 0
        for name in sources:
            first[name] = width
            width += len((root / name).read_text().splitlines()) + 1
        plan = {"width": width, "first": {str(root / name): place for name, place in first.items()}}
        (trace / "lines.json").write_text(json.dumps(plan))
        with open(trace / "hits", "wb") as hits:  # a sparse file
            hits.truncate(mutate_trace.HEAD + mutate_trace.ROWS * width)
        (trace / "tests.jsonl").touch()

        # the run; what it prints stays beside the record
        env = environment(BEVATRON_TRACE=str(trace))
        KEPT.mkdir(parents=True, exist_ok=True)
        with open(record(tests).with_suffix(".log"), "wb") as log:
            done = subprocess.Popen(
                pytest_command(folder, tests),
                cwd=root,
                env=env,
                start_new_session=True,
                stdout=log,
                stderr=log,
            )
        try:
            done.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            group_ends(done)

        # what it saw
        ran = [json.loads(line) for line in (trace / "tests.jsonl").read_text().splitlines()]
        passed = [(number, name, seconds) for number, name, seconds, ok in ran if ok]
        with open(trace / "hits", "rb") as hits:
            rows = {-1: row_of(hits, IMPORT, width)} | {
                i: row_of(hits, n, width) for i, (n, *_) in enumerate(passed)
            }
        lines: dict[str, dict[str, list[int]]] = {}
        for name in sources:
            for line in range(1, len((root / name).read_text().splitlines()) + 1):
                seen = [i for i, row in rows.items() if row[first[name] + line]]
                if seen:
                    lines.setdefault(name, {})[str(line)] = seen
        texts = {name: keep_text((root / name).read_text()) for name in sources}
    return {
        "sources": texts,
        "tests": [[name, seconds] for _, name, seconds in passed],
        "lines": lines,
        "left_out": [name for *_, name, _, ok in ran if not ok],
        "ended": done.returncode in (0, 1),
    }


def row_of(hits, number: int, width: int) -> bytes:
    hits.seek(mutate_trace.HEAD + number * width)
    return hits.read(width)


def keep_text(text: str) -> str:
    """Keep a source under its hash; returns the hash."""
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    KEPT.mkdir(parents=True, exist_ok=True)
    if not (KEPT / f"{name}.py").exists():
        (KEPT / f"{name}.py").write_text(text)
    return name


def keep(tests: str, found: dict) -> None:
    record(tests).write_text(json.dumps(found))


def record(tests: str) -> Path:
    """Where the measurement of a file of tests lies."""
    return KEPT / (tests.removesuffix(".py").replace("/", ".") + ".json")


# ---- asking ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Map:
    """records: {file of tests: its measurement}."""

    records: dict[str, dict]

    @staticmethod
    def read() -> "Map":
        return Map(
            {name: json.loads(record(name).read_text()) for name in test_files() if record(name).exists()}
        )

    def tests(self, file: str, text: str, line: int) -> list[tuple[float, str]]:
        """[(seconds, name)] of the tests that run a statement of `file`, whose text is now `text`. For a
        line that runs at import (a default, a class's body): the tests of its function, else those of its
        file."""
        spans = around(text, line)
        found: dict[str, float] = {}
        for measured in self.records.values():
            seen = measured["lines"].get(file)
            if not seen:
                continue
            known = (KEPT / f"{measured['sources'][file]}.py").read_text()
            for span in spans:
                hits = {i for n in lines_then(known, text, span) for i in seen.get(str(n), ())}
                found |= {measured["tests"][i][0]: measured["tests"][i][1] for i in hits if i >= 0}
                if hits - {-1} or (not hits and span is spans[0] and runs_when_called(text, line)):
                    break
        return sorted((seconds, name) for name, seconds in found.items())


def around(text: str, line: int) -> list[range]:
    """The lines of the statement at `line`, of the function around it, of the file."""
    every = [
        n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.stmt) and n.lineno <= line <= n.end_lineno
    ]
    spans = [range(1, len(text.splitlines()) + 1)]
    for node in sorted(every, key=lambda n: n.end_lineno - n.lineno, reverse=True):
        head = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        last = min((child.lineno for child in head), default=node.end_lineno + 1) - 1
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            spans.insert(0, range(node.lineno, node.end_lineno + 1))
        elif line <= max(last, node.lineno):
            spans.insert(0, range(node.lineno, max(last, node.lineno) + 1))
    return spans


def runs_when_called(text: str, line: int) -> bool:
    """Whether a line is of the body of a function: not of its head, nor of a class or the file alone."""
    return any(
        n.body[0].lineno <= line <= n.end_lineno
        for n in ast.walk(ast.parse(text))
        if isinstance(n, ast.FunctionDef)
    )


def lines_then(then: str, now: str, span: range) -> list[int]:
    """The lines of the older text that stand where the span's stand now."""
    if then == now:
        return list(span)
    lines = []
    for _, i, j, k, l in difflib.SequenceMatcher(
        None, then.splitlines(), now.splitlines(), autojunk=False
    ).get_opcodes():
        for at in range(k, l):
            if at + 1 in span:
                lines.append(min(i + at - k, max(i, j - 1)) + 1)
    return lines
