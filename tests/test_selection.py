"""tests/selection.py and tests/footprints.py: which tests a run takes."""

import itertools
import subprocess
import sys
from pathlib import Path

import footprint_file
import pytest
import selection
from footprint_file import REST, Footprints
from selection import SelectionError

from config import ConfigError

ROOT = Path(__file__).parent.parent


def known(tests, columns=()):
    """tests: {node id: (seconds, parts that it runs)}"""
    columns = list(columns)
    bits = {name: sum(1 << columns.index(part) for part in parts) for name, (_, parts) in tests.items()}
    passed = {name: (seconds, "passed", bits[name]) for name, (seconds, _) in tests.items()}
    return Footprints(commit="c", summary={}, columns=columns, tests=passed)


# ---- the core and parts ------------------------------------------------------------------------------------


def test_the_core_is_what_is_not_slow_and_the_named_cases():
    one = {"core": ["1"]}
    marks = {"a": None, "b": {}, "c[1]": one, "c[2]": one, "d[x[y]]": {"core": ("x[y]",)}}
    assert selection.core_of(marks) == {"a", "c[1]", "d[x[y]]"}


def test_every_third_case_of_a_table_and_one_by_name():
    marks = {f"{function}[{case}]": {"every": 3, "core": ["4"]} for function in "ab" for case in range(6)}
    assert selection.core_of(marks) == {f"{function}[{case}]" for function in "ab" for case in (0, 3, 4)}


def test_a_mark_that_names_no_case_is_refused():
    with pytest.raises(SelectionError, match=r"c: its mark slow names cases .*\['3'\]"):
        selection.core_of({"c[1]": {"core": ["3"]}, "c[2]": {"core": ["3"]}})


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_parts_have_every_test_once_by_files_and_are_even(parts):
    seconds = {f"f{file}::t{test}": 1.0 + file % 5 for file in range(40) for test in range(file % 4 + 1)}
    recorded = known({name: (time, ()) for name, time in seconds.items()})
    shares = [selection.part_of(seconds, f"{n}/{parts}", recorded) for n in range(1, parts + 1)]
    assert sorted(name for share in shares for name in share) == sorted(seconds)
    files = [{name.partition("::")[0] for name in share} for share in shares]
    assert sum(map(len, files)) == 40
    lengths = [sum(seconds[name] for name in share) for share in shares]
    assert max(lengths) - min(lengths) <= 20  # the longest file


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "a/b", "1/0"])
def test_a_part_that_is_not_one_is_refused(part):
    with pytest.raises(ConfigError, match=f"^--part: '{part}' must be K/M"):
        selection.part_of(["f::t", "g::t"], part, footprint_file.NOTHING)


def test_long_files_come_first():
    recorded = known({"a::x": (1.0, ()), "b::x": (5.0, ()), "a::y": (1.0, ())})
    assert selection.longest_first(["a::x", "b::x", "a::y"], recorded) == ["b", "a"]


# ---- what has changed --------------------------------------------------------------------------------------

OLD = """TABLE = 1

def first(x):
    return x

class Thing:
    size = 2

    @property
    def second(self):
        def inner():
            return 1
        return inner()
"""


@pytest.mark.parametrize(
    "edit, changed",
    [
        (("return x", "return x + 1"), {"first"}),
        (("return 1", "return 2"), {"Thing.second"}),
        (("@property", "@cached"), {"Thing.second"}),
        (("TABLE = 1", "TABLE = 2"), {REST}),
        (("size = 2", "size = 3"), {REST}),
        (("def first(x)", "def last(x)"), {"first", "last"}),
        (("TABLE = 1\n", "TABLE = 1\n\n\n"), set()),
        (("\nclass", "\ndef third(): pass\n\nclass"), {"third"}),
    ],
)
def test_what_differs_between_two_texts(edit, changed):
    new = OLD.replace(*edit)
    assert new != OLD
    parts = selection.changed_parts({"m.py": OLD, "x.py": OLD}, {"m.py": new, "x.py": OLD})
    assert parts == {("m.py", name) for name in changed}


def test_files_that_come_and_go():
    old = {"gone.py": "def f(): pass\n", "a.md": "old"}
    parts = selection.changed_parts(old, {"a.md": "new", "new.sh": "x"})
    assert parts == {("gone.py", "f"), ("gone.py", REST), ("a.md", REST), ("new.sh", REST)}


COLUMNS = [("m.py", REST), ("m.py", "f"), ("m.py", "g"), ("a.md", REST), ("tests/test_m.py", "test_f")]
RECORDED = known(
    {
        "tests/test_m.py::test_f": (2.0, [("m.py", "f"), ("tests/test_m.py", "test_f")]),
        "tests/test_m.py::test_g": (1.0, [("m.py", "g")]),
        "tests/test_m.py::test_page": (0.5, [("a.md", REST)]),
        "tests/test_m.py::test_both": (3.0, [("m.py", "f"), ("m.py", "g")]),
        "tests/test_m.py::test_other": (0.1, []),
    },
    COLUMNS,
)


@pytest.mark.parametrize(
    "changed, expected",
    [
        ({("m.py", "f")}, ["test_f", "test_both"]),
        ({("m.py", "g")}, ["test_g", "test_both"]),
        ({("m.py", REST)}, ["test_g", "test_f", "test_both"]),  # a table of the file
        ({("a.md", REST)}, ["test_page"]),
        ({("tests/test_m.py", "test_f")}, ["test_f"]),
        ({("new.py", "h")}, []),
        ({("m.py", "f"), ("m.py", "g")}, ["test_f", "test_g", "test_both"]),  # one of each before a second
        ({("requirements.txt", REST)}, ["test_other", "test_page", "test_g", "test_f", "test_both"]),
    ],
)
def test_tests_that_run_what_has_changed(changed, expected):
    runs = selection.tests_of_changes(list(RECORDED.tests), changed, RECORDED)
    assert [name.partition("::")[2] for name in selection.in_order(runs)] == expected


def test_a_test_that_nobody_has_seen_runs_first():
    names = ["tests/test_m.py::test_new", *RECORDED.tests]
    runs = selection.tests_of_changes(names, {("m.py", "g")}, RECORDED)
    assert selection.in_order(runs)[0] == "tests/test_m.py::test_new"


def test_a_new_case_of_a_table_runs_what_the_others_do():
    cases = known({"a::t[1]": (2.0, [("m.py", "f")]), "a::t[2]": (4.0, [("m.py", "g")])}, COLUMNS)
    more = selection.with_siblings(cases, ["a::t[1]", "a::t[3]", "a::other"])
    assert more.tests["a::t[3]"] == (3.0, "unknown", cases.tests["a::t[1]"][2] | cases.tests["a::t[2]"][2])
    assert more.tests.keys() == {"a::t[1]", "a::t[2]", "a::t[3]"}


def test_the_order_does_not_depend_on_that_of_a_set():
    """Each worker chooses for itself, and its sets have an order of their own: all must choose the same."""
    parts = [("a.py", "f"), ("a.py", "g"), ("b.py", "f"), ("", "every test")]
    runs = {part: [f"t{number}" for number in range(at, 9)] for at, part in enumerate(parts)}
    orders = {tuple(selection.in_order(dict(order))) for order in itertools.permutations(runs.items())}
    assert len(orders) == 1


def test_as_many_as_fit():
    names = ["tests/test_m.py::test_both", "tests/test_m.py::test_f", "tests/test_m.py::test_g"]
    assert selection.that_fit(names, None, RECORDED) == names
    assert selection.that_fit(names, 2.1 / 60, RECORDED) == [names[0], names[2]]  # 4.2 s of two processes
    assert selection.that_fit(names, 0, RECORDED) == []


@pytest.mark.parametrize("minutes,outcome", [(0, "1 skipped"), (10, "1 passed")])
def test_what_has_not_begun_at_the_deadline_is_skipped(tmp_path, minutes, outcome):
    (tmp_path / "test_it.py").write_text("def test_one(): pass\n")
    program = (
        f"import sys, pytest\nsys.path[:0] = [{str(ROOT / 'tests')!r}, {str(ROOT)!r}]\nimport selection\n"
        "arguments = ['-q', '-rs', '-p', 'no:cacheprovider', 'test_it.py']\n"
        f"sys.exit(pytest.main(arguments, plugins=[selection.Deadline({minutes})]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and outcome in done.stdout, done.stdout + done.stderr
    assert ("not begun when the 0 minutes were over" in done.stdout) == (minutes == 0)


def test_a_commit_that_git_does_not_have_is_refused():
    with pytest.raises(SelectionError, match="git has no such commit"):
        selection.changes_since("0" * 40)


def test_changes_of_this_checkout_are_seen(tmp_path, monkeypatch):
    def git(*words):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "m.py").write_text(OLD)
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one")
    monkeypatch.setattr(selection, "ROOT", tmp_path)
    assert selection.changes_since("HEAD") == set()
    (tmp_path / "m.py").write_text(OLD.replace("return x", "return -x"))
    (tmp_path / "added.py").write_text("def f(): pass\n")
    assert selection.changes_since("HEAD") == {("m.py", "first"), ("added.py", "f"), ("added.py", REST)}


# ---- recording ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The footprints of three tests of a project of two files, in processes of every kind."""
    root = tmp_path_factory.mktemp("project")
    (root / "thing.py").write_text("def used(): pass\n\ndef in_child(): pass\n\ndef never(): pass\n")
    (root / "page.md").write_text("text")
    (root / "test_it.py").write_text(
        "import os, subprocess, sys, pytest, thing\n"
        "@pytest.fixture(scope='module')\n"
        "def shared(): thing.in_child()\n"
        "def test_here(): thing.used()\n"
        "def test_forked():\n"
        "    if os.fork() == 0:\n        thing.in_child()\n        os._exit(0)\n    os.wait()\n"
        "def test_started():\n"
        "    subprocess.run([sys.executable, '-c', 'import thing; thing.in_child()'], check=True)\n"
        "def test_reads(): open('page.md').close()\n"
        "def test_shares(shared): pass\n"
        "def test_shares_too(shared): pass\n"
        "def test_fails(): assert False\n"
    )
    program = (
        "import pathlib, sys, pytest\n"
        f"sys.path[:0] = [{str(ROOT / 'tests')!r}]\n"
        "import footprints\n"
        "footprints.ROOT = pathlib.Path.cwd()\n"
        "footprints.tracked_files = lambda: ['thing.py', 'page.md', 'test_it.py']\n"
        "recorder = footprints.Recorder(pathlib.Path('record/alone'))\n"
        "pytest.main(['-q', '-p', 'no:cacheprovider', 'test_it.py'], plugins=[recorder])\n"
        "packed = footprints.pack([pathlib.Path('record')], 'c')\n"
        "print({n: (o, [packed.columns[i] for i in range(len(packed.columns)) if b >> i & 1])"
        " for n, (_, o, b) in packed.tests.items()})\n"
        "pathlib.Path('thing.py').write_text('import os\\n\\n' + pathlib.Path('thing.py').read_text())\n"
        "try:\n    footprints.pack([pathlib.Path('record')], 'c')\n"
        "except footprints.ConfigError as error:\n    print(repr(str(error)))\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    tests, refusal = map(eval, done.stdout.splitlines()[-2:])
    assert "record/alone: was recorded of other files than c has" in refusal
    return {name.partition("::")[2]: (outcome, set(parts)) for name, (outcome, parts) in tests.items()}


@pytest.mark.parametrize(
    "test, part",
    [
        ("test_here", ("thing.py", "used")),
        ("test_forked", ("thing.py", "in_child")),
        ("test_started", ("thing.py", "in_child")),
        ("test_reads", ("page.md", REST)),
        ("test_here", ("test_it.py", "test_here")),
    ],
)
def test_a_footprint_has_what_every_process_of_a_test_runs(recorded, test, part):
    assert recorded[test][0] == "passed" and part in recorded[test][1]
    assert ("thing.py", "never") not in recorded[test][1]


def test_a_shared_fixture_counts_for_every_test_of_its_file(recorded):
    for test in ("test_shares", "test_shares_too"):
        assert ("thing.py", "in_child") in recorded[test][1]
    assert recorded["test_fails"][0] == "failed"


CASES = known(
    {
        "tests/test_m.py::TestM::test_g[a::b[]": (2.0, [("m.py", "f"), ("tests/test_m.py", "TestM.test_g")]),
        **{
            f"tests/test_m.py::test_f[{case}]": (1.0, [COLUMNS[0], COLUMNS[case % len(COLUMNS)]])
            for case in range(20)
        },
        "tests/test_imported.py::test_f[0]": (0.5, [COLUMNS[-1]]),
    },
    [*COLUMNS, ("tests/test_m.py", "TestM.test_g")],
)


@pytest.mark.parametrize("footprints", [RECORDED, CASES])
def test_footprints_are_read_as_they_were_written(tmp_path, footprints):
    footprint_file.write_footprints(footprints, tmp_path / "footprints.xz")
    assert footprint_file.read_footprints(tmp_path / "footprints.xz") == footprints


def test_the_footprints_are_small():
    """They travel to a GPU: 16.0 bytes a test, of names, seconds and bits of 8550 functions."""
    size = footprint_file.FOOTPRINTS.stat().st_size
    assert size < 18 * len(footprint_file.read_footprints().tests)
