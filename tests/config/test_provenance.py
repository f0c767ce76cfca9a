"""The commit, patch and command that made something, beside git itself, in small repositories."""

import filecmp
import json
import os
import shlex
import subprocess

import pytest

from config import ConfigError, code_hash, provenance
from config.provenance import Code, code_change, read_code, typed

IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")


def git(folder, *words):
    done = subprocess.run(
        ["git", *IDENTITY, *words], cwd=folder, check=True, capture_output=True, text=True, timeout=60
    )
    return done.stdout


@pytest.fixture
def repo(tmp_path):
    """A checkout in which little lies, with one commit."""
    root = tmp_path / "repo"
    for name in ("model", "config", "docs", "configs/runs"):
        (root / name).mkdir(parents=True)
    (root / "train.py").write_text("import model.mlp\n")
    (root / "model/mlp.py").write_text("".join(f"line {n}\n" for n in range(20)))
    (root / "model/norm.py").write_text("norm\n")
    (root / "docs/page.md").write_text("no code\n")
    (root / "configs/runs/fast.yaml").write_text("train: {steps: 3}\n")
    (root / "weights.bin").write_bytes(bytes(range(256)) * 9)
    (root / ".gitignore").write_text("/runs/\nmodel/private.py\n")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    return root


def edited(root):
    """Every kind of change: lines, an end without a newline, what is deleted, new, ignored, empty, binary."""
    (root / "model/mlp.py").write_text("".join(f"line {n}\n" for n in range(20) if n != 7) + "more\nlast")
    (root / "model/norm.py").unlink()
    (root / "docs/page.md").write_text("no code, ü\n")
    (root / "weights.bin").write_bytes(bytes(range(256)) * 7)
    (root / "model/mine.py").write_text("mine = 1\n\n\nlast = 'ü'")
    (root / "model/private.py").write_text("key = 1\n")
    (root / "model/__init__.py").write_text("")
    (root / "one more.py").write_text("\n")
    (root / "configs/runs/mine \"2\".yaml").write_text("train: {steps: 4}\n")
    git(root, "add", "weights.bin")


def test_the_patch_makes_the_same_tree_of_the_commit(repo, tmp_path):
    edited(repo)
    code = read_code(repo)
    assert code.commit == git(repo, "rev-parse", "HEAD").strip()
    assert code.digest == code_hash(repo)

    again = tmp_path / "again"
    git(tmp_path, "clone", "-q", str(repo), str(again))
    assert read_code(again).patch == b"" and read_code(again).changed == {}
    subprocess.run(["git", "apply", "-"], cwd=again, input=code.patch, check=True)
    for path in repo.rglob("*"):
        if path.is_file() and ".git" not in path.parts:
            assert filecmp.cmp(path, again / path.relative_to(repo), shallow=False), path
    assert not (again / "model/norm.py").exists()
    assert code_hash(again) == code.digest
    assert code.changed["model/mlp.py"] == (2, 1) and code.changed["model/mine.py"] == (4, 0)
    assert code.changed["model/norm.py"] == (0, 1) and "docs/page.md" in code.changed


def test_a_checkout_within_another_repository_has_a_prefix(repo, tmp_path):
    outer = tmp_path / "outer"
    outer.mkdir()
    git(outer, "init", "-q")
    git(outer, "commit", "-q", "--allow-empty", "-m", "nothing")
    inner = outer / "lab" / "bevatron"
    inner.mkdir(parents=True)
    git(repo, "checkout-index", "-a", f"--prefix={inner}/")
    assert "does not have it" in read_code(inner).why  # as an installed package in a virtual environment
    git(outer, "add", ".")
    git(outer, "commit", "-q", "-m", "all")
    edited(inner)
    code = read_code(inner)
    assert code.commit == git(outer, "rev-parse", "HEAD").strip() and code.prefix == "lab/bevatron/"
    assert code.changed["model/mlp.py"] == (2, 1)
    again = tmp_path / "again"
    git(tmp_path, "clone", "-q", str(outer), str(again))
    subprocess.run(["git", "apply", "-"], cwd=again, input=code.patch, check=True)
    assert code_hash(again / code.prefix) == code.digest


def test_what_git_cannot_do_is_said(repo, tmp_path, monkeypatch):
    plain = tmp_path / "plain"
    git(repo, "checkout-index", "-a", f"--prefix={plain}/")
    code = read_code(plain)
    assert code.commit is None and "not a git repository" in code.why
    assert code.digest == code_hash(repo) and "model/mlp.py" in code.files
    with monkeypatch.context() as patch:
        patch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
        assert "dubious ownership" in read_code(repo).why
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        assert read_code(repo).why == "git is not installed"
    (tmp_path / "bin").mkdir()
    slow = tmp_path / "bin" / "git"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        patch.setattr(provenance.git, "__kwdefaults__", {"content": b"", "seconds": 0.3})
        assert read_code(repo).why == "git rev-parse did not end within 0.3 s"
    (repo / ".git" / "HEAD").write_text("nonsense\n")
    assert read_code(repo).commit is None and read_code(repo).why.startswith("git: ")


def test_nothing_is_written_into_the_repository(repo):
    """A .git that cannot be written to, as that of another user: files are as new, and the index says so."""
    for path in (repo / "model").iterdir():
        os.utime(path, (1, 1))
    before = {path: path.stat().st_mtime_ns for path in (repo / ".git").rglob("*")}
    code = read_code(repo)
    assert (code.why, code.changed, code.patch) == ("", {}, b"")
    text = (repo / "model/mlp.py").read_text()
    (repo / "model/mlp.py").write_text("other\n")
    (repo / "model/mlp.py").write_text(text)  # as it was, but newer: an editor's undo
    code = read_code(repo)
    assert (code.commit, code.changed, code.patch) == (git(repo, "rev-parse", "HEAD").strip(), {}, b"")
    (repo / "model/norm.py").chmod(0o755)
    assert b"new mode 100755" in read_code(repo).patch
    assert {path: path.stat().st_mtime_ns for path in (repo / ".git").rglob("*")} == before


def test_settings_of_the_user_change_no_patch(repo, monkeypatch):
    edited(repo)
    plain = read_code(repo).patch
    settings = {
        "diff.noprefix": "true", "diff.mnemonicPrefix": "true", "color.ui": "always",
        "diff.external": "false", "core.quotepath": "true", "diff.renames": "copies",
        "core.pager": "false", "core.fsmonitor": "false",
    }
    for name, value in settings.items():
        git(repo, "config", name, value)
    assert read_code(repo).patch == plain


def test_git_is_never_asked_for_untracked_files(repo, tmp_path, monkeypatch):
    """Data that lies about in a clone may be millions of files."""
    log, real = tmp_path / "log", subprocess.check_output(["which", "git"], text=True).strip()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "git").write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {real} "$@"\n')
    (tmp_path / "bin" / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert read_code(repo).commit
    asked = log.read_text().splitlines()
    assert len(asked) <= 3
    assert not any("--others" in line or " status" in line for line in asked)


@pytest.mark.parametrize("kept", [True, False])
def test_what_differs_is_named_with_its_lines(repo, tmp_path, kept):
    """From one uncommitted tree to another, over two commits; counted by git between the two trees."""
    folder = tmp_path / "run"
    folder.mkdir()
    edited(repo)
    then = read_code(repo)
    provenance.keep(folder, {"code": then.tree()}, then.patch)
    git(repo, "worktree", "add", "-q", "--detach", str(tmp_path / "tree"), "HEAD")
    subprocess.run(["git", "apply", "-"], cwd=tmp_path / "tree", input=then.patch, check=True)

    git(repo, "add", "-A")
    git(repo, "commit", "-q", "-m", "second")
    (repo / "model/mlp.py").write_text((repo / "model/mlp.py").read_text().replace("line 3\n", "a\nb\n"))
    (repo / "model/later.py").write_text("later\n")
    (repo / "model/mine.py").unlink()
    (repo / "docs/page.md").write_text("other\n")
    now = read_code(repo)
    if not kept:
        next((folder / provenance.PATCHES).iterdir()).unlink()
    line = code_change(then.tree(), now, folder, repo)
    assert line.startswith(f"{then.commit[:7]}+ -> {now.commit[:7]}+: ")
    if not kept:
        assert "which files differ is not known" in line and ".patch: No such file" in line
        return

    for name in ("model/mlp.py", "model/later.py", "model/mine.py"):
        paths = [root / name for root in (tmp_path / "tree", repo)]
        old, new = (path if path.exists() else "/dev/null" for path in paths)
        words = ["git", "diff", "--no-index", "--numstat", str(old), str(new)]
        added, removed, _ = subprocess.run(words, capture_output=True, text=True).stdout.split(maxsplit=2)
        assert f"{name} +{added} -{removed}" in line
    assert "docs" not in line and "norm" not in line


def test_the_same_code_under_another_commit_is_no_change(repo, tmp_path):
    then = read_code(repo)
    (repo / "docs/page.md").write_text("other\n")
    git(repo, "commit", "-q", "-a", "-m", "words")
    assert code_change(then.tree(), read_code(repo), tmp_path, repo) is None


def test_a_commit_that_is_not_there_is_said_and_a_tree_without_git_compared(repo, tmp_path):
    now = read_code(repo)
    gone = {**now.tree(), "hash": "1" * 64, "commit": "1" * 40}
    assert "1111111 is not in this clone" in code_change(gone, now, tmp_path, repo)

    plain = tmp_path / "plain"
    git(repo, "checkout-index", "-a", f"--prefix={plain}/")
    then = read_code(plain)
    (plain / "model/mlp.py").write_text("other\n")
    line = code_change(then.tree(), read_code(plain), tmp_path, plain)
    assert line == f"code {then.digest[:7]} -> code {code_hash(plain)[:7]}: model/mlp.py"


def test_a_patch_that_is_too_large_is_not_kept(repo, tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "MAX_PATCH_BYTES", 100)
    edited(repo)
    code = read_code(repo)
    provenance.keep(tmp_path, {"code": code.tree()}, code.patch)
    (record,) = provenance.read_records(tmp_path)
    assert not (tmp_path / provenance.PATCHES).exists()
    assert record["code"]["patch_bytes"] > 100 and "model/mine.py" in record["code"]["changed"]
    with pytest.raises(ConfigError, match="bytes were not committed, more than the 100 .*model/m"):
        provenance.read_patch(tmp_path, record["code"])


def test_a_patch_is_kept_once_and_its_damage_is_found(repo, tmp_path):
    edited(repo)
    code = read_code(repo)
    for _ in range(3):
        provenance.keep(tmp_path, {"code": code.tree()}, code.patch)
    (tmp_path / provenance.RECORDS_FILE).open("a").write("{torn\n")
    assert len(provenance.read_records(tmp_path)) == 3
    (path,) = (tmp_path / provenance.PATCHES).iterdir()
    assert provenance.read_patch(tmp_path, code.tree()) == code.patch
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(ConfigError, match="is damaged"):
        provenance.read_patch(tmp_path, code.tree())


@pytest.mark.parametrize("words, shown", [
    (["python", "train.py", "a b", "--data.path", "0.7 x 0.3 y"], None),
    (["x", "--train.tokens", "1e9", "--data.tokenizer", "t", "--jsonl-key", "body", "--max-new-tokens", "9"],
     None),
    (["x", "--hf-token", "hf_abc", "--api-key=k9", "--steps", "3"],
     ["x", "--hf-token", "...", "--api-key=...", "--steps", "3"]),
    (["--data.path", "s3://me:word@host/a", "https://h/a?X-Sig=1&b=2"],
     ["--data.path", "s3://...@host/a", "https://h/a?..."]),
])
def test_a_command_is_kept_without_its_secrets(words, shown):
    assert shlex.split(typed(words)) == (shown or words)


def test_a_label_is_the_commit_with_a_plus_for_changed_code():
    code = Code("1" * 64, "2" * 40, changed={"docs/a.md": (1, 0)})
    assert provenance.label(code.tree()) == "2222222"
    code.changed["model/a.py"] = (1, 0)
    assert provenance.label(code.tree()) == "2222222+"
    assert provenance.label(Code("1" * 64, why="no").tree()) == "code 1111111"


def test_what_another_writes_becomes_no_option_of_git(repo, tmp_path):
    """A run folder from elsewhere: its records are words of git, and names of files."""
    edited(repo)
    good = read_code(repo).tree()
    assert provenance.is_code(good) and provenance.is_code(Code("1" * 64, why="no").tree())
    (tmp_path / provenance.RECORDS_FILE).write_text(json.dumps({"code": good}) + "\n")
    for change in (
        {"commit": f"--output={tmp_path}/taken"},
        {"commit": 7},
        {"patch": "../" * 8},
        {"changed": {"model/../../../taken.py": [1, 0]}},
        {"changed": {"/taken.py": [1, 0]}},
        {"prefix": "../"},
        {"hash": None},
        {"changed": None},
    ):
        assert not provenance.is_code({**good, **change}), change
        with open(tmp_path / provenance.RECORDS_FILE, "a") as file:
            file.write(json.dumps({"code": {**good, **change}}) + "\n")
    for other in (None, [], "code", {}):
        assert not provenance.is_code(other)
    assert provenance.read_records(tmp_path) == [{"code": good}]
