"""Does the proof catch a bug? python -m scripts.mutate [--only WORD ...] | --draw N --seed S [--resume FILE]

Without --draw: the table of planted bugs (lab/proof/mutate/table.py), each representing a class of bugs found
in published codebases, against scripts.verify. A bug that verify misses is a hole in the proof: exit 1.

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
from pathlib import Path

from config import ConfigError
from config.command_line import CommandParser
from config.parts import part_of
from lab.proof.mutate import cover, table
from lab.proof.mutate.checkout import ROOT, copy_checkout
from lab.proof.mutate.control import Controls
from lab.proof.mutate.cover import footprint_file
from lab.proof.mutate.draw import Mutant, draw
from lab.proof.mutate.judge import BUDGET_S, Verdict, append_verdict, count_kills, judge, read_verdicts
from lab.proof.mutate.report import make_report, read_explanations


def main(argv: list[str]) -> int:
    """Return the exit code."""
    args = make_parser().parse_args(argv)
    if args.draw is None and not args.without_verify:
        return table.run(args.only, args.world, args.part)
    return judge_all(args)


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
    parser.add_argument("--list", action="store_true", help="show the mutants of --draw and judge none")
    parser.add_argument(
        "--without-verify", action="store_true", help="ask tests alone, also about the bugs of the table"
    )
    return parser


def judge_all(args: argparse.Namespace) -> int:
    """Judge the mutants of a draw or of the table, print the report, and return the exit code."""
    if args.draw is None:
        mutants = table.mutants(part_of(table.chosen(args.only, args.world), args.part))
    else:
        part_of(range(args.draw), args.part)  # raises before the slow draw
        mutants = part_of(draw(ROOT, args.draw, args.seed, tuple(args.only)), args.part)
    if args.list:
        print(*(mutant.difference() for mutant in mutants), sep="\n")
        return 0

    if not footprint_file.FOOTPRINTS.exists():
        raise ConfigError(
            f"{footprint_file.FOOTPRINTS.name}: it is not known which test runs which function; run "
            "bash scripts/test.sh --all --record FOLDER and python tests/footprints.py FOLDER first"
        )
    coverage = cover.CoverageMap(footprint_file.read_footprints(), cover.core_tests())
    verdicts = judge_mutants(mutants, coverage, args)

    judged = [verdicts[mutant.key] for mutant in mutants if mutant.key in verdicts]
    lines, enough = make_report(judged, read_explanations())
    print(*lines, sep="\n")
    if len(judged) < len(mutants):
        print(f"{len(mutants) - len(judged)} mutants are left: the same command with --resume continues")
    return 0 if enough else 1


def judge_mutants(
    mutants: list[Mutant], coverage: cover.CoverageMap, args: argparse.Namespace
) -> dict[tuple[str, int, str, str], Verdict]:
    """Judge the mutants that the --resume file lacks, until --minutes are over.

    Returns {key of a mutant: its verdict}, including those from the file.
    """
    known = read_verdicts(args.resume) if args.resume else []
    verdicts = {verdict.key: verdict for verdict in known}
    started = time.perf_counter()
    with copy_checkout(ROOT) as base, contextlib.closing(Controls(base)) as controls:
        for mutant in mutants:
            if mutant.key in verdicts:
                continue
            if args.minutes is not None and time.perf_counter() - started > 60 * args.minutes:
                break

            # another process may have added to the file
            kills = count_kills(read_verdicts(args.resume) if args.resume else verdicts.values())
            verdict = judge(
                mutant,
                controls,
                coverage,
                budget_s=args.budget,
                verify=not args.without_verify,
                kills=kills,
            )
            verdicts[mutant.key] = verdict

            outcome = verdict.stage or "SURVIVED"
            hung = " (hung)" if verdict.hung else ""
            print(f"{outcome:<9}{verdict.seconds:>6.1f} s  {mutant.difference()}")
            print(f"  {verdict.by}{hung}", flush=True)
            if args.resume:
                append_verdict(args.resume, verdict)
    return verdicts
