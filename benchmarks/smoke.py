"""Is anything wrong on this machine? The first ten minutes with a GPU.

    python -m scripts.bench smoke --device cuda --minutes 9.5 --site SITE --out OUT
    python -m scripts.bench smoke --device cpu --tiny --minutes 10      a rehearsal, interpreted kernels

Six phases, in the order of what decides. Each has a time box (BOXES; they sum to --minutes), and leaves
what it does not need to those after it:

    imports      one process, which warms the disk; another makes the corpus
    models       five steps of small models with the kernels and without (smoke_models.py)
    train        train.py on a larger model, with a profiler trace, deterministic or not: tokens/s
    exchanges    every verb of parallel/wire/comm.py over NCCL: one rank, and one rank a GPU
    contestants  one step of each contestant of the race (card.py), with few layers: does it start?
    tests        those that profit from a GPU

Whatever may crash or hang has a process of its own, several beside each other (--jobs). Its row then says so,
and the run goes on: it never stops at a failure. Rows are appended to OUT/smoke.jsonl as they come. The table
is OUT/smoke.md, also where the run is ended by SIGTERM. The exit code is 1 if a row failed.

--only tests,models/dense takes whole phases, or single tasks of them.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import card
from benchmarks.process import terminates_cleanly
from benchmarks.smoke_phases import PHASES, SmokeRun
from benchmarks.smoke_table import make_table, progress_line
from benchmarks.travel import describe_peers, travel_line

RESERVE_S = 6.0  # for the table, and for what a killed process leaves behind
BOXES = {  # seconds of a run of 9.5 minutes; a shorter one divides its own in the same way
    "imports": 25,
    "models": 130,
    "train": 100,
    "exchanges": 25,
    "contestants": 72,
    "tests": 212,
}
MOST_JOBS = 8  # beside each other: each takes its part of the GPU's memory


def main(args: argparse.Namespace) -> int:
    """Runs the phases that --only asks for; prints and writes the table; returns the exit code."""
    started = time.monotonic()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    only = tuple(word for word in args.only.split(",") if word)
    unknown = [word for word in only if word.split("/")[0] not in PHASES]
    if unknown:
        print(f"error: --only {unknown[0]}: no such phase; of {', '.join(PHASES)}", file=sys.stderr)
        return 2

    print(travel_line(), describe_peers(args.site), sep="\n", flush=True)
    machine, _ = card.describe_machine(args.device)
    num_gpus = torch.cuda.device_count() if args.device == "cuda" else 0
    rows: list[dict] = []
    with terminates_cleanly(), tempfile.TemporaryDirectory() as scratch:
        run = SmokeRun(
            device=args.device,
            is_tiny=args.tiny,
            only=only,
            site=args.site,
            out=out,
            scratch=Path(scratch),
            jobs=args.jobs or default_jobs(args.device),
            num_gpus=num_gpus,
        )
        try:
            for row in run_phases(run, 60 * args.minutes - RESERVE_S, started):
                rows.append(row)
                with (out / "smoke.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(progress_line(row), flush=True)
        finally:
            text = make_table(rows, machine, time.monotonic() - started)
            (out / "smoke.md").write_text(text)
            print("\n" + text, flush=True)
    return 1 if any(row["ok"] is False for row in rows) else 0


def run_phases(run: SmokeRun, seconds: float, started: float) -> Iterator[dict]:
    """The rows of all phases, each with the phase's name. A phase that raises gets a row that says so."""
    chosen = [name for name in PHASES if run.takes_phase(name)]
    unit = seconds / sum(BOXES[name] for name in chosen)
    end = started
    for name in chosen:
        end += unit * BOXES[name]

        def seconds_left(end: float = end) -> float:
            return end - time.monotonic()

        try:
            for row in PHASES[name](run, seconds_left):
                yield {"phase": name, **row}
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            yield {"phase": name, "row": "the phase", "ok": False, "problem": problem}


def default_jobs(device: str) -> int:
    cores = os.cpu_count() or 1
    return max(1, min(MOST_JOBS, cores // 2)) if device == "cuda" else min(2, cores)
