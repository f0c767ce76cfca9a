"""Does the proof see a bug? python -m scripts.mutate [--only WORD ...] | --draw N --seed S [--resume FILE]

Without --draw: the table of planted bugs (scripts/mutate/table.py), each a class of faults that published
codebases shipped, against scripts.verify. A bug that verify does not see is a hole in the proof: exit 1.

With --draw: N mutants of the whole core (model/, parallel/, optim/, data/, checkpoint/, the step and the
evaluation), drawn by the seed. Each meets the unit tests that run its line, then verify on layouts that
use its file; what fails counts where it passes without the mutant (scripts/mutate/control.py). Exit 1
where fewer than 95 % of those not explained in equivalent.yaml are killed. --map measures first which
test runs which line: once, and for tests that are new. --part K/M and --resume FILE.jsonl spread a draw
over sittings.
"""

import argparse
import re
import sys
import time
from pathlib import Path

from config import ConfigError
from runtime.failure import fail_cleanly
from scripts.mutate import cover, table
from scripts.mutate.checkout import ROOT, copied
from scripts.mutate.control import Controls
from scripts.mutate.draw import core, draw, part_of
from scripts.mutate.judge import BUDGET_S, add, judge, kills_of, read
from scripts.mutate.report import explained, report


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(
        prog="python -m scripts.mutate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "--only",
        nargs="*",
        default=[],
        help="bugs of the table whose text has all these words; with --draw: files whose names begin so",
    )
    p.add_argument("--world", type=int, default=8, help="leave out bugs of the table that need more ranks")
    p.add_argument("--draw", type=int, metavar="N", help="draw N mutants instead")
    p.add_argument("--seed", type=int, default=0, help="of the draw")
    p.add_argument("--part", default="1/1", help="K/M: the K-th of M parts of the draw")
    p.add_argument(
        "--resume",
        type=Path,
        metavar="FILE.jsonl",
        help="add a line for each mutant, and leave out those that it has",
    )
    p.add_argument("--minutes", type=float, help="begin no mutant after so long")
    p.add_argument("--budget", type=float, default=BUDGET_S, help="seconds of unit tests that a mutant meets")
    p.add_argument("--list", action="store_true", help="show the mutants of --draw and judge none")
    p.add_argument(
        "--map",
        nargs="*",
        metavar="TESTS",
        help="measure which test runs which line (no names: every file of tests not yet measured)",
    )
    a = p.parse_args(argv)
    if a.map is not None:
        return measure(a.map)
    if a.draw is None:
        return table.run(a.only, a.world)
    return drawn(a)


def measure(names: list[str]) -> int:
    for name in names or [n for n in cover.test_files() if not cover.record(n).exists()]:
        begun = time.perf_counter()
        found = cover.measure(name, core(ROOT))
        cover.keep(name, found)
        print(
            f"{name}: {len(found['tests'])} tests ({time.perf_counter() - begun:.0f} s)"
            + f", left out: {', '.join(found['left_out'])}" * bool(found["left_out"]),
            flush=True,
        )
    return 0


def drawn(a: argparse.Namespace) -> int:
    k, m = map(int, found.groups()) if (found := re.fullmatch(r"([0-9]+)/([0-9]+)", a.part)) else (0, 0)
    if not 1 <= k <= m:
        raise ConfigError(f"--part: {a.part!r} must be K/M with 1 <= K <= M, as 2/4: the second quarter")
    mutants = part_of(draw(ROOT, a.draw, a.seed, tuple(a.only)), k, m)
    if a.list:
        print(*(one.difference() for one in mutants), sep="\n")
        return 0
    known = cover.Map.read()
    if not known.records:
        raise ConfigError(
            "--draw: nothing tells which test runs which line; "
            "run python -m scripts.mutate --map first (minutes, once)"
        )
    verdicts = {v.key: v for v in (read(a.resume) if a.resume else [])}
    begun = time.perf_counter()
    with copied(ROOT) as base:
        controls = Controls(base)
        for one in mutants:
            if one.key in verdicts:
                continue
            if a.minutes is not None and time.perf_counter() - begun > 60 * a.minutes:
                break
            seen = kills_of(read(a.resume) if a.resume else verdicts.values())  # others may have added to the file
            v = verdicts[one.key] = judge(one, controls, known, budget_s=a.budget, kills=seen)
            print(
                f"{v.stage or 'SURVIVED':<9}{v.seconds:>6.1f} s  {one.difference()}\n"
                f"  {v.by}{' (hung)' * v.hung}",
                flush=True,
            )
            if a.resume:
                add(a.resume, v)
    done = [verdicts[one.key] for one in mutants if one.key in verdicts]
    lines, enough = report(done, explained())
    print(*lines, sep="\n")
    if len(done) < len(mutants):
        print(f"{len(mutants) - len(done)} mutants are left: the same command with --resume goes on")
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(fail_cleanly(main, sys.argv[1:]))
