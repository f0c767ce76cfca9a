"""The footprint of each test: the functions and the other files of this checkout that it uses.

    bash scripts/test.sh --all --record FOLDER       runs every test and notes its footprint and its seconds
    python tests/footprints.py FOLDER [FOLDER ...]   packs what was noted, in parts or at once

tests/footprints.xz has what was packed, with the commit at which these tests passed. From it `--changed`
(tests/selection.py) knows which tests run what has changed since, `--all --part K/M` how long a file takes,
and a planted bug (lab/proof/mutate) the tests that it can meet.

A footprint is of all processes of a test: of this one, of ranks of the pool, of programs that it starts.
What fixtures of a module run counts for each test of its file.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]

from footprint_file import (  # noqa: E402
    FOOTPRINTS,
    REST,
    Footprints,
    functions_of,
    write_footprints,
)
from hooks import mutate_trace  # noqa: E402

from config import ConfigError  # noqa: E402

HOOKS = ROOT / "tests" / "hooks"

NO_TEXT = (".png", ".xz", ".bin")
ROWS = 12000


def tracked_files(root: Path = ROOT) -> list[str]:
    """The files of the checkout that git knows and that are text."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and not name.endswith(NO_TEXT)]


def read_texts() -> dict[str, str]:
    """{file: its text} of the tracked files."""
    return {name: (ROOT / name).read_text(errors="replace") for name in tracked_files()}


def digest_of(texts: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


# ---- recording ---------------------------------------------------------------------------------------------


class Recorder:
    """A plugin that notes the footprint of every test of this process in a folder.

    tests.jsonl has a line a test: [row, node id, seconds, outcome]. `hits` has a row of bytes a test
    (mutate_trace.py), and row 0 what ran outside of any.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        texts = read_texts()
        first, width = {}, 0
        for name, text in texts.items():
            first[str(ROOT / name)] = width
            width += 2 + text.count("\n")
        plan = {"width": width, "first": first, "texts": digest_of(texts)}
        (folder / "lines.json").write_text(json.dumps(plan))
        with open(folder / "hits", "wb") as hits:  # a sparse file
            hits.truncate(mutate_trace.HEAD + ROWS * width)
        self.row = 0
        self.shared_rows: dict[str, int] = {}
        self.seconds = 0.0
        self.outcome = "passed"
        os.environ["BEVATRON_TRACE"] = str(folder)
        path = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(HOOKS), *([path] if path else [])])
        mutate_trace.start(str(folder))
        trace_some_programs()

    def tell(self, row: int) -> None:
        with open(self.folder / "hits", "r+b") as hits:
            hits.write(row.to_bytes(mutate_trace.HEAD, "little"))

    def next_row(self) -> int:
        self.row += 1
        return self.row

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        row = self.current = self.next_row()
        self.seconds, self.outcome = 0.0, "passed"
        self.tell(row)
        result = yield
        self.write([row, item.nodeid, round(self.seconds, 3), self.outcome])
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef, request):
        if fixturedef.scope == "function":
            return (yield)
        file = request.node.nodeid.partition("::")[0]
        if file not in self.shared_rows:
            self.shared_rows[file] = self.next_row()
            self.write([self.shared_rows[file], file, 0.0, "shared"])
        self.tell(self.shared_rows[file])
        try:
            return (yield)
        finally:
            self.tell(self.current)

    def pytest_runtest_logreport(self, report):
        self.seconds += report.duration
        if report.outcome != "passed" and self.outcome != "failed":
            self.outcome = report.outcome

    def write(self, line: list) -> None:
        with open(self.folder / "tests.jsonl", "a") as out:
            print(json.dumps(line), file=out)


def trace_some_programs() -> None:
    """Traces the first, second, fourth, eighth program of a launch that Triton's interpreter runs, and so on.

    All are of the same functions, and a traced one takes ten times as long.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:  # no wheel for this platform
        return
    tracer = sys.gettrace()
    launch = interpreter.GridExecutor.__call__
    begin_program = interpreter.InterpreterBuilder.set_grid_idx

    def traced_launch(self, *arguments, **named):
        try:
            return launch(self, *arguments, **named)
        finally:
            sys.settrace(tracer)

    def traced_program(self, x, y, z):
        begin_program(self, x, y, z)
        self.num_programs = 1 if x == y == z == 0 else self.num_programs + 1
        is_power_of_two = self.num_programs & (self.num_programs - 1) == 0
        sys.settrace(tracer if is_power_of_two else None)

    interpreter.GridExecutor.__call__ = traced_launch
    interpreter.InterpreterBuilder.set_grid_idx = traced_program


# ---- packing -----------------------------------------------------------------------------------------------


def pack(folders: list[Path], commit: str) -> Footprints:
    """Reads what recorders have left of this checkout, which is at `commit`.

    Raises ConfigError for what was recorded of other texts: their lines are those of other functions.
    """
    texts = read_texts()

    # the columns: every function and every rest; which of them a line belongs to
    columns: list[tuple[str, str]] = []
    column_of_line: dict[str, list[int]] = {}
    for name, text in texts.items():
        rest = len(columns)
        columns.append((name, REST))
        of_line = [rest] * (text.count("\n") + 2)
        if name.endswith(".py"):
            for function in functions_of(text):
                of_line[function.first : function.last + 1] = [len(columns)] * (
                    function.last + 1 - function.first
                )
                columns.append((name, function.name))
        column_of_line[name] = of_line

    tests: dict[str, tuple[float, str, int]] = {}
    for folder in folders:
        for recorded in sorted(folder.glob("*/tests.jsonl")):
            if json.loads(recorded.with_name("lines.json").read_text())["texts"] != digest_of(texts):
                raise ConfigError(
                    f"{recorded.parent}: was recorded of other files than {commit[:7]} has; check out the "
                    "commit that was recorded, and pack it there"
                )
            tests |= read_record(recorded.parent, column_of_line)
    outcomes = defaultdict(int)
    for _, outcome, _ in tests.values():
        outcomes[outcome] += 1
    summary = {**outcomes, "minutes": round(sum(seconds for seconds, _, _ in tests.values()) / 60, 1)}
    return Footprints(commit, summary, columns, tests)


def read_record(folder: Path, column_of_line: dict[str, list[int]]) -> dict[str, tuple[float, str, int]]:
    """The tests of one recorder, each with its footprint as bits, those of its file's fixtures included."""
    plan = json.loads((folder / "lines.json").read_text())
    width = plan["width"]
    column_of_byte: list[int] = []
    for path in plan["first"]:
        column_of_byte += column_of_line[str(Path(path).relative_to(ROOT))]
    bits_of_row: dict[int, int] = {}
    rows = [json.loads(line) for line in (folder / "tests.jsonl").read_text().splitlines()]
    with open(folder / "hits", "rb") as hits:
        for row, *_ in rows:
            hits.seek(mutate_trace.HEAD + row * width)
            marks = hits.read(width)
            bits, at = 0, marks.find(1)
            while at >= 0:
                bits |= 1 << column_of_byte[at]
                at = marks.find(1, at + 1)
            bits_of_row[row] = bits
    shared = {name: bits_of_row[row] for row, name, _, outcome in rows if outcome == "shared"}
    tests = {}
    for row, name, seconds, outcome in rows:
        if outcome != "shared":
            tests[name] = (seconds, outcome, bits_of_row[row] | shared.get(name.partition("::")[0], 0))
    return tests


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("python tests/footprints.py", description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path)
    folders = parser.parse_args(argv).folders
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    try:
        footprints = pack(folders, head.stdout.strip())
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    failed = [name for name, (_, outcome, _) in footprints.tests.items() if outcome == "failed"]
    if failed:
        print(f"error: {len(failed)} tests failed, such as {failed[0]}: nothing is written", file=sys.stderr)
        return 2
    write_footprints(footprints)
    num_tests = len(footprints.tests)
    print(f"{FOOTPRINTS.name}: {num_tests} tests at {footprints.commit[:7]}: {footprints.summary}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
