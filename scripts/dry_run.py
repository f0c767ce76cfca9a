"""A step of a job of any size, without the job: what its ranks compute, hold and exchange.

    python train.py NAME --dry-run --world N [--cluster C] [--json F] [--picture F] [--trace F]
        [--memory F] [--ranks R,R] [--phase K] [--section.key VALUE ...]

The program's own build_run and train_step run as a rank of N, on tensors without storage, down the paths that
they take on the cluster's GPU (--cluster cpu: those of a CPU). The first rank of each place in the pipeline
is recorded, or --ranks. The others of a place do the same on shards of the same size, or of a smaller one;
under Muon, NorMuon and Dion each has other matrices. Nothing needs a GPU, and nothing is timed: times are
modelled, from rates that are assumed (plan/record/rates.py) and the cluster's links.

What depends on values is assumed: every target counts, experts get equal shares of the tokens, and under
data.doc_mask each sequence is one document.

What the ranks of a pipeline exchange is checked: that ranks of a group run the same collectives in one order,
and that each send meets its receive, under the rules of NCCL, or of gloo on CPUs.

Exits with 1 if the exchanges do not meet, or if a rank holds more than its GPU has.
"""

import argparse
import contextlib
import gzip
import json
import math
import os
import pickle
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from build import build_run, make_buckets, with_vocab
from config import Config, ConfigError
from config.command_line import CommandParser
from config.plots import new_figure, save_figure, shades
from config.reading import get_phases, resolve, split_argv, stated_keys, unused
from config.reading.schedules import plan_pipeline
from config.terminal import output_width, table_lines, wrapped
from config.tree import plain_data, with_values
from data.loader import open_loader
from data.tokenizer import load_tokenizer
from model.flops import keys_of_layers
from model.sharding import parallel_dims
from parallel.topology.dims import EXPERT_AXES, GROUP_AXES, ParallelDims
from parallel.topology.mesh import Mesh
from parallel.wire.lanes import PostedExchange, Wait
from plan import auto, elastic
from plan.communicators import Gpu, communicator_bytes, reserved_bytes
from plan.cost import Cluster, Efficiency, cluster
from plan.count import flops_per_token
from plan.job import check_routing, make_rank_job
from plan.record.check import check
from plan.record.events import without_collection
from plan.record.launches import CHIPS, Chip
from plan.record.links import ClusterLinks, seconds_of_exchange
from plan.record.rates import HOST_EXCHANGE, HOST_LINK, LaunchRates, Sheet, assumed_of, get_rates, ratios
from plan.record.rates import seconds as launch_seconds
from plan.record.role import Program, collect_answers, record_role, training_program
from plan.record.snapshot import snapshot
from plan.record.streams import COMPUTE
from plan.record.summary import LaunchKind, RoleSummary, memory_by_kind, summarize
from plan.record.timeline import BUBBLE, BY_HOST, COPIES, Costs, JobTimeline, timeline
from plan.record.trace import trace_events
from plan.record.work import Facts
from runtime.failure import fail_cleanly
from runtime.run import TrainingRun
from train import train_step

GIB = 2**30
STATE_KINDS = ("weights", "gradients", "optimizer")  # at the bottom of the plot
NUM_DRAWN = 8  # other kinds of memory in the plot
NUM_HELD = 12  # allocation sites listed for the rank with the highest peak
SEARCHED = ("data.", "eval.", "log.", "checkpoint.")  # keys that a step does not read
# Optimizers that gather plain data from other ranks: {name: (the group, the coordinates that determine what a
# rank sends; with none, every rank sends different data)}
ASK_OTHERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "muon": ("pipeline_stage", ()),
    "normuon": ("pipeline_stage", ()),
    "dion": ("pipeline_stage", ()),
    "lamb": ("world", GROUP_AXES["expert_model_parallel"]),
    "lars": ("world", GROUP_AXES["expert_model_parallel"]),
}
MAX_ASKED = 256  # ranks to build in order to get the data that they send
ON_CPU = "cpu"
FIRST_WITH_FP8 = (8, 9)  # compute capability
PICTURES = (".png", ".svg", ".pdf")
TRACES = (".json", ".json.gz")


@dataclass(frozen=True)
class JobHardware:
    """The hardware of the job. On CPUs everything except the name is None."""

    name: str
    chip: Chip | None
    gpu: Gpu | None
    memory: float | None
    cluster: Cluster | None = None


def arguments() -> argparse.ArgumentParser:
    parser = CommandParser(prog="python train.py --dry-run", description=__doc__)
    add = parser.add_argument
    add("name", nargs="?", help="recipe")
    add("--dry-run", action="store_true", help=argparse.SUPPRESS)
    add("--world", type=int, help="ranks of the job")
    add("--cluster", default="h100-ib", help="a cluster of configs/clusters.yaml, or cpu (h100-ib)")
    add("--ranks", metavar="R,R", help="ranks to record, or all (the first of each place in the pipeline)")
    add("--phase", type=int, default=1, metavar="K", help="of train.phases (1, the first)")
    add("--json", type=Path, metavar="F", help="write everything to a file")
    add("--picture", type=Path, metavar="F", help="draw memory over the step: " + ", ".join(PICTURES))
    add("--trace", type=Path, metavar="F", help="the modelled times, for ui.perfetto.dev: .json, .json.gz")
    add("--memory", type=Path, metavar="F", help="every allocation, for pytorch.org/memory_viz: .pickle")
    return parser


def main(argv: list[str]) -> int:
    args, rest = arguments().parse_known_args(argv)
    if args.world is None or args.world < 1:
        raise ConfigError("--dry-run: needs --world N, the number of ranks, such as --dry-run --world 1024")
    if args.picture and args.picture.suffix not in PICTURES:
        raise ConfigError(f"--picture: {args.picture} must end in {', '.join(PICTURES)}")
    if args.trace and not args.trace.name.endswith(TRACES):
        raise ConfigError(f"--trace: {args.trace} must end in {', '.join(TRACES)}")
    if args.trace and args.cluster == ON_CPU:
        raise ConfigError("--trace: needs times, and rates are known of GPUs; leave it out, or --cluster cpu")
    name, file, rest = split_argv([*([args.name] if args.name else []), *rest])
    cfg = resolve(name, file, rest)
    if cfg.parallel.auto is not None:
        stated = stated_keys(file, rest)
        layout = auto.best_layout(cfg, args.world, elastic.RankDevice(), stated)
        print("\n".join(wrapped(f"auto: {layout.text}", output_width())))
        cfg = with_values(cfg, layout.values)
    phases = get_phases(cfg).all
    if not 1 <= args.phase <= len(phases):
        raise ConfigError(f"--phase: {args.phase} must be 1 to {len(phases)}, a phase of train.phases")
    cfg = with_tokenizer(phases[args.phase - 1].cfg)
    unused.check_unused(cfg, args.world, but=SEARCHED)
    plan_pipeline(cfg, args.world)
    hardware = get_hardware(args.cluster)
    check_chip(cfg, hardware.chip)
    check_routing(cfg)
    for option in ("json", "picture", "trace", "memory"):
        check_writable(f"--{option}", getattr(args, option))

    # record one rank per pipeline position, or the requested ranks
    began = time.perf_counter()
    dims = parallel_dims(cfg, args.world)
    roles = record_roles(cfg, dims, ranks_to_record(args.ranks, dims), hardware.chip)
    transport = "gloo" if hardware.chip is None else "nccl"
    findings = check({role.rank: role.steps.events for role in roles}, transport)
    seconds = time.perf_counter() - began
    modelled = None
    if hardware.cluster is not None and not findings:
        modelled = modelled_step(cfg, dims, hardware.cluster, roles)

    # print the results
    beside = memory_beside(cfg, args.world, hardware)
    needs = max(role.peak for role in roles) + sum(beside.values())
    fits = hardware.memory is None or needs <= hardware.memory
    width = output_width()
    print("\n".join(wrapped(headline(name or str(file), cfg, dims, hardware, len(roles), seconds), width)))
    if len(phases) > 1:
        print(f"recorded: phase {args.phase} of {len(phases)} (--phase)")
    table = role_table(roles, dims, hardware.chip is None, width)
    print("\n".join(["", *table, "", *held_lines(roles, beside, hardware), ""]))
    print("\n".join(exchange_lines(roles, width)))
    if modelled is not None:
        print("\n".join(["", *time_lines(modelled, dims, width)]))
    print("\n".join(["", *check_lines(findings, transport, roles)]))
    if args.json:
        results = {"beside": beside, "findings": findings, "modelled": modelled and modelled.as_tree()}
        write_json(args.json, cfg, hardware, roles, results)
    if args.picture:
        draw(roles, dims, hardware, args.picture)
    if args.trace and modelled is not None:
        titles = {role.rank: f"rank {role.rank}, {place_of(dims, role.rank)}" for role in roles}
        curves = {role.rank: role.curve for role in roles}
        write_trace(args.trace, trace_events(modelled.line, titles, curves))
    if args.memory:
        write_memory(args.memory, snapshot([role.memory for role in roles]))
    return 0 if fits and not findings else 1


def with_tokenizer(cfg: Config) -> Config:
    """Return the config with model.vocab from its tokenizer if it is not set. Raises ConfigError."""
    data = cfg.data
    if cfg.model.vocab is not None:
        return cfg
    is_made_later = "stdlib" in data.path if data.tokenizer is None else data.tokenizer.startswith("bpe-")
    if is_made_later or (data.tokenizer is None and "://" in data.path):
        raise ConfigError("model.vocab: is that of a tokenizer that a run makes or fetches when it starts; "
                          "set it, such as --model.vocab 32000, or give data.tokenizer a file")
    if data.tokenizer is not None:
        return with_vocab(cfg, load_tokenizer(data.tokenizer, data.eod).vocab)
    loader = open_loader(cfg, "train", 0, 1)
    loader.close()
    return with_vocab(cfg, loader.required_tokenizer.vocab)


def get_hardware(name: str) -> JobHardware:
    """Look up a cluster's hardware. Raises ConfigError if the cluster or its GPU's code paths are unknown."""
    if name == ON_CPU:
        return JobHardware(name, chip=None, gpu=None, memory=None)
    row = cluster(name)
    chip = CHIPS.get(row.gpu)
    if chip is None:
        raise ConfigError(f"--cluster: {name} has {row.gpu}, where torch's own operations run: which, is not "
                          f"known; the paths of {', '.join(CHIPS)} are, and those of a CPU ({ON_CPU})")
    chip = replace(chip, memory_bytes=int(row.memory))
    return JobHardware(name, chip=chip, gpu=Gpu(row.gpu, row.node), memory=row.memory, cluster=row)


def check_chip(cfg: Config, chip: Chip | None) -> None:
    """Raise ConfigError if the GPU cannot run the config (build.py: check_device)."""
    if chip is not None and cfg.train.dtype == "fp8" and chip.capability < FIRST_WITH_FP8:
        raise ConfigError(f"train.dtype: {chip.name} does not support fp8 (sm_89 or newer does); use bf16")


def ranks_to_record(asked: str | None, dims: ParallelDims) -> list[int]:
    """Return the ranks of --ranks, by default the first of each pipeline position. Raises ConfigError."""
    if asked is None:
        return dims.group(0, "pp")
    if asked == "all":
        return list(range(dims.world))
    words = asked.split(",")
    if not all(word.isdecimal() and int(word) < dims.world for word in words):
        raise ConfigError(f"--ranks: {asked} must be all, or ranks from 0 to {dims.world - 1} with commas "
                          "between them")
    return sorted({int(word) for word in words})


# ---- recording ---------------------------------------------------------------------------------------------


def record_roles(
    cfg: Config, dims: ParallelDims, ranks: Sequence[int], chip: Chip | None
) -> list[RoleSummary]:
    """Record these ranks in one process per core, and return their summaries."""
    record = partial(record_one, cfg, dims, chip, collect_peer_answers(cfg, dims, ranks, chip))
    workers = min(len(ranks), os.cpu_count() or 1)
    if workers == 1:
        return [record(rank) for rank in ranks]
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        roles = pool.map(record, ranks)
        with without_collection():  # does not affect the worker processes, which are already running
            return list(roles)


def record_one(
    cfg: Config, dims: ParallelDims, chip: Chip | None, answers: Mapping[int, object], rank: int
) -> RoleSummary:
    torch.set_num_threads(1)
    facts = Facts(keys_of_layers(cfg.model, (cfg.train.seq_len,)))
    return summarize(record_role(cfg, dims, rank, chip, make_program(cfg), answers=answers), facts)


def collect_peer_answers(
    cfg: Config, dims: ParallelDims, ranks: Iterable[int], chip: Chip | None
) -> dict[int, object]:
    """Return {rank: plain data that it sends} for all ranks from which these ranks gather data.

    Empty if the optimizer gathers none. Raises ConfigError if too many ranks would have to be built for it.
    """
    if cfg.optim.name not in ASK_OTHERS or dims.world == 1:
        return {}
    group, apart = ASK_OTHERS[cfg.optim.name]
    groups = [dims.group(rank, *GROUP_AXES[group]) for rank in ranks]
    heard = sorted({other for own in groups if len(own) > 1 for other in own})  # one alone gathers none
    kinds = {rank: classify_rank(dims, rank, apart) for rank in heard}
    first = {kind: rank for rank, kind in reversed(kinds.items())}
    if len(first) > MAX_ASKED:
        raise ConfigError(f"optim.name: {cfg.optim.name} divides its work by what each of {len(first):,} "
                          f"ranks holds, and a dry run asks at most {MAX_ASKED}; give --world fewer ranks, "
                          "or use adamw, lion or sgd")
    said = collect_answers(dims, first.values(), chip, make_program(cfg))
    return {rank: said[first[kind]] for rank, kind in kinds.items()}


def classify_rank(dims: ParallelDims, rank: int, apart: tuple[str, ...]) -> tuple[int, ...]:
    """Return the rank's coordinates on these axes, or the rank itself if there are none."""
    if not apart:
        return (rank,)
    index = dims.coordinates(rank, EXPERT_AXES)
    return tuple(index[axis] for axis in apart)


def make_program(cfg: Config) -> Program:
    """Wrap build_run and train_step for a recording. With distill.teacher, reads the teacher's sizes."""
    if cfg.distill.teacher is None:
        return training_program(cfg, build_run, train_step)
    from checkpoint.teacher import place_teacher, read_model
    from config.reading.teacher import teacher_config

    model = read_model(cfg)

    def build_both(cfg: Config, mesh: Mesh, *others: Any) -> TrainingRun:
        run = build_run(cfg, mesh, *others)
        place_teacher(run, teacher_config(cfg, model, cfg.distill.teacher, mesh.world.size), make_buckets)
        return run

    return training_program(cfg, build_both, train_step)


# ---- times -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimedStep:
    """A step with modelled times. line: timeline of the recorded ranks. assumed: description of the rates."""

    line: JobTimeline
    mfu: float
    assumed: str

    def as_tree(self) -> dict[str, object]:
        ranks = {rank: {"compute": one.busy, **one.waits} for rank, one in self.line.ranks.items()}
        return {
            "seconds": self.line.step,
            "mfu": self.mfu,
            "assumed": self.assumed,
            "ranks": ranks,
        }


def modelled_step(
    cfg: Config, dims: ParallelDims, where: Cluster, roles: Sequence[RoleSummary]
) -> TimedStep:
    """Model the step of these ranks with assumed times. MFU is relative to the bf16 peak, also for fp8."""
    sheet = get_sheet(where)
    costs = get_costs(where, get_rates(sheet), has_graphs=cfg.train.cuda_graphs)
    line = timeline({role.rank: role.steps for role in roles}, costs)
    tokens = cfg.train.global_batch * cfg.train.seq_len
    dtype = "bf16" if cfg.train.dtype == "fp8" else cfg.train.dtype
    peak = where.flops.get(dtype, math.nan) * dims.world
    mfu = flops_per_token(cfg.model, cfg.train.seq_len, groups=cfg.optim.groups) * tokens / line.step / peak
    factors = ratios(sheet)
    scaled = f", by the data sheet of this GPU ({factors})" if factors else ""
    share = Efficiency()
    assumed = (
        f"modelled, not measured: rates assumed for {assumed_of(where.gpu).gpu.upper()} "
        f"(lab/docs/step-model.md){scaled}; exchanges alone "
        f"on {100 * share.inside:.0f} % of the links in a node, {100 * share.between:.0f} % of those between "
        "nodes"
    )
    return TimedStep(line, mfu, assumed)


def get_sheet(where: Cluster) -> Sheet:
    flops = {name: where.flops.get(name, 0.0) for name in ("bf16", "fp8", "fp32")}
    return Sheet(where.gpu, **flops, hbm=where.hbm)


def get_costs(where: Cluster, rates: LaunchRates, has_graphs: bool) -> Costs:
    """Return costs at middle rates. has_graphs: forward and backward cost the host nothing (CUDA graphs)."""
    links = ClusterLinks(where)

    def launch(kind: LaunchKind) -> float:
        if kind.stream != COMPUTE:  # a copy between device and host: read once and written once
            return kind.work.nbytes / 2 / (1e9 * HOST_LINK.middle)
        return launch_seconds(kind.work, "middle", rates)

    def host(kind: LaunchKind) -> float:
        is_replayed = has_graphs and kind.phase != "optimizer"
        return 0.0 if is_replayed else 1e-6 * rates.host[kind.host].middle

    return Costs(
        launch,
        host,
        exchange=partial(seconds_of_exchange, links),
        post=1e-6 * HOST_EXCHANGE.middle,
        read=1e-6 * rates.host_read.middle,
    )


def memory_beside(cfg: Config, world: int, hardware: JobHardware) -> dict[str, int]:
    """Return {kind: bytes} of memory outside of tensors."""
    if hardware.gpu is None:
        return {}
    job = make_rank_job(cfg, world, 0)
    return {
        "buffers of NCCL's communicators": communicator_bytes(job, hardware.gpu),
        "CUDA, its libraries and the allocator": reserved_bytes(hardware.gpu),
    }


# ---- output ------------------------------------------------------------------------------------------------


def headline(
    name: str, cfg: Config, dims: ParallelDims, hardware: JobHardware, num_roles: int, seconds: float
) -> str:
    chip = "a CPU" if hardware.chip is None else hardware.chip.name
    train = cfg.train
    return (
        f"{name} on {dims.to_text()} of {hardware.name} ({chip}) · global batch {train.global_batch} x "
        f"{train.seq_len}, micro-batch {train.micro_batch}, {train.dtype} · {num_roles} of {dims.world:,} "
        f"ranks recorded in {seconds:.0f} s"
    )


def role_table(
    roles: list[RoleSummary], dims: ParallelDims, is_on_cpu: bool, width: int | None
) -> list[str]:
    rows = []
    for role, ranks in group_alike(roles, dims):
        sent = sum(one.nbytes for one in role.exchanges)
        rows.append({
            "pp": str(dims.coordinates(role.rank)["pp"]),
            "rank": ranks,
            "TFLOP": f"{role.flops / 1e12:,.3g}",
            "state GiB": f"{role.state / GIB:.2f}",
            "peak GiB": f"{role.peak / GIB:.2f}",
            "host GiB": f"{role.host / GIB:.2f}",
            "exchanged GB": f"{sent / 1e9:,.2f}",
            "launches": f"{role.launches:,}",
            "host waits": str(sum(role.waits.values())),
        })
    absent = {"host GiB"} if not any(role.host for role in roles) else set()
    absent |= {"host waits"} if is_on_cpu else set()
    rows = [{key: value for key, value in row.items() if key not in absent} for row in rows]
    return table_lines(rows, first_to_go=("launches", "host waits"), width=width)


def place_of(dims: ParallelDims, rank: int) -> str:
    """Format the rank's pipeline position as "pp 1"."""
    return f"pp {dims.coordinates(rank)['pp']}"


def group_alike(roles: list[RoleSummary], dims: ParallelDims) -> list[tuple[RoleSummary, str]]:
    """Return [(a rank, all recorded ranks with an identical summary)], grouped within pipeline positions."""
    result: dict[tuple, list[RoleSummary]] = {}
    for role in roles:
        place = dims.coordinates(role.rank)["pp"]
        held = role.state, role.peak, role.host
        exchanges = tuple(sorted((one.group, one.verb, one.calls, one.nbytes) for one in role.exchanges))
        key = place, role.flops, role.launches, held, tuple(role.waits.items()), exchanges
        result.setdefault(key, []).append(role)
    return [(same[0], spans_in_words([role.rank for role in same])) for same in result.values()]


def spans_in_words(ranks: list[int]) -> str:
    """Format as "0-6, 8"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)


def held_lines(roles: list[RoleSummary], beside: dict[str, int], hardware: JobHardware) -> list[str]:
    """List the memory at the peak of the rank with the highest peak."""
    fullest = max(roles, key=lambda role: role.peak)
    total = fullest.peak + sum(beside.values())
    has = "" if hardware.memory is None else f" of {hardware.memory / GIB:.1f} GiB"
    verdict = "" if hardware.memory is None or total <= hardware.memory else ": too much"
    lines = [f"rank {fullest.rank} holds {total / GIB:.2f} GiB{has} at its peak{verdict}"]
    lines += [f"  {nbytes / GIB:10.2f}  {what}" for what, nbytes in beside.items()]
    shown, others = fullest.held[:NUM_HELD], fullest.held[NUM_HELD:]
    across = max(len(held.module) for held in shown)
    lines += [
        f"  {held.nbytes / GIB:10.2f}  {held.phase:9}  {held.module or '-':{across}}  {held.place}"
        for held in shown
    ]
    if others:
        lines.append(f"  {sum(held.nbytes for held in others) / GIB:10.2f}  {len(others)} other places")
    return lines


def exchange_lines(roles: list[RoleSummary], width: int | None) -> list[str]:
    """List the exchanges in a step of the rank that sends the most."""
    busiest = max(roles, key=lambda role: sum(one.nbytes for one in role.exchanges))
    if not busiest.exchanges:
        return ["nothing is exchanged"]
    rows = [
        {
            "group": one.group,
            "exchange": one.verb,
            "calls": f"{one.calls:,}",
            "GB": f"{one.nbytes / 1e9:,.3f}",
            "MB a call": f"{one.nbytes / one.calls / 1e6:,.2f}",
        }
        for one in busiest.exchanges
    ]
    title = f"exchanges of rank {busiest.rank} in a step"
    return [title, *table_lines(rows, to_left=("group", "exchange"), width=width)]


def time_lines(modelled: TimedStep, dims: ParallelDims, width: int | None) -> list[str]:
    """List the step time and its breakdown for each recorded rank."""
    line = modelled.line
    causes = sorted({cause for one in line.ranks.values() for cause in one.waits})
    last = [cause for cause in (COPIES, BY_HOST, BUBBLE) if cause in causes]
    causes = [cause for cause in causes if cause not in last] + last
    rows = []
    for rank, one in line.ranks.items():
        waits = {f"{cause} %": f"{100 * one.waits.get(cause, 0.0) / line.step:.1f}" for cause in causes}
        rows.append({
            "pp": str(dims.coordinates(rank)["pp"]),
            "rank": str(rank),
            "compute %": f"{100 * one.busy / line.step:.1f}",
            **waits,
        })
    title = (
        f"a step takes {seconds_in_words(line.step)}, MFU {100 * modelled.mfu:.1f} % ({modelled.assumed}). "
        "What a rank computes and waits for: exchanges by group, as far as nothing hides them; the host; "
        "other ranks (bubble)"
    )
    return [*wrapped(title, width), *table_lines(rows, width=width)]


def seconds_in_words(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def check_lines(findings: list[str], transport: str, roles: list[RoleSummary]) -> list[str]:
    """List the findings of the check, and what could not be counted."""
    lines = [f"error: {finding}" for finding in findings]
    if not findings and len(roles) > 1:
        lines.append(f"the exchanges of these ranks meet, under the rules of {transport}")
    unknown = {kernel: nbytes for role in roles for kernel, nbytes in role.unknown.items()}
    lines += [f"without a formula: {kernel}, which moves {nbytes / 1e9:.3f} GB"
              for kernel, nbytes in unknown.items()]
    if transport == "nccl":  # a CPU run has no device to wait for
        for place in sorted({place for role in roles for place in role.waits}):
            lines.append(f"the host waits for the device in {place}")
    return lines


def write_json(
    path: Path,
    cfg: Config,
    hardware: JobHardware,
    roles: list[RoleSummary],
    results: dict[str, object],
) -> None:
    """Write the results as JSON. Raises ConfigError if the file cannot be written."""
    nothing = {"steps": None, "memory": None}
    tree = {
        "cluster": hardware.name,
        "config": plain_data(cfg),
        **results,
        "roles": [asdict(replace(role, **nothing)) | {"events": exchange_words(role)} for role in roles],
    }
    with writing("--json", path):
        path.write_text(json.dumps(tree) + "\n")


@contextlib.contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Create the folder of a file that is written inside. Raises ConfigError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be written ({error.strerror})") from None


def check_writable(option: str, path: Path | None) -> None:
    """Check before all work. Raises ConfigError if the file cannot be written."""
    if path is not None:
        with writing(option, path):
            path.open("ab").close()


def write_trace(path: Path, events: Iterable[dict]) -> None:
    """Write a trace event by event, since a large job has hundreds of thousands. Raises ConfigError."""
    with writing("--trace", path):
        with gzip.open(path, "wt", 3) if path.suffix == ".gz" else path.open("w") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [')
            for number, event in enumerate(events):
                file.write(("," if number else "") + "\n" + json.dumps(event))
            file.write("\n]}\n")


def write_memory(path: Path, tree: dict) -> None:
    """Write the memory snapshot. Raises ConfigError if the file cannot be written."""
    with writing("--memory", path):
        path.write_bytes(pickle.dumps(tree))


def exchange_words(role: RoleSummary) -> list[str]:
    """List what a rank posts and awaits, in order."""
    return [str(event) for event in role.steps.events if isinstance(event, PostedExchange | Wait)]


def draw(roles: list[RoleSummary], dims: ParallelDims, hardware: JobHardware, path: Path) -> None:
    """Plot memory over the step: a curve per pipeline position, and a breakdown for the rank with the highest
    peak. Raises ConfigError if the file cannot be written."""
    from matplotlib import colormaps

    figure = new_figure(9, 8, dpi=150)
    of_places, of_fullest = figure.subplots(2, 1)
    for role, colour in zip(roles, shades(len(roles), first=0.0, last=0.9)):
        of_places.step(
            [point.time for point in role.curve],
            [point.nbytes / GIB for point in role.curve],
            where="post",
            linewidth=0.8,
            color=colour,
            label=f"place {dims.coordinates(role.rank)['pp']}",
        )
    if hardware.memory is not None:
        of_places.axhline(hardware.memory / GIB, color="black", linewidth=0.8, linestyle="--")
    if len(roles) > 1:
        of_places.legend(fontsize="small", ncols=2, frameon=False)

    fullest = max(roles, key=lambda role: role.peak)
    held = memory_by_kind(fullest.memory)
    at_peak = {kind: max(nbytes) for kind, nbytes in held.nbytes.items()}
    shown = [kind for kind in STATE_KINDS if kind in at_peak]
    shown += sorted(set(at_peak) - set(shown), key=lambda kind: -at_peak[kind])[:NUM_DRAWN]
    rest = [kind for kind in at_peak if kind not in shown]
    heights = {kind: held.nbytes[kind] for kind in shown}
    if rest:
        heights["others"] = [sum(column) for column in zip(*(held.nbytes[kind] for kind in rest))]
    of_fullest.stackplot(
        held.times,
        [[nbytes / GIB for nbytes in column] for column in heights.values()],
        labels=list(heights),
        colors=colormaps["tab20"].colors,
        linewidth=0,
        step="post",
    )
    handles, labels = of_fullest.get_legend_handles_labels()
    of_fullest.legend(handles[::-1], labels[::-1], fontsize="small", frameon=False, loc="upper left",
                      bbox_to_anchor=(1, 1))
    of_fullest.set_title(f"what rank {fullest.rank} holds", loc="left", fontsize="medium")
    for axes in (of_places, of_fullest):
        axes.set(xlabel="operations of the step", ylabel="GiB of tensors", ylim=(0, None), xlim=(0, None))
    with writing("--picture", path):
        save_figure(figure, path)


if __name__ == "__main__":
    sys.exit(fail_cleanly(main, sys.argv[1:]))
