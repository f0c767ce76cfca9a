"""Training steps of large models on one GPU, ours beside the peers, in one run of a given length.

    python -m scripts.bench step --device cuda --minutes 9.5 --site SITE --out step.jsonl --table step.md
    python -m scripts.bench step --device cpu --tiny --minutes 3        a rehearsal: the same plan, tiny

Each contestant (benchmarks/contestant.py) has a process of its own with a time limit. One that crashes or
hangs costs its own time alone, and its row says why. Results are appended to --out as they are measured, so a
run that is killed keeps what it has. PLAN is in the order of importance, the kernels (benchmarks/gpu.py)
among its entries; an entry for which no time is left gets a row that says so.

Before the first box one process imports the packages, which warms the disk, and then all contestants start
beside each other with three layers (`--warm-up` seconds): what they compile is in the caches of Triton and of
torch.compile when their own time begins. Ours runs the dense model first and last among the rows that decide:
the difference is the noise. "ours is" compares the model's FLOPs a second, so a contestant that fits fewer
layers of the 8B model (its row says how many) is compared all the same.

What travels to a machine without a network, and how the peers' packages get there: docs/benchmarks.md. First
what may be wrong (benchmarks/smoke.py), then the race.

MFU: model FLOPs (plan/count.py: causal attention once and within documents, a mixture's active experts, no
padding) over 989 TFLOP/s dense bf16.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

import config
from benchmarks.card_table import KERNELS, make_table, progress_line
from benchmarks.process import Outcome, Task, last_error_line, run_task, run_tasks, terminates_cleanly
from benchmarks.shape import Shape
from benchmarks.travel import describe_peers, travel_line
from plan.count import flops_per_token
from plan.job import job_of_rank
from plan.memory import peak_activation_bytes, state_bytes
from runtime.setup import peak_flops_of_gpu

HELP = "cuda: the large models on one GPU (benchmarks/card.py says how)"
RESERVE_S = 8.0  # for the table, and for what a killed process leaves behind
USABLE_MEMORY = 0.88  # share of the GPU's memory; the rest: workspaces of libraries, gaps of the allocator
GPU_STEPS = {"warm": 4, "steps": 10}
CPU_STEPS = {"warm": 1, "steps": 2}
ONE_STEP = {"warm": 1, "steps": 1}
NO_RESULT = {"ms": None, "problem": None}
MIN_LAYERS_8B = 4
FEWER_LAYERS_8B = 3  # that the 8B model loses where it does not fit
IMPORTS = ("torch", "triton", "transformers", "torchtitan", "megatron.core", "transformer_engine")
IMPORT_S = 60.0  # at most, for the imports that warm the disk
WARM_UP_LAYERS = 3  # in fp8, the first and the last are not
WARM_UP_BESIDE = 3  # contestants that warm up beside each other: all of them must fit the GPU
WARM_UP_LOGITS = 1 << 31  # elements: a contestant that keeps more warms up alone, in its own time


@dataclass(frozen=True)
class Entry:
    """A contestant with a model.

    It does not start with less than min_s seconds left, and is killed after max_s seconds.
    """

    model: str
    contestant: str
    min_s: float = 35
    max_s: float = 75


PLAN = (
    Entry("dense", "ours", 30, 90),
    Entry("dense", "megatron-core"),
    Entry("dense", "torchtitan+compile", 40, 90),
    Entry(KERNELS, "products", 40, 75),
    Entry("packed", "ours"),
    Entry("moe", "ours"),
    Entry("dense", "ours+fp8"),
    Entry("8b", "ours"),
    Entry("dense-128k", "ours"),
    Entry("dense", "ours+graphs"),
    Entry("dense", "transformers+liger"),
    Entry("packed-uneven", "ours"),
    Entry("packed", "megatron-core"),
    Entry("moe", "megatron-core"),
    Entry("dense", "ours"),
    Entry("8b", "torchtitan+compile", 40, 90),
    Entry("dense-128k", "torchtitan+compile", 40, 90),
    Entry(KERNELS, "memory", 40, 90),
    Entry("packed", "torchtitan+compile", 40, 90),
    Entry("packed-uneven", "megatron-core"),
    Entry("dense", "nanogpt+compile", 40),
    Entry("moe", "torchtitan+compile", 40),
    Entry("8b", "ours+fp8"),
    Entry("moe", "ours+fp8"),
    Entry("dense-128k", "transformers+liger"),
    Entry("moe", "transformers"),
    Entry("dense", "megatron-core+unfused"),
    Entry("dense", "megatron-core+local"),
    Entry("8b", "megatron-core"),
)


# ---- the run -----------------------------------------------------------------------------------------------


def main(args: argparse.Namespace) -> int:
    """Runs the plan, prints and writes the table; returns the exit code."""
    started = time.monotonic()
    results = Path(args.out)
    results.parent.mkdir(parents=True, exist_ok=True)
    print(travel_line(), describe_peers(args.site), sep="\n", flush=True)
    machine, memory_bytes = describe_machine(args.device)
    shapes = Shape.gpu_models(args.tiny)
    shapes["8b"] = fit_layers(shapes["8b"], memory_bytes)

    def seconds_left() -> float:
        return 60 * args.minutes - RESERVE_S - (time.monotonic() - started)

    rows = []
    with terminates_cleanly():
        try:
            warm_up(shapes, args, seconds_left)
            for row in run_plan(shapes, machine, args, seconds_left):
                rows.append(row)
                with results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(progress_line(row), flush=True)
        finally:
            text = make_table(rows, machine)
            print("\n" + text)
            if args.table:
                Path(args.table).write_text(text)
    return 0


def warm_up(shapes: dict[str, Shape], args: argparse.Namespace, seconds_left: Callable[[], float]) -> None:
    """Imports the packages once, and starts the contestants beside each other with few layers.

    It takes at most args.warm_up seconds, and prints which contestant did not start.
    """
    if args.warm_up <= 0:
        return
    end = seconds_left() - args.warm_up

    def seconds() -> float:
        return min(seconds_left(), seconds_left() - end)

    run_task(import_task(args.site, min(IMPORT_S, seconds())))
    tasks = start_tasks(chosen_entries(shapes, args), shapes, args, limit_s=max(seconds(), 1.0))
    for task, outcome in run_tasks(tasks, most=WARM_UP_BESIDE, seconds_left=seconds):
        problem = problem_of(outcome)
        if problem:
            print(f"warm-up of {task.name}: {problem}", flush=True)


def import_task(site: str, limit_s: float) -> Task:
    """One process that imports what the contestants import: the first to do so waits for the disk."""
    lines = ["import importlib, contextlib"]
    for name in IMPORTS:
        lines.append(f"with contextlib.suppress(Exception): importlib.import_module({name!r})")
    command = [sys.executable, "-c", "\n".join(lines)]
    return Task("imports", command, environment_of("imports", site), limit_s)


def start_tasks(
    entries: list[Entry], shapes: dict[str, Shape], args: argparse.Namespace, limit_s: float
) -> list[Task]:
    """One step of each contestant with WARM_UP_LAYERS layers: what it compiles is that of all its layers."""
    tasks: dict[str, Task] = {}
    for entry in entries:
        shape = shapes.get(entry.model)
        if shape is None or shape.tokens * shape.vocab > WARM_UP_LOGITS:
            continue
        small = replace(shape, layers=min(shape.layers, WARM_UP_LAYERS))
        name = f"{entry.model} {entry.contestant}"
        command = contestant_command(entry.contestant, small, args.device, ONE_STEP)
        tasks[name] = Task(name, command, environment_of(entry.contestant, args.site), limit_s)
    return list(tasks.values())


def run_plan(
    shapes: dict[str, Shape],
    machine: Mapping[str, str],
    args: argparse.Namespace,
    seconds_left: Callable[[], float],
) -> Iterator[dict]:
    """Yields a row of results for each entry of the plan that the options ask for.

    A contestant for which the 8B model is too large runs it again with fewer layers.
    """
    pending = [(entry, shapes.get(entry.model)) for entry in chosen_entries(shapes, args)]
    while pending:
        entry, shape = pending.pop(0)
        date = time.strftime("%Y-%m-%d %H:%M")
        row = {"model": entry.model, "contestant": entry.contestant, "date": date, **machine}

        left = seconds_left()
        is_too_late = left < 1 or (left < entry.min_s and not args.tiny)
        if is_too_late:
            row |= NO_RESULT | {"problem": f"no time left ({max(left, 0):.0f} s)"}
        else:
            row |= run_contestant(entry, shape, args, min(entry.max_s, left))

        if shape is not None:
            row["shape"] = asdict(shape)
            if row["ms"]:
                row |= derived_figures(row, shape, peak_flops_of_gpu(machine["card"], "bf16"))
            if entry.model == "8b" and row["problem"] == "out of memory" and shape.layers > MIN_LAYERS_8B:
                pending.insert(0, (entry, replace(shape, layers=shape.layers - FEWER_LAYERS_8B)))
        yield row


def chosen_entries(shapes: Mapping[str, Shape], args: argparse.Namespace) -> list[Entry]:
    """Returns the entries of PLAN that --only and --peers ask for."""
    models = args.only.split(",") if args.only else [*shapes, KERNELS]
    if args.device != "cuda":  # tests/benchmarks/test_gpu.py is the rehearsal of the kernels
        models = [model for model in models if model != KERNELS]
    entries = [entry for entry in PLAN if entry.model in models]
    if not args.peers:
        return entries
    peers = args.peers.split(",")

    def is_chosen(entry: Entry) -> bool:
        base = entry.contestant.split("+")[0]
        return entry.contestant in peers or base in peers

    return [entry for entry in entries if is_chosen(entry)]


def describe_machine(device: str) -> tuple[dict[str, str], int]:
    """Returns {card, driver, torch} and the bytes of the device's memory.

    It asks nvidia-smi: a CUDA context would take some of the memory. Raises ConfigError without a GPU.
    """
    if device == "cpu":
        return {"card": f"CPU ({platform.machine()})", "driver": "", "torch": torch.__version__}, 2**31
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise config.ConfigError(
            "--device cuda: nvidia-smi finds no GPU here; a rehearsal is --device cpu --tiny"
        ) from error
    name, driver, mebibytes = (part.strip() for part in output.splitlines()[0].split(","))
    return {"card": name, "driver": driver, "torch": torch.__version__}, int(mebibytes) * 2**20


def fit_layers(shape: Shape, memory_bytes: int) -> Shape:
    """Returns the shape with as many of its layers as fit by plan/memory.py, at least 2."""
    for layers in range(shape.layers, 2, -1):
        smaller = replace(shape, layers=layers)
        if planned_bytes(smaller) <= USABLE_MEMORY * memory_bytes:
            return smaller
    return replace(shape, layers=min(shape.layers, 2))


def planned_bytes(shape: Shape) -> int:
    """Returns the bytes that a step of the shape needs on one GPU."""
    train = {
        "seq_len": shape.seq,
        "micro_batch": shape.batch,
        "global_batch": shape.batch,
        "dtype": "bf16",
        "steps": 1,
    }
    cfg = config.build_tree(config.Config, {"model": shape.model_keys(), "train": train})
    job = job_of_rank(cfg, world=1, rank=0)
    return sum(state_bytes(job).values()) + peak_activation_bytes(job, flash=True)


# ---- one contestant ----------------------------------------------------------------------------------------


def run_contestant(entry: Entry, shape: Shape | None, args: argparse.Namespace, limit_s: float) -> dict:
    """Runs one contestant -> what it measured, or {"problem": why not}. shape: None for the kernels."""
    env = environment_of(entry.contestant, args.site)
    if shape is None:
        command = [sys.executable, "-m", "scripts.bench", "kernels", "--device", args.device, "--json"]
        command += ["--part", entry.contestant]
    else:
        num_steps = GPU_STEPS if args.device == "cuda" else CPU_STEPS
        command = contestant_command(entry.contestant, shape, args.device, num_steps)
    outcome = run_task(Task(entry.contestant, command, env, limit_s))
    took = {"took s": round(outcome.seconds, 1)}
    problem = problem_of(outcome)

    if shape is None:
        kernels = [message for message in outcome.messages if "kernel" in message]
        return NO_RESULT | {"problem": problem, "kernels": kernels, **took}
    if problem is not None:
        return NO_RESULT | {"problem": problem, **took}
    first_step = next(message["s"] for message in outcome.messages if message.get("phase") == "first step")
    return {**outcome.messages[-1]["done"], "first s": first_step, "problem": None, **took}


def problem_of(outcome: Outcome) -> str | None:
    """Why a contestant, or the kernels, did not come to their last message; None if they did."""
    last = outcome.messages[-1] if outcome.messages else {}
    if "done" in last or "machine" in last:
        return None
    if "error" in last:
        return last["error"]
    if outcome.timed_out:
        phase = last.get("phase") or last.get("kernel") or "starting"
        return f"stopped after its {outcome.seconds:.0f} s, last phase: {phase}"
    return last_error_line(outcome.errors)


def contestant_command(name: str, shape: Shape, device: str, num_steps: dict[str, int]) -> list[str]:
    settings = {"shape": asdict(shape), "device": device, **num_steps}
    return [sys.executable, "-m", "benchmarks.contestant", name, json.dumps(settings)]


def environment_of(contestant: str, site: str) -> dict[str, str]:
    """Returns the environment of a contestant; `site` is on the path of peers and of the kernels."""
    env = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        **os.environ,
    }
    if site and not contestant.startswith("ours"):
        paths = [os.path.abspath(site), env.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if "graphs" in contestant:
        del env["PYTORCH_CUDA_ALLOC_CONF"]  # a recorded step has a memory pool of its own
    return env


def derived_figures(row: dict, shape: Shape, peak_flops: float | None) -> dict:
    """Returns what follows from the milliseconds of a step. peak_flops: of the GPU, FLOP/s; None: unknown."""
    tokens_per_s = shape.tokens / row["ms"] * 1e3
    flops = flops_per_token(config.ModelConfig(**shape.model_keys()), shape.seq, shape.documents)
    flops_per_s = flops * shape.tokens / row["ms"] * 1e3
    mfu = flops_per_s / peak_flops if peak_flops else None
    return {"tokens/s": tokens_per_s, "TFLOP/s": flops_per_s / 1e12, "MFU": mfu}
