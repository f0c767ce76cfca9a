"""Training steps of large models on one GPU, ours beside the peers, in one run that ends when it was told to.

    python -m scripts.bench step --device cuda --minutes 9.5 --site SITE --out step.jsonl --table step.md
    python -m scripts.bench step --device cpu --tiny --minutes 3        a rehearsal of it: the same plan, tiny

Each contestant (scripts/bench/contestant.py) has a process of its own in a time box: one that crashes or hangs costs its box, and
its row says why. Results are appended to --out as they come, so a run that is killed keeps what it has. PLAN is in the order of
worth, the kernels (scripts/bench/gpu.py) among its entries; what does not fit into the time that is left is said so. Ours runs
the dense model twice: the difference is the noise.

The run of ten minutes, on a machine without a network (Python 3.12, torch 2.11, one H200). Beforehand, where there is a network, the
peers' wheels go to peers/wheels of the checkout (git ignores peers/), 45 MiB in all; a prebuilt extension of Transformer Engine to peers/:

    pip download --no-deps --only-binary=:all: --python-version 3.12 -d peers/wheels megatron-core==0.19.2 transformer-engine==2.20.2 \
        transformer-engine-cu13==2.20.2 torchtitan==0.2.2 liger-kernel==0.8.5 torchdata torchao tyro docstring_parser datasets dill \
        multiprocess pydantic pydantic-core annotated-types typing-inspection nvdlfw-inspect

Then, there (SITE=/tmp/site; results under $OUT, or wherever they are kept), first what breaks, then the run itself:

    pip install -q --no-index --no-deps --no-compile --target $SITE peers/wheels/*.whl; cp peers/*.so $SITE/
    timeout 240 python -m pytest -q -x tests/runtime/test_graphs.py tests/kernels
    python -m scripts.bench step --device cuda --minutes 3 --only dense --peers ours,megatron-core --site $SITE
    python -m scripts.bench step --device cuda --minutes 9.5 --site $SITE --out $OUT/step.jsonl --table $OUT/step.md

    MFU: model FLOPs (plan/count.py: causal attention once, a mixture's active experts, no padding) over 989 TFLOP/s dense bf16.
"""
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

import config
from build import plan_pipeline
from model.split import layers_of
from parallel.layout import Layout
from plan.count import flops_per_token
from plan.memory import peak_activation_bytes, state_bytes
from plan.parts import Job
from runtime.setup import peak_of
from scripts.bench.shape import Shape

HELP = "cuda: the large models on one GPU (scripts/bench/card.py says how)"
RESERVE = 8.0  # seconds for the table, and for what a killed process leaves
ROOM = 0.88  # of the card's memory that a model may plan for: libraries' workspaces and the allocator's holes are the rest
GPU = {"warm": 4, "steps": 10}
CPU = {"warm": 1, "steps": 2}
NOTHING = {"ms": None, "problem": None}
KERNELS = "kernels"  # of PLAN's models the one that is none: scripts/bench/gpu.py, whose rows are kept as they come, too


@dataclass(frozen=True)
class Entry:
    """needs: seconds without which it is not begun; box: at most so many."""
    model: str
    contestant: str
    needs: float = 35
    box: float = 75


PLAN = (
    Entry("dense", "ours", 30, 90), Entry("dense", "megatron-core"), Entry("dense", "torchtitan+compile", 40, 90), Entry("dense", "ours+graphs"),
    Entry("moe", "ours"), Entry("dense", "transformers+liger"), Entry("8b", "ours"), Entry("dense-128k", "ours"),
    Entry("dense", "nanogpt+compile", 40), Entry("dense", "ours+fp8"), Entry(KERNELS, "ours", 60, 150), Entry("moe", "megatron-core"),
    Entry("dense-128k", "torchtitan+compile", 40, 90), Entry("dense", "ours"), Entry("8b", "torchtitan+compile", 40, 90),
    Entry("moe", "torchtitan+compile", 40), Entry("8b", "ours+fp8"), Entry("moe", "ours+fp8"),
    Entry("dense-128k", "transformers+liger"), Entry("moe", "transformers"), Entry("dense", "megatron-core+local"), Entry("8b", "megatron-core"))


def main(args) -> int:
    begun, results, rows = time.monotonic(), Path(args.out), []
    results.parent.mkdir(parents=True, exist_ok=True)
    where, bytes_ = machine(args.device)
    shapes = Shape.card(args.tiny)
    shapes["8b"] = cut(shapes["8b"], bytes_)
    wanted, peers = args.only.split(",") if args.only else [*shapes, KERNELS], args.peers.split(",") if args.peers else None
    if args.device != "cuda":
        wanted = [m for m in wanted if m != KERNELS]  # a rehearsal of those is tests/scripts/test_bench_gpu.py
    todo = [e for e in PLAN if e.model in wanted and (peers is None or e.contestant in peers or e.contestant.split("+")[0] in peers)]
    share = 60 * args.minutes - RESERVE
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what runs is killed, and what is there gets its table
    try:
        while todo:
            entry, *todo = todo
            left = share - (time.monotonic() - begun)
            row = {"model": entry.model, "contestant": entry.contestant, "date": time.strftime("%Y-%m-%d %H:%M"), **where}
            shape = shapes.get(entry.model)
            if left < entry.needs and not args.tiny or left < 1:
                row |= NOTHING | {"problem": f"no time left ({max(left, 0):.0f} s)"}
            else:
                row |= run(entry, shape, args, min(entry.box, left))
                if row["problem"] == "out of memory" and entry.model == "8b" and entry.contestant == "ours" and shape.layers > 4:
                    shapes["8b"] = replace(shape, layers=shape.layers - 3)
                    todo = [entry, *todo]
            if row["ms"]:
                row |= judge(row, shape, peak_of(where["card"], "bf16"))
            rows.append(row)
            with results.open("a") as f:
                f.write(json.dumps(row) + "\n")
            print(line(row), flush=True)
    finally:
        signal.signal(signal.SIGTERM, before)
        text = table(rows, where)
        print("\n" + text)
        if args.table:
            Path(args.table).write_text(text)
    return 0


def machine(device: str) -> tuple[dict, int]:
    """{card, driver, torch}, and bytes of its memory; asked without a CUDA context, which would take some of it."""
    if device == "cpu":
        return {"card": f"CPU ({platform.machine()})", "driver": "", "torch": torch.__version__}, 2**31
    said = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader,nounits"],
                          capture_output=True, text=True, check=True).stdout.splitlines()[0]
    name, driver, mib = (part.strip() for part in said.split(","))
    return {"card": name, "driver": driver, "torch": torch.__version__}, int(mib) * 2**20


def cut(shape: Shape, room: int) -> Shape:
    """The shape with as many of its layers as the closed forms of plan/memory.py let fit."""
    for layers in range(shape.layers, 1, -1):
        smaller = replace(shape, layers=layers)
        cfg = config.build(config.Config, {"model": smaller.model(), "train": {
            "seq_len": shape.seq, "micro_batch": shape.batch, "global_batch": shape.batch, "dtype": "bf16", "steps": 1}})
        schedule = plan_pipeline(cfg, 1)
        job = Job(cfg, Layout(1), 0, schedule, layers_of(cfg, 1))
        if sum(state_bytes(job).values()) + peak_activation_bytes(job, flash=True) <= ROOM * room:
            return smaller
    return smaller


def run(entry: Entry, shape: Shape | None, args, box: float) -> dict:
    """One contestant in a session of its own, which is killed whole at the end -> what it measured, or {"problem": why not}."""
    if shape is None:
        command = ["scripts.bench", "kernels", "--device", args.device, "--json"]
    else:
        settings = {"shape": asdict(shape), "device": args.device, **(GPU if args.device == "cuda" else CPU)}
        command = ["scripts.bench.contestant", entry.contestant, json.dumps(settings)]
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    if args.site and (shape is None or not entry.contestant.startswith("ours")):
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (os.path.abspath(args.site), env.get("PYTHONPATH"))))
    if "graphs" in entry.contestant:
        del env["PYTORCH_CUDA_ALLOC_CONF"]  # a recording's memory is a pool of its own
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as complaints:
        begun, late = time.monotonic(), False
        process = subprocess.Popen([sys.executable, "-m", *command], stdout=out, stderr=complaints, stdin=subprocess.DEVNULL,
                                   env=env, start_new_session=True)
        try:
            process.wait(box)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # compilers that it started, too
            process.wait()
        out.seek(0), complaints.seek(0)
        said = [json.loads(x) for x in out.read().splitlines() if x.startswith("{") and x.endswith("}")]  # the last may be half a line
        last = said[-1] if said else {}
        took = {"took s": round(time.monotonic() - begun, 1)}
        if "done" in last:
            first = next(x["s"] for x in said if x.get("at") == "the first step")
            return {**last["done"], "first s": first, "problem": None, **took}
        at = last.get("at") or last.get("kernel") or "starting"
        why = last.get("error") or (f"its {box:.0f} s ended after {at}" if late else reason(complaints.read()))
        if shape is None:
            return NOTHING | {"problem": None if "machine" in last else why, "kernels": [x for x in said if "kernel" in x], **took}
        return NOTHING | {"problem": why, **took}


def reason(complaints: str) -> str:
    """The last line that names an error, of what a process that died has said."""
    lines = [x.strip() for x in complaints.splitlines() if x.strip()]
    return next((x for x in reversed(lines) if "Error" in x), lines[-1] if lines else "died without a word")[:160]


def judge(row: dict, shape: Shape, peak: float | None) -> dict:
    """What follows from the milliseconds."""
    flops = flops_per_token(config.Model(**shape.model()), shape.seq) * shape.tokens / row["ms"] * 1e3
    return {"tokens/s": shape.tokens / row["ms"] * 1e3, "TFLOP/s": flops / 1e12, "MFU": flops / peak if peak else None}


def cells(row: dict, best: dict[str, float]) -> dict[str, str]:
    """A row of the table. best: of each model, the tokens/s of ours in bf16."""
    if row["model"] == KERNELS:
        problem = f", then: {row['problem']}" if row["problem"] else ""
        return {"model": KERNELS, "contestant": row["contestant"], "tokens/s": f"{len(row.get('kernels', []))} measured, below{problem}"}
    if row["problem"]:
        return {"model": row["model"], "contestant": row["contestant"], "tokens/s": f"not run: {row['problem']}"}
    ratio = best.get(row["model"], 0.0) / row["tokens/s"]
    return {"model": row["model"], "contestant": row["contestant"], "tokens/s": f"{row['tokens/s']:,.0f}", "step ms": f"{row['ms']:.1f}",
            "spread": f"{row['spread']:.1%}", "TFLOP/s": f"{row['TFLOP/s']:.3g}", "MFU": "n/a" if row["MFU"] is None else f"{row['MFU']:.1%}",
            "peak GiB": "n/a" if row["gib"] is None else f"{row['gib']:.1f}", "ours is": f"{ratio:.2f} x" if ratio else "",
            "loss": f"{row['loss']:.3f}", "params": f"{row['parameters'] / 1e9:.2f}B", "first step s": f"{row['first s']:.0f}"}


def line(row: dict) -> str:
    """For whoever watches."""
    return "  ".join(f"{k} {v}" if k not in ("model", "contestant") else f"{v:22}" for k, v in cells(row, {}).items() if v)


def markdown(rows: list[dict[str, str]]) -> list[str]:
    columns = list(dict.fromkeys(k for row in rows for k in row))
    head, *rest = ["| " + " | ".join(row.get(k, "") for k in columns) + " |" for row in [dict(zip(columns, columns)), *rows]]
    return [head, "|" + "---|" * len(columns), *rest] if rows else []


def table(rows: list[dict], where: dict) -> str:
    """Markdown: when and on what, a row each, each kernel, and the shapes."""
    best: dict[str, float] = {}
    for r in rows:
        if r["ms"] and r["contestant"] in ("ours", "ours+graphs"):
            best[r["model"]] = max(best.get(r["model"], 0.0), r["tokens/s"])
    known = {k: v for r in rows for k, v in (r.get("versions") or {}).items()}
    text = [f"{time.strftime('%Y-%m-%d')}, {where['card']}" + (f", driver {where['driver']}" if where["driver"] else "")
            + "".join(f", {k} {v}" for k, v in known.items()) + ".", ""]
    order = {model: i for i, model in enumerate(dict.fromkeys(r["model"] for r in rows))}
    text += markdown([cells(r, best) for r in sorted(rows, key=lambda r: order[r["model"]])])
    measured = [k for r in rows for k in r.get("kernels", ())]
    for unit in dict.fromkeys(k for row in measured for k in row if k not in ("kernel", "beside it")):
        text += ["", *markdown([row for row in measured if unit in row])]
    shapes = {r["model"]: r["shape"] for r in rows if r.get("shape")}
    text += ["", *(f"- {m}: " + ", ".join(f"{k} {v}" for k, v in s.items() if v) for m, s in shapes.items()), ""]
    return "\n".join(text)
