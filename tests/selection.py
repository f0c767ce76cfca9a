"""Which tests a run takes.

    bash scripts/test.sh                     the core: every test but those marked slow
    bash scripts/test.sh --all [--part K/M]  every test, or the K-th of M parts that take about as long
    bash scripts/test.sh --changed [COMMIT]  the core, and each test that runs what has changed since COMMIT
    bash scripts/test.sh tests/optim         what is named, slow or not

A mark stands where the test does. `@pytest.mark.slow` leaves a test to --all. Of a table the core takes every
fifth case with `@pytest.mark.slow(every=5)`, and those with these ids with `@pytest.mark.slow(core=["a"])`.
Slow are tests of functions that the core runs in others, and tests that take too long for it.

What a test runs is known from tests/footprints.xz (tests/footprints.py), of a commit at which it passed.
`--changed` without a commit begins there. With --minutes it takes the tests that fit, first some for every
function that has changed, and says how many are left; --without-core skips what has not begun by then.
"""

import re
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from footprint_file import REST, Footprints, get_parts
from footprints import NO_TEXT

from config.parts import parse_part

ROOT = Path(__file__).resolve().parents[1]
EVERY_TEST_READS = re.compile(r"pyproject\.toml|requirements.*\.txt|tests/conftest\.py")
UNKNOWN_S = 1.0  # of a test that has not been recorded
PROCESSES = 2  # that are busy, of the three of scripts/test.sh


class SelectionError(Exception):
    """A mark or an option that means nothing."""


# ---- the core ----------------------------------------------------------------------------------------------


def case_of(name: str) -> str:
    """The id of a case: what stands in brackets; "" for a test without parameters."""
    return name.partition("[")[2].removesuffix("]")


def core_of(marks: Mapping[str, dict | None]) -> set[str]:
    """The tests of the core. marks: {node id: arguments of its mark slow, None without one}, in their order.

    Raises SelectionError for an id in `core` that no case has.
    """
    chosen = set()
    place: Counter[str] = Counter()
    missing: dict[str, set[str]] = {}
    for name, mark in marks.items():
        function, case = name.partition("[")[0], case_of(name)
        if mark is None:
            chosen.add(name)
            continue
        ids = missing.setdefault(function, set(mark.get("core", ())))
        if case in mark.get("core", ()) or ("every" in mark and place[function] % mark["every"] == 0):
            chosen.add(name)
        ids.discard(case)
        place[function] += 1
    for function, ids in missing.items():
        if ids:
            raise SelectionError(f"{function}: its mark slow names cases that are not there: {sorted(ids)}")
    return chosen


# ---- parts -------------------------------------------------------------------------------------------------


def with_siblings(known: Footprints, names: Iterable[str]) -> Footprints:
    """Adds the tests that have not been recorded, but other cases of whose function have: as one of them that
    runs all that they run, and takes as long as they do on average.
    """
    of_function: dict[str, list[tuple[float, str, int]]] = defaultdict(list)
    for name, test in known.tests.items():
        of_function[name.partition("[")[0]].append(test)
    tests = dict(known.tests)
    for name in names:
        siblings = of_function.get(name.partition("[")[0])
        if name not in tests and siblings:
            seconds = sum(seconds for seconds, _, _ in siblings) / len(siblings)
            bits = 0
            for _, _, footprint in siblings:
                bits |= footprint
            tests[name] = (seconds, "unknown", bits)
    return replace(known, tests=tests)


def time_call(name: str, known: Footprints) -> float:
    return known.tests[name][0] if name in known.tests else UNKNOWN_S


def lengths_of(names: Iterable[str], known: Footprints) -> dict[str, float]:
    """{file: seconds of these tests of it}"""
    lengths: dict[str, float] = defaultdict(float)
    for name in names:
        lengths[name.partition("::")[0]] += time_call(name, known)
    return lengths


def longest_first(names: Iterable[str], known: Footprints) -> list[str]:
    """The files of these tests."""
    lengths = lengths_of(names, known)
    return sorted(lengths, key=lambda file: (-lengths[file], file))


def part_of(names: Iterable[str], part: str, known: Footprints) -> set[str]:
    """The tests of part K of M ("K/M"): whole files, spread so that the parts take about as long.

    Raises ConfigError if there is no such part.
    """
    names = list(names)
    lengths = lengths_of(names, known)
    number, parts = parse_part(part, len(lengths))
    totals = [0.0] * parts
    files = set()
    for file in longest_first(names, known):
        shortest = totals.index(min(totals))
        totals[shortest] += lengths[file]
        if shortest == number - 1:
            files.add(file)
    return {name for name in names if name.partition("::")[0] in files}


# ---- what has changed --------------------------------------------------------------------------------------


def changed_parts(old: Mapping[str, str], new: Mapping[str, str]) -> set[tuple[str, str]]:
    """{(file, function or REST)} that differ between two states {file: text}, or are in one alone."""
    changed = set()
    for file in old.keys() | new.keys():
        if old.get(file) == new.get(file):
            continue
        before = get_parts(file, old[file]) if file in old else {}
        after = get_parts(file, new[file]) if file in new else {}
        for name in before.keys() | after.keys():
            if before.get(name) != after.get(name):
                changed.add((file, name))
    return changed


def text_at(commit: str, names: Iterable[str]) -> dict[str, str]:
    """{file: its text at the commit}, of the files that were there."""
    texts = {}
    for name in names:
        done = subprocess.run(["git", "show", f"{commit}:{name}"], cwd=ROOT, capture_output=True)
        if done.returncode == 0:
            texts[name] = done.stdout.decode(errors="replace")
    return texts


def changes_since(commit: str) -> set[tuple[str, str]]:
    """The parts that differ between a commit and the files as they are.

    Raises SelectionError for a commit that git does not have.
    """
    command = ["git", "diff", "--name-only", "--no-renames", "-z", commit, "--"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise SelectionError(
            f"--changed {commit}: git has no such commit; a shallow clone needs `git fetch --unshallow`"
        )
    untracked = subprocess.run(
        ["git", "ls-files", "--others", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True
    )
    names = {name for name in (done.stdout + untracked.stdout).split("\0") if name}
    names -= {name for name in names if name.endswith(NO_TEXT)}
    now = {name: (ROOT / name).read_text(errors="replace") for name in names if (ROOT / name).exists()}
    return changed_parts(text_at(commit, names), now)


def tests_of_changes(
    names: Iterable[str], changed: set[tuple[str, str]], known: Footprints
) -> dict[tuple[str, str], list[str]]:
    """{changed part: the tests that run it, the cheapest first}. A test that is not known counts for
    ("", "new"); what stands outside of functions counts for all that run a function of its file.
    """
    display_width: dict[tuple[str, str], int] = defaultdict(int)
    for at, (file, function) in enumerate(known.columns):
        display_width[file, function] |= 1 << at
        display_width[file, REST] |= 1 << at
    runs: dict[tuple[str, str], list[str]] = {}
    unknown = []
    masks = {part: display_width.get(part, 0) for part in changed}
    if any(EVERY_TEST_READS.fullmatch(file) and function == REST for file, function in changed):
        masks["", "every test"] = -1
    for name in names:
        if name not in known.tests:
            unknown.append(name)
            continue
        footprint = known.tests[name][2]
        for part, mask in masks.items():
            if footprint & mask or mask == -1:
                runs.setdefault(part, []).append(name)
    for tests in runs.values():
        tests.sort(key=lambda name: known.tests[name][0])
    if unknown:
        runs["", "new"] = unknown
    return runs


def in_order(runs: Mapping[tuple[str, str], Sequence[str]]) -> list[str]:
    """The tests of all changed parts: the cheapest of each part, then the second of each, and so on."""
    place: dict[str, int] = {}
    for part, tests in runs.items():
        for at, name in enumerate(tests):
            rank = -1 if part == ("", "new") else at
            place[name] = min(rank, place.get(name, rank))
    return sorted(place, key=lambda name: (place[name], name))  # every worker finds the same


def that_fit(names: Sequence[str], minutes: float | None, known: Footprints) -> list[str]:
    """The first of these tests that two processes are expected to run within the minutes."""
    if minutes is None:
        return list(names)
    chosen, left = [], 60 * minutes * PROCESSES
    for name in names:
        seconds = time_call(name, known)
        if seconds <= left:
            chosen.append(name)
            left -= seconds
    return chosen


class Deadline:
    """A plugin of pytest that skips each test that has not begun when the minutes are over.

    that_fit counts on recorded times; a busy machine takes longer.
    """

    def __init__(self, minutes: float) -> None:
        self.minutes, self.end = minutes, time.monotonic() + 60 * minutes

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.monotonic() > self.end:
            pytest.skip(f"not begun when the {self.minutes:g} minutes were over")
