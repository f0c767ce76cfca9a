"""First contact with a GPU: how fast, right or wrong, and where the time goes, most valuable results first.

    python -m scripts.bench first --minutes 9 --site SITE --out OUT
    python -m scripts.bench first --minutes 9 --site SITE --out OUT2 --after OUT/first.tar.gz
                                                          continues where the first call ended
    python -m scripts.bench first --plan --card-gb 80     the order, times and layers; needs no GPU
    python -m scripts.bench first --device cpu --tiny --minutes 4        a rehearsal, interpreted kernels

lab/benchmarks/first_plan.py lists the sections in order. This process imports everything without touching the
GPU, and forks a child for each job (lab/benchmarks/jobs.py). Rows are written to OUT/first.jsonl as they
come; the table is OUT/first.md, and OUT/first.tar.gz contains both, with the logs of failures. All are
written even if SIGTERM ends the run.

    ok         measured, or right
    wrong      beyond its bound, crashed, or hung longer than its own limit
    no time    not started, or stopped only because the minutes were over
    absent     a missing package, chip or memory; the row says which

A section may take a multiple of its expected time; what it did not reach is retried after all the others, in
the remaining time. --after takes over the ok rows of an earlier call on the same card, and runs the rest. The
exit code is 1 if a row is wrong.
"""

import argparse
import json
import math
import multiprocessing
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from config import ConfigError
from config.provenance import commit_id
from lab.benchmarks import card
from lab.benchmarks.first_jobs import FirstRun, card_job, files_of_tests, get_jobs
from lab.benchmarks.first_plan import RESERVE_S, SECTIONS, SLACK, Section, jobs_beside, plan_text
from lab.benchmarks.first_table import make_table, progress_line
from lab.benchmarks.jobs import ForkedJob, JobPlace, run_jobs
from lab.benchmarks.process import terminates_cleanly
from lab.benchmarks.travel import describe_peers, travel_line
from plan.record.launches import Chip

HELP = "a first meeting with a GPU: rates, steps, kernels, small models, peers"
CARD = "card"  # the section of the first row


@dataclass
class Results:
    """The rows of this call and of earlier ones. complete: (section, job) pairs to skip.
    planned: {section: its jobs} for the sections reached.
    """

    rows: list[dict] = field(default_factory=list)
    complete: set[tuple[str, str]] = field(default_factory=set)
    planned: dict[str, list[str]] = field(default_factory=dict)

    def done(self, section: str) -> dict[str, frozenset[str]]:
        """Return {job: names of its rows}."""
        names: dict[str, set[str]] = {}
        for row in self.rows:
            if row["section"] == section:
                names.setdefault(row["job"], set()).add(row["row"])
        return {job: frozenset(rows) for job, rows in names.items()}

    def add(self, message: dict) -> bool:
        """Store a row, or the end of a job, and return whether it is a row."""
        if "complete" in message:
            self.complete.add((message["section"], message["job"]))
            return False
        self.rows.append(message)
        return True


def main(args: argparse.Namespace) -> int:
    """Return the exit code."""
    started = time.monotonic()
    if args.plan:
        memory = args.card_gb * card.GIB if args.card_gb else card.describe_machine(args.device).memory_bytes
        print(plan_text(int(memory), args.minutes))
        return 0
    if args.device == "cpu" and not args.tiny:
        raise ConfigError("--device cpu: a CPU rehearses tiny sizes alone; add --tiny")
    sections = chosen_sections(args.only)
    if any(section.kind == "kernels" for section in sections):
        files_of_tests(args.tests)
    machine = card.describe_machine(args.device)
    facts = machine.facts() | {"commit": commit_id()}
    results = results_before(args.after, machine.card) if args.after else Results()
    num_before = len(results.rows)
    print(travel_line(), describe_peers(args.site), sep="\n", flush=True)

    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "logs", ignore_errors=True)
    (out / "logs").mkdir()
    with (out / "first.jsonl").open("w", buffering=1) as file:
        file.write(json.dumps({"run": facts}) + "\n")
        for row in results.rows:
            file.write(json.dumps(row) + "\n")
        for section, job in sorted(results.complete):
            file.write(json.dumps({"section": section, "job": job, "complete": True}) + "\n")

        with terminates_cleanly(), tempfile.TemporaryDirectory() as scratch:
            try:
                end = started + 60 * args.minutes - RESERVE_S
                rows = run_sections(
                    args, sections, machine, results, scratch=Path(scratch), logs=out / "logs", end=end
                )
                with closing(rows):  # stops all jobs, however this loop ends
                    for message in rows:
                        is_row = results.add(message)
                        file.write(json.dumps(message) + "\n")
                        if is_row:
                            print(progress_line(message), flush=True)
            finally:
                for row in rows_without_time(sections, results):
                    results.rows.append(row)
                    file.write(json.dumps(row) + "\n")
                text = make_table(results.rows, facts, time.monotonic() - started)
                (out / "first.md").write_text(text)
                print(f"\n{text}", flush=True)
                pack(out)
    new = results.rows[num_before:]
    return 1 if any(row["state"] == "wrong" for row in new) else 0


def chosen_sections(only: str) -> list[Section]:
    """Return the sections by name. Raises ConfigError for an unknown name."""
    names = [name for name in only.split(",") if name]
    known = [section.name for section in SECTIONS]
    for name in names:
        if name.partition("/")[0] not in known:
            raise ConfigError(f"--only {name}: no such section; there are {', '.join(known)}")
    wanted = {name.partition("/")[0] for name in names}
    return [section for section in SECTIONS if not names or section.name in wanted]


# ---- running -----------------------------------------------------------------------------------------------


def run_sections(
    args: argparse.Namespace,
    sections: list[Section],
    machine: card.GpuMachine,
    results: Results,
    *,
    scratch: Path,
    logs: Path,
    end: float,
) -> Generator[dict, None, None]:
    """Yield rows and ends of jobs: each section within its time, then what is missing while time is left."""

    def seconds_left() -> float:
        return end - time.monotonic()

    place, card_rows = meet_card(args, logs)
    yield from card_rows
    row = card_rows[-1]
    if row["state"] != "ok":
        return
    run = FirstRun(
        device=args.device,
        is_tiny=args.tiny,
        site=args.site,
        scratch=scratch,
        machine=machine,
        jobs=args.jobs or jobs_at_once(args.device, machine),
        chip=Chip(row["name"], tuple(row["capability"]), row["processors"], row["memory_bytes"]),
        tests=args.tests,
    )

    expected = sum(section.expected_s for section in sections)
    scale = seconds_left() / expected if args.tiny else 1.0  # a rehearsal visits every section
    only = [name for name in args.only.split(",") if "/" in name]
    for is_boxed in (True, False):
        for pool in make_pools(sections):
            if seconds_left() <= 0:
                return
            box = time.monotonic() + sum(scale * one.expected_s * SLACK[one.beside] for one in pool)
            section_of, jobs = jobs_of_pool(pool, run, only, results)
            messages = run_jobs(
                jobs,
                place,
                most=num_together(pool[0], run),
                seconds_left=lambda: min(seconds_left(), box - time.monotonic() if is_boxed else math.inf),
                done={job: rows for section in pool for job, rows in results.done(section.name).items()},
            )
            with closing(messages):
                for message in messages:
                    yield {"section": section_of[message["job"]], **message}


def meet_card(args: argparse.Namespace, logs: Path) -> tuple[JobPlace, list[dict]]:
    """Return where jobs run, and rows that describe the card; the last one counts."""
    place = JobPlace(multiprocessing.get_context(args.start), logs)
    rows = rows_of_card(args.device, place)
    if rows[-1]["state"] != "ok" and args.start == "fork":
        print("a forked process cannot use the GPU here: each job imports everything", flush=True)
        place = JobPlace(multiprocessing.get_context("spawn"), logs)
        rows += rows_of_card(args.device, place)
    return place, rows


def jobs_at_once(device: str, machine: card.GpuMachine) -> int:
    cores = os.cpu_count() or 1
    if device == "cpu":
        return min(2, cores)
    return 1 if machine.is_exclusive else jobs_beside(machine.memory_bytes, cores)


def jobs_of_pool(
    pool: list[Section], run: FirstRun, only: list[str], results: Results
) -> tuple[dict[str, str], list[ForkedJob]]:
    """Return {job: its section}, and the incomplete jobs, alternating between sections.

    `only` lists SECTION/JOB; a section named there runs only these jobs. Records the planned jobs in
    `results`.
    """
    divided = {name.partition("/")[0] for name in only}
    section_of: dict[str, str] = {}
    incomplete: list[list[ForkedJob]] = []
    for section in pool:
        jobs = get_jobs(section, run)
        if section.name in divided:
            jobs = [job for job in jobs if f"{section.name}/{job.name}" in only]
        results.planned[section.name] = [job.name for job in jobs]
        section_of |= {job.name: section.name for job in jobs}
        incomplete.append([job for job in jobs if (section.name, job.name) not in results.complete])
    return section_of, [job for turn in zip_longest(*incomplete) for job in turn if job]


def make_pools(sections: list[Section]) -> list[list[Section]]:
    """Return the pools: sections that share processes are in one pool, and pools run one after another."""
    pools: list[list[Section]] = []
    for section in sections:
        if section.shares_pool and pools and pools[-1][0].beside:
            pools[-1].append(section)
        else:
            pools.append([section])
    return pools


def num_together(section: Section, run: FirstRun) -> int:
    """Return how many jobs run at a time: the ranks of a world are concurrent, timed jobs run alone."""
    if section.kind == "exchanges":
        return max(2, run.machine.num_gpus)
    return run.jobs if section.beside else 1


def rows_of_card(device: str, place: JobPlace) -> list[dict]:
    messages = run_jobs([card_job(device)], place, most=1, seconds_left=lambda: 1.0, done={})
    return [{"section": CARD, **message} for message in messages if "row" in message]


def rows_without_time(sections: list[Section], results: Results) -> Iterator[dict]:
    """Yield a row for each incomplete section."""
    for section in sections:
        planned = results.planned.get(section.name)
        lost = [job for job in planned or () if (section.name, job) not in results.complete]
        if lost or planned is None:
            problem = "never begun" if planned is None else f"not complete: {', '.join(lost)}"
            yield {
                "section": section.name,
                "job": section.name,
                "row": section.name,
                "state": "no time",
                "problem": problem,
            }


# ---- files -------------------------------------------------------------------------------------------------


def pack(out: Path) -> None:
    """Write the tar with the rows, the table and the logs of failures."""
    with tarfile.open(out / "first.tar.gz", "w:gz") as tar:
        for path in (out / "first.jsonl", out / "first.md", *sorted((out / "logs").glob("*.log"))):
            tar.add(path, path.relative_to(out).as_posix())


def results_before(path: str, name_of_card: str) -> Results:
    """Read the ok rows of a first.jsonl, or of the tar that contains it.

    Raises ConfigError if it is unreadable, or of another card.
    """
    try:
        if path.endswith((".tar.gz", ".tgz")):
            with tarfile.open(path) as tar:
                file = tar.extractfile("first.jsonl")
                assert file is not None
                text = file.read().decode()
        else:
            text = Path(path).read_text()
        messages = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        before = messages[0]["run"]["card"]
    except (OSError, KeyError, IndexError, tarfile.TarError, json.JSONDecodeError) as error:
        raise ConfigError(f"--after {path}: not a first.jsonl or first.tar.gz ({error})") from error
    if before != name_of_card:
        raise ConfigError(f"--after {path}: is of {before}; this is {name_of_card}")

    results = Results()
    not_ok = set()
    for message in messages[1:]:
        if message["section"] == CARD:
            continue
        if "complete" in message:
            results.complete.add((message["section"], message["job"]))
        elif message["state"] == "ok":
            results.rows.append(message)
        else:
            not_ok.add((message["section"], message["job"]))
    results.complete -= not_ok
    return results
