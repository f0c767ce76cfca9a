"""lab/docs/faults.md: every fault has its row, and every test that it names exists."""

import re
from pathlib import Path

from lab.benchmarks.chaos.layouts import LAYOUTS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "lab" / "docs" / "faults.md").read_text()
HOW_MANY = {"P": 16, "C": 13, "N": 6, "D": 6, "S": 9}
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def rows():
    """[(first cell, last cell)] of the tables of tests."""
    lines = [line for line in PAGE.splitlines() if line.startswith("|") and "::" in line]
    return [(line.split(" | ")[0].strip("| "), line.split(" | ")[-1]) for line in lines]


def test_every_fault_has_one_row():
    ids = [first for first, _ in rows() if re.fullmatch(r"[A-Z]\d+", first)]
    wanted = {f"{letter}{number}" for letter, count in HOW_MANY.items() for number in range(1, count + 1)}
    assert len(wanted) == 50
    assert sorted(ids) == sorted(wanted)


def test_every_test_that_the_page_names_exists():
    assert rows()
    for first, tests in rows():
        named = NAMED.findall(tests)
        assert len(named) == tests.count("::") > 0, first
        for file, test in named:
            assert f"\ndef {test}(" in (ROOT / file).read_text(), f"{first}: {file}::{test}"


def test_every_layout_is_described():
    for layout in LAYOUTS:
        assert f"`{layout.name}`" in PAGE, layout.name
