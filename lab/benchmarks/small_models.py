"""Does a small model train the same with and without our kernels? Five steps of train.py, in one process.

train.py's own command runs three times: with the kernels, with the torch references instead, and with the
references in fp32. It compares the loss and the gradient norm of each step, as in metrics.jsonl, and the
gradient of each parameter in the first and the last step (jointly over all experts of a layer, since rounding
makes a router send some tokens elsewhere).

A bound is the larger of two:

    4 * the distance of the reference in bf16 (or fp8) from fp32: the effect of the dtype on this model. Two
        runs that round differently are twice as far from each other as one is from fp32, and a kernel may
        round twice as often as its reference. For losses and norms, 8 * the largest distance over the steps:
        two numbers, unlike two tensors, can be close by chance.
    u * the value: bf16's unit roundoff, a single rounding of the result
"""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import train
from build import with_vocab
from config import ConfigError
from config.reading import resolve
from data.loader import open_loader
from kernels import triton_
from lab.benchmarks.jobs import Report
from parallel.sharding.views import get_boxes
from runtime.run import TrainingRun

STEPS = 5
TINY_STEPS = 2
SLACK = 4
SLACK_OF_NUMBERS = 8
BF16_ROUNDOFF = torch.finfo(torch.bfloat16).eps / 2
TINY_NORM = 1e-30  # of a zero gradient: an expert without tokens
COMPARED = ("loss", "grad_norm")

COMMON = """--log.every 1 --eval.batches 1 --eval.sample 0 --checkpoint.resume none --optim.warmup 1"""
LARGE = """--model.layers 4 --model.hidden 1024 --model.vocab 8192 --train.seq_len 1024 --train.micro_batch 2
    --train.global_batch 4"""
TINY = """--model.layers 2 --model.hidden 64 --train.seq_len 16 --train.micro_batch 1 --train.global_batch 1
    --train.fp8_keep 0 --train.fp8_block 32"""

LLAMA = "--model.mixer.heads 8 --model.mixer.kv_heads 4 --model.mlp.width 2816"


@dataclass(frozen=True)
class SmallModel:
    """A recipe and its changes. numerics: keys of the dtype, which the fp32 run omits."""

    recipe: str = "llama3-tiny"
    large: str = LLAMA
    tiny: str = "--model.mixer.heads 2 --model.mixer.kv_heads 1 --model.mlp.width 64"
    args: str = ""
    numerics: str = "--train.dtype bf16"


def in_fp8(recipe: str) -> str:
    return f"--train.dtype fp8 --train.fp8 {recipe}"


QWEN = "--model.mixer.heads 8 --model.mixer.kv_heads 4 --model.mixer.head_dim 128 --model.mlp.width 2816"
TINY_QWEN = "--model.mixer.heads 2 --model.mixer.kv_heads 1 --model.mixer.head_dim 16 --model.mlp.width 64"
LATENT = """--model.mixer.heads 8 --model.blocks.dense.mlp.width 2816 --model.mixer.kv_rank 256
    --model.mixer.q_rank 384 --model.mixer.nope_dim 128 --model.mixer.rope_dim 64 --model.mixer.v_dim 128
    --model.mlp.width 512"""
TINY_LATENT = """--model.mixer.heads 2 --model.blocks.dense.mlp.width 48 --model.mixer.kv_rank 16
    --model.mixer.q_rank 24 --model.mixer.nope_dim 16 --model.mixer.rope_dim 16 --model.mixer.v_dim 16
    --model.mlp.width 16 --model.mlp.experts 4 --model.mlp.top_k 4
    --model.mlp.router.groups 1 --model.mlp.router.group_top_k 1"""
MIXTURE = SmallModel(
    "qwen3-moe-tiny",
    QWEN.replace("2816", "512"),
    TINY_QWEN.replace("width 64", "width 16") + " --model.mlp.experts 4 --model.mlp.top_k 4",
)

MODELS = {
    "dense": SmallModel(),
    "documents": SmallModel(
        large=LLAMA + " --train.seq_len 2048 --train.micro_batch 1",
        args="--data.doc_mask true",
    ),
    "moe": MIXTURE,
    "mla": SmallModel("deepseek-v3-tiny", LATENT, TINY_LATENT),
    "fp8-tensorwise": SmallModel(numerics=in_fp8("tensorwise")),
    "fp8-rowwise": SmallModel(numerics=in_fp8("rowwise")),
    "fp8-blockwise": SmallModel(
        tiny="--model.mixer.heads 2 --model.mixer.kv_heads 1 --model.mlp.width 64 --train.seq_len 32",
        numerics=in_fp8("blockwise"),
    ),
    "graphs": SmallModel(args="--train.cuda_graphs true"),
    "qk-norm": SmallModel("qwen3-tiny", QWEN, TINY_QWEN),
    "window": SmallModel("mistral-tiny", args="--model.mixer.window 200"),
    "tied": SmallModel("llama3.2-tiny", QWEN, TINY_QWEN),
    "gpt2": SmallModel(
        "gpt2-tiny",
        "--model.mixer.heads 8 --model.mlp.width 4096 --model.context 1024",
        "--model.mixer.heads 2 --model.mlp.width 64",
    ),
    "recompute": SmallModel(args="--parallel.recompute full"),
    "offload": SmallModel(args="--parallel.offload both"),
    "bf16-states": SmallModel(args="--optim.states bf16"),
    "muon": SmallModel(args="--optim.name muon"),
    "moe-fp8": SmallModel(MIXTURE.recipe, MIXTURE.large, MIXTURE.tiny, numerics=in_fp8("rowwise")),
    "deterministic": SmallModel(args="--train.deterministic true"),
}


def command_line(model: SmallModel, device: str, is_tiny: bool, *, in_fp32: bool) -> list[str]:
    """Return the arguments of train.py. The last of repeated keys counts."""
    sizes = f"{TINY} {model.tiny}" if is_tiny else f"{LARGE} {model.large}"
    steps = TINY_STEPS if is_tiny else STEPS
    numerics = "--train.dtype fp32" if in_fp32 else model.numerics
    words = shlex.split(f"{COMMON} {sizes} {model.args} {numerics}")
    keys = dict(zip(words[::2], words[1::2], strict=True))
    if "fp8 " not in numerics:
        keys.pop("--train.fp8_keep", None)
    if "blockwise" not in numerics:
        keys.pop("--train.fp8_block", None)
    keys |= {"--train.device": device, "--train.steps": str(steps)}
    return [model.recipe, *(word for pair in keys.items() for word in pair)]


# ---- one run -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainedSteps:
    """figures: {loss or grad_norm: its value in each step}. gradients: {parameter and step: its gradient}."""

    figures: dict[str, list[float]]
    gradients: dict[str, Tensor]


class GradientRecorder:
    """Observes the fault points (durable/faults.py) and keeps gradients."""

    def __init__(self, steps: tuple[int, ...]) -> None:
        self.steps = steps
        self.run: TrainingRun | None = None
        self.parts: dict[str, list[Tensor]] = {}

    def observe(self, point: str, step: int = 0, **seen: Any) -> None:
        """Store the run when it is built, and the gradients of `steps` once they are complete."""
        if point == "run.built":
            self.run = seen["run"]
        if point == "step.backward" and step in self.steps and self.run is not None:
            for bucket in self.run.buckets:
                for box, part in get_boxes(bucket, bucket.grads.local):
                    name = re.sub(r"experts\.\d+", "experts", box.key)
                    parts = self.parts.setdefault(f"gradient of {name} in step {step}", [])
                    parts.append(part.float().flatten().cpu().clone())

    def gradients(self) -> dict[str, Tensor]:
        return {name: torch.cat(parts) for name, parts in self.parts.items()}


def steps_of(argv: list[str], folder: Path, name: str, num_steps: int) -> TrainedSteps:
    """Train, and return the values to compare."""
    recorder = GradientRecorder((1, num_steps))
    with mock.patch.object(train, "fault_hook", lambda env: recorder.observe):
        code = train.main([*argv, "--log.dir", str(folder), "--log.name", name])
    assert code == 0, f"train.py ended with exit code {code}"

    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    return TrainedSteps({key: [step[key] for step in steps] for key in COMPARED}, recorder.gradients())


# ---- the comparison ----------------------------------------------------------------------------------------


def compare(kernels: TrainedSteps, reference: TrainedSteps, wide: TrainedSteps) -> dict:
    """Return a row with the value that is nearest to its bound, or above it, and the figures of both runs."""
    rows = [*figure_rows(kernels, reference, wide), *gradient_rows(kernels, reference, wide)]
    worst = max(rows, key=lambda row: row["error"] / row["bound"])
    figures = {"kernels": kernels.figures, "reference": reference.figures}
    row = {"state": "ok" if worst["error"] <= worst["bound"] else "wrong", **worst, **figures}
    same = all(torch.equal(kernels.gradients[key], reference.gradients[key]) for key in reference.gradients)
    if same and kernels.figures == reference.figures:
        row |= {"state": "wrong", "problem": "the same bits as the reference: the kernels did not run"}
    return row


def figure_rows(kernels: TrainedSteps, reference: TrainedSteps, wide: TrainedSteps) -> Iterator[dict]:
    for key in COMPARED:
        ours, theirs = kernels.figures[key], reference.figures[key]
        dtype_distance = max(map(distance, theirs, wide.figures[key]))
        for step, (got, want) in enumerate(zip(ours, theirs, strict=True), 1):
            bound = max(SLACK_OF_NUMBERS * dtype_distance, BF16_ROUNDOFF * abs(want))
            name = f"{key.replace('_', ' ')} of step {step}"
            yield {"result": name, "error": distance(got, want) / abs(want), "bound": bound / abs(want)}


def gradient_rows(kernels: TrainedSteps, reference: TrainedSteps, wide: TrainedSteps) -> Iterator[dict]:
    for name, theirs in reference.gradients.items():
        ours = kernels.gradients[name]
        size = max(float(theirs.norm()), TINY_NORM)
        dtype_distance = float((theirs - wide.gradients[name]).norm()) / size
        bound = max(SLACK * dtype_distance, BF16_ROUNDOFF)
        yield {"result": name, "error": finite_distance(ours, theirs) / size, "bound": bound}


def distance(a: float, b: float) -> float:
    """Return |a - b|, or infinity if either is NaN."""
    difference = abs(a - b)
    return float("inf") if difference != difference else difference


def finite_distance(a: Tensor, b: Tensor) -> float:
    """Return ||a - b||, or infinity if it is NaN."""
    return distance(float((a - b).norm()), 0.0)


def check_model(name: str, device: str, is_tiny: bool, folder: Path) -> dict:
    """Train a model three times and return its row. Raises ConfigError if this machine rejects it."""
    num_steps = TINY_STEPS if is_tiny else STEPS
    as_users_do = command_line(MODELS[name], device, is_tiny, in_fp32=False)
    in_fp32 = command_line(MODELS[name], device, is_tiny, in_fp32=True)
    devices = triton_.DEVICES
    notes: list[str] = []
    triton_.print_once = notes.append
    with_kernels = steps_of(as_users_do, folder, f"{name}-kernels", num_steps)
    fallbacks = [note for note in notes if "instead" in note]

    triton_.DEVICES = ()
    try:
        reference = steps_of(as_users_do, folder, f"{name}-reference", num_steps)
        wide = steps_of(in_fp32, folder, f"{name}-fp32", num_steps)
    finally:
        triton_.DEVICES = devices
    row = compare(with_kernels, reference, wide)
    return row | ({"note": fallbacks[0]} if fallbacks else {})


def prepare(device: str) -> None:
    """Make the corpus that all models read, so that concurrent jobs need not make it."""
    cfg = resolve("llama3-tiny", None, ["--train.device", device])
    data = open_loader(cfg, "train", 0, 1)
    with_vocab(cfg, data.required_tokenizer.vocab)
    data.close()


def report_model(
    report: Report, name: str, device: str, is_tiny: bool, folder: Path
) -> None:
    """Report the model's row, also if it is wrong, or absent because this machine rejects it."""
    report(starting=name)
    try:
        row = check_model(name, device, is_tiny, folder)
    except ConfigError as refusal:
        is_for_others = "needs a GPU" in str(refusal) or "has no fp8" in str(refusal)
        row = {"state": "absent" if is_for_others else "wrong", "problem": f"refused: {refusal}"}
    report(row=name, **row)


def report_corpus(report: Report, done: frozenset[str], *, device: str) -> None:
    report(starting="corpus")
    prepare(device)
    report(row="corpus", state="ok")
