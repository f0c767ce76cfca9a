"""A copy of the checkout in which a mutant lives, and the end of the processes that it started."""

import compileall
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def files_of(root: Path) -> list[str]:
    """What git tracks or would track; of a folder without git, every file that is not hidden."""
    done = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True
    )
    if (root / ".git").exists() and done.returncode == 0:
        return [name for name in done.stdout.splitlines() if (root / name).is_file()]
    found = (str(path.relative_to(root)) for path in sorted(root.rglob("*")) if path.is_file())
    return [
        name
        for name in found
        if not any(part.startswith(".") or part == "__pycache__" for part in Path(name).parts)
    ]


@contextlib.contextmanager
def copied(root: Path) -> Iterator[Path]:
    """A temporary folder with the checkout in its `checkout`, compiled."""
    with tempfile.TemporaryDirectory(prefix="bevatron-mutants-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for file in files_of(root):
            (folder / "checkout" / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / file, folder / "checkout" / file)
        compileall.compile_dir(folder / "checkout", quiet=2)
        yield folder


def group_ends(process: subprocess.Popen) -> None:
    """Kill what is left of the session that the process leads."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
