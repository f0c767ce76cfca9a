"""Does a small model train with the kernels as it does without them? Five steps of train.py, in one process.

    python -m benchmarks.smoke_models NAME --device cuda --folder FOLDER      benchmarks/smoke.py runs it

train.py's own command runs three times: with the kernels, with the torch references in their place, and with
the references in fp32. Compared are the loss and the gradient norm of each step, as metrics.jsonl has them.

The bound of a step is the larger of two:

    4 * the largest distance of the reference in bf16 (or fp8) from fp32, over the steps: what the dtype does
        to this model. Two runs that round apart are twice as far from each other as one is from fp32, and the
        largest of five distances is known to a factor of two.
    u * the value: bf16's unit roundoff, a single rounding of the result
"""

import argparse
import json
import shlex
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import config
import train
from build import with_vocab
from config import ConfigError
from data.loader import open_loader
from kernels import triton_

STEPS = 5
TINY_STEPS = 2
SLACK = 4
BF16_ROUNDOFF = torch.finfo(torch.bfloat16).eps / 2
COMPARED = ("loss", "grad_norm")

COMMON = """--log.every 1 --eval.batches 1 --eval.sample 0 --checkpoint.resume none --optim.warmup 1"""
LARGE = """--model.layers 4 --model.hidden 1024 --model.vocab 32000 --train.seq_len 1024 --train.micro_batch 2
    --train.global_batch 4"""
TINY = """--model.layers 2 --model.hidden 32 --train.seq_len 16 --train.micro_batch 1 --train.global_batch 1
    --train.fp8_keep 0"""


@dataclass(frozen=True)
class SmallModel:
    """recipe, and what differs from it. numerics: keys of the dtype, which the run in fp32 does not have."""

    recipe: str = "llama3-tiny"
    large: str = "--model.heads 8 --model.kv_heads 4 --model.ffn 2816"
    tiny: str = "--model.heads 2 --model.kv_heads 1 --model.ffn 48"
    args: str = ""
    numerics: str = "--train.dtype bf16"


def in_fp8(recipe: str) -> str:
    return f"--train.dtype fp8 --train.fp8 {recipe}"


QWEN = "--model.heads 8 --model.kv_heads 4 --model.head_dim 128 --model.ffn 2816"
TINY_QWEN = "--model.heads 2 --model.kv_heads 1 --model.head_dim 16 --model.ffn 48"
LATENT = """--model.heads 8 --model.ffn 2816 --model.kv_rank 256 --model.q_rank 384 --model.nope_dim 128
    --model.rope_dim 64 --model.v_dim 128 --model.moe_ffn 512"""
TINY_LATENT = """--model.heads 2 --model.ffn 48 --model.kv_rank 16 --model.q_rank 24 --model.nope_dim 16
    --model.rope_dim 16 --model.v_dim 16 --model.moe_ffn 16"""
MIXTURE = SmallModel(
    "qwen3-moe-tiny",
    QWEN + " --model.moe_ffn 512",
    TINY_QWEN + " --model.moe_ffn 16 --model.experts 4 --model.top_k 2",
)

MODELS = {
    "dense": SmallModel(),
    "documents": SmallModel(
        large="--model.heads 8 --model.kv_heads 4 --model.ffn 2816 --train.seq_len 4096",
        args="--data.doc_mask true",
    ),
    "moe": MIXTURE,
    "mla": SmallModel("deepseek-v3-tiny", LATENT, TINY_LATENT),
    "fp8-tensorwise": SmallModel(numerics=in_fp8("tensorwise")),
    "fp8-rowwise": SmallModel(numerics=in_fp8("rowwise")),
    "fp8-blockwise": SmallModel(numerics=in_fp8("blockwise")),
    "graphs": SmallModel(args="--train.cuda_graphs true"),
    "qk-norm": SmallModel("qwen3-tiny", QWEN, TINY_QWEN),
    "window": SmallModel("mistral-tiny", args="--model.window 200"),
    "tied": SmallModel("llama3.2-tiny", QWEN, TINY_QWEN),
    "gpt2": SmallModel(
        "gpt2-tiny", "--model.heads 8 --model.ffn 4096 --model.context 1024", "--model.heads 2 --model.ffn 64"
    ),
    "recompute": SmallModel(args="--parallel.recompute full"),
    "offload": SmallModel(args="--parallel.offload both"),
    "bf16-states": SmallModel(args="--optim.states bf16"),
    "muon": SmallModel(args="--optim.name muon"),
    "moe-fp8": SmallModel(MIXTURE.recipe, MIXTURE.large, MIXTURE.tiny, numerics=in_fp8("rowwise")),
    "deterministic": SmallModel(args="--train.deterministic true"),
}


def command_line(model: SmallModel, device: str, is_tiny: bool, *, in_fp32: bool) -> list[str]:
    """The arguments of train.py. Of a key that is there twice, the last counts."""
    sizes = f"{TINY} {model.tiny}" if is_tiny else f"{LARGE} {model.large}"
    steps = TINY_STEPS if is_tiny else STEPS
    numerics = "--train.dtype fp32" if in_fp32 else model.numerics
    words = shlex.split(f"{COMMON} {sizes} {model.args} {numerics}")
    keys = dict(zip(words[::2], words[1::2], strict=True))
    if "fp8 " not in numerics:
        keys.pop("--train.fp8_keep", None)
    keys |= {"--train.device": device, "--train.steps": str(steps)}
    return [model.recipe, *(word for pair in keys.items() for word in pair)]


def steps_of(argv: list[str], folder: Path, name: str) -> dict[str, list[float]]:
    """Trains, and returns what is compared of each step."""
    code = train.main([*argv, "--log.dir", str(folder), "--log.name", name])
    assert code == 0, f"train.py ended with exit code {code}"
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    return {key: [step[key] for step in steps] for key in COMPARED}


def compare(
    kernels: dict[str, list[float]], reference: dict[str, list[float]], wide: dict[str, list[float]]
) -> dict:
    """A row: the value of a step that is nearest to its bound, or above it; all distances with it."""
    rows: list[dict] = []
    for key in COMPARED:
        dtype_distance = max(map(distance, reference[key], wide[key]))
        for step, (got, want) in enumerate(zip(kernels[key], reference[key], strict=True), 1):
            bound = max(SLACK * dtype_distance, BF16_ROUNDOFF * abs(want))
            error = distance(got, want)
            name = f"{key.replace('_', ' ')} of step {step}"
            rows.append({"result": name, "error": error / abs(want), "bound": bound / abs(want)})
    worst = max(rows, key=lambda row: row["error"] / row["bound"])
    row = {"ok": worst["error"] <= worst["bound"], **worst, "kernels": kernels, "reference": reference}
    if kernels == reference:
        row |= {"ok": False, "problem": "the same bits as the reference: the kernels did not run"}
    return row


def distance(a: float, b: float) -> float:
    """|a - b|; infinite where one of them is no number."""
    difference = abs(a - b)
    return float("inf") if difference != difference else difference


def check_model(name: str, device: str, is_tiny: bool, folder: Path) -> dict:
    """Trains a model three times -> its row. Raises ConfigError where this machine does not take it."""
    model = MODELS[name]
    devices = triton_.DEVICES
    notes: list[str] = []
    triton_.print_once = notes.append
    with_kernels = steps_of(command_line(model, device, is_tiny, in_fp32=False), folder, f"{name}-kernels")
    fallbacks = [note for note in notes if "instead" in note]

    triton_.DEVICES = ()
    try:
        reference = steps_of(command_line(model, device, is_tiny, in_fp32=False), folder, f"{name}-reference")
        wide = steps_of(command_line(model, device, is_tiny, in_fp32=True), folder, f"{name}-fp32")
    finally:
        triton_.DEVICES = devices
    row = compare(with_kernels, reference, wide)
    return row | ({"note": fallbacks[0]} if fallbacks else {})


def prepare(device: str) -> None:
    """Makes the corpus that all models read, so that they need not make it beside each other."""
    cfg = config.resolve("llama3-tiny", None, ["--train.device", device])
    data = open_loader(cfg, "train", 0, 1)
    with_vocab(cfg, data.required_tokenizer.vocab)
    data.close()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.smoke_models", description=__doc__)
    parser.add_argument("name", choices=("prepare", *MODELS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("runs/smoke"))
    parser.add_argument("--share", type=float, default=1.0, help="of the GPU's memory that it may take")
    args = parser.parse_args(argv)

    if args.name == "prepare":
        prepare(args.device)
        return 0
    if args.device == "cuda":
        torch.cuda.set_per_process_memory_fraction(args.share)
    print(json.dumps({"checking": args.name}), flush=True)
    try:
        row = check_model(args.name, args.device, args.tiny, args.folder)
    except ConfigError as refusal:
        is_for_gpus = args.device == "cpu" and "needs a GPU" in str(refusal)
        row = {"ok": None if is_for_gpus else False, "problem": f"refused: {refusal}"}
    except Exception as error:
        traceback.print_exc()
        row = {"ok": False, "problem": f"{type(error).__name__}: {error}"[:160]}
    print(json.dumps({"row": args.name, **row}), flush=True)
    print(json.dumps({"complete": True}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
