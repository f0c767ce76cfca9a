"""A copy of the checkout to plant mutants in, and cleanup of the processes that a mutant started."""

import compileall
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]


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


@contextlib.contextmanager
def copy_checkout(root: Path) -> Iterator[Path]:
    """Yield a temporary folder with a compiled copy of the checkout in its subfolder `checkout`."""
    with tempfile.TemporaryDirectory(prefix="bevatron-mutants-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for file in checkout_files(root):
            target = folder / "checkout" / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / file, target)
        compileall.compile_dir(folder / "checkout", quiet=2)
        yield folder


def kill_session(process: subprocess.Popen) -> None:
    """Kill what is left of the session that the process leads, and reap the process."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
