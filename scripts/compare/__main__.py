"""Runs side by side.

    python -m scripts.compare RUN [RUN ...] [--out report.html] [--watch 30]

Prints the differences in their code, data and settings, and their losses at equal tokens and at equal FLOPs.
--out writes a self-contained page with the plot and all settings (.png: only the plot). --watch rewrites it
at this interval in seconds until all runs have ended, and an open browser reloads it by itself. A run that
has not ended and writes nothing for ten minutes is shown with "no news": it may have been killed. For a
single run it is a report.
"""
import argparse
import json
import sys
import time
from pathlib import Path

from config import ConfigError
from config.command_line import CommandParser
from config.terminal import output_width, wrapped
from runtime.failure import fail_cleanly
from scripts.compare.runs import (
    SMOOTHING_TEXT,
    Run,
    differences,
    doubts,
    draw_runs,
    numbers,
    page,
    read_run,
    table_rows,
    text_table,
)


def arguments() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m scripts.compare",
        description=__doc__,
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--out", type=Path, help="a file ending in .html or .png")
    parser.add_argument("--watch", type=int, metavar="SECONDS", help="write --out again at this interval")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: list[str]) -> int:
    args = arguments().parse_args(argv)
    if args.out is not None and args.out.suffix not in (".html", ".png"):
        raise ConfigError(f"--out: {args.out} ends in neither .html nor .png")
    if args.watch is not None and (args.out is None or args.watch < 1):
        raise ConfigError("--watch: needs --out FILE, and at least one second")
    names = [folder.name for folder in args.runs]
    if len(set(names)) < len(names):
        raise ConfigError(f"two runs are named {max(names, key=names.count)}; rename a folder")

    runs = readable(args.runs)
    report(runs, args.json)
    while args.out is not None:
        write(runs, args.out, args.watch)
        if args.watch is None or all(run.finished is not None for run in runs):
            break
        time.sleep(args.watch)
        runs = readable(args.runs)
    return 0


def readable(names: list[Path]) -> list[Run]:
    """Return the runs with at least one step, for example among runs/*, and print which are left out.

    Raises ConfigError for a name that matches nothing, and if no run is left.
    """
    results: list[Run] = []
    refusals: list[ConfigError] = []
    for path in names:
        try:
            results.append(read_run(path))
        except ConfigError as error:
            if not path.exists() or len(names) == 1:
                raise
            refusals.append(error)
    if not results:
        raise refusals[0]
    for error in refusals:
        print(f"left out: {error}", file=sys.stderr)
    return results


def report(runs: list[Run], as_json: bool) -> None:
    differing = differences(runs)
    if as_json:
        found = {"runs": table_rows(runs), "numbers": numbers(runs)}
        print(json.dumps({**found, "different": differing, "doubts": doubts(runs)}))
        return
    width = output_width()
    print("\n".join(text_table(table_rows(runs), width)))
    for line in (f"training losses: {SMOOTHING_TEXT}", *doubts(runs)):
        print("\n".join(wrapped(line, width)))
    print()
    if len(runs) > 1:
        rows = [{"different": key} | {run.name: str(value) for run, value in zip(runs, values)}
                for key, values in differing.items()]
        print("\n".join(text_table(rows, width)) if rows else nothing_differs(runs))


def nothing_differs(runs: list[Run]) -> str:
    known = all(run.origins for run in runs)
    return "neither code, nor data, nor a setting differs" if known else "no setting differs"


def write(runs: list[Run], path: Path, refresh_s: int | None) -> None:
    """Replace the file atomically, so that a browser never reads half of it, and create its folder."""
    if path.suffix == ".png":
        content = draw_runs(runs)
    else:
        still_training = any(run.finished is None for run in runs)
        content = page(runs, refresh_s if still_training else None).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f".{path.name}.tmp")
    temp.write_bytes(content)
    temp.replace(path)


if __name__ == "__main__":
    sys.exit(fail_cleanly(main, sys.argv[1:]))
