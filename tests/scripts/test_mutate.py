"""scripts.mutate --draw: each operator by hand, the draw is a function of the seed, and a mutant is judged
by what the tests say.
"""

import pytest

from config import ConfigError
from scripts.mutate import checkout, cover, draw, judge, report
from scripts.mutate.__main__ import main
from scripts.mutate.operators import OPERATORS
from scripts.mutate.source import Edit, Source

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
    source = Source.read(text)
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
        "x = self.mesh.loss",
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
        for s in draw.sites("x.py", Source.read(text))
        if s.operator not in ("dropped_statement", "dropped_call")
    ] == []


# ---- the draw ----------------------------------------------------------------------------------------------


def test_the_draw_is_a_function_of_the_seed_and_parts_are_the_whole():
    only = ("optim/", "parallel/ring")
    whole = draw.draw(checkout.ROOT, 40, 7, only)
    assert whole == draw.draw(checkout.ROOT, 40, 7, only)
    assert whole != draw.draw(checkout.ROOT, 40, 8, only)
    assert whole[:10] == draw.draw(checkout.ROOT, 10, 7, only)  # more of the same seed begin with the fewer
    assert len({m.key for m in whole}) == 40
    parts = [draw.part_of(whole, k, 3) for k in (1, 2, 3)]
    assert sorted(m.key for part in parts for m in part) == sorted(m.key for m in whole)
    assert {m.file.split("/")[0] for m in whole} == {"optim", "parallel"}


def test_every_mutant_compiles_differs_and_is_read_as_a_difference_of_lines():
    for m in draw.draw(checkout.ROOT, 40, 3, ("model/m", "data/p")):
        old = (checkout.ROOT / m.file).read_text()
        new = m.applied(old)
        compile(new, m.file, "exec")
        at, lines = m.line - 1, old.splitlines()
        n = len(m.before.splitlines())
        assert lines[:at] + m.after.splitlines() + lines[at + n :] == new.splitlines() and m.before != m.after


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
TEST = """import subprocess, sys
from model.toy import larger
CHILD = "from model.toy import larger; assert larger(1, 2) == 2"
def test_here(): assert larger(2, 1) == 2
def test_in_another_process(): subprocess.run([sys.executable, "-c", CHILD], check=True)
def test_other(): pass
"""


def test_a_toy_is_measured_and_judged(tmp_path, monkeypatch):
    """Measured lines, also of a process that a test starts; a mutant that a test sees, one that none can
    see, one that hangs."""
    toy(tmp_path, BODY, TEST)
    for where in (cover, checkout):
        monkeypatch.setattr(where, "ROOT", tmp_path)
    monkeypatch.setattr(cover, "KEPT", tmp_path / ".cache")
    monkeypatch.setattr(judge, "START_S", 5.0)
    known = cover.Map({"tests/test_toy.py": cover.measure("tests/test_toy.py", ["model/toy.py"])})
    names = [f"tests/test_toy.py::{name}" for name in ("test_here", "test_in_another_process", "test_other")]
    assert sorted(name for _, name in known.tests("model/toy.py", BODY, 5)) == sorted(names[:2])
    assert known.tests("model/toy.py", BODY, 4) == []  # the loop never runs
    moved = "# a line above\n\n" + BODY
    assert known.tests("model/toy.py", moved, 7) == known.tests("model/toy.py", BODY, 5)

    def judged(old: str, new: str) -> judge.Verdict:
        at = BODY.index(old)
        edit = Edit(at, at + len(old), new)
        return judge.judge(
            draw.mutant("model/toy.py", Source.read(BODY), "by hand", edit), base, known, verify=False
        )

    with checkout.copied(tmp_path) as base:
        seen, alike, hangs, clean = (
            judged(">= b", "< b"),
            judged(">= b", "> b"),
            judged("a > 10", "a < 10"),
            judged("unused", "other"),
        )
        assert (base / "checkout/model/toy.py").read_text() == BODY
    assert (seen.stage, seen.by, seen.hung, seen.ran) == ("test", names[0], False, 2)
    assert (alike.stage, clean.stage) == ("", "")
    assert (hangs.stage, hangs.hung) == ("test", True)

    # the file of verdicts, and the closing table
    file = tmp_path / "verdicts.jsonl"
    for v in (seen, alike, hangs):
        judge.add(file, v)
    with open(file, "a") as out:
        out.write('{"file": "half a li')
    assert judge.read(file) == [seen, alike, hangs]
    lines, enough = report.report([seen, alike, hangs], {})
    assert (
        not enough
        and lines[-1].startswith("2 of 3 mutants killed (66.7 %")
        and any("a > b" in line for line in lines)
    )
    lines, enough = report.report(
        [seen, alike, hangs], {("model/toy.py", alike.before.strip(), alike.after.strip()): "equal values"}
    )
    assert (
        enough
        and lines[-1].startswith("2 of 2 mutants killed (100.0 %")
        and not any(line.startswith("SURVIVED") for line in lines)
    )


def test_explanations_are_complete():
    for (file, before, after), reason in report.explained().items():
        assert len(reason.split()) >= 4 and before != after, (file, before)


def test_the_cases_of_one_test_take_turns():
    tests = [(0.1, "a[1]"), (0.1, "a[2]"), (0.1, "a[3]"), (5.0, "b"), (9.0, "c"), (60.0, "d")]
    assert [name for _, name in judge.chosen(tests, 14.3)] == ["a[1]", "b", "c", "a[2]", "a[3]"]
    assert [name for _, name in judge.chosen([(99.0, "a")], 1.0)] == ["a"]  # one at least


@pytest.mark.parametrize(
    "words, says",
    [
        (["--draw", "5", "--part", "3/2"], "^--part: '3/2'"),
        (["--draw", "9", "--only", "nowhere/"], "^--draw: 9"),
    ],
)
def test_bad_words_are_one_line(words, says):
    with pytest.raises(ConfigError, match=says) as e:
        main(words)
    assert "\n" not in str(e.value)
