"""Training steps of large models on one GPU, ours beside the peers, in one run of a given length.

    python -m scripts.bench step --device cuda --minutes 9.5 --site SITE --out step.jsonl --table step.md
    python -m scripts.bench step --device cpu --tiny --minutes 3        a rehearsal: the same plan, tiny

Each contestant (benchmarks/contestant.py) has a process of its own with a time limit. One that crashes or
hangs costs its own time alone, and its row says why. Results are appended to --out as they are measured, so a
run that is killed keeps what it has. PLAN is in the order of importance, the kernels (benchmarks/gpu.py)
among its entries; an entry for which no time is left gets a row that says so. Ours runs the dense model
twice: the difference is the noise.

The run of ten minutes, on a machine without a network (Python 3.12, torch 2.11, one H200). Beforehand, on a
machine with a network, download the peers' wheels to peers/wheels of the checkout (git ignores peers/), 45
MiB in all, and a prebuilt extension of Transformer Engine to peers/:

    pip download --no-deps --only-binary=:all: --python-version 3.12 -d peers/wheels megatron-core==0.19.2 \\
        transformer-engine==2.20.2 transformer-engine-cu13==2.20.2 torchtitan==0.2.2 liger-kernel==0.8.5 \\
        torchdata torchao tyro docstring_parser datasets dill multiprocess pydantic pydantic-core \\
        annotated-types typing-inspection nvdlfw-inspect

Then, on the GPU machine (SITE=/tmp/site; results under $OUT), first what may break, then the run itself:

    pip install -q --no-index --no-deps --no-compile --target $SITE peers/wheels/*.whl; cp peers/*.so $SITE/
    timeout 240 python -m pytest -q -x tests/runtime/test_graphs.py tests/kernels
    python -m scripts.bench step --device cuda --minutes 3 --site $SITE \\
        --only dense --peers ours,megatron-core
    python -m scripts.bench step --device cuda --minutes 9.5 --site $SITE --out $OUT/step.jsonl \\
        --table $OUT/step.md

MFU: model FLOPs (plan/count.py: causal attention once, a mixture's active experts, no padding) over
989 TFLOP/s dense bf16.
"""

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

import config
from benchmarks.shape import Shape
from plan.count import flops_per_token
from plan.job import job_of_rank
from plan.memory import peak_activation_bytes, state_bytes
from runtime.setup import peak_flops_of_gpu

HELP = "cuda: the large models on one GPU (benchmarks/card.py says how)"
RESERVE_S = 8.0  # for the table, and for what a killed process leaves behind
USABLE_MEMORY = 0.88  # share of the GPU's memory; the rest: workspaces of libraries, gaps of the allocator
GPU_STEPS = {"warm": 4, "steps": 10}
CPU_STEPS = {"warm": 1, "steps": 2}
NO_RESULT = {"ms": None, "problem": None}
KERNELS = "kernels"  # an entry of PLAN that is no model: benchmarks/gpu.py
MIN_LAYERS_8B = 4


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
    Entry("dense", "ours+graphs"),
    Entry("moe", "ours"),
    Entry("dense", "transformers+liger"),
    Entry("8b", "ours"),
    Entry("dense-128k", "ours"),
    Entry("dense", "nanogpt+compile", 40),
    Entry("dense", "ours+fp8"),
    Entry(KERNELS, "ours", 60, 150),
    Entry("moe", "megatron-core"),
    Entry("dense-128k", "torchtitan+compile", 40, 90),
    Entry("dense", "ours"),
    Entry("8b", "torchtitan+compile", 40, 90),
    Entry("moe", "torchtitan+compile", 40),
    Entry("8b", "ours+fp8"),
    Entry("moe", "ours+fp8"),
    Entry("dense-128k", "transformers+liger"),
    Entry("moe", "transformers"),
    Entry("dense", "megatron-core+local"),
    Entry("8b", "megatron-core"),
)


# ---- the run -----------------------------------------------------------------------------------------------


def main(args: argparse.Namespace) -> int:
    """Runs the plan, prints and writes the table; returns the exit code."""
    started = time.monotonic()
    results = Path(args.out)
    results.parent.mkdir(parents=True, exist_ok=True)
    machine, memory_bytes = describe_machine(args.device)
    shapes = Shape.gpu_models(args.tiny)
    shapes["8b"] = fit_layers(shapes["8b"], memory_bytes)

    def seconds_left() -> float:
        return 60 * args.minutes - RESERVE_S - (time.monotonic() - started)

    # SIGTERM kills the contestant that runs; the results so far still get their table
    previous_handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rows = []
    try:
        for row in run_plan(shapes, machine, args, seconds_left):
            rows.append(row)
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(progress_line(row), flush=True)
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
        text = make_table(rows, machine)
        print("\n" + text)
        if args.table:
            Path(args.table).write_text(text)
    return 0


def run_plan(
    shapes: dict[str, Shape],
    machine: Mapping[str, str],
    args: argparse.Namespace,
    seconds_left: Callable[[], float],
) -> Iterator[dict]:
    """Yields a row of results for each entry of the plan that the options ask for.

    If the 8B model does not fit after all, it loses layers (in `shapes`) and runs again.
    """
    pending = chosen_entries(shapes, args)
    while pending:
        entry = pending.pop(0)
        shape = shapes.get(entry.model)
        date = time.strftime("%Y-%m-%d %H:%M")
        row = {"model": entry.model, "contestant": entry.contestant, "date": date, **machine}

        left = seconds_left()
        is_too_late = left < 1 or (left < entry.min_s and not args.tiny)
        if is_too_late:
            row |= NO_RESULT | {"problem": f"no time left ({max(left, 0):.0f} s)"}
        else:
            row |= run_contestant(entry, shape, args, min(entry.max_s, left))

        if shape is not None and row["ms"]:
            row |= derived_figures(row, shape, peak_flops_of_gpu(machine["card"], "bf16"))
        is_our_8b = entry.model == "8b" and entry.contestant == "ours"
        if shape is not None and is_our_8b and row["problem"] == "out of memory":
            if shape.layers > MIN_LAYERS_8B:
                shapes["8b"] = replace(shape, layers=shape.layers - 3)
                pending.insert(0, entry)
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

    It asks nvidia-smi: a CUDA context would take some of the memory.
    """
    if device == "cpu":
        return {"card": f"CPU ({platform.machine()})", "driver": "", "torch": torch.__version__}, 2**31
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader,nounits"]
    output = subprocess.run(query, capture_output=True, text=True, check=True).stdout
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
    started = time.monotonic()
    command = command_of(entry, shape, args.device)
    env = environment_of(entry, shape, args.site)
    messages, errors, timed_out = run_process(command, env, limit_s)
    took = {"took s": round(time.monotonic() - started, 1)}
    last = messages[-1] if messages else {}

    if "done" in last:
        first_step = next(message["s"] for message in messages if message.get("phase") == "first step")
        return {**last["done"], "first s": first_step, "problem": None, **took}

    if "error" in last:
        problem = last["error"]
    elif timed_out:
        phase = last.get("phase") or last.get("kernel") or "starting"
        problem = f"stopped after its {limit_s:.0f} s, last phase: {phase}"
    else:
        problem = last_error_line(errors)
    if shape is not None:
        return NO_RESULT | {"problem": problem, **took}

    kernels = [message for message in messages if "kernel" in message]
    is_complete = "machine" in last
    return NO_RESULT | {"problem": None if is_complete else problem, "kernels": kernels, **took}


def command_of(entry: Entry, shape: Shape | None, device: str) -> list[str]:
    if shape is None:
        return [sys.executable, "-m", "scripts.bench", "kernels", "--device", device, "--json"]
    num_steps = GPU_STEPS if device == "cuda" else CPU_STEPS
    settings = {"shape": asdict(shape), "device": device, **num_steps}
    return [sys.executable, "-m", "benchmarks.contestant", entry.contestant, json.dumps(settings)]


def environment_of(entry: Entry, shape: Shape | None, site: str) -> dict[str, str]:
    """Returns the environment of a contestant; `site` is on the path of peers and of the kernels."""
    env = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        **os.environ,
    }
    is_ours = shape is not None and entry.contestant.startswith("ours")
    if site and not is_ours:
        paths = [os.path.abspath(site), env.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if "graphs" in entry.contestant:
        del env["PYTORCH_CUDA_ALLOC_CONF"]  # a recorded step has a memory pool of its own
    return env


def run_process(command: list[str], env: dict[str, str], limit_s: float) -> tuple[list[dict], str, bool]:
    """Runs a command in a session of its own, which is killed at the end: compilers that it started, too.

    Returns the JSON lines of its standard output, its standard error, and whether it reached the limit.
    """
    timed_out = False
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            env=env,
            start_new_session=True,
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

        out.seek(0)
        errors.seek(0)
        lines = out.read().splitlines()
        complete = [line for line in lines if line.startswith("{") and line.endswith("}")]
        return [json.loads(line) for line in complete], errors.read(), timed_out


def last_error_line(errors: str) -> str:
    """Returns the last line that names an error, of the standard error of a process that died."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    if not lines:
        return "exited without output"
    named = [line for line in lines if "Error" in line]
    return (named or lines)[-1][:160]


def derived_figures(row: dict, shape: Shape, peak_flops: float | None) -> dict:
    """Returns what follows from the milliseconds of a step. peak_flops: of the GPU, FLOP/s; None: unknown."""
    tokens_per_s = shape.tokens / row["ms"] * 1e3
    flops = flops_per_token(config.ModelConfig(**shape.model_keys()), shape.seq)
    flops_per_s = flops * shape.tokens / row["ms"] * 1e3
    mfu = flops_per_s / peak_flops if peak_flops else None
    return {"tokens/s": tokens_per_s, "TFLOP/s": flops_per_s / 1e12, "MFU": mfu}


# ---- the table ---------------------------------------------------------------------------------------------


def table_cells(row: dict, best: Mapping[str, float]) -> dict[str, str]:
    """Returns a row of the table. best: {model: the tokens/s of ours in bf16}."""
    cells = {"model": row["model"], "contestant": row["contestant"]}
    if row["model"] == KERNELS:
        num_measured = len(row.get("kernels", []))
        problem = f", then: {row['problem']}" if row["problem"] else ""
        return cells | {"tokens/s": f"{num_measured} measured, below{problem}"}
    if row["problem"]:
        return cells | {"tokens/s": f"not run: {row['problem']}"}

    ratio = best.get(row["model"], 0.0) / row["tokens/s"]
    return cells | {
        "tokens/s": f"{row['tokens/s']:,.0f}",
        "step ms": f"{row['ms']:.1f}",
        "spread": f"{row['spread']:.1%}",
        "TFLOP/s": f"{row['TFLOP/s']:.3g}",
        "MFU": "n/a" if row["MFU"] is None else f"{row['MFU']:.1%}",
        "peak GiB": "n/a" if row["gib"] is None else f"{row['gib']:.1f}",
        "ours is": f"{ratio:.2f} x" if ratio else "",
        "loss": f"{row['loss']:.3f}",
        "params": f"{row['parameters'] / 1e9:.2f}B",
        "first step s": f"{row['first s']:.0f}",
    }


def progress_line(row: dict) -> str:
    """Returns a row as one line, for whoever watches the run."""
    parts = []
    for column, cell in table_cells(row, {}).items():
        if column in ("model", "contestant"):
            parts.append(f"{cell:22}")
        elif cell:
            parts.append(f"{column} {cell}")
    return "  ".join(parts)


def markdown_table(rows: list[dict[str, str]]) -> list[str]:
    """Returns the lines of a Markdown table with every column that a row has; none without rows."""
    if not rows:
        return []
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [markdown_line(columns), "|" + "---|" * len(columns)]
    for row in rows:
        lines.append(markdown_line([row.get(column, "") for column in columns]))
    return lines


def markdown_line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def make_table(rows: list[dict], machine: Mapping[str, str]) -> str:
    """Returns the Markdown text: the date and the machine, a row for each result, each kernel, the shapes."""
    lines = [title_line(rows, machine), ""]

    # the results, sorted by model in the order of the plan
    best: dict[str, float] = {}
    for row in rows:
        if row["ms"] and row["contestant"] in ("ours", "ours+graphs"):
            best[row["model"]] = max(best.get(row["model"], 0.0), row["tokens/s"])
    models = list(dict.fromkeys(row["model"] for row in rows))
    results = sorted(rows, key=lambda row: models.index(row["model"]))
    lines += markdown_table([table_cells(row, best) for row in results])

    # the kernels, a table for each unit
    kernels = [kernel for row in rows for kernel in row.get("kernels", ())]
    columns = dict.fromkeys(column for kernel in kernels for column in kernel)
    units = [column for column in columns if column not in ("kernel", "beside it")]
    for unit in units:
        lines += ["", *markdown_table([kernel for kernel in kernels if unit in kernel])]

    # the shapes
    lines.append("")
    shapes = {row["model"]: row["shape"] for row in rows if row.get("shape")}
    for model, shape in shapes.items():
        sizes = ", ".join(f"{key} {value}" for key, value in shape.items() if value)
        lines.append(f"- {model}: {sizes}")
    lines.append("")
    return "\n".join(lines)


def title_line(rows: list[dict], machine: Mapping[str, str]) -> str:
    """Returns the date, the machine and the versions of the packages."""
    versions: dict[str, str] = {}
    for row in rows:
        versions |= row.get("versions") or {}
    parts = [time.strftime("%Y-%m-%d"), machine["card"]]
    if machine["driver"]:
        parts.append(f"driver {machine['driver']}")
    parts += [f"{name} {version}" for name, version in versions.items()]
    return ", ".join(parts) + "."
