"""Which code a measurement is of."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


def commit_id() -> str:
    """Of the checkout; with a plus where Python files differ from it. "unknown": this is no checkout."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "*.py")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
