"""Which code a measurement is of."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


def commit_id() -> str:
    """Returns the short hash of HEAD, with a plus if Python files differ from it; "unknown" without git."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "*.py")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
