"""Does the proof catch a bug? python -m scripts.mutate [--only WORD ...] | --draw N --seed S [--resume FILE]

Without --draw: the table of planted bugs (lab/proof/mutate/table.yaml), each representing a class of bugs
found in published codebases, against scripts.verify. A bug that verify misses is a hole in the proof: exit 1.

With --draw: N mutants of the whole core (model/, parallel/, optim/, data/, checkpoint/, the step and the
evaluation), drawn by the seed. Each runs against the tests that cover its function (per tests/footprints.xz),
first those of the core (bash scripts/test.sh) and then slow ones, and then against verify on layouts that use
its file. A failure counts only if the same command passes without the mutant (lab/proof/mutate/control.py).
Exit 1 if fewer than 95 % of the mutants that are not explained in equivalent.yaml are killed. --part K/M and
--resume FILE.jsonl spread a draw over several runs.

With --without-verify only tests are run, also for the bugs of the table.
"""

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from config import ConfigError
from config.command_line import CommandParser
from config.parts import part_of
from lab.proof.mutate import cover, table
from lab.proof.mutate.checkout import ROOT, copy_checkout
from lab.proof.mutate.control import Controls
from lab.proof.mutate.cover import footprint_file
from lab.proof.mutate.draw import draw
from lab.proof.mutate.judge import BUDGET_S, Verdict, append_verdict, count_kills, judge, read_verdicts
from lab.proof.mutate.mutant import Key, Mutant
from lab.proof.mutate.report import explained_mutants, make_report, make_table_report, read_explanations

# (mutant, kills of each test function so far) -> verdict
Judge = Callable[..., Verdict]


def main(argv: list[str]) -> int:
    """Return the exit code."""
    args = make_parser().parse_args(argv)
    mutants = choose_mutants(args)
    if args.list:
        print(*(mutant.difference() for mutant in mutants), sep="\n")
        return 0

    verdicts = judge_mutants(mutants, args)
    judged = [verdicts[mutant.key] for mutant in mutants if mutant.key in verdicts]
    if is_by_verify(args):
        lines, enough = make_table_report(judged)
    else:
        lines, enough = make_report(judged, explained_mutants(judged, read_explanations(), ROOT))
    print(*lines, sep="\n")
    if len(judged) < len(mutants):
        print(f"{len(mutants) - len(judged)} mutants are left: the same command with --resume continues")
    return 0 if enough else 1


def is_by_verify(args: argparse.Namespace) -> bool:
    """Return whether the mutants are bugs of the table, each with its own run of verify."""
    return args.draw is None and not args.without_verify


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m scripts.mutate",
        description=__doc__,
    )
    parser.add_argument(
        "--only",
        nargs="*",
        default=[],
        help="bugs of the table whose text has all these words; with --draw: files whose names start so",
    )
    parser.add_argument(
        "--world", type=int, default=8, help="leave out bugs of the table that need more ranks"
    )
    parser.add_argument("--draw", type=int, metavar="N", help="draw N mutants instead")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--part", default="1/1", help="K/M: the K-th of M parts of the table or the draw")
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE.jsonl",
        help="add a line for each mutant, and leave out those that the file has",
    )
    parser.add_argument("--minutes", type=float, help="start no mutant after this time")
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, help="seconds of tests of each kind that a mutant meets"
    )
    parser.add_argument("--list", action="store_true", help="show the mutants and judge none")
    parser.add_argument(
        "--without-verify", action="store_true", help="ask tests alone, also about the bugs of the table"
    )
    return parser


def choose_mutants(args: argparse.Namespace) -> list[Mutant]:
    """Return the chosen part of the table or of the draw."""
    if args.draw is None:
        bugs = table.choose(table.read_table(), args.only, args.world)
        if not bugs:
            raise ConfigError(
                f"--only: no planted bug of up to {args.world} ranks has the words {' '.join(args.only)}; "
                "--list shows all"
            )
        return table.mutants(part_of(bugs, args.part))
    part_of(range(args.draw), args.part)  # raises before the slow draw
    return part_of(draw(ROOT, args.draw, args.seed, tuple(args.only)), args.part)


@contextlib.contextmanager
def make_judge(args: argparse.Namespace) -> Iterator[Judge]:
    """Yield the function that judges a mutant in copies of the checkout."""
    if is_by_verify(args):
        with copy_checkout(ROOT) as base:
            yield lambda mutant, kills: table.judge_by_verify(mutant, base)
        return

    if not footprint_file.FOOTPRINTS.exists():
        raise ConfigError(
            f"{footprint_file.FOOTPRINTS.name}: it is not known which test runs which function; run "
            "bash scripts/test.sh --all --record FOLDER and python tests/footprints.py FOLDER first"
        )
    coverage = cover.CoverageMap(footprint_file.read_footprints(), cover.core_tests())
    with copy_checkout(ROOT) as base, contextlib.closing(Controls(base)) as controls:
        yield partial(
            judge,
            controls=controls,
            coverage=coverage,
            budget_s=args.budget,
            verify=not args.without_verify,
        )


def judge_mutants(mutants: list[Mutant], args: argparse.Namespace) -> dict[Key, Verdict]:
    """Judge the mutants that the --resume file lacks, until --minutes are over.

    Returns {key of a mutant: its verdict}, including those from the file.
    """
    known = read_verdicts(args.resume) if args.resume else []
    verdicts = {verdict.key: verdict for verdict in known}
    started = time.perf_counter()
    with make_judge(args) as judge_mutant:
        for mutant in mutants:
            if mutant.key in verdicts:
                continue
            if args.minutes is not None and time.perf_counter() - started > 60 * args.minutes:
                break

            # another process may have added to the file
            kills = count_kills(read_verdicts(args.resume) if args.resume else verdicts.values())
            verdict = judge_mutant(mutant, kills=kills)
            verdicts[mutant.key] = verdict

            outcome = verdict.stage or "SURVIVED"
            hung = " (hung)" if verdict.hung else ""
            print(f"{outcome:<9}{verdict.seconds:>6.1f} s  {mutant.difference()}")
            print(f"  {verdict.by}{hung}", flush=True)
            if args.resume:
                append_verdict(args.resume, verdict)
    return verdicts
