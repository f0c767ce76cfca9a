"""One contestant of the GPU step benchmark: a process that builds a model, warms up, times steps and exits.

    python -m lab.benchmarks.contestant NAME '{"shape": {...}, "device": "cuda", "warm": 4, "steps": 10}'

It reports its phases as JSON lines on the real standard output; the last line has the times. Every contestant
runs forward, a loss with fp32 softmax, backward, clipping to norm 1 and AdamW on the same random tokens, back
to back with no waits between steps. All are in class A: bf16 compute (by autocast, or Megatron-core's mixed
precision), fp32 master weights and moments. SDPA prefers cuDNN's Hopper kernels for all. Written for
torchtitan 0.2, Megatron-core 0.19 with Transformer Engine 2, Liger 0.8.

    ours, +graphs, +fp8,           train.py's own step; with train.cuda_graphs; with train.dtype fp8; with the
    +libraries                     attention libraries of a site folder
    megatron-core, +unfused,       its GPT with Transformer Engine layers, whose weight-gradient GEMMs
    +local                         accumulate in fp32; +unfused: without that; +local: its own layers with
                                   SDPA attention
    torchtitan+compile             blocks and loss compiled, as its trainer does
    transformers, +liger           Llama or Qwen3-MoE (grouped_mm); +liger: with Liger's kernels, including
                                   the fused linear cross entropy
    nanogpt+compile                nanoGPT's block and loop, blocks and loss compiled; its MLP has two
                                   matrices of width 4 d instead of SwiGLU's three

Packed documents (shape.documents: attention is masked at document boundaries, positions restart): ours uses
the documents of the batch, Megatron-core its packed format (thd), torchtitan its variable-length attention.
The others have no competitive support for them.
"""

import contextlib
import importlib.metadata
import itertools
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.benchmarks import others
from lab.benchmarks.megatron import megatron
from lab.benchmarks.others import (
    ADAMW,
    TrainStep,
    cross_entropy,
    document_numbers,
    num_parameters,
    refuse_packed,
    sdpa_backends,
    token_positions,
)
from lab.benchmarks.shape import Shape

PACKAGES = (
    "torch",
    "triton",
    "megatron-core",
    "transformer-engine",
    "torchtitan",
    "transformers",
    "liger-kernel",
)
NUM_BATCHES = 4


# ---- contestants: each function returns (step, number of parameters) ---------------------------------------


def ours(shape: Shape, device: str, flags: set[str]) -> tuple[TrainStep, int]:
    """Use train.py's own step."""
    import config.reading
    from build import build_run
    from parallel.sharding import spec
    from parallel.topology.mesh import Mesh
    from parallel.microbatch import Microbatch
    from train import train_step

    train_keys = {
        "seq_len": shape.seq,
        "micro_batch": shape.batch,
        "global_batch": shape.batch,
        "dtype": "fp8" if "fp8" in flags else "bf16",
        "steps": 1000,
        "device": device,
        "cuda_graphs": "graphs" in flags,
    }
    optim_keys = {"lr": ADAMW["lr"], "warmup": 0, "decay": "constant"}
    data_keys = {"doc_mask": bool(shape.documents)}
    tree = {"model": shape.model_keys(), "optim": optim_keys, "train": train_keys, "data": data_keys}
    cfg = config.reading.build_tree(config.Config, tree)

    # skip train.py's initialization on the host, which would take longer than all steps here
    if device == "cuda":
        spec.draw_normal = lambda box, out, seed, std: out.normal_(0.0, std)
    run = build_run(cfg, Mesh.single(), torch.device(device), None, 1000)
    step_numbers = itertools.count(1)
    sequence_ids = torch.arange(shape.batch, device=device)
    positions = token_positions(shape, device).expand(shape.batch, -1)
    documents = None
    if shape.documents:
        documents = document_numbers(shape, device).to(torch.int32).expand(shape.batch, -1)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        number = next(step_numbers)
        batch = Microbatch(tokens, targets, positions, documents, sequence_ids, number)
        loss = train_step(run, number, [batch]).loss
        return loss

    return step, sum(slot.numel for bucket in run.buckets for slot in bucket.slots)


def autocast_step(
    model: nn.Module, device: str, loss_function: Callable[[Any, Tensor, Tensor], Tensor]
) -> tuple[TrainStep, int]:
    """Return the usual training step: loss_function(model, tokens, targets) in bf16 with fp32 weights."""
    model.to(device).train()  # in fp32; torchtitan's complex RoPE table is unchanged
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with sdpa_backends(device):
            with torch.autocast(device, torch.bfloat16):
                loss = loss_function(model, tokens, targets)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step, num_parameters(model)


def nanogpt(shape: Shape, device: str, flags: set[str]) -> tuple[TrainStep, int]:
    refuse_packed(shape, "nanogpt")
    with torch.device(device):
        model = others.NanoGPT(shape)
    loss = others.compile_blocks(model.blocks) if "compile" in flags else cross_entropy
    return autocast_step(model, device, lambda model, tokens, targets: loss(model(tokens), targets))


def torchtitan(shape: Shape, device: str, flags: set[str]) -> tuple[TrainStep, int]:
    model = others.build_torchtitan(shape, device)
    loss = cross_entropy
    if "compile" in flags:
        loss = others.compile_blocks(model.layers.values(), fullgraph=not shape.experts)
    options = torchtitan_documents(shape, device) if shape.documents else {}
    return autocast_step(
        model, device, lambda model, tokens, targets: loss(model(tokens, **options), targets)
    )


def torchtitan_documents(shape: Shape, device: str) -> dict[str, Any]:
    """Return additional model inputs: document boundaries in the flattened batch, and token positions."""
    from torchtitan.models.attention import VarlenMetadata

    lengths = torch.tensor(shape.documents * shape.batch, device=device)
    ends = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    longest = max(shape.documents)
    positions = token_positions(shape, device).expand(shape.batch, -1)
    return {"attention_masks": VarlenMetadata(ends, ends, longest, longest), "positions": positions}


def transformers(shape: Shape, device: str, flags: set[str]) -> tuple[TrainStep, int]:
    """Build Llama, or Qwen3-MoE for an MoE shape; with the flag liger, use Liger's kernels."""
    refuse_packed(shape, "transformers")
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    if "liger" in flags:
        from liger_kernel import transformers as liger

        if shape.experts:
            liger.apply_liger_kernel_to_qwen3_moe(fused_linear_cross_entropy=True)
        else:
            liger.apply_liger_kernel_to_llama(fused_linear_cross_entropy=True)

    settings = others.transformers_settings(shape)
    with torch.device(device):
        if shape.experts:
            mixture = dict(
                num_experts=shape.experts,
                num_experts_per_tok=shape.top_k,
                moe_intermediate_size=shape.ffn,
                norm_topk_prob=True,
                head_dim=shape.hidden // shape.heads,
                experts_implementation="grouped_mm",
            )
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**mixture, **settings))
        else:
            model = LlamaForCausalLM(LlamaConfig(**settings))

    def liger_loss(model: Any, tokens: Tensor, _: Tensor) -> Tensor:
        # the fused loss shifts the labels itself, so it has one token fewer per sequence than the others
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    def plain_loss(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(model(input_ids=tokens, use_cache=False).logits, targets)

    return autocast_step(model, device, liger_loss if "liger" in flags else plain_loss)


# ---- the process -------------------------------------------------------------------------------------------

MAKERS = {
    "ours": ours,
    "nanogpt": nanogpt,
    "transformers": transformers,
    "torchtitan": torchtitan,
    "megatron-core": megatron,
}


def time_steps(
    step: TrainStep,
    batches: Sequence[tuple[Tensor, Tensor]],
    device: str,
    *,
    num_warm: int,
    num_steps: int,
    report: Callable[..., None],
) -> dict:
    """Time steps that run back to back after num_warm warm-up steps.

    Returns {ms: median, spread: (slowest - fastest) / median, loss: last loss, gib: peak memory}.
    """
    on_gpu = device == "cuda"

    def synchronize() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    def stamp() -> Any:
        if not on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    loss = torch.tensor(float("nan"))
    for index in range(num_warm):
        loss = step(*batches[index % len(batches)])
        if index == 0:
            synchronize()
            report(phase="first step")
    synchronize()

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    stamps = [stamp()]
    for index in range(num_warm, num_warm + num_steps):
        loss = step(*batches[index % len(batches)])
        stamps.append(stamp())
    synchronize()

    times = []
    for start, end in zip(stamps, stamps[1:]):
        times.append(start.elapsed_time(end) if on_gpu else 1000 * (end - start))
    median = statistics.median(times)
    return {
        "ms": median,
        "spread": (max(times) - min(times)) / median,
        "loss": float(loss),
        "gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
    }


def random_batches(shape: Shape, device: str) -> list[tuple[Tensor, Tensor]]:
    """Return (tokens, targets), each [b, s], the same for every contestant."""
    generator = torch.Generator(device).manual_seed(7)
    batches = []
    for _ in range(NUM_BATCHES):
        ids = torch.randint(
            shape.vocab, (shape.batch, shape.seq + 1), generator=generator, device=device
        )
        batches.append((ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))
    return batches


def package_versions() -> dict[str, str]:
    """Return the versions of the installed PACKAGES and of CUDA."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {**versions, "CUDA": torch.version.cuda or "none"}


def first_line(error: BaseException, default: str) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else default


def measure(name: str, settings: dict, report: Callable[..., None]) -> dict:
    """Build a contestant and time its steps. Returns the result of time_steps, parameters and packages.

    settings: shape, device, warm and steps (numbers of steps), and profile: the number of steps to profile
    for kernel times, or 0. report: called with phase=NAME at each phase.
    """
    torch.manual_seed(1234)
    shape = Shape(**settings["shape"] | {"documents": tuple(settings["shape"]["documents"])})
    device = settings["device"]
    base, *flags = name.split("+")
    step, parameters = MAKERS[base](shape, device, set(flags))
    report(phase="building")
    batches = random_batches(shape, device)
    times = time_steps(
        step,
        batches,
        device,
        num_warm=settings["warm"],
        num_steps=settings["steps"],
        report=report,
    )
    if settings.get("profile"):
        report(phase="profile")
        times["kernels"] = kernel_times(step, batches, device, settings["profile"])
    return times | {"parameters": parameters, "versions": package_versions()}


def kernel_times(
    step: TrainStep, batches: Sequence[tuple[Tensor, Tensor]], device: str, num_steps: int
) -> dict[str, float]:
    """Return {kernel: ms per step}; on a CPU, {torch operation: ms per step}."""
    on_gpu = device == "cuda"
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as profile:
        for index in range(num_steps):
            step(*batches[index % len(batches)])
        if on_gpu:
            torch.cuda.synchronize()
    times = {}
    for event in profile.key_averages():
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if microseconds:
            times[event.key] = 1e-3 * microseconds / num_steps
    return times


def find_problem(error: Exception) -> str:
    """Return one line on why a contestant could not be measured."""
    if isinstance(error, ImportError):
        return f"not installed ({error.name})" if error.name else first_line(error, "ImportError")
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return f"{type(error).__name__}: {first_line(error, '')[:160]}"


def main(name: str, settings: dict) -> None:
    protocol = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # redirect the output of libraries to standard error
    started = time.perf_counter()

    def report(**message) -> None:
        seconds = round(time.perf_counter() - started, 1)
        print(json.dumps({**message, "s": seconds}), file=protocol, flush=True)

    try:
        report(done=measure(name, settings, report))
    except Exception as error:
        report(error=find_problem(error))
        traceback.print_exc()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
    sys.stderr.flush()
    os._exit(0)  # do not wait for a library's threads and exit hooks
