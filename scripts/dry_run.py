"""A step of a job of any size, without the job: what its ranks compute, hold and exchange.

    python train.py NAME --dry-run --world N [--cluster C] [--json F] [--picture F] [--section.key VALUE ...]

The program's own build_run and train_step run as a rank of N, on tensors without storage, down the paths that
they take on the cluster's GPU (--cluster cpu: those of a CPU). One rank of each place in the pipeline is
recorded. The others of a place do the same on shards of the same size, or of a smaller one. Nothing needs a
GPU, and nothing is timed.

What depends on values is assumed: every target counts, experts get equal shares of the tokens, and under
data.doc_mask each sequence is one document.

What the ranks of a pipeline exchange is checked: that ranks of a group run the same collectives in one order,
and that each send meets its receive, under the rules of NCCL, or of gloo on CPUs.

Exits with 1 if the exchanges do not meet, or if a rank holds more than its GPU has.
"""

import triton  # noqa: F401  before the kernels: it is what makes them import it

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import config
from build import TrainingRun, build_run
from config import Config, ConfigError, phases_of, unused
from config.terminal import ParagraphHelp, output_width, table_lines, wrapped
from model.describe import workload
from model.schedules import plan_pipeline
from model.sharding import parallel_dims
from parallel.microbatch import Microbatch
from parallel.topology.dims import ParallelDims
from parallel.topology.mesh import Mesh
from plan.communicators import Gpu, communicator_bytes, reserved_bytes
from plan.cost import cluster
from plan.job import job_of_rank
from plan.record.check import check
from plan.record.launches import CHIPS, Chip
from plan.record.role import Program, record_role
from plan.record.summary import RoleSummary, summarize
from plan.record.work import Facts
from runtime.failure import fail_cleanly
from runtime.guard import NonFiniteGuard
from train import train_step

GIB = 2**30
NUM_HELD = 12  # places of the code that are listed, of the fullest role
STEPS = 1000  # a horizon: no schedule of a learning rate changes what a step costs
SEARCHED = ("data.", "eval.", "log.", "checkpoint.")  # keys that a step does not read
ASK_OTHERS = ("muon", "lamb", "lars")  # optimizers that gather plain data of the ranks
ON_CPU = "cpu"
PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class JobHardware:
    """Where the job would run. gpu, memory, chip: None on CPUs."""

    name: str
    chip: Chip | None
    gpu: Gpu | None
    memory: float | None


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python train.py", description=__doc__, formatter_class=ParagraphHelp
    )
    add = parser.add_argument
    add("name", nargs="?", help="recipe")
    add("--dry-run", action="store_true", help=argparse.SUPPRESS)
    add("--world", type=int, help="ranks of the job")
    add("--cluster", default="h100-ib", help="a cluster of configs/clusters.yaml, or cpu (h100-ib)")
    add("--json", type=Path, metavar="F", help="write everything to a file")
    add("--picture", type=Path, metavar="F", help="draw memory over the step: " + ", ".join(PICTURES))
    return parser


def main(argv: list[str]) -> int:
    args, rest = arguments().parse_known_args(argv)
    if args.world is None or args.world < 1:
        raise ConfigError("--dry-run: needs --world N, the number of ranks, as --dry-run --world 1024")
    if args.picture and args.picture.suffix not in PICTURES:
        raise ConfigError(f"--picture: {args.picture} must end in {', '.join(PICTURES)}")
    name, file, rest = config.split_argv([*([args.name] if args.name else []), *rest])
    cfg = config.resolve(name, file, rest)
    if cfg.model.vocab is None:
        raise ConfigError("model.vocab: is the tokenizer's, which a dry run does not read; set it, "
                          "as --model.vocab 32000")
    if cfg.optim.name in ASK_OTHERS and args.world > 1:
        raise ConfigError(f"optim.name: {cfg.optim.name} divides its work by what other ranks hold, which a "
                          "record of one does not know; a dry run takes adamw, lion and sgd")
    unused.check_unused(cfg, args.world, but=SEARCHED)
    plan_pipeline(cfg, args.world)
    hardware = hardware_of(args.cluster)

    # one rank of each place in the pipeline
    began = time.perf_counter()
    dims = parallel_dims(cfg, args.world)
    roles = record_roles(cfg, dims, dims.group(0, "pp"), hardware.chip)
    transport = "gloo" if hardware.chip is None else "nccl"
    findings = check({role.rank: role.events for role in roles}, transport)
    seconds = time.perf_counter() - began

    # show
    phases = phases_of(cfg).all
    beside = memory_beside(cfg, args.world, hardware)
    needs = max(role.peak for role in roles) + sum(beside.values())
    fits = hardware.memory is None or needs <= hardware.memory
    width = output_width()
    print("\n".join(wrapped(headline(name or str(file), cfg, dims, hardware, len(roles), seconds), width)))
    if len(phases) > 1:
        print(f"recorded: the first of {len(phases)} phases; --train.phases none with the keys of another "
              "shows that one")
    table = role_table(roles, dims, hardware.chip is None, width)
    print("\n".join(["", *table, "", *held_lines(roles, beside, hardware), ""]))
    print("\n".join(exchange_lines(roles, width)))
    print("\n".join(["", *check_lines(findings, transport, roles)]))
    if args.json:
        write_json(args.json, cfg, hardware, roles, beside=beside, findings=findings)
    if args.picture:
        draw(roles, dims, hardware, args.picture)
    return 0 if fits and not findings else 1


def hardware_of(name: str) -> JobHardware:
    """Raises ConfigError for a cluster that is not known, or whose GPU takes paths that are not known."""
    if name == ON_CPU:
        return JobHardware(name, chip=None, gpu=None, memory=None)
    row = cluster(name)
    chip = CHIPS.get(row.gpu)
    if chip is None:
        raise ConfigError(f"--cluster: {name} has {row.gpu}; the paths of {', '.join(CHIPS)} are known, and "
                          f"those of a CPU ({ON_CPU})")
    return JobHardware(name, chip=chip, gpu=Gpu(row.gpu, row.node), memory=row.memory)


# ---- recording ---------------------------------------------------------------------------------------------


def record_roles(
    cfg: Config, dims: ParallelDims, ranks: Sequence[int], chip: Chip | None
) -> list[RoleSummary]:
    """The summaries of these ranks, recorded by as many processes as there are cores."""
    record = partial(record_one, cfg, dims, chip)
    workers = min(len(ranks), os.cpu_count() or 1)
    if workers == 1:
        return [record(rank) for rank in ranks]
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        return list(pool.map(record, ranks))


def record_one(cfg: Config, dims: ParallelDims, chip: Chip | None, rank: int) -> RoleSummary:
    torch.set_num_threads(1)
    facts = Facts(workload(cfg).keys_seen(cfg.model.window))
    return summarize(record_role(cfg, dims, rank, chip, program_of(cfg)), facts)


def program_of(cfg: Config) -> Program:
    """build_run and train_step, as a recording calls them."""
    guard = NonFiniteGuard()

    def build(mesh: Mesh, device: torch.device) -> TrainingRun:
        return build_run(cfg, mesh, device, None, STEPS)

    def step(run: TrainingRun, number: int, microbatches: list[Microbatch], grads_ready) -> None:
        train_step(run, number, microbatches, guard, grads_ready=grads_ready)

    return Program(build, step)


def memory_beside(cfg: Config, world: int, hardware: JobHardware) -> dict[str, int]:
    """Bytes that no tensor holds: {what: how many}."""
    if hardware.gpu is None:
        return {}
    job = job_of_rank(cfg, world, 0)
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
        f"{name} on {dims.in_words()} of {hardware.name} ({chip}) · global batch {train.global_batch} x "
        f"{train.seq_len}, micro-batch {train.micro_batch}, {train.dtype} · {num_roles} places in the "
        f"pipeline recorded in {seconds:.0f} s"
    )


def role_table(
    roles: list[RoleSummary], dims: ParallelDims, is_on_cpu: bool, width: int | None
) -> list[str]:
    rows = []
    for role in roles:
        sent = sum(one.nbytes for one in role.exchanges)
        rows.append({
            "pp": str(dims.coordinates(role.rank)["pp"]),
            "rank": str(role.rank),
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


def held_lines(roles: list[RoleSummary], beside: dict[str, int], hardware: JobHardware) -> list[str]:
    """What the fullest rank holds at its peak."""
    fullest = max(roles, key=lambda role: role.peak)
    total = fullest.peak + sum(beside.values())
    has = "" if hardware.memory is None else f" of {hardware.memory / GIB:.1f} GiB"
    verdict = "" if hardware.memory is None or total <= hardware.memory else ": too much"
    lines = [f"rank {fullest.rank} holds {total / GIB:.2f} GiB{has} at its peak{verdict}"]
    lines += [f"  {nbytes / GIB:10.2f}  {what}" for what, nbytes in beside.items()]
    shown, others = fullest.held[:NUM_HELD], fullest.held[NUM_HELD:]
    lines += [f"  {held.nbytes / GIB:10.2f}  {held.phase:9}  {held.place}" for held in shown]
    if others:
        lines.append(f"  {sum(held.nbytes for held in others) / GIB:10.2f}  {len(others)} other places")
    return lines


def exchange_lines(roles: list[RoleSummary], width: int | None) -> list[str]:
    """What the rank that sends most exchanges in a step."""
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


def check_lines(findings: list[str], transport: str, roles: list[RoleSummary]) -> list[str]:
    """What the check says, and what could not be counted."""
    lines = [f"error: {finding}" for finding in findings]
    if not findings and len(roles) > 1:
        lines.append(f"the exchanges of a pipeline meet, under the rules of {transport}")
    unknown = {kernel: nbytes for role in roles for kernel, nbytes in role.unknown.items()}
    lines += [f"without a formula: {kernel}, which moves {nbytes / 1e9:.3f} GB"
              for kernel, nbytes in unknown.items()]
    if transport == "nccl":  # a CPU waits for nobody
        for place in sorted({place for role in roles for place in role.waits}):
            lines.append(f"the host waits for the device in {place}")
    return lines


def write_json(
    path: Path,
    cfg: Config,
    hardware: JobHardware,
    roles: list[RoleSummary],
    *,
    beside: dict[str, int],
    findings: list[str],
) -> None:
    """Raises ConfigError if the file cannot be written."""
    tree = {
        "cluster": hardware.name,
        "config": asdict(cfg),
        "beside": beside,
        "findings": findings,
        "roles": [asdict(replace(role, events=[])) | {"events": [str(one) for one in role.events]}
                  for role in roles],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(tree) + "\n")
    except OSError as error:
        raise ConfigError(f"--json: {path} cannot be written ({error.strerror})") from None


def draw(roles: list[RoleSummary], dims: ParallelDims, hardware: JobHardware, path: Path) -> None:
    """Memory over the step, a curve for each place. Raises ConfigError if the file cannot be written."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    shades = colormaps["viridis"]
    for number, role in enumerate(roles):
        times = [point.time - role.curve[0].time for point in role.curve]
        axes.step(
            times,
            [point.nbytes / GIB for point in role.curve],
            where="post",
            linewidth=0.8,
            color=shades(0.9 * number / max(1, len(roles) - 1)),
            label=f"place {dims.coordinates(role.rank)['pp']}",
        )
    if hardware.memory is not None:
        axes.axhline(hardware.memory / GIB, color="black", linewidth=0.8, linestyle="--")
    axes.set(xlabel="operations of the step", ylabel="GiB of tensors", ylim=(0, None), xlim=(0, None))
    if len(roles) > 1:
        axes.legend(fontsize="small", ncols=2, frameon=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"--picture: {path} cannot be written ({error.strerror})") from None


if __name__ == "__main__":
    sys.exit(fail_cleanly(main, sys.argv[1:]))
