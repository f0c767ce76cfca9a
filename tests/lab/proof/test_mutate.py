"""scripts.mutate: each operator and each kind of change by hand, every place of the tables is found, the draw
is a function of the seed, and a mutant is judged by what the tests and verify say.
"""

import ast
import contextlib
import re
import time
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest

from config import ConfigError
from lab.proof.mutate import checkout, command, control, cover, draw, judge, report, table
from lab.proof.mutate.change import PlacedChange, read_source
from lab.proof.mutate.command import main
from lab.proof.mutate.mutant import make_mutant
from lab.proof.mutate.operators import OPERATORS
from lab.proof.mutate.source import Edit, Source
from lab.proof.verify.cells import every_word

ROOT = Path(__file__).parents[3]
BY_HAND = [
    ("constants", "x = 1", {"x = 0", "x = 2"}),
    ("constants", "x = 4", {"x = 0", "x = 2", "x = 3", "x = 5", "x = 8"}),
    ("constants", "x = 0", {"x = 1", "x = (-1)"}),
    ("constants", "x = True", {"x = False"}),
    ("constants", "x = 0.5", {"x = 1.0", "x = 0.25"}),
    ("constants", "x = 'a', None", set()),
    ("relations", "x = a < b", {"x = a <= b", "x = a >= b"}),
    ("relations", "x = a is not b", {"x = a is b"}),
    ("relations", "x = a in b", {"x = a not in b"}),
    ("relations", "x = a not in b", {"x = a in b"}),
    ("relations", "x = (a) == (b)  # a == b", {"x = (a) != (b)  # a == b"}),
    ("relations", "x = 0 <= a != b", {"x = 0 < a != b", "x = 0 > a != b", "x = 0 <= a == b"}),
    ("relations", "x = inn in innin", {"x = inn not in innin"}),
    ("arithmetic", "x = a + b", {"x = a - b"}),
    ("arithmetic", "x = a * b", {"x = a / b", "x = a + b"}),
    ("arithmetic", "x = a // b", {"x = a % b", "x = a / b"}),
    ("arithmetic", "x = a ** b", {"x = a * b"}),
    ("arithmetic", "x = a + 'b' + c", set()),
    (
        "arithmetic",
        "é = a  # ü\nx = 'é' * 2 + len('é' if a - b else c)",
        {"é = a  # ü\nx = 'é' * 2 + len('é' if a + b else c)"},
    ),
    ("updates", "x += a", {"x -= a", "x = a"}),
    ("signs", "x = -a", {"x = a"}),
    ("signs", "x = not a", {"x = a"}),
    ("signs", "x = -(a + b)", {"x = (a + b)"}),
    ("dropped_term", "x = a + b", {"x = a", "x = b"}),
    ("dropped_term", "x = (a - b) * c", {"x = (a - b)", "x = c", "x = (a) * c"}),
    ("dropped_term", "x = a / b", {"x = a"}),
    ("dropped_condition", "x = a and b", {"x = a", "x = b"}),
    ("dropped_condition", "x = a or b or c", {"x = (b or c)", "x = (a or c)", "x = (a or b)"}),
    ("and_or", "x = a and b", {"x = a or b"}),
    ("and_or", "x = a or not b", {"x = a and not b"}),
    ("missing_wait", "work.wait()", {"pass"}),
    ("missing_wait", "x = work.wait()", {"x = work"}),
    ("missing_wait", "x = a.sum()", set()),
    ("dropped_statement", "f(a)\nx = f(a)", {"pass\nx = f(a)"}),
    ("dropped_assignment", "x.a = b", {"pass"}),
    ("dropped_assignment", "x[a] = b\ny = c", {"pass\ny = c"}),
    ("dropped_call", "x = f(a, b)", {"x = a"}),
    ("dropped_call", "x = a.clone()", {"x = a"}),
    ("dropped_call", "x = torch.exp(a)", {"x = a"}),
    ("dropped_call", "x = A(a) + len(a)", set()),
    ("dropped_call", "import np\nx = np.f(a)", {"import np\nx = a"}),
    ("dropped_keyword", "x = f(a, k=b)", {"x = f(a)"}),
    ("dropped_keyword", "x = f(k=b, l=c)", {"x = f(l=c)", "x = f(k=b)"}),
    ("dropped_keyword", "x = f(k=b)", {"x = f()"}),
    ("swapped_arguments", "x = f(a, b)", {"x = f(b, a)"}),
    ("swapped_arguments", "x = f(a, a)", set()),
    ("swapped_arguments", "x = f(a, b, c)", {"x = f(b, a, c)", "x = f(a, c, b)"}),
    ("off_by_one", "x = a[i:j]", {"x = a[i + 1:j]", "x = a[i - 1:j]", "x = a[i:j + 1]", "x = a[i:j - 1]"}),
    ("off_by_one", "x = a[:j]", {"x = a[1:j]", "x = a[:j + 1]", "x = a[:j - 1]"}),
    ("off_by_one", "x = range(n)", {"x = range(n + 1)", "x = range(n - 1)"}),
    ("off_by_one", "x = a[i + b]", {"x = a[(i + b) + 1]", "x = a[(i + b) - 1]"}),
    ("wrong_axis", "x = a.sum(-1)", {"x = a.sum(0)"}),
    ("wrong_axis", "x = a.mean(dim=0)", {"x = a.mean(dim=1)"}),
    ("wrong_axis", "x = torch.cat(a, 1)", {"x = torch.cat(a, 0)"}),
    ("wrong_axis", "x = a.transpose(0, 1)", {"x = a.transpose(1, 1)", "x = a.transpose(0, 0)"}),
    ("condition", "if a:\n    x = b", {"if (not a):\n    x = b"}),
    ("condition", "x = a if b > c else d", {"x = a if (not (b > c)) else d"}),
    ("condition", "x = [a for a in b if c]", {"x = [a for a in b if (not c)]"}),
    (
        "dropped_branch",
        "if a:\n    x = b\nelse:\n    x = c\n    y = c",
        {"if a:\n    x = b\nelse:\n    pass"},
    ),
    ("dropped_branch", "x = a if b else c", {"x = a", "x = c"}),
    ("dropped_branch", "x = [a for a in b if c]", {"x = [a for a in b if True]"}),
    (
        "other_name",
        "def f(a, b):\n    c = a\n    return c",
        {"def f(a, b):\n    c = a\n    return a", "def f(a, b):\n    c = a\n    return b"},
    ),
]


def made(name: str, text: str) -> set[str]:
    source = Source.parse(text)
    edits = [edit for site in draw.sites("x.py", source) if site.operator == name for edit in site.edits]
    return {text[: e.start] + e.new + text[e.end :] for e in edits}


@pytest.mark.parametrize(
    "name,text,wanted", BY_HAND, ids=[f"{name} {text[:30]!r}" for name, text, _ in BY_HAND]
)
def test_operators_by_hand(name, text, wanted):
    assert made(name, text) == wanted


def test_another_group_of_ranks_is_any_other():
    others = made("wrong_group", "x = self.mesh.tp")
    assert {
        "x = self.mesh.cp",
        "x = self.mesh.world",
        "x = self.mesh.dp_cp",
    } <= others and "x = self.mesh.tp" not in others


def test_every_operator_has_a_test_by_hand():
    assert {name for name, *_ in BY_HAND} | {"wrong_group"} == set(OPERATORS)


@pytest.mark.parametrize(
    "text",
    [
        '"""x = 1"""',
        "def f(a: 'b' < 1) -> 1 + 2: ...",
        "x: 1 + 2",
        "raise ValueError(1 + 2)",
        "class A:\n    def __str__(self):\n        return 1 + 2",
        "@f(1 + 2)\ndef g(): ...",
        "if __name__ == '__main__':\n    f(1)",
        "if x.type == 'cuda':\n    y = 1 + 2",
        "y = torch.cuda.f(1 + 2)",
        "x = f'{1 + 2}'",
        "import a, b",
    ],
)
def test_what_is_no_behaviour_is_not_drawn(text):
    """(A call may still be dropped: that a warning is printed at all is behaviour.)"""
    assert [
        s
        for s in draw.sites("x.py", Source.parse(text))
        if s.operator not in ("dropped_statement", "dropped_call")
    ] == []


# ---- the draw ----------------------------------------------------------------------------------------------


def test_the_draw_is_a_function_of_the_seed():
    only = ("optim/l", "parallel/context/ring")
    whole = draw.draw(checkout.ROOT, 40, 7, only)
    assert whole == draw.draw(checkout.ROOT, 40, 7, only)
    assert whole != draw.draw(checkout.ROOT, 40, 8, only)
    assert whole[:10] == draw.draw(checkout.ROOT, 10, 7, only)  # more of the same seed begin with the fewer
    assert len({m.key for m in whole}) == 40
    assert {m.file.split("/")[0] for m in whole} == {"optim", "parallel"}


@pytest.mark.slow
def test_every_mutant_compiles_differs_and_is_read_as_a_difference_of_lines():
    for m in draw.draw(checkout.ROOT, 40, 3, ("model/m", "data/p")):
        old = (checkout.ROOT / m.file).read_text()
        new = m.edit.apply_to(old)
        compile(new, m.file, "exec")
        at, lines = m.line - 1, old.splitlines()
        n = len(m.before.splitlines())
        assert lines[:at] + m.after.splitlines() + lines[at + n :] == new.splitlines() and m.before != m.after


@pytest.mark.slow
def test_what_only_a_gpu_runs_is_not_drawn():
    """The table of draw.py, each line of it: it must still find something, and of that nothing is drawn."""
    sources = {}
    for file in ("parallel/offload.py", "parallel/wire/clock.py", "parallel/wire/comm.py", "optim/base.py"):
        source = Source.parse((checkout.ROOT / file).read_text())
        edits = [edit for site in draw.sites(file, source) for edit in site.edits]
        sources[file] = source, draw.gpu_spans(file, source), edits
    for start, words, reason in draw.GPU_ONLY:
        assert len(reason.split()) >= 3
        found = 0
        for file in (f for f in sources if f.startswith(start)):
            source, spans, edits = sources[file]
            spans = [s for s in spans if re.fullmatch(words, source.text[slice(*s)], re.S)]
            found += len(spans)
            for a, b in spans:
                assert not any(a <= e.start and e.end <= b for e in edits), (file, source.line_number(a))
        assert found, (start, words)


def toy(root, body: str, test: str) -> None:
    (root / "model").mkdir()
    (root / "tests").mkdir()
    (root / "model" / "__init__.py").write_text("")
    (root / "model" / "toy.py").write_text(body)
    (root / "tests" / "test_toy.py").write_text(test)
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')


def test_a_mutant_of_the_same_bytecode_is_not_drawn(tmp_path):
    """`0 and f` is 0, whatever f is."""
    toy(tmp_path, "def f():\n    return 0 and 5\n", "")
    drawn = draw.draw(tmp_path, 3, 0)
    assert all("and 6" not in m.after and "and 4" not in m.after for m in drawn)
    with pytest.raises(ConfigError, match="^--draw: 1000 mutants, the sources have 3"):
        draw.draw(tmp_path, 1000, 0)


# ---- the judgement -----------------------------------------------------------------------------------------

BODY = """def larger(a, b):
    unused = a + b
    while a > 10**6:
        a -= 1
    return a if a >= b else b
"""
TEST = """import os, subprocess, sys, time
from model.toy import larger
CHILD = "from model.toy import larger; assert larger(1, 2) == 2"
def test_here(): assert larger(2, 1) == 2
def test_in_another_process(): subprocess.run([sys.executable, "-c", CHILD], check=True)
def test_other(): pass
def test_flaky():
    time.sleep(0.2)
    assert larger(1, 2) == 2 and "BEVATRON_CHOSEN" not in os.environ
"""
NAMES = [f"tests/test_toy.py::{name}" for name in ("test_here", "test_in_another_process", "test_flaky")]


def toy_map(seconds: dict[str, float], core: tuple[str, ...] = tuple(NAMES)) -> cover.CoverageMap:
    """As if these tests had been seen to run `larger`, and another one to fail in it."""
    columns = [("model/toy.py", cover.REST), ("model/toy.py", "larger"), ("model/other.py", "larger")]
    tests = {name: (time, "passed", 0b10) for name, time in seconds.items()}
    tests["tests/test_toy.py::test_fails"] = (0.1, "failed", 0b10)
    tests["tests/test_toy.py::test_other"] = (0.1, "passed", 0b100)
    return cover.CoverageMap(cover.Footprints("c", {}, columns, tests), frozenset(core))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(controls of a compiled copy of a toy checkout, its map). test_flaky never passes where a mutant is
    judged; it is the slowest, and so the last that a mutant meets.
    """
    root = tmp_path_factory.mktemp("toy")
    toy(root, BODY, TEST)
    with pytest.MonkeyPatch.context() as patch, checkout.copy_checkout(root) as base:
        patch.setattr(checkout, "ROOT", root)
        patch.setattr(cover, "CACHE", root / ".cache")
        with contextlib.closing(control.Controls(base)) as controls:
            yield controls, toy_map(dict(zip(NAMES, (0.1, 0.2, 0.3))))
        assert (base / "checkout/model/toy.py").read_text() == BODY


def judged(measured, old: str, new: str) -> judge.Verdict:
    controls, known = measured
    at = BODY.index(old)
    one = make_mutant("model/toy.py", Source.parse(BODY), "by hand", Edit(at, at + len(old), new))
    return judge.judge(one, controls, known, verify=False)


def test_a_line_has_the_tests_that_run_its_function(measured):
    _, known = measured
    assert [name for _, name in known.tests_of_line("model/toy.py", BODY, 5)] == NAMES
    moved = "# a line above\n\n" + BODY
    assert known.tests_of_line("model/toy.py", moved, 7) == known.tests_of_line("model/toy.py", BODY, 5)
    assert known.tests_of_line("model/toy.py", moved, 1) == known.tests_of_line("model/toy.py", BODY, 5)
    assert known.tests_of_line("model/toy.py", "def another():\n    pass\n", 2) == []


@pytest.mark.slow
def test_the_core_is_asked_first(measured):
    controls, _ = measured
    known = toy_map(dict(zip(NAMES, (0.1, 0.2, 0.3))), core=(NAMES[1],))
    seen = judged((controls, known), ">= b", "< b")
    assert (seen.stage, seen.by) == ("core", NAMES[1])
    known = toy_map(dict(zip(NAMES, (0.1, 0.2, 0.3))), core=(NAMES[2],))  # the flaky one
    seen = judged((controls, known), ">= b", "< b")
    assert (seen.stage, seen.by) == ("slow", NAMES[0])


@pytest.mark.slow
def test_the_tests_of_the_core_are_known():
    core = cover.core_tests()
    here = "tests/lab/proof/test_mutate.py::"
    assert f"{here}test_every_operator_has_a_test_by_hand" in core
    assert f"{here}test_the_core_is_asked_first" not in core  # it is marked slow


@pytest.mark.slow
def test_a_mutant_is_killed_by_a_test_that_passes_without_it(measured):
    seen = judged(measured, ">= b", "< b")
    assert (seen.stage, seen.by, seen.hung, seen.ran) == ("core", NAMES[0], False, 3)
    assert measured[0].seconds[NAMES[0]] > 0  # its control


@pytest.mark.slow
def test_what_no_test_can_see_survives_and_a_flaky_test_kills_nothing(measured):
    alike = judged(measured, ">= b", "> b")
    assert (alike.stage, alike.by, alike.hung) == ("", "", False)
    assert measured[0].seconds[NAMES[2]] is None  # its control failed as it did


def test_a_run_that_does_not_end_is_stopped_with_all_that_it_started(tmp_path):
    ran = control.run_command(["sh", "-c", "sleep 99 & echo $!; wait"], tmp_path, 0.8, tmp_path / "log")
    assert ran.code is None and ran.seconds >= 0.8
    stat = Path("/proc", ran.output.strip(), "stat")
    for _ in range(100):  # a signal takes a moment
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("what it started still runs")


@pytest.mark.parametrize("seconds, stage", [(1.0, "core"), (40.0, "")])
def test_a_hang_is_a_kill_where_the_control_ends_well_within(measured, tmp_path, monkeypatch, seconds, stage):
    """The limit of one test of a second is 65 s."""
    known = toy_map({NAMES[0]: 1.0})
    monkeypatch.setattr(judge, "run_tests", lambda *_: (control.CommandResult(None, 65.0, ""), NAMES[0]))
    monkeypatch.setattr(control, "run_tests", lambda *_: (control.CommandResult(0, seconds, ""), NAMES[0]))
    fresh = control.Controls(measured[0].base, tmp_path / "controls.json")  # runs nothing
    v = judged((fresh, known), ">= b", "> b")
    assert (v.stage, v.hung) == (stage, bool(stage))


def test_what_took_too_long_among_others_meets_the_mutant_once_more_alone(measured, tmp_path, monkeypatch):
    """A busy machine stops a list of tests as well: the tests behind the one that ran then are asked too."""
    runs = []

    def run_tests(_warm, _folder, names, _limit_s):
        runs.append(names)
        if len(names) == 3:
            return control.CommandResult(None, 62.0, ""), NAMES[1]
        return control.CommandResult(1 if names == NAMES[2:] else 0, 1.0, ""), names[-1]

    monkeypatch.setattr(judge, "run_tests", run_tests)
    monkeypatch.setattr(control, "run_tests", lambda *_: (control.CommandResult(0, 1.0, ""), NAMES[2]))
    fresh = control.Controls(measured[0].base, tmp_path / "controls.json")
    v = judged((fresh, toy_map(dict(zip(NAMES, (0.1, 0.2, 0.3))))), ">= b", "> b")
    assert runs == [NAMES, [NAMES[1]], [NAMES[2]]]
    assert (v.stage, v.by, v.hung) == ("core", NAMES[2], False)


def test_controls_outlive_a_sitting_until_the_checkout_changes(measured, tmp_path):
    controls, _ = measured
    file = tmp_path / "controls.json"
    control.Controls(controls.base, file).record("a", control.CommandResult(0, 2.0, ""), True)
    assert control.Controls(controls.base, file).seconds == {"a": 2.0}
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / "x.py").write_text("x = 1\n")
    assert control.Controls(tmp_path, file).seconds == {}


# ---- what verify says --------------------------------------------------------------------------------------

SAYS = {
    "right": control.CommandResult(0, 1.0, "ok     dp2 zero0\n"),
    "wrong": control.CommandResult(1, 1.0, "WRONG  dp2 zero0   first step 1 loss\n"),
    "died": control.CommandResult(1, 1.0, "Traceback (most recent call last):\n"),
    "refused": control.CommandResult(2, 1.0, "error: --only: no legal layout of 2 ranks has the words x\n"),
    "killed": control.CommandResult(-9, 1.0, ""),
    "hung": control.CommandResult(None, 1.0, ""),
}


@pytest.mark.parametrize(
    "mutated, without, stage",
    [
        ("right", ["right"], ""),
        ("wrong", ["right"], "verify"),
        ("died", ["right"], "verify"),
        ("refused", ["right"], ""),
        ("killed", ["right"], ""),
        ("hung", ["right", "right"], "verify"),
        ("hung", ["right", "hung"], None),
        ("wrong", ["wrong"], None),
        ("refused", ["refused"], None),
    ],
)
def test_verify_kills_by_a_verdict_alone(measured, tmp_path, monkeypatch, mutated, without, stage):
    """stage None: nothing can be said of the mutant, and that is an error that names the proof."""
    base, left = measured[0].base, list(without)
    monkeypatch.setattr(control, "run_verify", lambda *_: SAYS[left.pop(0)])
    monkeypatch.setattr(judge, "run_verify", lambda *_: SAYS[mutated])
    monkeypatch.setattr(judge, "verify_runs", lambda file: (control.VerifyRun("toy", 2, "dp2"),))
    edit = Edit(BODY.index(">= b"), BODY.index(">= b") + 4, "> b")
    one = make_mutant("model/toy.py", Source.parse(BODY), "by hand", edit)
    controls = control.Controls(base, tmp_path / "controls.json")
    if stage is None:
        with pytest.raises(ConfigError, match=r"^scripts\.verify toy --world 2 --only dp2"):
            judge.judge(one, controls, toy_map({}))
        return
    v = judge.judge(one, controls, toy_map({}))
    assert (v.stage, v.hung, left) == (stage, stage != "" and mutated == "hung", [])
    assert v.by.startswith("no verdict of" if mutated in ("refused", "killed") else "toy" if stage else "")


NO_VERDICT = ("died", "refused", "killed", "hung")  # a bug of the table is silent: verify itself goes on


@pytest.mark.parametrize(
    "said, stage", [("right", ""), ("wrong", "verify"), *((said, None) for said in NO_VERDICT)]
)
def test_a_bug_of_the_table_is_caught_by_a_verdict_alone(said, stage):
    kill = table.read_result(SAYS[said])
    assert kill.stage == (stage or "")
    assert kill.by.startswith("no verdict of scripts.verify") == (stage is None)


@pytest.mark.parametrize(
    "name, stage", [("AttributeError", ""), ("NameError", ""), ("RuntimeError", "verify")]
)
def test_a_copy_of_the_table_that_cannot_run_is_no_verdict(name, stage):
    """A name that is gone kills a rank of any program: it says nothing of what verify sees."""
    output = f"WRONG  dp2 zero1   died: {name}: 'Bucket' ...\n0 of 1 layouts train like one process"
    kill = table.read_result(control.CommandResult(1, 1.0, output))
    assert kill.stage == stage
    assert ("the copy cannot run: WRONG dp2 zero1 died" in kill.by) == (not stage)


def test_a_bug_meets_its_own_run_of_verify_in_a_copy_that_has_it(measured, monkeypatch):
    checks = {"is_strict": True, "on_lanes": True}
    run = control.VerifyRun("toy", 2, "dp2 mb1", 2, **checks, overrides=("--train.seed", "3"))
    mutant = make_mutant("model/toy.py", Source.parse(BODY), "a fault", Edit(0, 3, "async def"), run)
    seen = []

    def run_command(command, cwd, limit_s, log):
        seen.append((command[2:], (cwd / "model/toy.py").read_text()))
        return SAYS["wrong"]

    monkeypatch.setattr(control, "run_command", run_command)
    verdict = table.judge_by_verify(mutant, measured[0].base)
    words = "scripts.verify toy --world 2 --layouts 2 --only dp2 mb1 --strict --lanes --train.seed 3"
    assert seen == [(words.split(), "async " + BODY)]
    assert (verdict.stage, verdict.operator, verdict.by.split()[0]) == ("verify", "a fault", "WRONG")


def test_the_table_goes_on_after_a_bug_without_a_verdict(monkeypatch, capsys, tmp_path):
    bugs = table.read_table()[:3]
    monkeypatch.setattr(table, "read_table", lambda: bugs)
    monkeypatch.setattr(command, "copy_checkout", lambda root: contextlib.nullcontext(tmp_path))

    def judge_by_verify(mutant, base):
        is_first = mutant.operator == bugs[0].fault
        kill = judge.Kill("", "no verdict", False) if is_first else judge.Kill("verify", "WRONG", False)
        return judge.make_verdict(mutant, kill, time.perf_counter())

    monkeypatch.setattr(table, "judge_by_verify", judge_by_verify)
    verdicts = str(tmp_path / "verdicts.jsonl")
    assert main(["--resume", verdicts]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"MISSED {bugs[0].fault}: no verdict" in lines
    assert lines[-1].startswith("2 of 3 planted bugs caught")
    assert [main(["--part", f"{part}/3"]) for part in (1, 2, 3)] == [1, 0, 0]
    monkeypatch.setattr(table, "judge_by_verify", None)  # --resume knows all three
    assert main(["--resume", verdicts]) == 1


def test_words_of_layouts_are_words_that_verify_has():
    """Of the proofs of stage 2 and of the table: a word that went out of use would find no layout."""
    runs = [run for _, of in judge.VERIFY_RUNS for run in of] + [bug.run for bug in table.read_table()]
    for word in {word.removeprefix("no-") for run in runs for word in run.words.split()}:
        assert word in every_word(8), word


# ---- changes of a place ------------------------------------------------------------------------------------

TOY = """
class Bucket:
    def owners(self, ranks, group=None):  # of the bucket
        total = sum_over(self.full,
                         self.group, is_partial=True)
        if total is None and not ranks:
            return 0
        elif total:
            clear()
        for rank in ranks:
            self.send(rank, self.full)
        total = total + 1
        return (("a", total), ("b", {"x": 1, **ranks}))

def owners():
    return self.full
"""
CHANGES = [  # kinds, what stands in TOY, what stands there then
    ({"replace": {"self.group": "self.world"}}, "self.group, is", "self.world, is"),
    ({"replace": {"is_partial=_": "it and ranks"}}, "is_partial=True", "is_partial=True and ranks"),
    ({"replace": {"sum_over(_, ...)": "it * 2"}}, "sum_over(self.full", "sum_over(self.full * 2"),
    ({"replace": {"total + _": "-1 if ranks else it"}}, "total + 1", "total + (-1 if ranks else 1)"),
    ({"replace": {"if _: return 0": "False"}}, "total is None and not ranks", "False"),
    ({"replace": {"for rank in _: ...": "it[1:]"}}, "in ranks:", "in ranks[1:]:"),
    ({"replace": {"clear()": "it; a = 1"}}, "clear()", "clear(); a = 1"),
    (
        {"replace": {"for rank in ranks: ...": "if ranks:\n    it"}},
        "        for rank in ranks:\n    ",
        "        if ranks:\n          for rank in ranks:\n      ",
    ),
    ({"replace": {"self.full": "None"}, "which": "2"}, "rank, self.full", "rank, None"),
    ({"replace": {"self.full": "it[0]"}, "which": "all"}, "self.full", "self.full[0]"),
    ({"drop": "self.send(...)"}, "self.send(rank, self.full)", "pass"),
    ({"drop": "is_partial=..."}, ", is_partial=True", ""),
    ({"drop": "self.group"}, "self.group, ", ""),
    ({"drop": "not ranks"}, "total is None and not ranks", "total is None"),
    ({"drop": "total + _"}, "total + 1", "total"),
    ({"drop": '("a", ...)'}, '(("a", total), ("b", {"x": 1, **ranks}))', '(("b", {"x": 1, **ranks}),)'),
    ({"drop": '{"x": _, **ranks}'}, '"x": 1, ', ""),
    ({"append": {"self.send(...)": "wait=True"}}, "rank, self.full", "rank, self.full, wait=True"),
    ({"append": {"clear()": "1"}}, "clear()", "clear(1)"),
    (
        {"swap": {"sum_over(_, ...)": "sum_over(self.full, _, ...)"}},
        "self.full,\n                         self.group",
        "self.group, self.full",
    ),
    ({"swap": {"clear()": "total = total + 1"}}, None, None),
]


@pytest.mark.parametrize("kinds, old, new", CHANGES, ids=[str(kinds) for kinds, *_ in CHANGES])
def test_changes_by_hand(kinds, old, new):
    """Whatever comments and line breaks the function has; another of the same name is left alone."""
    edit = PlacedChange.from_entry({"place": "x.py Bucket.owners", **kinds}, ()).edit(Source.parse(TOY))
    method, function = TOY.split("\ndef owners")
    if old is None:
        swapped = {"clear()": "total = total + 1", "total = total + 1": "clear()"}
        wanted = re.sub(r"clear\(\)|total = total \+ 1", lambda found: swapped[found[0]], method)
    else:
        assert old in method
        wanted = method.replace(old, new)
    assert ast.dump(ast.parse(edit.apply_to(TOY))) == ast.dump(ast.parse(f"{wanted}\ndef owners{function}"))


@pytest.mark.parametrize(
    "kinds, message",
    [
        ({"drop": "self.ful"}, "has no `self.ful`"),
        ({"drop": "sum_over(self.full, self.group)"}, "has no `sum_over(self.full, self.group)`"),
        ({"replace": {"self.full": "1"}}, "has 2 of `self.full`, in lines 4, 11; `which: N` or `which: all`"),
        ({"replace": {"self.full": "1"}, "which": "3"}, "has only 2 of `self.full`, and not 3"),
        ({"replace": {"a b": "1"}}, "`a b` is not one expression or statement"),
        ({"replace": {"self.group": "a = 1"}}, "`a = 1` is no expression"),
        ({"drop": "total is not None"}, "has no `total is not None`"),
        ({"drop": "self.send"}, "`self.send` is nothing that can be left out"),
    ],
)
def test_a_target_that_is_not_there_is_one_line(kinds, message):
    change = PlacedChange.from_entry({"place": "x.py Bucket.owners", **kinds}, ())
    with pytest.raises(ConfigError, match=f"^x.py Bucket.owners: {re.escape(message)}") as error:
        change.edit(Source.parse(TOY))
    assert "\n" not in str(error.value)


def test_a_place_that_is_gone_is_named():
    with pytest.raises(ConfigError, match=r"^x.py Bucket.owner: there is no such function or class"):
        PlacedChange.from_entry({"place": "x.py Bucket.owner", "drop": "clear()"}, ()).edit(Source.parse(TOY))
    with pytest.raises(ConfigError, match="^model/x.py: there is no such file"):
        read_source(ROOT, "model/x.py")
    for entry, message in (({}, "no change; one of"), ({"drops": "clear()"}, "unknown key drops")):
        with pytest.raises(ConfigError, match=message):
            PlacedChange.from_entry({"place": "x.py", **entry}, ())


def broken_places(changes: list[PlacedChange]) -> list[str]:
    """A line for each change whose place is gone, or that changes nothing or does not compile."""
    parse = cache(read_source)
    broken = []
    for change in changes:
        try:
            source = parse(ROOT, change.file)
            changed = change.edit(source).apply_to(source.text)
            compile(changed, change.file, "exec")
            if ast.dump(ast.parse(changed)) == ast.dump(source.tree):
                broken.append(f"{change}: changes nothing")
        except (ConfigError, SyntaxError) as error:
            broken.append(f"{change.file} {change.within}: {error}")
    return broken


def test_every_place_of_the_table_is_found():
    """One test of all bugs: of a table of tests, a commit would draw some."""
    bugs = table.read_table()
    assert len({bug.fault for bug in bugs}) == len(bugs)
    assert not (broken := broken_places([bug.change for bug in bugs])), "\n".join(broken)


def test_every_place_of_the_explanations_is_found():
    explanations = report.read_explanations()
    assert all(len(explanation.reason.split()) >= 4 for explanation in explanations)
    changes = [explanation.change for explanation in explanations]
    assert not (broken := broken_places(changes)), "\n".join(broken)


def test_the_closing_table_and_the_file_of_verdicts(tmp_path):
    def verdict(line: int, stage: str) -> judge.Verdict:
        return judge.Verdict("model/toy.py", line, "relations", "a >= b", "a > b", stage, "", False, 2, 1.0)

    seen, alike, proved = verdict(1, "core"), verdict(2, ""), verdict(3, "verify")
    file = tmp_path / "verdicts.jsonl"
    for v in (seen, alike, proved):
        judge.append_verdict(file, v)
    with open(file, "a") as out:
        out.write('{"file": "half a li')
    assert judge.read_verdicts(file) == [seen, alike, proved]
    lines, enough = report.make_report([seen, alike, proved], ())
    assert not enough and lines[-1].startswith("2 of 3 mutants killed (66.7 %")
    lines, _ = report.make_report([seen, alike, proved, verdict(4, "slow")], ())
    assert lines[-2] == "the core kills 1 of the 2 that a test kills (50.0 %)"
    assert any(line.startswith("SURVIVED model/toy.py:2") for line in lines)
    lines, enough = report.make_report([seen, alike, proved], {alike.key})
    assert enough and lines[-1].startswith("2 of 2 mutants killed (100.0 %")
    assert not any(line.startswith("SURVIVED") for line in lines)


def test_a_survivor_is_explained_by_its_syntax_tree(tmp_path):
    """However its lines are written, and wherever they stand today."""
    toy(tmp_path, "\n\n" + BODY, "")
    change = PlacedChange.from_entry({"place": "model/toy.py larger", "replace": {"a >= b": "a > b"}}, ())
    verdict = partial(
        judge.Verdict, "model/toy.py", 5, "relations", stage="", by="", hung=False, ran=1, seconds=1.0
    )
    before = "    return a if a >= b else b"
    alike = verdict(before=before, after="    return a if (a > b) else b")
    other = verdict(before=before, after="    return a if a < b else b")
    gone = verdict(before="    return a", after="    return a if a > b else b")
    killed = replace(alike, stage="core", line=6)
    explanations = [report.Explanation(change, "equal values")]
    explained = report.explained_mutants([alike, other, gone, killed], explanations, tmp_path)
    assert explained == {alike.key}


def test_the_cases_of_one_test_take_turns():
    tests = [(0.1, "a[1]"), (0.1, "a[2]"), (0.1, "a[3]"), (5.0, "b"), (9.0, "c"), (60.0, "d")]
    assert [name for _, name in judge.choose_tests(tests, 14.3)] == ["a[1]", "b", "c", "a[2]", "a[3]"]
    assert [name for _, name in judge.choose_tests([(99.0, "a")], 1.0)] == ["a"]  # one at least
    # a test that killed before comes sooner, and the budget is of seconds all the same
    order = [name for _, name in judge.choose_tests(tests, 14.3, kills={"c": 9})]
    assert order == ["a[1]", "c", "b", "a[2]", "a[3]"]


def test_the_tests_of_a_file_come_first():
    tests = [
        (0.1, "tests/a.py::x"),
        (5.0, "tests/b.py::x[1]"),
        (5.0, "tests/b.py::x[2]"),
        (0.2, "tests/c.py::x"),
    ]
    order = [name for _, name in judge.choose_tests(tests, 20.0, related={"tests/b.py"})]
    assert order == ["tests/b.py::x[1]", "tests/b.py::x[2]", "tests/a.py::x", "tests/c.py::x"]
    root = Path(__file__).parents[3]
    assert "tests/parallel/sharding/test_zero.py" in judge.related_test_files(
        "parallel/sharding/zero.py", root
    )  # by its name
    assert "tests/data/test_loader.py" in judge.related_test_files(
        "data/indexed.py", root
    )  # by what it imports
    assert "tests/data/test_loader.py" not in judge.related_test_files("parallel/sharding/zero.py", root)


@pytest.mark.parametrize(
    "words, says",
    [
        (["--draw", "5", "--part", "3/2"], "^--part: '3/2'"),
        (["--draw", "9", "--only", "nowhere/"], "^--draw: 9"),
        (["--without-verify", "--part", "1"], "^--part: '1'"),
    ],
)
def test_bad_words_are_one_line(words, says):
    with pytest.raises(ConfigError, match=says) as e:
        main(words)
    assert "\n" not in str(e.value)
