"""docs/editing.md, followed to the letter: each of its edits is made in a copy of the checkout, and its
commands run there.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from test_docs import ROOT, Block, commands_of, files, pages

PAGE = "docs/editing.md"
EDITS = ("edit-1", "edit-2", "edit-3", "edit-4", "edit-5", "edit-6")
MAX_FILES = {"edit-1": 2, "edit-2": 1, "edit-3": 2, "edit-4": 2, "edit-5": 2, "edit-6": 4}  # of the program
TESTS = {"edit-1": 2, "edit-6": 3}  # files of tests, if not one: a function and a key; a key, a rule, groups
# {edit: (file, what is right, a mistake in its place)}, which the first proof of the edit sees
MISTAKES = {
    "edit-6": (
        ("parallel/topology/dims.py", '"ring", "ulysses", "tp")', '"ulysses", "ring", "tp")'),
        ("model/attention.py", "cp=mesh.ring if mesh.ulysses.size > 1 else mesh.cp", "cp=mesh.cp"),
    ),
}
LEFT_OUT = ("runs/", "out/", ".git/", ".venv/", ".cache/")


def changes(edit: str) -> list[Block]:
    """The diffs of a section: those before the commands of the edit, after those of the one before."""
    found: list[Block] = []
    for block in pages()[PAGE].blocks:
        if block.language == "diff":
            found.append(block)
        elif block.label == edit:
            return found
        elif block.label in EDITS:
            found = []
    raise AssertionError(f"{PAGE} has no commands of {edit}")


def apply(diff: str, root: pathlib.Path) -> str:
    """Changes the file of a diff under root; returns its name. Raises AssertionError if a hunk does not fit
    exactly once.
    """
    name = re.findall(r"^\+\+\+ b/(\S+)", diff, re.M)[0]
    path = root / name
    text = path.read_text() if path.exists() else ""
    assert bool(text) != ("--- /dev/null" in diff), name
    for hunk in re.split(r"^@@.*\n?", diff, flags=re.M)[1:]:
        lines = hunk.splitlines()
        old = "".join(line[1:] + "\n" for line in lines if not line.startswith("+"))
        new = "".join(line[1:] + "\n" for line in lines if not line.startswith("-"))
        assert not text or text.count(old) == 1, f"{name}: {text.count(old)} times:\n{old}"
        text = text.replace(old, new) if text else new
    path.write_text(text)
    return name


def copy(target: pathlib.Path) -> None:
    """The checkout, as far as it is a program."""
    for name in files():
        if not name.endswith("/") and not name.startswith(LEFT_OUT):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def test_every_edit_fits_and_is_small(tmp_path):
    """It changes as few files as the page says, and its table names each."""
    rows = [line for line in pages()[PAGE].prose.splitlines() if line.startswith("| [")]
    for edit, row in zip(EDITS, rows, strict=True):
        copy(tmp_path / edit)
        changed = {apply(block.text, tmp_path / edit) for block in changes(edit)}
        program = {name for name in changed if not name.startswith("tests/")}
        assert len(program) <= MAX_FILES[edit] and len(changed) == len(program) + TESTS.get(edit, 1)
        assert set(re.findall(r"`([^`]+)`", row)) == changed


@pytest.mark.slow
@pytest.mark.parametrize("edit", EDITS)
def test_the_commands_of_an_edit_run(tmp_path, edit):
    """In a process of its own, which loads the edited program once and forks for each command."""
    edited(edit, tmp_path / "checkout")
    assert commands_of(pages()[PAGE], edit)
    done = started(tmp_path, str(tmp_path / "checkout/tests/test_editing.py"), edit)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]


def edited(edit: str, checkout: pathlib.Path) -> None:
    """A copy of the checkout with the edit."""
    copy(checkout)
    for block in changes(edit):
        apply(block.text, checkout)


def started(tmp_path: pathlib.Path, *words: str) -> subprocess.CompletedProcess:
    """A process of the edited program, with its output."""
    folders = [str(tmp_path / "checkout" / name) for name in ("", "tests")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600
    )


@pytest.mark.slow
@pytest.mark.parametrize("edit", MISTAKES)
def test_its_proof_sees_mistakes(tmp_path, edit):
    edited(edit, tmp_path / "checkout")
    proof = next(each for each in commands_of(pages()[PAGE], edit) if "scripts.verify" in each.text)
    for name, right, wrong in MISTAKES[edit]:
        file = tmp_path / "checkout" / name
        text = file.read_text()
        assert text.count(right) == 1
        file.write_text(text.replace(right, wrong))
        done = started(tmp_path, *proof.words[1:])
        assert done.returncode == 1 and "WRONG" in done.stdout, f"{wrong}\n{done.stdout}{done.stderr}"
        file.write_text(text)


def follow(edit: str) -> None:
    """Runs the commands of an edit here. Raises AssertionError where one ends otherwise than the page
    says.
    """
    from test_docs import made_smaller, prepare, run

    home = pathlib.Path.cwd() / "home"
    home.mkdir()
    prepare(home)
    for command in commands_of(pages()[PAGE], edit):
        where = ROOT if "pytest" in command.text else home
        code, output = run(command, where)
        assert code == 0, f"{command.text}\n{output[-4000:]}"
        print("ok", *made_smaller(command))
    expected = iter(refusals(edit))
    for command in commands_of(pages()[PAGE], f"{edit}-refused"):
        code, output = run(command, home)
        refusal = next(expected)
        assert code == 2 and refusal in output, f"{command.text}\n{output[-4000:]}\nthe page says: {refusal}"
        print("refused", command.text)


def refusals(edit: str) -> list[str]:
    """The lines that the page shows after the commands that are refused."""
    blocks = pages()[PAGE].blocks
    after = [blocks[i + 1] for i, block in enumerate(blocks) if block.label == f"{edit}-refused"]
    return [line for block in after for line in block.text.splitlines()]


if __name__ == "__main__":
    follow(sys.argv[1])
