"""Which tests run a function? tests/footprints.xz says it: what each test ran at the commit that it names.

A footprint has the functions that a test runs, in whatever process, and the other files that it opens
(tests/footprints.py records them). A function is known by its name, wherever it stands in its file.
"""

import ast
import hashlib
import itertools
import json
import lzma
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from proof.mutate.checkout import ROOT

HOOKS = Path(__file__).parent / "hooks"
CACHE = ROOT / ".cache" / "mutate"
FOOTPRINTS = ROOT / "tests" / "footprints.xz"
OF_TESTS = ("names", "seconds", "outcomes", "bits")  # of footprints.xz, a list each
REST = "<rest>"  # what a file holds outside of functions; of a file that is not Python, all of it


# ---- the parts of a file -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Function:
    """A function, or a method: Class.method. first, last: its lines, decorators included."""

    name: str
    first: int
    last: int
    digest: str


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def functions_of(text: str) -> list[Function]:
    """The functions of a Python file, outermost ones alone: what one holds inside belongs to it."""
    functions = []
    lines = text.splitlines()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                body = "\n".join(lines[first - 1 : child.end_lineno])
                functions.append(Function(prefix + child.name, first, child.end_lineno, digest_of(body)))
            elif isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")
            else:
                visit(child, prefix)

    visit(ast.parse(text), "")
    return functions


def parts_of(file: str, text: str) -> dict[str, str]:
    """{name of a function, or REST: digest of its text}."""
    if not file.endswith(".py"):
        return {REST: digest_of(text)}
    lines = text.splitlines()
    parts = {}
    for function in functions_of(text):
        name = function.name
        while name in parts:  # a second definition of the name, in another branch
            name += "'"
        parts[name] = function.digest
        for number in range(function.first - 1, function.last):
            lines[number] = ""
    parts[REST] = digest_of("\n".join(line for line in lines if line.strip()))
    return parts


# ---- footprints --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Footprints:
    """The footprints of the tests at a commit.

    columns: (file, function or REST) of each bit of a footprint.
    tests: {node id: (seconds, outcome, footprint)}.
    """

    commit: str
    summary: dict
    columns: list[tuple[str, str]]
    tests: dict[str, tuple[float, str, int]]


NOTHING = Footprints(commit="", summary={}, columns=[], tests={})


def read_footprints(file: Path = FOOTPRINTS) -> Footprints:
    tree = json.loads(lzma.decompress(file.read_bytes()))
    tests = {}
    bits = 0
    for name, seconds, outcome, changed in zip(*(tree[key] for key in OF_TESTS)):
        bits ^= int(changed, 16)
        tests[name] = (seconds, outcome, bits)
    columns = [(file, name) for file, names in tree["columns"] for name in names]
    return Footprints(tree["commit"], tree["summary"], columns, tests)


def write_footprints(footprints: Footprints, file: Path = FOOTPRINTS) -> None:
    """Small: tests that run nearly the same follow each other, each with the bits that differ from the one
    before it; seconds have two digits."""
    tests: list[tuple[str, float, str, str]] = []
    before = 0
    for name, (seconds, outcome, bits) in sorted(footprints.tests.items(), key=lambda item: item[1][2]):
        tests.append((name, float(f"{seconds:.2g}"), outcome, f"{bits ^ before:x}"))
        before = bits
    columns: list[tuple[str, list[str]]] = []
    for of_file, group in itertools.groupby(footprints.columns, key=lambda column: column[0]):
        columns.append((of_file, [name for _, name in group]))
    tree = {
        "commit": footprints.commit,
        "summary": footprints.summary,
        "columns": columns,
        **dict(zip(OF_TESTS, zip(*tests))),
    }
    text = json.dumps(tree, separators=(",", ":"))
    file.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


@dataclass(frozen=True)
class CoverageMap:
    """Which tests a mutant can meet. core: those of the tests that `bash scripts/test.sh` runs."""

    footprints: Footprints
    core: frozenset[str]

    def tests_of_line(self, file: str, text: str, line: int) -> list[tuple[float, str]]:
        """Returns [(seconds, name)] of the tests that run the function at a line, sorted.

        text: the present text of `file`. Outside of functions these are the tests that run any function of
        the file.
        """
        name = function_at(text, line)
        mask = 0
        for at, (column_file, column) in enumerate(self.footprints.columns):
            if column_file == file and name in (REST, column):
                mask |= 1 << at
        found = []
        for test, (seconds, outcome, footprint) in self.footprints.tests.items():
            if outcome == "passed" and footprint & mask:
                found.append((seconds, test))
        return sorted(found)


def function_at(text: str, line: int) -> str:
    """The name of the function at a line; REST outside of any."""
    for function in functions_of(text):
        if function.first <= line <= function.last:
            return function.name
    return REST


def core_tests() -> frozenset[str]:
    """The tests that `bash scripts/test.sh` runs. Raises RuntimeError if pytest cannot collect them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-o", "addopts=-q"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    names = [line for line in done.stdout.splitlines() if "::" in line]
    if done.returncode != 0 or not names:
        raise RuntimeError(f"pytest collects no tests: {done.stdout[-500:]}{done.stderr[-500:]}")
    return frozenset(names)


# ---- a run of tests that a mutant meets --------------------------------------------------------------------


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


def pytest_arguments(folder: Path, *arguments: str) -> list[str]:
    """Returns the words of a pytest command with the plugin of the hooks. folder: for temporary files."""
    words = ["-q", "-p", "no:cacheprovider", "-p", "mutate_pytest", "-o", "addopts=", "--tb", "line"]
    return [*words, "--basetemp", str(folder / "tmp"), *arguments]
