"""Training steps of large models on one GPU, ours against the peers, in one run of a given length.

    python -m scripts.bench step --device cuda --minutes 9 --site SITE --out step.jsonl --table step.md
    python -m scripts.bench step --device cpu --tiny --minutes 3        a rehearsal: the same plan, tiny

Each contestant (lab/benchmarks/contestant.py) runs in a separate process with a time limit. A crash or a hang
only costs its own time, and its row gives the reason. Results are appended to --out as they are measured, so
a killed run keeps its results. PLAN is in order of importance; an entry that no time is left for gets a row
that says so. Every model gets as many layers as fit the GPU (its row says how many), and fewer if it still
runs out of memory. Ours runs the dense model first and last among the rows that matter: the difference is the
noise. "ours is" compares the model's FLOPs a second, so rows with different numbers of layers are comparable.
On a new machine, run `scripts.bench first` before the race.

For what to copy to a machine without a network, and how to install the peers there, see
lab/docs/benchmarks.md.

MFU: model FLOPs (plan/count.py: causal attention once and within documents, a mixture's active experts, no
padding) over 989 TFLOP/s dense bf16.
"""

import argparse
import functools
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

import config
from config.reading import build_tree
from lab.benchmarks.card_table import make_table, progress_line
from lab.benchmarks.process import Outcome, Task, last_error_line, run_task, terminates_cleanly
from lab.benchmarks.shape import Shape
from lab.benchmarks.travel import describe_peers, travel_line
from plan.count import flops_per_token
from plan.job import make_rank_job, peak_flops_of_gpu
from plan.memory import peak_activation_bytes, state_bytes

HELP = "cuda: the large models on one GPU (lab/benchmarks/card.py says how)"
RESERVE_S = 8.0  # for the table, and for cleanup after a killed process
USABLE_MEMORY = 0.88  # fraction of the GPU's memory; the rest: library workspaces, fragmentation
GPU_STEPS = {"warm": 4, "steps": 10}
CPU_STEPS = {"warm": 1, "steps": 2}
NO_RESULT = {"ms": None, "problem": None}
MIN_LAYERS = {"bf16": 2, "fp8": 3}  # by dtype: in fp8 the first and the last stay in bf16
TOO_LARGE = "the fewest layers do not fit the memory"
FEWER_LAYERS = 3  # layers to drop from a model that does not fit
GIB = 2**30
CPU_MEMORY = 2 * GIB  # of the stand-in for a GPU in a rehearsal


@dataclass(frozen=True)
class Entry:
    """A contestant and a model.

    It starts only with at least min_s seconds left, and is killed after max_s seconds.
    """

    model: str
    contestant: str
    min_s: float = 35
    max_s: float = 75


PLAN = (
    Entry("dense", "ours", 30, 90),
    Entry("dense", "megatron-core"),
    Entry("dense", "torchtitan+compile", 40, 90),
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
    """Run the plan, print and write the table, and return the exit code."""
    started = time.monotonic()
    results = Path(args.out)
    results.parent.mkdir(parents=True, exist_ok=True)
    print(travel_line(), describe_peers(args.site), sep="\n", flush=True)
    machine = describe_machine(args.device)

    def seconds_left() -> float:
        return 60 * args.minutes - RESERVE_S - (time.monotonic() - started)

    rows = []
    with terminates_cleanly():
        try:
            for row in run_plan(machine, args, seconds_left):
                rows.append(row)
                with results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(progress_line(row), flush=True)
        finally:
            text = make_table(rows, machine.facts())
            print("\n" + text)
            if args.table:
                Path(args.table).write_text(text)
    return 0


def run_plan(
    machine: "GpuMachine", args: argparse.Namespace, seconds_left: Callable[[], float]
) -> Iterator[dict]:
    """Yield a row of results for each entry of the plan that the options ask for.

    A contestant that cannot fit a model runs it again with fewer layers.
    """
    pending = []
    for entry in chosen_entries(args):
        shape = fitted_shape(entry.model, entry.contestant, machine.memory_bytes, args.tiny)
        pending.append((entry, shape))
    while pending:
        entry, shape = pending.pop(0)
        date = time.strftime("%Y-%m-%d %H:%M")
        row = {"model": entry.model, "contestant": entry.contestant, "date": date, **machine.facts()}

        left = seconds_left()
        is_too_late = left < 1 or (left < entry.min_s and not args.tiny)
        if shape is None:
            row |= NO_RESULT | {"problem": TOO_LARGE}
        elif is_too_late:
            row |= NO_RESULT | {"problem": f"no time left ({max(left, 0):.0f} s)"}
        else:
            row |= run_contestant(entry, shape, args, min(entry.max_s, left))

        if shape is not None:
            row["shape"] = asdict(shape)
            if row["ms"]:
                row |= derived_figures(row, shape, peak_flops_of_gpu(machine.card, "bf16"))
            smaller = with_fewer_layers(shape, get_dtype(entry.contestant))
            if row["problem"] == "out of memory" and smaller is not None:
                pending.insert(0, (entry, smaller))
        yield row


def chosen_entries(args: argparse.Namespace) -> list[Entry]:
    """Return the entries of PLAN that --only and --peers ask for."""
    models = args.only.split(",") if args.only else [entry.model for entry in PLAN]
    entries = [entry for entry in PLAN if entry.model in models]
    if not args.peers:
        return entries
    peers = args.peers.split(",")

    def is_chosen(entry: Entry) -> bool:
        base = entry.contestant.split("+")[0]
        return entry.contestant in peers or base in peers

    return [entry for entry in entries if is_chosen(entry)]


# ---- the machine, and what fits on it ----------------------------------------------------------------------


@dataclass(frozen=True)
class GpuMachine:
    """card: the GPU's name. is_exclusive: only one process at a time may use it."""

    card: str
    driver: str
    torch: str
    memory_bytes: int
    num_gpus: int = 1
    is_exclusive: bool = False

    def facts(self) -> dict[str, str]:
        return {"card": self.card, "driver": self.driver, "torch": self.torch}


def describe_machine(device: str) -> GpuMachine:
    """Query nvidia-smi, since a CUDA context would use memory. Raises ConfigError without a GPU."""
    if device == "cpu":
        return GpuMachine(f"CPU ({platform.machine()})", "", torch.__version__, CPU_MEMORY)
    query = "--query-gpu=name,driver_version,memory.total,compute_mode"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise config.ConfigError(
            "--device cuda: nvidia-smi finds no GPU here; a rehearsal is --device cpu --tiny"
        ) from error
    gpus = output.strip().splitlines()
    name, driver, mebibytes, mode = (part.strip() for part in gpus[0].split(","))
    return GpuMachine(
        name,
        driver,
        torch.__version__,
        memory_bytes=int(mebibytes) * 2**20,
        num_gpus=len(gpus),
        is_exclusive="Exclusive" in mode,
    )


@functools.cache
def fitted_shape(model: str, contestant: str, memory_bytes: int, is_tiny: bool) -> Shape | None:
    """Return a contestant's model with as many layers as fit, or None if it does not fit."""
    return fit_layers(Shape.gpu_models(is_tiny)[model], memory_bytes, get_dtype(contestant))


def get_dtype(contestant: str) -> str:
    return "fp8" if "fp8" in contestant.split("+") else "bf16"


def fit_layers(shape: Shape, memory_bytes: int, dtype: str = "bf16") -> Shape | None:
    """Return the shape with as many layers as fit by plan/memory.py, or None if the fewest do not fit."""
    for layers in range(shape.layers, MIN_LAYERS[dtype] - 1, -1):
        smaller = replace(shape, layers=layers)
        if planned_bytes(smaller, dtype) <= USABLE_MEMORY * memory_bytes:
            return smaller
    return None


def with_fewer_layers(shape: Shape, dtype: str) -> Shape | None:
    """Return the shape to try when this one runs out of memory, or None if it has the fewest layers."""
    layers = max(shape.layers - FEWER_LAYERS, MIN_LAYERS[dtype])
    return replace(shape, layers=layers) if layers < shape.layers else None


def planned_bytes(shape: Shape, dtype: str = "bf16") -> int:
    """Return the bytes that a step of the shape needs on one GPU."""
    train = {
        "seq_len": shape.seq,
        "micro_batch": shape.batch,
        "global_batch": shape.batch,
        "dtype": dtype,
        "steps": 1,
    }
    if shape.hidden % 128:  # a tiny model
        train["fp8_block"] = 32
    cfg = build_tree(config.Config, {"model": shape.model_keys(), "train": train})
    job = make_rank_job(cfg, world=1, rank=0)
    return sum(state_bytes(job).values()) + peak_activation_bytes(job)


# ---- one contestant ----------------------------------------------------------------------------------------


def run_contestant(entry: Entry, shape: Shape, args: argparse.Namespace, limit_s: float) -> dict:
    """Run one contestant and return its measurements, or {"problem": reason}."""
    env = make_environment(entry.contestant, args.site)
    num_steps = GPU_STEPS if args.device == "cuda" else CPU_STEPS
    command = contestant_command(entry.contestant, shape, args.device, num_steps)
    outcome = run_task(Task(entry.contestant, command, env, limit_s))
    took = {"took s": round(outcome.seconds, 1)}
    problem = find_problem(outcome)
    if problem is not None:
        return NO_RESULT | {"problem": problem, **took}
    first_step = next(message["s"] for message in outcome.messages if message.get("phase") == "first step")
    return {**outcome.messages[-1]["done"], "first s": first_step, "problem": None, **took}


def find_problem(outcome: Outcome) -> str | None:
    """Return why a contestant did not finish, or None if it did."""
    last = outcome.messages[-1] if outcome.messages else {}
    if "done" in last:
        return None
    if "error" in last:
        return last["error"]
    if outcome.timed_out:
        phase = last.get("phase", "starting")
        return f"stopped after its {outcome.seconds:.0f} s, last phase: {phase}"
    return last_error_line(outcome.errors)


def contestant_command(name: str, shape: Shape, device: str, num_steps: dict[str, int]) -> list[str]:
    settings = {"shape": asdict(shape), "device": device, **num_steps}
    return [sys.executable, "-m", "lab.benchmarks.contestant", name, json.dumps(settings)]


def make_environment(contestant: str, site: str) -> dict[str, str]:
    """Return the environment of a contestant; peers and ours+libraries have `site` on their path."""
    env = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        **os.environ,
    }
    base, *flags = contestant.split("+")
    if site and (base != "ours" or "libraries" in flags):
        paths = [os.path.abspath(site), env.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if "graphs" in flags:
        del env["PYTORCH_CUDA_ALLOC_CONF"]  # a recorded step has its private memory pool
    return env


def derived_figures(row: dict, shape: Shape, peak_flops: float | None) -> dict:
    """Return tokens/s, TFLOP/s and MFU of a step. `peak_flops` is the GPU's in FLOP/s, if known."""
    tokens_per_s = shape.tokens / row["ms"] * 1e3
    model = build_tree(config.ModelConfig, shape.model_keys())
    flops = flops_per_token(model, shape.seq, shape.documents)
    flops_per_s = flops * shape.tokens / row["ms"] * 1e3
    mfu = flops_per_s / peak_flops if peak_flops else None
    return {"tokens/s": tokens_per_s, "TFLOP/s": flops_per_s / 1e12, "MFU": mfu}
