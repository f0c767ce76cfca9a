"""Which tests run a line? Measured once for each test file and kept in .cache/mutate.

A measurement is kept with the text of the sources that it saw. A line that has moved since is still found,
and a new line has the tests of the line that it replaced. Only tests that passed count.
"""

import ast
import difflib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from proof.mutate.checkout import ROOT, copy_checkout, kill_session
from proof.mutate.hooks import mutate_trace
from proof.mutate.source import last_line

HOOKS = Path(__file__).parent / "hooks"
CACHE = ROOT / ".cache" / "mutate"
LIMIT_S = 1800.0
IMPORT_ROW = 0  # the row of what runs before the first test
IMPORT = -1  # in a list of indices of tests: the import

# Tests of kernels and of the planner, tests of texts, tests that take long, and the tests of mutate itself.
NOT_MEASURED = (
    "tests/kernels/",
    "tests/plan/",
    "tests/test_house.py",
    "tests/test_invariance.py",
    "tests/proof/test_mutate.py",
    "tests/benchmarks/",
)


def test_files(root: Path = ROOT) -> list[str]:
    """Returns the test files that a mutant of the core can meet, relative to root."""
    names = sorted(str(path.relative_to(root)) for path in root.glob("tests/**/test_*.py"))
    return [name for name in names if not name.startswith(NOT_MEASURED)]


# ---- measure -----------------------------------------------------------------------------------------------


def child_environment(**more: str) -> dict[str, str]:
    """Returns the environment of a run of tests or of scripts.verify.

    One thread, no bytecode files, the hooks on the path, and a short timeout for a rank that a mutant has
    lost.
    """
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "BEVATRON_POOL_TIMEOUT_S": "20",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(HOOKS),
        **more,
    }


def pytest_command(folder: Path, *arguments: str) -> list[str]:
    """Returns a pytest command with the plugin of the hooks. folder: for temporary files."""
    command = [sys.executable, "-m", "pytest", "-q"]
    command += ["-p", "no:cacheprovider", "-p", "mutate_pytest"]
    command += ["-o", "addopts=", "--tb", "line"]
    command += ["--basetemp", str(folder / "tmp")]
    return [*command, *arguments]


def measure(test_file: str, sources: Sequence[str], limit_s: float = LIMIT_S) -> dict:
    """Runs one test file in a copy of the checkout and records the lines that each of its tests runs.

    Returns {"sources": {file: hash of its text}, "tests": [[name, seconds]], "lines": {file: {line: [indices
    of tests, IMPORT for the import]}}, "left_out": [names of tests that did not pass], "ended": whether
    pytest ended by itself}. Tests that have not ended after limit_s are left out.
    """
    with copy_checkout(ROOT) as folder:
        checkout = folder / "checkout"
        trace = folder / "trace"
        trace.mkdir()
        texts = {name: (checkout / name).read_text() for name in sources}

        # One row of `hits` has a byte for each line of each source.
        first_column = {}
        width = 0
        for name, text in texts.items():
            first_column[name] = width
            width += len(text.splitlines()) + 1
        start_trace_files(trace, checkout, first_column, width)

        process = run_traced(test_file, folder, limit_s)

        results = [json.loads(line) for line in (trace / "tests.jsonl").read_text().splitlines()]
        passed = [(number, name, seconds) for number, name, seconds, has_passed in results if has_passed]
        failed = [name for _, name, _, has_passed in results if not has_passed]
        with open(trace / "hits", "rb") as hits:
            rows = {IMPORT: read_row(hits, IMPORT_ROW, width)}
            for index, (number, _, _) in enumerate(passed):
                rows[index] = read_row(hits, number, width)

        lines: dict[str, dict[str, list[int]]] = {}
        for name, text in texts.items():
            for line in range(1, len(text.splitlines()) + 1):
                indices = [index for index, row in rows.items() if row[first_column[name] + line]]
                if indices:
                    lines.setdefault(name, {})[str(line)] = indices

    return {
        "sources": {name: save_source(text) for name, text in texts.items()},
        "tests": [[name, seconds] for _, name, seconds in passed],
        "lines": lines,
        "left_out": failed,
        "ended": process.returncode in (0, 1),
    }


def start_trace_files(trace: Path, checkout: Path, first_column: Mapping[str, int], width: int) -> None:
    """Writes the files that hooks/mutate_trace.py and hooks/mutate_pytest.py need."""
    columns = {str(checkout / name): column for name, column in first_column.items()}
    (trace / "lines.json").write_text(json.dumps({"width": width, "first": columns}))
    with open(trace / "hits", "wb") as hits:  # a sparse file
        hits.truncate(mutate_trace.HEAD + mutate_trace.ROWS * width)
    (trace / "tests.jsonl").touch()


def run_traced(test_file: str, folder: Path, limit_s: float) -> subprocess.Popen:
    """Runs a test file with the trace on; returns the ended process. Its output stays beside the record."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(record_path(test_file).with_suffix(".log"), "wb") as log:
        process = subprocess.Popen(
            pytest_command(folder, test_file),
            cwd=folder / "checkout",
            env=child_environment(BEVATRON_TRACE=str(folder / "trace")),
            start_new_session=True,
            stdout=log,
            stderr=log,
        )
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        pass  # the tests that ended count
    finally:
        kill_session(process)
    return process


def read_row(hits: BinaryIO, number: int, width: int) -> bytes:
    """Returns the row of a test: a byte for each line, 0 if the test did not run it."""
    hits.seek(mutate_trace.HEAD + number * width)
    return hits.read(width)


def save_source(text: str) -> str:
    """Saves a source in the cache under its hash; returns the hash."""
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    CACHE.mkdir(parents=True, exist_ok=True)
    path = source_path(name)
    if not path.exists():
        path.write_text(text)
    return name


def source_path(name: str) -> Path:
    return CACHE / f"{name}.py"


def save_record(test_file: str, record: dict) -> None:
    record_path(test_file).write_text(json.dumps(record))


def record_path(test_file: str) -> Path:
    """Returns the file in which the measurement of a test file is kept."""
    return CACHE / (test_file.removesuffix(".py").replace("/", ".") + ".json")


# ---- look up -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CoverageMap:
    """records: {test file: its measurement}."""

    records: dict[str, dict]

    @staticmethod
    def read() -> "CoverageMap":
        """Reads the measurements of all test files that have one."""
        measured = [name for name in test_files() if record_path(name).exists()]
        return CoverageMap({name: json.loads(record_path(name).read_text()) for name in measured})

    def tests_of_line(self, file: str, text: str, line: int) -> list[tuple[float, str]]:
        """Returns [(seconds, name)] of the tests that run a statement, sorted.

        text: the present text of `file`. For a line that runs at import (a default, the body of a class)
        these are the tests of its function, else those of its file.
        """
        spans = enclosing_spans(text, line)
        is_in_body = is_in_function_body(text, line)
        seconds_of_test: dict[str, float] = {}
        for record in self.records.values():
            hits_of_line = record["lines"].get(file)
            if not hits_of_line:
                continue
            measured_text = source_path(record["sources"][file]).read_text()
            for span in spans:
                indices: set[int] = set()
                for number in lines_in_older_text(measured_text, text, span):
                    indices.update(hits_of_line.get(str(number), ()))
                run_by_tests = indices - {IMPORT}
                for index in run_by_tests:
                    name, seconds = record["tests"][index]
                    seconds_of_test[name] = seconds

                # A statement of a body that nothing runs has no tests; the span around it does not count.
                is_never_run = not indices and span is spans[0] and is_in_body
                if run_by_tests or is_never_run:
                    break
        return sorted((seconds, name) for name, seconds in seconds_of_test.items())


def enclosing_spans(text: str, line: int) -> list[range]:
    """Returns the lines of the statement at `line`, of the functions and classes around it, of the file."""
    statements = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and node.lineno <= line <= last_line(node):
            statements.append(node)
    statements.sort(key=lambda node: last_line(node) - node.lineno, reverse=True)

    spans = [range(1, len(text.splitlines()) + 1)]
    for node in statements:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            spans.insert(0, range(node.lineno, last_line(node) + 1))
            continue
        # a compound statement counts up to the first statement of its body
        children = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        end_of_head = min((child.lineno for child in children), default=last_line(node) + 1) - 1
        last = max(end_of_head, node.lineno)
        if line <= last:
            spans.insert(0, range(node.lineno, last + 1))
    return spans


def is_in_function_body(text: str, line: int) -> bool:
    """Returns whether a line runs when a function is called: not its head, nor a class or a file alone."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef):
            continue
        first = node.body[0].lineno
        if first <= line <= last_line(node):
            return True
    return False


def lines_in_older_text(older: str, newer: str, span: range) -> list[int]:
    """Returns the lines of the older text that correspond to the lines `span` of the newer one."""
    if older == newer:
        return list(span)
    matcher = difflib.SequenceMatcher(None, older.splitlines(), newer.splitlines(), autojunk=False)
    lines = []
    for _, old_start, old_end, new_start, new_end in matcher.get_opcodes():
        last_old = max(old_start, old_end - 1)
        for index in range(new_start, new_end):
            if index + 1 in span:
                lines.append(min(old_start + index - new_start, last_old) + 1)
    return lines
