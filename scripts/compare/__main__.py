"""Runs side by side.

    python -m scripts.compare RUN [RUN ...] [--out report.html] [--watch 30]
    python -m scripts.compare GRID [--csv means.csv]
    python -m scripts.compare runs --group NAME --out group.html --watch 30

Prints the differences in their code, data and settings, and their losses at equal tokens and at equal FLOPs.
--out writes a self-contained page with the plot and all settings (.png: only the plot). --watch rewrites it
at this interval in seconds until all runs have ended, and an open browser reloads it by itself. A run that
has not ended and writes nothing for ten minutes is shown with "no news": it may have been killed. For a
single run it is a report. A run that cannot be read is named, and the others are compared.

A folder of scripts.grid stands for its runs. Runs that differ in nothing but train.seed are one group: their
mean, standard deviation and the 95 % interval of the mean (Student's t), and how far each group is above the
lowest, with the interval of the difference (Welch's t). --csv writes the groups, a row each.

--group takes the runs below the folders whose log.group is NAME. With --watch, runs that join later are on
the page, too.

--figure FILE.pdf draws a figure for a paper: --width inches wide, all text in --font and --font-size, the
legend below the panel.
"""
import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from config import ConfigError
from config.command_line import CommandParser
from config.reading.grid import GRID_FILE, grid_runs
from config.strict import read_yaml
from config.terminal import output_width, wrapped
from runtime.failure import fail_cleanly, one_line
from scripts.compare.figure import X_AXES, FigureStyle, check_style, write_figure
from scripts.compare.groups import group_csv, group_numbers, notes, study_seeds, text_lines
from scripts.compare.runs import (
    SMOOTHING_TEXT,
    Run,
    differences,
    doubts,
    draw_runs,
    numbers,
    page,
    read_run,
    repeats,
    table_rows,
    text_table,
)

UNREADABLE = (ConfigError, OSError, ValueError, LookupError, TypeError, ArithmeticError)  # files of all kinds
OF_FIGURE = ("width", "font", "font_size", "x", "log_x", "log_y")  # options that nothing but --figure reads


def arguments() -> argparse.ArgumentParser:
    parser = CommandParser(prog="python -m scripts.compare", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, or folders of grids")
    parser.add_argument("--group", metavar="NAME", help="the runs in these folders whose log.group is NAME")
    parser.add_argument("--out", type=Path, help="a file ending in .html or .png")
    parser.add_argument("--watch", type=int, metavar="SECONDS", help="write --out again at this interval")
    parser.add_argument("--csv", type=Path, help="a file for the means over seeds")
    figure = parser.add_argument_group("a figure for a paper")
    add = figure.add_argument
    add("--figure", type=Path, metavar="FILE", help="a file ending in .pdf, .svg or .png")
    add("--width", type=float, default=3.25, metavar="INCHES", help="of the figure: a column by default")
    add("--font", metavar="NAME", help="such as \"Times New Roman\" or serif; none: matplotlib's")
    add("--font-size", type=float, default=8.0, metavar="POINTS", help="of all its text")
    add("--x", choices=tuple(X_AXES), default="tokens", help="its horizontal axis")
    add("--log-x", action="store_true", help="a logarithmic horizontal axis, from the first step on")
    add("--log-y", action="store_true", help="a logarithmic axis of the loss")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: list[str]) -> int:
    parser = arguments()
    args = parser.parse_args(argv)
    if args.out is not None and args.out.suffix not in (".html", ".png"):
        raise ConfigError(f"--out: {args.out} ends in neither .html nor .png")
    if args.watch is not None and (args.out is None or args.watch < 1):
        raise ConfigError("--watch: needs --out FILE, and at least one second")
    style = FigureStyle(
        width=args.width,
        font=args.font,
        size=args.font_size,
        x=args.x,
        log_x=args.log_x,
        log_y=args.log_y,
    )
    if args.figure is not None:
        check_style(args.figure, style)
    for key in () if args.figure is not None else OF_FIGURE:
        if getattr(args, key) != parser.get_default(key):
            option = f"--{key.replace('_', '-')}"
            raise ConfigError(f"{option}: belongs to --figure FILE; add that, or leave it out")
    folders = named_folders(args.runs, args.group)
    runs, left_out = readable(folders)
    for line in left_out:
        print(f"left out: {line}", file=sys.stderr)
    report(runs, left_out, args.json)
    if args.csv is not None:
        with written("--csv", args.csv):
            replace_file(args.csv, group_csv(study_seeds(runs)).encode())
    if args.figure is not None:
        with written("--figure", args.figure):
            write_figure(runs, repeats(runs), args.figure, style)
    while args.out is not None:
        with written("--out", args.out):
            write(runs, args.out, args.watch)
        have_begun = all(folder.exists() for folder in folders.values())  # those of a grid follow each other
        if args.watch is None or have_begun and all(run.finished is not None for run in runs):
            break
        time.sleep(args.watch)
        folders = named_folders(args.runs, args.group)
        runs, _ = readable(folders)
    return 0


@contextlib.contextmanager
def written(option: str, path: Path) -> Iterator[None]:
    """Write the file of an option inside. Raises ConfigError, naming both, where it cannot be written."""
    try:
        yield
    except OSError as error:
        why = f"{path} cannot be written ({one_line(error)})"
        raise ConfigError(f"{option}: {why}; give another file") from None


def named_folders(paths: list[Path], group: str | None = None) -> dict[str, Path]:
    """Return {name: run folder}, with the runs of each grid, or those of a group below the paths. Several
    grids name their runs GRID/RUN.

    Raises ConfigError for a path that does not exist, a group without runs, and for two runs of one name.
    """
    if group is not None:
        paths = runs_of_group(paths, group)
    grids = [path for path in paths if (path / GRID_FILE).is_file()]
    pairs: list[tuple[str, Path]] = []
    for path in paths:
        if path in grids:
            prefix = f"{path.name}/" if len(grids) > 1 else ""
            pairs += [(prefix + folder.name, folder) for folder in grid_runs(path)]
        else:
            pairs.append((path.name, path))
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ConfigError(f"two runs are named {max(names, key=names.count)}; rename a folder")
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path}: no run that can be read; there is no such folder")
    return dict(pairs)


def runs_of_group(parents: list[Path], group: str) -> list[Path]:
    """Return the run folders directly below these folders whose log.group is `group`. Raises ConfigError if
    there is none."""
    found: list[Path] = []
    for file in sorted(file for parent in parents for file in parent.glob("*/config.yaml")):
        with contextlib.suppress(ConfigError):  # another program's, or not whole yet
            log = read_yaml(file).get("log")
            if isinstance(log, dict) and log.get("group") == group:
                found.append(file.parent)
    if not found:
        where = ", ".join(map(str, parents))
        raise ConfigError(f"--group: no run in {where} has log.group {group}; name the folder of the runs")
    return found


def readable(folders: dict[str, Path]) -> tuple[list[Run], list[str]]:
    """Return the runs with at least one step, for example among runs/*, and why each other is left out.

    Raises ConfigError if no run is left.
    """
    results: list[Run] = []
    refusals: list[str] = []
    for name, folder in folders.items():
        if not folder.exists():
            refusals.append(f"{folder}: has not begun")
            continue
        try:
            results.append(dataclasses.replace(read_run(folder), name=name))
        except UNREADABLE as error:
            known = isinstance(error, ConfigError)
            refusals.append(str(error) if known else f"{folder}: cannot be read ({one_line(error)})")
    if not results:
        raise ConfigError(refusals[0])
    return results, refusals


def report(runs: list[Run], left_out: list[str], as_json: bool) -> None:
    differing = differences(runs)
    if as_json:
        found = {"runs": table_rows(runs), "numbers": numbers(runs), **group_numbers(study_seeds(runs))}
        print(json.dumps({**found, "different": differing, "doubts": doubts(runs), "left_out": left_out}))
        return
    width = output_width()
    print("\n".join(text_table(table_rows(runs), width)))
    for line in (f"training losses: {SMOOTHING_TEXT}", *doubts(runs)):
        print("\n".join(wrapped(line, width)))
    study = repeats(runs)
    if study is not None:
        print("\n".join(text_lines(study, width)))
        for line in notes(study):
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
    """Write the page or the plot."""
    if path.suffix == ".png":
        content = draw_runs(runs, repeats(runs))
    else:
        still_training = any(run.finished is None for run in runs)
        content = page(runs, refresh_s if still_training else None).encode()
    replace_file(path, content)


def replace_file(path: Path, content: bytes) -> None:
    """Replace the file atomically, so that a browser never reads half of it, and create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f".{path.name}.tmp")
    temp.write_bytes(content)
    temp.replace(path)


if __name__ == "__main__":
    sys.exit(fail_cleanly(main, sys.argv[1:]))
