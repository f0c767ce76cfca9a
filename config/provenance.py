"""Record which code, command, packages and machine produced a run, a checkpoint, a data set or an export.

    read_code(root)                     the code of a checkout: commit, uncommitted changes, a hash
    describe(command, code, hardware)   the full record, as a tree for JSON
    keep(folder, record, patch)         append to provenance.jsonl in a run folder, and store the patch once
    read_records(folder)                read those lines
    changed_files(...)                  compare a recorded tree with today's files

Nothing here can abort a launch: if git is absent, refuses or does not answer, the record says why, and the
code hash stands in for the commit. git never searches for untracked files, which takes minutes if many lie
around; this module scans the code folders itself. git writes nothing, not even its index.
"""
import contextlib
import difflib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from config.machine import usable_cores
from config.strict import ConfigError, Tree

ROOT = Path(__file__).resolve().parent.parent
CODE_FOLDERS = (
    "config", "kernels", "parallel", "model", "data", "optim", "checkpoint", "durable", "runtime", "plan",
)
RECIPES = ("configs/*.yaml", "configs/*/*.yaml")
PACKAGES = ("torch", "triton", "numpy", "tokenizers", "sentencepiece", "safetensors", "flash-attn")
RECORDS_FILE = "provenance.jsonl"
PATCHES = "patches"  # a folder next to it
MAX_PATCH_BYTES = 1 << 20  # larger patches are not kept
MAX_FILES = 300  # named in a record
GIT_SECONDS = 10.0  # timeout of a git call at launch
TREE_SECONDS = 300.0  # timeout for checking out a working tree
GIT = (  # independent of the user's settings
    "git", "--no-pager", "--no-optional-locks",
    "-c", "core.quotepath=off", "-c", "core.fsmonitor=false", "-c", "color.ui=false",
    "-c", "diff.autoRefreshIndex=false",  # which would write the index
)
DIFF = (
    "diff", "--no-renames", "--no-ext-diff", "--no-textconv", "--src-prefix=a/", "--dst-prefix=b/",
    "--submodule=short",
)
COMMIT_DIGITS = 7  # in messages
SHOWN_FILES = 6  # in a line
# words in the name of an option whose value is secret; before "key", KEY_WORDS have the same meaning
SECRET_WORDS = {"token", "secret", "password", "passwd", "passphrase", "credential", "credentials", "apikey"}
KEY_WORDS = {"api", "access", "secret", "private", "account", "auth"}
FIRST_FILE = re.compile(rb"^diff --git ", re.MULTILINE)  # of a patch
# the diff of a file whose mtime changed but not its content
UNCHANGED = re.compile(rb"^diff --git .*\n(?=diff --git |\Z)", re.MULTILINE)
USER_OF_URL = re.compile(r"(?<=://)[^/@\s]+@")
QUERY_OF_URL = re.compile(r"(://[^?\s]*\?)\S+")
HIDDEN = "..."
COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
DIGEST = re.compile(r"[0-9a-f]{64}")


class GitError(Exception):
    """git is missing, refuses or does not answer. The message is one line."""


@dataclass(frozen=True)
class Code:
    """The code of a checkout.

    `digest` is code_hash. `commit` is HEAD, or None if git does not say, for the reason `why`. `prefix` is
    the checkout's path inside the repository, "" or "folder/". `changed` holds {path: (lines added, lines
    removed)} of uncommitted files, including untracked Python files and recipes. `patch` reproduces them on
    top of the commit (git apply). `files` holds {path: sha256} if there is no commit.
    """
    digest: str
    commit: str | None = None
    why: str = ""
    prefix: str = ""
    changed: dict[str, tuple[int, int]] = field(default_factory=dict)
    patch: bytes = b""
    files: dict[str, str] = field(default_factory=dict)

    def tree(self) -> Tree:
        """Return the code as a tree for JSON. The patch is represented by its sha256; "kept" says whether
        it is small enough to be stored."""
        found: Tree = {"hash": self.digest, "commit": self.commit}
        if self.commit is None:
            return {**found, "why": self.why, "files": self.files}
        names = sorted(self.changed, key=lambda name: not is_of_core(name))[:MAX_FILES]
        found |= {"prefix": self.prefix, "changed": {name: list(self.changed[name]) for name in names}}
        if self.patch:
            is_kept = len(self.patch) <= MAX_PATCH_BYTES
            found |= {"patch": sha256(self.patch), "patch_bytes": len(self.patch), "kept": is_kept}
        return found


@dataclass(frozen=True)
class Provenance:
    """The origin of a run, a checkpoint, data or an export.

    See `describe` for `record`. `code` includes the patch, which the record omits.
    """
    record: Tree
    code: Code


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# ---- the code ----------------------------------------------------------------------------------------------


def code_paths(root: Path) -> list[Path]:
    """Return the core's Python files in a checkout, sorted."""
    paths = list(root.glob("*.py"))
    for folder in CODE_FOLDERS:
        paths += (root / folder).rglob("*.py")
    return sorted(paths)


def checkout_files(root: Path) -> list[str]:
    """Return the files that git tracks or would track, or without git every file that is not hidden."""
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True
    )
    if (root / ".git").exists() and listing.returncode == 0:
        return [name for name in listing.stdout.splitlines() if (root / name).is_file()]

    names = []
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root)
        is_hidden = any(part.startswith(".") or part == "__pycache__" for part in name.parts)
        if path.is_file() and not is_hidden:
            names.append(str(name))
    return names


def code_hash(root: Path | None = None) -> str:
    """Return the sha256 of the core's Python files. `root` defaults to this checkout."""
    digest = hashlib.sha256()
    for path in code_paths(root or ROOT):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def is_of_core(name: str) -> bool:
    """Return whether code_hash covers a path of the checkout."""
    first, slash, _ = name.partition("/")
    return name.endswith(".py") and (not slash or first in CODE_FOLDERS)


def loaded_paths(root: Path) -> list[Path]:
    """Return the files below `root` that this process has imported, excluding its Python environment."""
    inside = f"{root}{os.sep}"
    environment = tuple(f"{place}{os.sep}" for place in (sys.prefix, sys.base_prefix))
    within = tuple(place for place in environment if place.startswith(inside))
    results: list[Path] = []
    for module in list(sys.modules.values()):
        file = str(getattr(module, "__file__", None))
        # compare strings: with thousands of modules, paths are slow
        if file.startswith(inside) and file.endswith(".py") and not file.startswith(within):
            results.append(Path(file))
    return [path for path in results if "site-packages" not in path.parts]


def read_code(root: Path | None = None) -> Code:
    """Read the code of a checkout, by default this one. Swallows any error that git causes."""
    root = root or ROOT
    core = code_paths(root)
    digest = code_hash(root)
    recipes = [path for pattern in RECIPES for path in root.glob(pattern)]
    names = sorted({str(path.relative_to(root)) for path in (*core, *recipes, *loaded_paths(root))})
    try:
        prefix, commit = git(root, "rev-parse", "--show-prefix", "HEAD").decode().split("\n")[:2]
        tracked = set(git(root, "ls-files", "-z", "--", *top_level_paths(names)).decode().split("\0"))
        if "train.py" not in tracked:
            raise GitError(f"git: the repository around {root} does not have it")
        changed, patch = uncommitted(root, prefix, [name for name in names if name not in tracked])
    except (GitError, OSError, ValueError) as error:
        files = {str(path.relative_to(root)): sha256(path.read_bytes()) for path in core}
        return Code(digest, why=str(error), files=files)
    return Code(digest, commit, prefix=prefix, changed=changed, patch=patch)


def top_level_paths(names: Iterable[str]) -> list[str]:
    """Return the top-level files and folders that hold these paths."""
    return sorted({name.partition("/")[0] for name in names})


def uncommitted(root: Path, prefix: str, untracked: list[str]) -> tuple[dict[str, tuple[int, int]], bytes]:
    """Return ({path: (lines added, lines removed)}, patch) of everything that HEAD lacks. Raises GitError.

    `untracked` lists additional files to include.
    """
    text = git(root, *DIFF, "--numstat", "-p", "--binary", "--full-index", "HEAD", "--", ".")
    begin = FIRST_FILE.search(text)
    counts, patch = (text, b"") if begin is None else (text[:begin.start()], text[begin.start():])
    patch = UNCHANGED.sub(b"", patch)
    changed: dict[str, tuple[int, int]] = {}
    for line in counts.decode(errors="replace").split("\n"):
        if not line:
            continue
        added, removed, name = line.split("\t", 2)  # dashes for binary files
        if (added, removed) != ("0", "0"):
            changed[name.removeprefix(prefix)] = (parse_count(added), parse_count(removed))
    for name in untracked:
        content = (root / name).read_bytes()
        lines = content.count(b"\n") + (not content.endswith(b"\n") and bool(content))
        changed[name] = (lines, 0)
        patch += patch_of_new_file(prefix + name, content)
    return changed, patch


def parse_count(text: str) -> int:
    return int(text) if text.isdigit() else 0


def patch_of_new_file(name: str, content: bytes) -> bytes:
    """Return the diff of an added file, as `git diff` prints it."""
    old, new = quoted(f"a/{name}"), quoted(f"b/{name}")
    head = f"diff --git {old} {new}\nnew file mode 100644\n"
    if not content:
        return f"{head}index 0000000..e69de29\n".encode()  # the id of an empty file
    lines = content.removesuffix(b"\n").split(b"\n")
    body = b"".join(b"+" + line + b"\n" for line in lines)
    if not content.endswith(b"\n"):
        body += b"\\ No newline at end of file\n"
    tab = "\t" if " " in name else ""  # marks where the name ends
    return f"{head}--- /dev/null\n+++ {new}{tab}\n@@ -0,0 +1,{len(lines)} @@\n".encode() + body


def quoted(name: str) -> str:
    """Quote a path as in patches: as a C string if it has quotes or control characters."""
    is_plain = name.isprintable() and not set(name) & set('"\\')
    return name if is_plain else json.dumps(name, ensure_ascii=False)


def git(root: Path, *words: str, content: bytes = b"", seconds: float = GIT_SECONDS) -> bytes:
    """Run git in the folder and return its output. `content` is its stdin. Raises GitError."""
    try:
        done = subprocess.run(
            [*GIT, *words], cwd=root, input=content, capture_output=True, timeout=seconds, check=False
        )
    except OSError as error:
        missing = isinstance(error, FileNotFoundError) and root.is_dir()
        raise GitError("git is not installed" if missing else f"git: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise GitError(f"git {words[0]} did not end within {seconds:g} s") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or [f"code {done.returncode}"]
        raise GitError("git: " + said[0].removeprefix("fatal: ").removeprefix("error: "))
    return done.stdout


def label(code: Tree) -> str:
    """Return "ab12cd3", "ab12cd3+" with uncommitted code, or "code 12ab34c" without a commit."""
    if not code.get("commit"):
        return f"code {code['hash'][:COMMIT_DIGITS]}"
    has_code = any(name.endswith((".py", ".yaml")) for name in code["changed"])
    return code["commit"][:COMMIT_DIGITS] + ("+" if has_code else "")


def commit_id() -> str:
    """Return label() of this checkout, or "unknown" without git."""
    code = read_code().tree()
    return label(code) if code["commit"] else "unknown"


# ---- the command, the packages, the machine ----------------------------------------------------------------


def typed(words: Sequence[str]) -> str:
    """Return a command as typed into a shell, with secrets in options and URLs hidden."""
    shown: list[str] = []
    hide_next = False
    for word in words:
        name, equals, _ = word.partition("=")
        if hide_next and not word.startswith("--"):
            word = HIDDEN
        elif name.startswith("-") and equals and is_secret(name):
            word = f"{name}={HIDDEN}"
        hide_next = word.startswith("--") and not equals and is_secret(word)
        word = USER_OF_URL.sub(f"{HIDDEN}@", word)
        shown.append(QUERY_OF_URL.sub(rf"\1{HIDDEN}", word))
    return shlex.join(shown)


def is_secret(option: str) -> bool:
    """Return whether the value of an option is secret."""
    words = re.split(r"[-_.]+", option.lower())
    is_key = any(pair[1] == "key" and pair[0] in KEY_WORDS for pair in zip(words, words[1:]))
    return is_key or bool(SECRET_WORDS & set(words))


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that affect numerics and token ids."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        loaded = getattr(sys.modules.get(name.replace("-", "_")), "__version__", None)
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = str(loaded or importlib.metadata.version(name))
    return found


def processor() -> str:
    """Return the name of the CPU."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        # with many cores, reading the whole file is slow
        name = re.search(r"^model name\s*:\s*(.*)$", file.read(4096), re.MULTILINE)
        if name:
            return name[1]
    return platform.machine()


def describe(command: str, code: Code, hardware: Tree | None = None) -> Tree:
    """Build the provenance of something produced now. See `typed` for `command`; `hardware` extends the
    CPU entry."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "code": code.tree(),
        "versions": versions(),
        "hardware": {"processor": processor(), "cores": usable_cores(), **(hardware or {})},
    }


def of_script(name: str, argv: Sequence[str]) -> Tree:
    """Return describe() for `python -m NAME ARGV`."""
    return describe(typed(["python", "-m", name, *argv]), read_code())


def of_process() -> Tree:
    """Return describe() for this process, however it was launched."""
    return describe(typed(["python", *sys.orig_argv[1:]]), read_code())


def other_versions(old: Tree, new: Tree) -> list[str]:
    """Return what differs between two results of versions(): ["numpy 1.26.4 -> 2.1.0", ...]."""
    names = dict.fromkeys([*old, *new])
    pairs = [(name, old.get(name, "none"), new.get(name, "none")) for name in names]
    return [f"{name} {before} -> {now}" for name, before, now in pairs if before != now]


# ---- in a run folder ---------------------------------------------------------------------------------------


def keep(folder: Path, record: Tree, patch: bytes) -> None:
    """Append a record to a run's provenance, and write the patch if it is missing. Raises OSError."""
    code = record["code"]
    if code.get("kept"):
        path = patch_path(folder, code)
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            temporary = path.with_name(f"{path.name}.tmp")
            temporary.write_bytes(patch)
            temporary.replace(path)
    with open(folder / RECORDS_FILE, "a") as file:
        file.write(json.dumps(record) + "\n")


def patch_path(folder: Path, code: Tree) -> Path:
    """Return where a run folder stores its uncommitted changes."""
    return folder / PATCHES / f"{code['patch'][:16]}.patch"


def read_patch(folder: Path, code: Tree) -> bytes:
    """Read the patch of a recorded code. Raises ConfigError if it was not kept, is gone or is damaged."""
    if not code.get("patch"):
        return b""
    if not code["kept"]:
        names = listed(code["changed"])
        raise ConfigError(f"{folder}: {code['patch_bytes']:,} bytes were not committed, more than the "
                          f"{MAX_PATCH_BYTES:,} that a run keeps: {names}; restore these files yourself")
    path = patch_path(folder, code)
    try:
        patch = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; it holds the uncommitted changes; restore it from a "
                          "copy of the run") from None
    if sha256(patch) != code["patch"]:
        raise ConfigError(f"{path}: is damaged (its sha256 differs); restore it from a copy of the run")
    return patch


def read_records(folder: Path) -> list[Tree]:
    """Return the records of a run, one per launch that trained, in order. Skips damaged lines."""
    results: list[Tree] = []
    with contextlib.suppress(OSError), open(folder / RECORDS_FILE, errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict) and is_code(record.get("code")):
                    results.append(record)
    return results


def is_code(tree: Any) -> bool:
    """Return whether this is a valid tree of Code. A run folder may be somebody else's, and its content
    ends up in git arguments and file names."""
    try:
        digests = [tree["hash"], *([tree["patch"]] if "patch" in tree else [])]
        commit, names = tree["commit"], [*tree.get("changed", {}), *tree.get("files", {})]
        paths = [Path(tree.get("prefix", ""), name) for name in names]
        return (
            all(DIGEST.fullmatch(digest) for digest in digests)
            and (isinstance(tree["files"], dict) if commit is None else bool(COMMIT.fullmatch(commit)))
            and (commit is None or isinstance(tree["prefix"], str))
            and not any(path.is_absolute() or ".." in path.parts for path in paths)
        )
    except (KeyError, TypeError, AttributeError):
        return False


# ---- other code --------------------------------------------------------------------------------------------


def code_change(old: Tree, new: Code, folder: Path, root: Path | None = None) -> str | None:
    """Describe a code change: "ab12cd3 -> ab12cd3+: model/mlp.py +1 -1", or None if the core is the same.

    `old` is the code of a record, `folder` its run, which has the patch. `root` is the checkout of `new`, by
    default this one.
    """
    if old["hash"] == new.digest:
        return None
    commits = f"{label(old)} -> {label(new.tree())}"
    try:
        changes = changed_files(old, new, folder, root or ROOT)
    except (ConfigError, GitError, OSError) as error:
        return f"{commits}: which files differ is not known ({error})"
    return f"{commits}: {listed(changes)}"


def listed(changes: dict[str, Any]) -> str:
    """List changed files: "model/mlp.py +1 -1, data/x.py and 3 more files"."""
    words = [f"{name} +{lines[0]} -{lines[1]}" if any(lines or ()) else name
             for name, lines in changes.items()]
    more = len(words) - SHOWN_FILES
    text = ", ".join(words[:SHOWN_FILES])
    return f"{text} and {more} more file{'s' if more > 1 else ''}" if more > 0 else text


def changed_files(old: Tree, new: Code, folder: Path, root: Path) -> dict[str, tuple[int, int] | None]:
    """Return {path: (lines added, lines removed) since the record} for core files.

    The counts are None if unknown. Raises GitError, ConfigError or OSError if the files themselves are
    unknown.
    """
    if not old.get("commit"):  # the record has a hash per file
        now = {str(path.relative_to(root)): sha256(path.read_bytes()) for path in code_paths(root)}
        before: dict[str, str] = old["files"]
        return {name: None for name in sorted(before.keys() | now) if before.get(name) != now.get(name)}

    names = set(old["changed"]) | set(new.changed)
    if old["commit"] != new.commit:
        try:
            there = new.commit or "HEAD"
            text = git(root, *DIFF, "--name-only", "-z", "--relative", old["commit"], there, "--", ".")
        except GitError as error:
            raise GitError(f"{label(old)} is not in this clone" if new.commit else str(error)) from None
        names |= set(text.decode().split("\0"))
    result: dict[str, tuple[int, int] | None] = {}
    for name, then in contents_at(old, sorted(filter(is_of_core, names)), folder, root).items():
        path = root / name
        lines = count_changes(then, path.read_bytes() if path.exists() else b"")
        if lines != (0, 0):
            result[name] = lines
    return result


def contents_at(code: Tree, names: list[str], folder: Path, root: Path) -> dict[str, bytes]:
    """Return {path: content in the recorded tree}, b"" if missing. Raises the same errors as
    changed_files."""
    patch, prefix = read_patch(folder, code), code["prefix"]
    found = dict(zip(names, blobs(root, code["commit"], [prefix + name for name in names])))
    patched = [name for name in names if name in code["changed"]]
    if patched:
        with tempfile.TemporaryDirectory() as place:
            paths = {name: Path(place, prefix + name) for name in patched}
            for name, path in paths.items():
                content = found[name]
                if content is not None:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content)
            chosen = [f"--include={prefix}{name}" for name in patched]
            # ignore any repository around the folder
            words = ("--git-dir=/dev/null", "apply", "--whitespace=nowarn", *chosen, "-")
            git(Path(place), *words, content=patch)
            found |= {name: path.read_bytes() if path.exists() else None for name, path in paths.items()}
    return {name: content or b"" for name, content in found.items()}


def blobs(root: Path, commit: str, names: list[str]) -> list[bytes | None]:
    """Return the content of each path in a commit, or None if missing. Raises GitError."""
    asked = "".join(f"{commit}:{name}\n" for name in names)
    answer = git(root, "cat-file", "--batch", content=asked.encode())
    results: list[bytes | None] = []
    for _ in names:
        head, _, answer = answer.partition(b"\n")
        if head.endswith(b" missing"):
            results.append(None)
            continue
        size = int(head.split()[-1])
        results.append(answer[:size])
        answer = answer[size + 1:]
    return results


def count_changes(old: bytes, new: bytes) -> tuple[int, int]:
    """Return (lines added, lines removed)."""
    texts = [content.decode(errors="replace").splitlines() for content in (old, new)]
    added = removed = 0
    for line in list(difflib.unified_diff(*texts, lineterm="", n=0))[2:]:
        added += line.startswith("+")
        removed += line.startswith("-")
    return added, removed
