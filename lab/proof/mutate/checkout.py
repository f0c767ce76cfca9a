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

from config.provenance import checkout_files

ROOT = Path(__file__).parents[3]


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
