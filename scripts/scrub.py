"""Verifies every byte of checkpoints: does the disk still hold what was written?

    python -m scripts.scrub runs/first                                      every checkpoint of a run
    python -m scripts.scrub runs/first/checkpoints/step_00001000            this one
    python -m scripts.scrub runs/*                                          those of several runs

Prints a line for each checkpoint, oldest first: good, or damaged with the file and the problem. Files are
read from the disk, bypassing the page cache where the system allows it. A checkpoint that a run removes
meanwhile is skipped. Nothing is written. Exit code 79 if a checkpoint is damaged.
"""
import argparse
import sys
import time
from pathlib import Path

from checkpoint.disk import store
from checkpoint.disk.files import IntegrityError, drop_page_cache
from checkpoint.disk.folder import NewerFormat
from checkpoint.remote import refuse_url
from config import ConfigError
from config.command_line import CommandParser
from runtime.failure import fail_cleanly

GOOD, DAMAGED, NEWER = "good", "damaged", "newer"
EXIT_CODES = {DAMAGED: IntegrityError.exit_code, NEWER: 2, GOOD: 0}  # the first one found decides


def arguments() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m scripts.scrub",
        description=__doc__,
    )
    parser.add_argument("places", nargs="+", metavar="RUN_OR_CHECKPOINT", help="folders of this machine")
    return parser


def main(argv: list[str]) -> int:
    """Return the exit code. Raises ConfigError for a place without checkpoints, before reading any."""
    places = arguments().parse_args(argv).places
    paths: list[Path] = []
    for place in places:
        paths += list_checkpoints(place)

    counts = {state: 0 for state in EXIT_CODES}
    for path in paths:
        state, line = scrub(path)
        if state:
            counts[state] += 1
            print(f"{state:<9}{line}", flush=True)
    print(f"{sum(counts.values())} checkpoints, {counts[DAMAGED]} damaged")
    return next((code for state, code in EXIT_CODES.items() if counts[state]), 0)


def list_checkpoints(place: str) -> list[Path]:
    """Return the checkpoints of a run, a folder of checkpoints, or a single checkpoint; oldest first.

    Raises ConfigError if there are none.
    """
    refuse_url(place, "scrub")
    folder = Path(place)
    if store.STEP.fullmatch(folder.name) and folder.is_dir():
        return [folder]
    root = folder / "checkpoints"
    found = store.committed_checkpoints(root if root.is_dir() else folder)
    if not found:
        raise ConfigError(
            f"scrub: {place} holds no checkpoint; give a run folder, or one like "
            f"runs/NAME/checkpoints/step_00001000"
        )
    return [path for _, path in reversed(found)]


def scrub(path: Path) -> tuple[str, str]:
    """Return (the state of a checkpoint, its description), or ("", "") if it was removed meanwhile."""
    begun = time.monotonic()
    try:
        files = [file for file in path.iterdir() if file.is_file() and not file.is_symlink()]
        for file in files:
            drop_page_cache(file)
        index = store.verify(path)
        if index.step != store.step_of(path):
            raise IntegrityError(f"{path}: holds step {index.step}")
    except NewerFormat as error:
        return NEWER, str(error)
    except (IntegrityError, FileNotFoundError) as error:
        return (DAMAGED, str(error)) if path.is_dir() else ("", "")
    num_bytes = sum(int(entry["bytes"]) for entry in index.files.values())
    seconds = time.monotonic() - begun
    return GOOD, f"{path}: {num_bytes:,} bytes in {seconds:.1f} s"


if __name__ == "__main__":
    sys.exit(fail_cleanly(main, sys.argv[1:]))
