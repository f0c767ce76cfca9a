"""python -m scripts.bench chaos: random faults, drawn by a seed, in real runs of train.py.

Each round launches a tiny model as a user would (`python train.py`, or scripts.launch with two ranks),
injects faults, restarts it until it has finished, and compares the result with an undisturbed run: exit
codes, metrics, weights and moments, checkpoints, and leftover processes, locks and files. Exit code 1 if a
round fails; the command that repeats only that round is printed.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean

from config import ConfigError
from config.parts import part_of
from config.provenance import commit_id
from lab.benchmarks.chaos.incidents import FAULTS
from lab.benchmarks.chaos.layouts import BY_NAME, LAYOUTS, RunLayout
from lab.benchmarks.chaos.results import append_report, read_reports
from lab.benchmarks.chaos.rounds import Draw, Harness, Report, draw_rounds
from lab.benchmarks.corpus import write_corpus
from lab.benchmarks.markdown import markdown_table
from lab.benchmarks.process import terminates_cleanly

DOCUMENTS = 60
HELP = "faults drawn by a seed in real runs of train.py: exit codes, weights, metrics, files, processes"


def add_chaos_options(chaos: argparse.ArgumentParser) -> None:
    chaos.add_argument("--rounds", type=int, default=len(FAULTS), help="runs that are disturbed")
    chaos.add_argument("--seed", type=int, default=0, help="of the draw")
    chaos.add_argument("--only", type=int, metavar="K", help="of all rounds only the K-th, from 0")
    chaos.add_argument("--layouts", default="", help=f"separated by commas, of {', '.join(BY_NAME)}")
    chaos.add_argument(
        "--faults", default="", help="separated by commas: faults whose name contains one of these words"
    )
    chaos.add_argument(
        "--resume",
        type=Path,
        metavar="FILE.jsonl",
        help="add a line for each round, leave out those that the file has, and show tables of them all",
    )
    chaos.add_argument("--part", default="1/1", help="K/M: the K-th of M parts of the rounds")
    chaos.add_argument("--home", default="", help="where the runs lie; without it a temporary folder")
    chaos.add_argument("--minutes", type=float, default=float("inf"), help="start no round after this time")
    chaos.add_argument("--list", action="store_true", help="show the rounds and run none")


def main(args: argparse.Namespace) -> int:
    """Return the exit code. Raises ConfigError for unknown names."""
    layouts = chosen_layouts(args.layouts)
    faults = chosen_faults(args.faults)
    every = draw_rounds(args.seed, args.rounds, layouts, faults)
    draws = part_of(every, args.part)
    if args.only is not None:
        draws = [draw for draw in draws if draw.number == args.only]
    if not draws:
        raise ConfigError("--rounds, --only, --part, --layouts, --faults: no round is left")
    if args.list:
        print(*(get_title(draw) for draw in draws), sep="\n")
        return 0
    if not sys.platform.startswith("linux"):
        raise ConfigError("chaos: finds processes in /proc, which only Linux has")

    reports = read_reports(args.resume, every, args.seed) if args.resume else []
    known = {report.draw.number for report in reports}
    with tempfile.TemporaryDirectory(prefix="bevatron-chaos-", ignore_cleanup_errors=True) as temporary:
        home = Path(args.home or temporary).resolve()
        home.mkdir(parents=True, exist_ok=True)
        try:
            with terminates_cleanly():
                run_rounds([draw for draw in draws if draw.number not in known], home, reports, args)
        finally:
            show_tables(reports, args.seed)
    return 1 if any(report.problems for report in reports) else 0


def run_rounds(draws: list[Draw], home: Path, reports: list[Report], args: argparse.Namespace) -> None:
    """Run these rounds until --minutes are over, appending a report of each to `reports`."""
    harness = Harness(home, write_corpus(home, DOCUMENTS), args.seed)
    commit = commit_id()
    started = time.monotonic()
    for draw in draws:
        if time.monotonic() - started > 60 * args.minutes:
            return
        report = replace(harness.run_round(draw), commit=commit)
        reports.append(report)
        if args.resume:
            append_report(args.resume, report, args.seed)
        show(report, args)


def chosen_layouts(names: str) -> list[RunLayout]:
    """Return the layouts by name. Raises ConfigError for an unknown name."""
    wanted = names.split(",") if names else list(BY_NAME)
    for name in wanted:
        if name not in BY_NAME:
            raise ConfigError(f"--layouts: {name!r} is not one of {', '.join(BY_NAME)}")
    return [layout for layout in LAYOUTS if layout.name in wanted]


def chosen_faults(words: str) -> list[str]:
    """Return the faults that contain one of the words. Raises ConfigError for a word that none contains."""
    if not words:
        return list(FAULTS)
    for word in words.split(","):
        if not any(word in name for name in FAULTS):
            raise ConfigError(f"--faults: {word!r} is in none of: {', '.join(FAULTS)}")
    return [name for name in FAULTS if any(word in name for word in words.split(","))]


# ---- output ------------------------------------------------------------------------------------------------


def get_title(draw: Draw) -> str:
    before = ", after a kill" if draw.disturbed_before else ""
    return f"round {draw.number}: {draw.fault}{before}, {draw.layout.name}"


def show(report: Report, args: argparse.Namespace) -> None:
    """Print one line for a round that passed, and everything for one that failed."""
    codes = " ".join(map(str, report.codes))
    print(f"{'FAILED' if report.problems else 'ok':<7}{get_title(report.draw)}: codes {codes}", flush=True)
    if not report.problems:
        return
    starts = [f"start: {line}" for line in report.starts]
    print(*(f"  {line}" for line in (*starts, *report.problems)), sep="\n")
    print(f"  again: {repeat_command(report.draw, args)}", flush=True)


def show_tables(reports: list[Report], seed: int) -> None:
    """Print the tables of all rounds so far, by fault and by layout, and the verdict as the last line."""
    print()
    print(*markdown_table(rows_by(reports, "fault", lambda draw: draw.fault)), "", sep="\n")
    print(*markdown_table(rows_by(reports, "layout", lambda draw: draw.layout.name)), "", sep="\n")
    print(verdict(reports, seed), flush=True)


def repeat_command(draw: Draw, args: argparse.Namespace) -> str:
    """Return the command that repeats only this round."""
    words = f"python -m scripts.bench chaos --rounds {args.rounds} --seed {args.seed}"
    for name in ("layouts", "faults"):
        if getattr(args, name):
            words += f' --{name} "{getattr(args, name)}"'
    return f"{words} --only {draw.number}"


def rows_by(reports: list[Report], column: str, key: Callable[[Draw], str]) -> list[dict[str, str]]:
    """Return a row for each fault or layout: rounds, survivors, exit codes, and the mean of lost seconds."""
    rows = []
    for name in dict.fromkeys(sorted(key(report.draw) for report in reports)):
        mine = [report for report in reports if key(report.draw) == name]
        codes = Counter(code for report in mine for code in report.codes)
        rows.append({
            column: name,
            "rounds": str(len(mine)),
            "survived": str(sum(not report.problems for report in mine)),
            "exit codes": ", ".join(f"{code} x{count}" for code, count in sorted(codes.items())),
            "seconds lost": f"{mean(report.lost_s for report in mine):.0f}",
        })
    return rows


def verdict(reports: list[Report], seed: int) -> str:
    """Return the last line."""
    failed = [report.draw.number for report in reports if report.problems]
    if failed:
        numbers = ", ".join(map(str, failed))
        return f"FAILED: {len(failed)} of {len(reports)} rounds, seed {seed}: {numbers}"
    starts = sum(len(report.codes) for report in reports)
    disturbed = starts - len(reports)  # the last start of a round is undisturbed
    commits = ", ".join(dict.fromkeys(report.commit for report in reports if report.commit))
    return (
        f"ok: {len(reports)} rounds, {starts} starts ({disturbed} disturbed), seed {seed}: every run survived"
        f"{f'; at {commits}' if commits else ''}"
    )
