"""One contestant of the CPU benchmark: a process that trains its model, a few steps at a time.

    python -m lab.benchmarks.peer NAME '{"dtype": "bf16", "threads": 2, "shape": {...}, "ranks": {...}}'

It prints JSON lines on the real standard output: first its number of parameters, then the times of N steps
for each line "N" that it reads. Every contestant runs forward, a loss with fp32 softmax, backward, clipping
to norm 1 and AdamW on the same batches.

    ours+compile                    with train.compile; +compile of the others: their blocks and the loss
    picotron, torchtitan, litgpt    from PYTHONPATH if not installed (torchtitan 0.2); picotron does not clip
                                    gradients, as in its own train.py
    transformers+grouped            MoE experts by torch's grouped_mm instead of one by one
    transformers+malloc (any peer)  with our malloc settings, to measure their effect
"""

import functools
import itertools
import json
import os
import resource
import sys
import time
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

if sys.argv[1].startswith("ours") or sys.argv[1].endswith("+malloc"):
    # before torch: train.py's OpenMP and malloc settings; the others run with their users' defaults
    import runtime  # noqa: F401
import torch
from torch import Tensor, nn

from lab.benchmarks import others
from lab.benchmarks.others import ADAMW, ROPE_THETA, TrainStep
from lab.benchmarks.shape import Shape

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class RankSetup:
    """One rank of a contestant.

    split: how the ranks divide the work, by batch ("dp") or within every layer ("tp").
    address: the rendezvous address for torch.distributed.
    """

    rank: int = 0
    size: int = 1
    split: str = "dp"
    address: str = ""

    @property
    def tp(self) -> int:
        return self.size if self.split == "tp" else 1

    @property
    def dp(self) -> int:
        return self.size if self.split == "dp" else 1

    def join(self):
        """Join the job over gloo and return our World."""
        from parallel.wire.world import join_job

        return join_job(torch.device("cpu"), self.rank, self.size, 120.0, self.address)


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# ---- contestants: each function returns (step, number of parameters) ---------------------------------------


def ours(shape: Shape, dtype: str, ranks: RankSetup, compiled: bool) -> tuple[TrainStep, int]:
    """Use train.py's own step."""
    import config.reading
    from build import build_run
    from parallel.microbatch import Microbatch
    from parallel.topology.dims import ParallelDims
    from parallel.topology.mesh import Mesh
    from train import train_step

    train_keys = {
        "seq_len": shape.seq,
        "micro_batch": shape.batch,
        "global_batch": shape.batch * ranks.dp,
        "dtype": dtype,
        "compile": compiled,
        "steps": 1000,
    }
    tree = {
        "model": shape.model_keys(),
        "train": train_keys,
        "optim": {"lr": ADAMW["lr"], "warmup": 0, "decay": "constant"},
        "parallel": {"tp": ranks.tp},
    }
    cfg = config.reading.build_tree(config.Config, tree)
    mesh = Mesh.bind(ParallelDims(ranks.size, tp=cfg.parallel.tp), ranks.join())
    run = build_run(cfg, mesh, torch.device("cpu"), None, 1000)
    step_numbers = itertools.count(1)
    positions = torch.arange(shape.seq).expand(shape.batch, -1)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        batch = Microbatch(tokens, targets, positions)
        loss = train_step(run, next(step_numbers), [batch]).loss
        return loss

    return step, sum(slot.numel for bucket in run.buckets for slot in bucket.slots)


def module_step(
    model: nn.Module,
    dtype: str,
    ranks: RankSetup,
    logits: Callable[[Any, Tensor], Tensor],
    blocks: Iterable[nn.Module] = (),
) -> tuple[TrainStep, int]:
    """Return the usual training step of a module, under DistributedDataParallel with several ranks.

    logits(model, tokens): [b, s, vocab]. blocks: the blocks of the model to compile, along with the loss.
    """
    model.train()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():  # torchtitan's complex RoPE table is unchanged
            tensor.data = tensor.data.to(DTYPES[dtype])
    cross_entropy = others.compile_blocks(blocks) if blocks else others.cross_entropy

    if ranks.size > 1:
        if ranks.split != "dp":
            missing = "tensor parallelism in this adapter"
            raise ImportError(missing, name=missing)
        ranks.join()
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = cross_entropy(logits(model, tokens), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step, num_parameters(model)


def picotron(shape: Shape, dtype: str, ranks: RankSetup) -> tuple[TrainStep, int]:
    """Use picotron's CPU mode: SDPA, with its own data-parallel buckets and tensor-parallel layers."""
    os.environ.update(
        RANK=str(ranks.rank),
        LOCAL_RANK=str(ranks.rank),
        WORLD_SIZE=str(ranks.size),
        DEVICE="cpu",
        FLASH_ATTEN="0",
        CONTEXT_PARALLEL="0",
        DTYPE={"bf16": "bfloat16", "fp32": "float32"}[dtype],
    )
    stub_flash_attn()

    from picotron import process_group_manager
    from picotron.data_parallel.data_parallel import DataParallelBucket
    from picotron.model import Llama
    from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel

    ranks.join()
    num_replicas = ranks.size // ranks.tp
    process_group_manager.setup_process_group_manager(
        tp_size=ranks.tp, cp_size=1, pp_size=1, dp_size=num_replicas
    )
    settings = types.SimpleNamespace(
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        vocab_size=shape.vocab,
        max_position_embeddings=shape.seq,
        rms_norm_eps=1e-5,
        rope_theta=ROPE_THETA,
    )
    model = Llama(settings)
    if ranks.tp > 1:
        model = apply_tensor_parallel(model)
        model.reset_parameters()
    model.to(DTYPES[dtype]).train()
    if num_replicas > 1:
        model = DataParallelBucket(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = others.cross_entropy(model(input_ids=tokens), targets)
        loss.backward()
        optimizer.step()
        if num_replicas > 1:
            model.reset()
        return loss.detach()

    return step, num_parameters(model)


def stub_flash_attn() -> None:
    """Create empty modules for flash_attn, which picotron imports but does not call on a CPU."""
    packages = ("", ".flash_attn_interface", ".layers", ".layers.rotary")
    packages += (".ops", ".ops.triton", ".ops.triton.layer_norm")
    for package in packages:
        sys.modules["flash_attn" + package] = types.ModuleType("flash_attn" + package)
    functions = {
        ".flash_attn_interface": "flash_attn_func",
        ".layers.rotary": "apply_rotary_emb",
        ".ops.triton.layer_norm": "layer_norm_fn",
    }
    for package, function in functions.items():
        setattr(sys.modules["flash_attn" + package], function, None)


def transformers(
    shape: Shape, dtype: str, ranks: RankSetup, compiled: bool, experts_implementation: str = "eager"
) -> tuple[TrainStep, int]:
    """Build Llama, or Mixtral for an MoE shape."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    settings = others.transformers_settings(shape)
    if shape.experts:
        mixture = dict(
            num_local_experts=shape.experts,
            num_experts_per_tok=shape.top_k,
            experts_implementation=experts_implementation,
        )
        model = MixtralForCausalLM(MixtralConfig(**mixture, **settings))
    else:
        model = LlamaForCausalLM(LlamaConfig(**settings))

    def logits(model: nn.Module, tokens: Tensor) -> Tensor:
        return model(input_ids=tokens, use_cache=False).logits

    return module_step(model, dtype, ranks, logits, model.model.layers if compiled else ())


def plain_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens)


def litgpt(shape: Shape, dtype: str, ranks: RankSetup, compiled: bool) -> tuple[TrainStep, int]:
    from litgpt.config import Config
    from litgpt.model import GPT

    settings = Config(
        name="race",
        block_size=shape.seq,
        vocab_size=shape.vocab,
        padded_vocab_size=shape.vocab,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_query_groups=shape.heads,
        n_embd=shape.hidden,
        intermediate_size=shape.ffn,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=1e-5,
        mlp_class_name="LLaMAMLP",
    )
    model = GPT(settings)
    return module_step(model, dtype, ranks, plain_logits, model.transformer.h if compiled else ())


def nanogpt(shape: Shape, dtype: str, ranks: RankSetup, compiled: bool) -> tuple[TrainStep, int]:
    model = others.NanoGPT(shape)
    return module_step(model, dtype, ranks, plain_logits, model.blocks if compiled else ())


def torchtitan(shape: Shape, dtype: str, ranks: RankSetup, compiled: bool) -> tuple[TrainStep, int]:
    model = others.build_torchtitan(shape, "cpu")
    return module_step(model, dtype, ranks, plain_logits, model.layers.values() if compiled else ())


def matrix_products(shape: Shape, dtype: str, ranks: RankSetup) -> tuple[TrainStep, int]:
    """Run only the matrix products of a step: y = x W^T, dx = dy W, dW = dy^T x of every linear layer."""
    repeats = []
    operands = []
    for outputs, inputs, times in shape.linear_sizes():
        local_outputs = outputs // ranks.tp
        x = torch.randn(shape.tokens, inputs).to(DTYPES[dtype])
        weight = torch.randn(local_outputs, inputs).to(DTYPES[dtype])
        dy = torch.randn(shape.tokens, local_outputs).to(DTYPES[dtype])
        repeats.append(times)
        operands.append((x, weight, dy, torch.empty_like(dy), torch.empty_like(x), torch.empty_like(weight)))

    def step(*_) -> Tensor:
        for times, (x, weight, dy, y, dx, dweight) in zip(repeats, operands):
            for _ in range(times):
                torch.mm(x, weight.t(), out=y)
                torch.mm(dy, weight, out=dx)
                torch.mm(dy.t(), x, out=dweight)
        return torch.tensor(float("nan"))

    return step, 0


def make_contestant(name: str, shape: Shape, dtype: str, ranks: RankSetup) -> tuple[TrainStep, int]:
    """Return (step, number of parameters). Raises ImportError if the package is not installed."""
    base, _, flag = name.partition("+")
    if base == "floor":
        return matrix_products(shape, dtype, ranks)
    if base == "picotron":
        return picotron(shape, dtype, ranks)
    makers = {
        "ours": ours,
        "transformers": transformers,
        "litgpt": litgpt,
        "nanogpt": nanogpt,
        "torchtitan": torchtitan,
    }
    make = makers[base]
    if flag == "grouped":
        make = functools.partial(transformers, experts_implementation="grouped_mm")
    return make(shape, dtype, ranks, compiled=flag == "compile")


# ---- the process -------------------------------------------------------------------------------------------


def peak_mib() -> int:
    """Return the peak resident memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main(name: str, settings: dict) -> None:
    protocol = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # redirect the output of libraries to standard error

    def send(**message) -> None:
        print(json.dumps(message), file=protocol, flush=True)

    torch.set_num_threads(settings["threads"])
    torch.manual_seed(1234)
    shape = Shape(**settings["shape"])
    ranks = RankSetup(**settings["ranks"])
    try:
        step, parameters = make_contestant(name, shape, settings["dtype"], ranks)
    except ImportError as error:
        return send(error=f"not installed ({error.name})")
    send(parameters=parameters)

    data_seed = 7 + (ranks.rank if ranks.split == "dp" else 0)
    generator = torch.Generator().manual_seed(data_seed)
    for line in sys.stdin:
        count = int(line)
        if count < 1:
            raise ValueError(f"{count} steps: a round needs at least one")
        wall = []
        cpu = []
        losses = []
        for _ in range(count):
            ids = torch.randint(0, shape.vocab, (shape.batch, shape.seq + 1), generator=generator)
            tokens = ids[:, :-1].contiguous()
            targets = ids[:, 1:].contiguous()
            wall_start = time.perf_counter()
            cpu_start = time.process_time()
            losses.append(step(tokens, targets))
            wall.append(time.perf_counter() - wall_start)
            cpu.append(time.process_time() - cpu_start)
        send(wall=wall, cpu=cpu, loss=float(losses[-1]), peak=peak_mib())


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
