"""A pipeline schedule, proved and timed: python -m scripts.schedule --kind zb-v --pp 4 --micro 8 [--out x.png]

Checks the lists that the pipeline would run (complete, in order, no deadlock, transfers that meet), simulates them,
prints the timeline, the bubble and each rank's peak of activations, and draws a picture. --list shows every schedule.
--run NAME runs a step of a small recipe on real ranks of this machine and shows what it took beside what the simulation
says for ops of those times.
"""
import argparse
import json
import shutil
import sys
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from statistics import median

import torch

import config
from build import build, plan_pipeline
from config import Config, ConfigError
from data.batch import Batch
from parallel import comm, pipeline
from parallel.comm import World
from parallel.layout import Layout
from parallel.mesh import Mesh
from parallel.schedule import SCHEDULES, Op, Order, Schedule, check, in_flight, lower, make, meets
from plan.count import parameters
from plan.plot import draw, text
from plan.simulate import PEAKS, Span, Timeline, closed_form, share, simulate
from runtime.failure import fail_cleanly
from runtime.pool import Pool

RANKS, LARGE = 16, 50_000_000  # processes and parameters that --run starts at most
LARGEST = 50_000  # (stage, microbatch) pairs: about ten seconds
PICTURES = (".png", ".svg", ".pdf")


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ConfigError(message.removeprefix("argument "))


def number(least: float):
    """An exact number of at least `least` (0: zero is allowed)."""
    def read(word: str) -> Fraction:
        try:
            if least <= float(word) <= 1e9:
                return Fraction(word)
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"expected a number from {least:g} to 1e9, got {word!r}")
    return read


def parser() -> Parser:
    p = Parser(prog="python -m scripts.schedule", description=__doc__,
               formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--kind", help=", ".join(SCHEDULES))
    p.add_argument("--pp", type=int, help="pipeline ranks")
    p.add_argument("--micro", type=int, help="microbatches a step")
    p.add_argument("--vpp", type=int, help="chunks a rank (interleaved: 2 if not given; the others have theirs)")
    p.add_argument("--f", type=number(1e-6), default=Fraction(1), help="time of a forward through all chunks of a rank")
    p.add_argument("--i", type=number(1e-6), default=Fraction(1), help="time of the backward to the inputs (B: i + w)")
    p.add_argument("--w", type=number(1e-6), default=Fraction(1), help="time of the backward to the weights")
    p.add_argument("--hop", type=number(0), default=Fraction(0), help="time of a transfer between ranks")
    p.add_argument("--overlap", type=number(1e-6), help="dualpipe-v: F and B side by side take this share of F + B")
    p.add_argument("--run", metavar="NAME", help="measure a step of this recipe, one process a rank, e.g. llama3-tiny")
    p.add_argument("--out", type=Path, help="draw a picture: " + ", ".join(PICTURES))
    p.add_argument("--width", type=int, help="columns of the timeline (the terminal's if not given)")
    p.add_argument("--json", action="store_true", help="one JSON object instead of text")
    p.add_argument("--list", action="store_true", help="every schedule: its bubble, memory and what it asks for")
    return p


def main(argv: list[str]) -> int:
    a = parser().parse_args(argv)
    if a.list:
        print(json.dumps(table()) if a.json else "\n".join(aligned([list(table()[0]), *(r.values() for r in table())])))
        return 0
    for name in ("kind", "pp", "micro"):
        if getattr(a, name) is None:
            raise ConfigError(f"--{name}: missing; for example --kind zb-v --pp 4 --micro 8 (or --list)")
    for name in ("pp", "micro", "vpp", "width"):
        if getattr(a, name) is not None and getattr(a, name) < 1:
            raise ConfigError(f"--{name}: expected at least 1, got {getattr(a, name)}")
    if a.out and a.out.suffix not in PICTURES:
        raise ConfigError(f"--out: {a.out} must end in {', '.join(PICTURES)}")
    if a.overlap and a.kind != "dualpipe-v":
        raise ConfigError(f"--overlap: only dualpipe-v runs F and B side by side, not {a.kind}")
    if a.pp * a.micro * (a.vpp or 2) > LARGEST:
        raise ConfigError(f"--pp x --micro x --vpp: the product may be {LARGEST} at most here")
    try:
        schedule = make(a.kind, a.pp, a.micro, a.vpp)
    except ValueError as e:
        raise ConfigError(str(e)) from None
    check(schedule.order, schedule.n_stages, schedule.microbatches, schedule.place)
    lowered = lower(schedule.order, schedule.place)
    if not meets(lowered):
        raise ValueError(f"{a.kind}: the transfers do not meet")
    timeline = simulate(schedule.order, schedule.n_stages, share(schedule, a.f, a.i, a.w), a.hop, a.overlap)
    facts = report(schedule, lowered, timeline, a)
    pictures = [(headline(facts), timeline)]
    if a.run:
        measured = measure(subject(a, schedule), schedule)
        timeline = simulate(schedule.order, schedule.n_stages, medians(measured, schedule.n_stages))
        both = (f"simulated with the median time of each op of {a.run}", timeline), (f"measured, {a.run}", measured)
        pictures = [(f"{headline(facts).split(',')[0]}, {what}: step {t.makespan:.1f} ms, bubble {t.bubble / t.makespan:.1%}", t) for what, t in both]
        facts |= {"measured_ms": measured.makespan, "simulated_ms": timeline.makespan}
    if a.out:
        try:
            a.out.parent.mkdir(parents=True, exist_ok=True)
            draw(pictures, a.out)
        except OSError as e:
            raise ConfigError(f"--out: {a.out}: {e.strerror}") from None
    if a.json:
        print(json.dumps(facts | {"order": [[str(op) for op in ops] for ops in schedule.order]}))
        return 0
    width = a.width or shutil.get_terminal_size((120, 24)).columns
    if a.run:
        print("\n".join(line for title, t in pictures for line in (title, *text(t, width), "")).rstrip())
    else:
        print("\n".join([headline(facts), *text(timeline, width), "", *ranks(facts), "", *summary(facts)]))
    if a.out:
        print(f"drawn: {a.out}")
    return 0


# ---- a real step -----------------------------------------------------------------------------------------------------

def subject(a, s: Schedule) -> Config:
    """The recipe with one sequence a microbatch, and layers for every stage. Raises ConfigError where it cannot run so."""
    if a.pp > RANKS:
        raise ConfigError(f"--run: starts a process for each of --pp {a.pp} ranks, at most {RANKS} here")
    cfg = config.resolve(a.run, None, ["--train.micro_batch", "1", "--train.global_batch", str(a.micro), "--train.dtype", "fp32",
                                       "--train.steps", "9", "--parallel.pp", str(a.pp), "--parallel.schedule", a.kind,
                                       "--parallel.vpp", str(a.vpp or "none")])
    layers = -(-cfg.model.layers // s.n_stages) * s.n_stages
    cfg = replace(cfg, model=replace(cfg.model, layers=layers, vocab=cfg.model.vocab or 256))
    if parameters(cfg.model)["total"] > LARGE:
        raise ConfigError(f"--run: {a.run} has {parameters(cfg.model)['total']:,} parameters; "
                          f"take a recipe of at most {LARGE:,}, such as llama3-tiny")
    plan_pipeline(cfg, a.pp)
    return cfg


def measure(cfg: Config, s: Schedule) -> Timeline:
    """The third step of a run, in milliseconds."""
    pool = Pool(cfg.parallel.pp)
    try:
        spans = pool.run(timed, cfg)
    finally:
        pool.close()
    zero = min(start for rank in spans for _, start, _ in rank)
    return Timeline([[Span(Op(*op), 1e3 * (start - zero), 1e3 * (end - zero)) for op, start, end in rank] for rank in spans])


def timed(world: World, cfg: Config) -> list[tuple[tuple, float, float]]:
    """[(op, start, end)] of this rank's third step: seconds of a clock that all ranks of a machine share. An op starts when
    what it waits for has arrived."""
    run = build(cfg, Mesh.bind(Layout(world.size, pp=world.size), world), torch.device("cpu"), None, cfg.train.steps)
    stream, shape, spans, arrivals = torch.Generator().manual_seed(0), (1, cfg.train.seq_len), [], [0.0]
    ids = [torch.randint(cfg.model.vocab, shape, generator=stream) for _ in range(cfg.train.global_batch)]
    batches = [Batch(x, x.roll(-1, 1), torch.arange(shape[1])[None], rows=torch.tensor([i])) for i, x in enumerate(ids)]

    def noted(work):
        def call(op, *args, **how):
            start = time.monotonic()
            out = work(op, *args, **how)
            spans.append((tuple(op), max(start, arrivals[0]), time.monotonic()))
            return out
        return call

    def arrived(x, inner=pipeline.arrived):
        x = inner(x)
        arrivals[0] = time.monotonic()
        return x
    for name in ("forward", "backward", "weights"):
        setattr(run.pipeline, name, noted(getattr(run.pipeline, name)))
    pipeline.arrived = arrived  # in this worker alone, which ends with the measurement
    for _ in range(3):
        spans.clear()
        comm.sum_(torch.zeros(1), run.mesh.world)  # together
        run.pipeline.run(run.ops[len(batches)], batches, 1 / (cfg.train.global_batch * shape[1]))
        for b in run.buckets:
            b.finish()
    return spans


def medians(t: Timeline, n_stages: int) -> dict[str, list[float]]:
    """The time of each kind of op on each stage."""
    took: dict[tuple, list[float]] = {}
    for span in (s for rank in t.ranks for s in rank):
        took.setdefault((span.op.kind, span.op.stage), []).append(span.end - span.start)
    cost = {k: [median(took.get((k, s), [0.0])) for s in range(n_stages)] for k in "FBIW"}
    return {k: times for k, times in cost.items() if any(times)}


def report(s: Schedule, lowered: Order, t: Timeline, a) -> dict:
    """What is known of the schedule as plain numbers: times in the units of --f, shares from 0 to 1, peaks in
    microbatches of a rank's whole share (a chunk counts 1/v)."""
    formula = None if a.hop else closed_form(a.kind, a.pp, a.micro, s.chunks, a.f, a.i, a.w, a.overlap)
    every = range(a.pp)
    bubbles = [float(1 - t.busy(r) / t.wall(r)) for r in every]
    idle = [float(t.idle(r) / t.makespan) for r in every]
    return {
        "kind": a.kind, "pp": a.pp, "micro": a.micro, "vpp": s.chunks, "overlap": a.overlap and float(a.overlap),
        "f": float(a.f), "i": float(a.i), "w": float(a.w), "hop": float(a.hop),
        "makespan": float(t.makespan), "bubble": max(bubbles), "bubble_time": float(t.bubble), "idle": sum(idle) / a.pp,
        "formula": formula and formula[0], "formula_time": formula and float(formula[1]),
        "rank_bubble": bubbles, "rank_idle": idle, "rank_peak": [in_flight(ops) / s.chunks for ops in s.order],
        "transfers": sum(op.kind in ("SF", "SB") for ops in lowered for op in ops),
    }


def count(n: float, word: str) -> str:
    return f"{n:.4g} {word}{'es' * (word[-2:] == 'ch') or 's'}" if n != 1 else f"1 {word}"


def headline(x: dict) -> str:
    chunks = f" x {count(x['vpp'], 'chunk')}" if x["vpp"] > 1 else ""
    return (f"{x['kind']}: {count(x['pp'], 'rank')}{chunks}, {count(x['micro'], 'microbatch')}, "
            f"bubble {x['bubble']:.1%}, peak {max(x['rank_peak']):.4g} held")


def ranks(x: dict) -> list[str]:
    return aligned([["rank", "bubble", "idle in the step", "peak of microbatches held"],
                    *([str(r), f"{bubble:.1%}", f"{idle:.1%}", f"{peak:.4g}"]
                      for r, (bubble, idle, peak) in enumerate(zip(x["rank_bubble"], x["rank_idle"], x["rank_peak"])))])


def summary(x: dict) -> list[str]:
    known = f", by formula {x['formula']} = {x['formula_time']:.6g}" if x["formula"] else ""
    if x["overlap"]:  # DeepSeek's formula counts the idle time of the last rank in the whole step
        known = f", last rank idle {x['rank_idle'][-1] * x['makespan']:.6g}" + known
    return [f"step {x['makespan']:.6g}, bubble {x['bubble_time']:.6g}{known}",
            f"idle {x['idle']:.1%} of all ranks' time in the step, late starts and early ends included",
            f"checked: complete, in order, no deadlock; {count(x['transfers'], 'transfer')} meet without buffers"]


def table() -> list[dict]:
    """Every schedule: what it asks for, its bubble and its memory."""
    asks, both = {"interleaved": "a multiple of p"}, {"dualpipe-v": (None, 1)}
    return [{"kind": k, "chunks": SCHEDULES[k].chunks or "v", "microbatches": asks.get(k, "any"),
             "bubble": ", overlapped ".join(closed_form(k, 2, 8, 1, 1, 1, 1, o)[0] for o in both.get(k, (None,))),
             "peak": PEAKS[k]} for k in SCHEDULES]


def aligned(rows) -> list[str]:
    rows = [[str(c) for c in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows]


if __name__ == "__main__":
    sys.exit(fail_cleanly(main, sys.argv[1:]))
