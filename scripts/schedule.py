"""Checks and times a pipeline schedule.

    python -m scripts.schedule --kind zb-v --pp 4 --micro 8 [--out x.png]

Checks the lists of ops that the pipeline would run (complete, in order, no deadlock, every transfer meets its
peer), simulates them, prints the timeline, the bubble and each rank's activation peak, and draws a picture.
--list shows every schedule. --lanes --hop 0.1 shows how much longer the step of each is where the transfers
of a direction run in order, as NCCL's do, than where they wait for nothing but their data. --run NAME runs
a step of a small recipe on real ranks of this machine and compares it with a simulation from the measured
times.
"""
import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor

import config
from build import build_run
from config import Config, ConfigError
from config.command_line import CommandParser
from config.reading import resolve
from config.reading.schedules import plan_pipeline
from config.terminal import output_width, wrapped
from durable.pool import WorkerPool
from parallel.microbatch import Microbatch
from parallel.pipeline import executor as pipeline
from parallel.pipeline.schedule import (
    SCHEDULES,
    Op,
    Order,
    Schedule,
    check_schedule,
    make_schedule,
    max_in_flight,
)
from parallel.topology.dims import ParallelDims
from parallel.topology.mesh import Mesh
from parallel.wire import comm
from parallel.wire.world import World
from plan.count import parameters
from plan.plot import draw, text
from plan.simulate import PEAKS, Span, Timeline, closed_form, share, simulate, simulate_on_lanes
from runtime.failure import fail_cleanly
from runtime.run import TrainingRun

Result = TypeVar("Result")
Picture = tuple[str, Timeline]  # (title, timeline)

FILE_WIDTH = 120  # columns of a timeline written to a file or a pipe
MAX_RANKS = 16  # most processes that --run starts
MAX_PARAMETERS = 50_000_000  # largest recipe that --run accepts
MAX_PAIRS = 50_000  # (stage, microbatch) pairs of a schedule: about ten seconds
WARM_UP_STEPS = 2  # before the measured step
PICTURES = (".png", ".svg", ".pdf")
REQUIRED_MICROBATCHES = {"interleaved": "a multiple of p"}  # the other schedules: any number
WITH_OVERLAP = "dualpipe-v"  # overlaps a forward and a backward
OVERLAPPED = ", overlapped "  # before the second formula of such a schedule
LANE_RANKS, LANE_MICROBATCHES = (4, 8, 16), (8, 16, 32, 64)  # the sizes that --lanes compares
LANE_CHUNKS = {"interleaved": (2, 4)}


# ---- command line ----------------------------------------------------------------------------------------

def number(least: float) -> Callable[[str], Fraction]:
    """Return a parser of exact numbers from `least` to 1e9."""
    def read(word: str) -> Fraction:
        try:
            if least <= float(word) <= 1e9:
                return Fraction(word)
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"expected a number from {least:g} to 1e9, got {word!r}")
    return read


def arguments() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m scripts.schedule",
        description=__doc__,
    )
    add = parser.add_argument
    positive, not_negative = number(1e-6), number(0)
    one, zero = Fraction(1), Fraction(0)
    add("--kind", help=", ".join(SCHEDULES))
    add("--pp", type=int, help="pipeline ranks")
    add("--micro", type=int, help="microbatches in a step")
    add("--vpp", type=int, help="chunks on a rank (interleaved: 2 if not set; the others: a fixed number)")
    add("--f", type=positive, default=one, help="time of a forward through all chunks of a rank")
    add("--i", type=positive, default=one, help="time of the backward to the inputs (B: i + w)")
    add("--w", type=positive, default=one, help="time of the backward to the weights")
    add("--hop", type=not_negative, default=zero, help="time of a transfer between ranks")
    add("--overlap", type=positive, help="dualpipe-v: F and B side by side take this share of F + B")
    add("--run", metavar="NAME", help="measure a step of this recipe, with a process for each rank, "
                                      "e.g. llama3-tiny")
    add("--out", type=Path, help="draw a picture: " + ", ".join(PICTURES))
    add("--width", type=int, help="columns of the timeline (those of the terminal if not set)")
    add("--json", action="store_true", help="print one JSON object instead of text")
    add("--list", action="store_true", help="show every schedule: its bubble, memory and requirements")
    add("--lanes", action="store_true", help="show what every schedule loses to transfers that run in order")
    return parser


def check_options(args: argparse.Namespace) -> None:
    """Raise ConfigError if an option is missing, out of range or does not fit the schedule."""
    for name in ("kind", "pp", "micro"):
        if getattr(args, name) is None:
            raise ConfigError(f"--{name}: missing; for example --kind zb-v --pp 4 --micro 8 (or --list)")
    for name in ("pp", "micro", "vpp", "width"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name}: expected at least 1, got {value}")
    if args.out and args.out.suffix not in PICTURES:
        raise ConfigError(f"--out: {args.out} must end in {', '.join(PICTURES)}")
    if args.overlap and args.kind != WITH_OVERLAP:
        raise ConfigError(f"--overlap: only {WITH_OVERLAP} runs F and B side by side, not {args.kind}")
    if args.pp * args.micro * (args.vpp or 2) > MAX_PAIRS:
        raise ConfigError(f"--pp x --micro x --vpp: the product may be {MAX_PAIRS} at most here")


def main(argv: list[str]) -> int:
    args = arguments().parse_args(argv)
    if args.list:
        print_schedules(args.json)
        return 0
    if args.lanes:
        print_lanes(args)
        return 0
    check_options(args)

    # check and simulate
    schedule, with_transfers = checked_schedule(args)
    cost = share(schedule, args.f, args.i, args.w)
    timeline = simulate(schedule.order, schedule.n_stages, cost, hop=args.hop, overlap=args.overlap)
    on_lanes = simulate_on_lanes(
        with_transfers, schedule.rank_of_stage, cost, hop=args.hop, overlap=args.overlap
    )
    facts = report(schedule, with_transfers, timeline, on_lanes, args)
    pictures = [(headline(facts), timeline)]

    # measure
    if args.run:
        measured = measure(run_config(args, schedule), schedule)
        simulated = simulate(schedule.order, schedule.n_stages, medians(measured, schedule.n_stages))
        pictures = pictures_of_run(facts, args.run, simulated, measured)
        facts |= {"measured_ms": measured.makespan, "simulated_ms": simulated.makespan}

    # show
    if args.out:
        draw_pictures(pictures, args.out, unit="ms" if args.run else "units of --f, --i and --w")
    if args.json:
        order = [[str(op) for op in ops] for ops in schedule.order]
        print(json.dumps(facts | {"order": order}))
        return 0
    width = args.width or output_width() or FILE_WIDTH
    print("\n".join(run_lines(pictures, width) if args.run else report_lines(facts, timeline, width)))
    if args.out:
        print(f"drawn: {args.out}")
    return 0


def print_schedules(as_json: bool) -> None:
    """Print every schedule."""
    rows = table()
    if as_json:
        print(json.dumps(rows))
        return
    cells: list[list[str]] = []
    for row in rows:
        bubble, _, overlapped = row["bubble"].partition(OVERLAPPED)
        cells.append([str(cell) for cell in (row | {"bubble": bubble}).values()])
        if overlapped:
            cells.append(["  overlapped", "", "", overlapped, ""])
    print("\n".join(aligned([rows[0].keys(), *cells])))


def print_lanes(args: argparse.Namespace) -> None:
    """Print what every schedule loses to transfers in order. Raises ConfigError without --hop."""
    if not args.hop:
        raise ConfigError("--lanes: transfers that take no time lose none; add --hop, such as --hop 0.1")
    rows = lane_losses(*(float(value) for value in (args.f, args.i, args.w, args.hop)))
    if args.json:
        print(json.dumps(rows))
        return
    cells: list[list[str]] = [["kind", "chunks", "ranks", *(f"m = {m}" for m in LANE_MICROBATCHES)]]
    for row in rows:
        losses = ("-" if loss is None else f"{loss:.2f} %" for loss in row["loss"])
        cells.append([row["kind"], str(row["chunks"]), str(row["pp"]), *losses])
    print("\n".join(aligned(cells)))


def lane_losses(f: float, i: float, w: float, hop: float) -> list[dict]:
    """Return each schedule's losses in percent at LANE_MICROBATCHES, None where it does not exist.

    Times are of a forward and backward through all chunks of a rank, and of a transfer.
    """
    rows: list[dict] = []
    for kind, row in SCHEDULES.items():
        for chunks in LANE_CHUNKS.get(kind, (row.chunks,)):
            for pp in LANE_RANKS:
                losses: list[float | None] = []
                for microbatches in LANE_MICROBATCHES:
                    if kind in REQUIRED_MICROBATCHES and microbatches % pp:
                        losses.append(None)
                        continue
                    schedule = make_schedule(kind, pp, microbatches, chunks)
                    cost = share(schedule, f, i, w)
                    free = simulate(schedule.order, schedule.n_stages, cost, hop).makespan
                    lanes = simulate_on_lanes(schedule.with_transfers, schedule.rank_of_stage, cost, hop)
                    losses.append(100 * (lanes.makespan / free - 1))
                rows.append({"kind": kind, "chunks": chunks, "pp": pp, "loss": losses})
    return rows


def checked_schedule(args: argparse.Namespace) -> tuple[Schedule, Order]:
    """Return the schedule, and its ops with transfers.

    Raises ConfigError if there is no such schedule; ValueError if a check fails.
    """
    try:
        schedule = make_schedule(args.kind, args.pp, args.micro, args.vpp)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    check_schedule(schedule.order, schedule.n_stages, schedule.microbatches, schedule.rank_of_stage)
    return schedule, schedule.with_transfers


def draw_pictures(pictures: list[Picture], path: Path, unit: str) -> None:
    """Draw the pictures, with times in `unit`. Raises ConfigError if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draw(pictures, path, unit)
    except OSError as error:
        raise ConfigError(f"--out: {path}: {error.strerror}") from None


# ---- a real step -----------------------------------------------------------------------------------------

def run_config(args: argparse.Namespace, schedule: Schedule) -> Config:
    """Return the recipe with one sequence per microbatch, and as many layers as the stages need.

    Raises ConfigError if it cannot run this way.
    """
    if args.pp > MAX_RANKS:
        raise ConfigError(f"--run: starts a process for each of --pp {args.pp} ranks, "
                          f"at most {MAX_RANKS} here")
    cfg = resolve(args.run, None, [
        "--train.micro_batch", "1",
        "--train.global_batch", str(args.micro),
        "--train.dtype", "fp32",
        "--train.steps", "9",
        "--parallel.pp", str(args.pp),
        "--parallel.schedule", args.kind,
        "--parallel.vpp", str(args.vpp or "none"),
    ])
    layers = -(-cfg.model.layers // schedule.n_stages) * schedule.n_stages
    cfg = replace(cfg, model=replace(cfg.model, layers=layers, vocab=cfg.model.vocab or 256))
    total = parameters(cfg.model)["total"]
    if total > MAX_PARAMETERS:
        raise ConfigError(f"--run: {args.run} has {total:,} parameters; "
                          f"use a recipe of at most {MAX_PARAMETERS:,}, such as llama3-tiny")
    plan_pipeline(cfg, args.pp)
    return cfg


def measure(cfg: Config, schedule: Schedule) -> Timeline:
    """Return the measured step of a run with one process per rank, in milliseconds since its first op."""
    pool = WorkerPool(cfg.parallel.pp)
    try:
        spans_of_ranks = pool.run(timed_step, cfg)
    finally:
        pool.close()

    first = min(start for spans in spans_of_ranks for _, start, _ in spans)
    ranks: list[list[Span]] = []
    for spans in spans_of_ranks:
        ranks.append([Span(Op(*op), 1e3 * (start - first), 1e3 * (end - first)) for op, start, end in spans])
    return Timeline(ranks)


def timed_step(world: World, cfg: Config) -> list[tuple[tuple, float, float]]:
    """Return [(op, start, end)] of this rank's step after warm-up, in seconds of a clock shared by all ranks.

    An op starts when its inputs have arrived.
    """
    mesh = Mesh.bind(ParallelDims(world.size, pp=world.size), world)
    assert cfg.train.steps is not None  # set by run_config
    run = build_run(cfg, mesh, torch.device("cpu"), data=None, steps=cfg.train.steps)
    batches = random_batches(cfg)
    spans = record_ops(run)

    loss_scale = 1 / (cfg.train.global_batch * cfg.train.seq_len)
    for _ in range(WARM_UP_STEPS + 1):
        spans.clear()
        comm.all_reduce_sum(torch.zeros(1), run.mesh.world)  # a barrier
        run.pipeline.run(run.schedules[len(batches)], batches, loss_scale)
        for bucket in run.buckets:
            bucket.grads.finish_reduce()
    return spans


def random_batches(cfg: Config) -> list[Microbatch]:
    """Return microbatches of one random sequence each, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    vocab, shape = config.vocab_size(cfg.model), (1, cfg.train.seq_len)
    positions = torch.arange(cfg.train.seq_len)[None]
    batches: list[Microbatch] = []
    for sequence in range(cfg.train.global_batch):
        ids = torch.randint(vocab, shape, generator=generator)
        batches.append(Microbatch(ids, ids.roll(-1, 1), positions, sequence_ids=torch.tensor([sequence])))
    return batches


def record_ops(run: TrainingRun) -> list[tuple[tuple, float, float]]:
    """Patch the pipeline to append (op, start, end) to the returned list.

    This replaces functions of the pipeline in this process, which ends with the measurement.
    """
    spans: list[tuple[tuple, float, float]] = []
    last_arrival = [0.0]

    def timed(work: Callable[..., Result]) -> Callable[..., Result]:
        def call(op: Op, *args: object, **kwargs: object) -> Result:
            start = time.monotonic()
            result = work(op, *args, **kwargs)
            spans.append((tuple(op), max(start, last_arrival[0]), time.monotonic()))
            return result
        return call

    wait_arrival = pipeline.wait_arrival

    def timed_arrival(arrival: pipeline.Arrival) -> Tensor:
        tensor = wait_arrival(arrival)
        last_arrival[0] = time.monotonic()
        return tensor

    for name in run.pipeline.OP_METHODS:
        setattr(run.pipeline, name, timed(getattr(run.pipeline, name)))
    pipeline.wait_arrival = timed_arrival
    return spans


def medians(timeline: Timeline, n_stages: int) -> dict[str, list[float]]:
    """Return {kind of op: its median time on each stage}."""
    durations: dict[tuple[str, int], list[float]] = defaultdict(list)
    for spans in timeline.ranks:
        for span in spans:
            durations[span.op.kind, span.op.stage].append(span.end - span.start)
    cost: dict[str, list[float]] = {}
    for kind in "FBIW":
        times = [median(durations.get((kind, stage), [0.0])) for stage in range(n_stages)]
        if any(times):
            cost[kind] = times
    return cost


def pictures_of_run(facts: dict, recipe: str, simulated: Timeline, measured: Timeline) -> list[Picture]:
    """Return the simulated and the measured step, with titles."""
    schedule_text = headline(facts).split(",")[0]
    pictures: list[Picture] = []
    for what, timeline in (
        (f"simulated with the median time of each op of {recipe}", simulated),
        (f"measured, {recipe}", measured),
    ):
        bubble = timeline.bubble / timeline.makespan
        title = f"{schedule_text}, {what}: step {timeline.makespan:.1f} ms, bubble {bubble:.1%}"
        pictures.append((title, timeline))
    return pictures


# ---- the report ------------------------------------------------------------------------------------------

def report(
    schedule: Schedule,
    with_transfers: Order,
    timeline: Timeline,
    on_lanes: Timeline,
    args: argparse.Namespace,
) -> dict:
    """Return the schedule in plain numbers.

    Times are in the units of --f, shares from 0 to 1, peaks in microbatches of a rank's whole share (one
    chunk counts 1/v).
    """
    ranks = range(args.pp)
    bubbles = [float(1 - timeline.busy(rank) / timeline.wall(rank)) for rank in ranks]
    idle = [float(timeline.idle(rank) / timeline.makespan) for rank in ranks]
    formula = None
    if not args.hop:
        sizes = args.pp, args.micro, schedule.chunks
        formula = closed_form(args.kind, *sizes, args.f, args.i, args.w, args.overlap)
    all_ops = [op for ops in with_transfers for op in ops]
    return {
        "kind": args.kind,
        "pp": args.pp,
        "micro": args.micro,
        "vpp": schedule.chunks,
        "overlap": args.overlap and float(args.overlap),
        "f": float(args.f),
        "i": float(args.i),
        "w": float(args.w),
        "hop": float(args.hop),
        "makespan": float(timeline.makespan),
        "lanes": float(on_lanes.makespan),
        "bubble": max(bubbles),
        "bubble_time": float(timeline.bubble),
        "idle": sum(idle) / args.pp,
        "formula": formula and formula[0],
        "formula_time": formula and float(formula[1]),
        "rank_bubble": bubbles,
        "rank_idle": idle,
        "rank_peak": [max_in_flight(ops) / schedule.chunks for ops in schedule.order],
        "transfers": sum(op.kind in ("SF", "SB") for op in all_ops),
    }


def report_lines(facts: dict, timeline: Timeline, width: int) -> list[str]:
    """Return the report on a simulation: headline, timeline, ranks, summary."""
    lines = [*wrapped(headline(facts), width), *text(timeline, width), "", *rank_lines(facts), ""]
    for line in summary(facts):
        lines += wrapped(line, width)
    return lines


def run_lines(pictures: list[Picture], width: int) -> list[str]:
    """Return the titles and timelines of --run, separated by blank lines."""
    lines: list[str] = []
    for title, timeline in pictures:
        lines += [*wrapped(title, width), *text(timeline, width), ""]
    return lines[:-1]


def headline(facts: dict) -> str:
    """Return the schedule in one line."""
    chunks = f" x {count(facts['vpp'], 'chunk')}" if facts["vpp"] > 1 else ""
    return (f"{facts['kind']}: {count(facts['pp'], 'rank')}{chunks}, {count(facts['micro'], 'microbatch')}, "
            f"bubble {facts['bubble']:.1%}, peak {max(facts['rank_peak']):.4g} held")


def rank_lines(facts: dict) -> list[str]:
    """Return each rank's bubble, idle time and peak, as aligned columns."""
    rows = [["rank", "bubble", "idle in the step", "peak of microbatches held"]]
    columns = zip(facts["rank_bubble"], facts["rank_idle"], facts["rank_peak"])
    for rank, (bubble, idle, peak) in enumerate(columns):
        rows.append([str(rank), f"{bubble:.1%}", f"{idle:.1%}", f"{peak:.4g}"])
    return aligned(rows)


def summary(facts: dict) -> list[str]:
    """Return the times of the step, and the checks that passed."""
    known = ""
    if facts["overlap"]:  # DeepSeek's formula counts the idle time of the last rank in the whole step
        known += f", last rank idle {facts['rank_idle'][-1] * facts['makespan']:.6g}"
    if facts["formula"]:
        known += f", by formula {facts['formula']} = {facts['formula_time']:.6g}"
    return [
        f"step {facts['makespan']:.6g}, bubble {facts['bubble_time']:.6g}{known}",
        f"idle {facts['idle']:.1%} of all ranks' time in the step, late starts and early ends included",
        "checked: complete, in order, no deadlock; "
        f"{count(facts['transfers'], 'transfer')} meet without buffers, in two lanes that run in order as "
        f"NCCL's do: step {facts['lanes']:.6g} ({facts['lanes'] / facts['makespan'] - 1:+.2%})",
    ]


def table() -> list[dict]:
    """Return every schedule with its requirements, bubble and memory."""
    rows: list[dict] = []
    for kind, schedule in SCHEDULES.items():
        overlaps = (None, 1) if kind == WITH_OVERLAP else (None,)
        rows.append({
            "kind": kind,
            "chunks": schedule.chunks or "v",
            "microbatches": REQUIRED_MICROBATCHES.get(kind, "any"),
            "bubble": OVERLAPPED.join(bubble_formula(kind, overlap) for overlap in overlaps),
            "peak": PEAKS[kind],
        })
    return rows


def bubble_formula(kind: str, overlap: float | None) -> str:
    """Return the formula of a schedule's bubble if F, I and W take equal time."""
    found = closed_form(kind, p=2, m=8, v=1, f=1, i=1, w=1, overlap=overlap)
    assert found is not None, f"{kind} has no formula"
    return found[0]


def count(amount: float, word: str) -> str:
    """Return "1 rank", "4 ranks", "8 microbatches"."""
    if amount == 1:
        return f"1 {word}"
    ending = "es" if word.endswith("ch") else "s"
    return f"{amount:.4g} {word}{ending}"


def aligned(rows: Iterable[Iterable[object]]) -> list[str]:
    """Return rows as lines of left-aligned columns."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts)]
    lines: list[str] = []
    for row in texts:
        padded = [cell.ljust(width) for cell, width in zip(row, widths)]
        lines.append("  ".join(padded).rstrip())
    return lines


if __name__ == "__main__":
    sys.exit(fail_cleanly(main, sys.argv[1:]))
