"""One contestant of the GPU's steps: a process that builds its model, warms up, times some steps and ends.

    python -m scripts.bench.contestant NAME '{"shape": {...}, "device": "cuda", "warm": 4, "steps": 10}'

Says where it is as JSON lines on the real standard output; the last has the times. Every contestant runs forward, a loss with fp32
softmax, backward, clipping to norm 1 and AdamW on the same random tokens, back to back: nothing waits between steps. All are of
class A: bf16 compute (the others by autocast, Megatron-core by its own mixed precision), fp32 master weights and moments. SDPA takes
cuDNN's Hopper kernels first, for all. Written for torchtitan 0.2, Megatron-core 0.19 with Transformer Engine 2, Liger 0.8.

    ours, ours+graphs, ours+fp8    train.py's own step; with train.cuda_graphs; with train.dtype fp8
    megatron-core, +local          its GPT with Transformer Engine's layers; +local: its own layers, SDPA for their attention
    torchtitan+compile             blocks and loss compiled, as its trainer does
    transformers, +liger           Llama or Qwen3-MoE (grouped_mm); +liger: with Liger's kernels, the fused linear cross entropy among them
    nanogpt+compile                nanoGPT's block and loop, blocks and loss compiled; two matrices of 4 d, where the others have SwiGLU's three
"""
import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import os
import statistics
import sys
import time
import traceback

if sys.argv[1].startswith("ours"):
    import runtime  # noqa: F401  before torch (see there)
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from scripts.bench import others
from scripts.bench.others import cross_entropy
from scripts.bench.peer import ADAMW
from scripts.bench.shape import Shape

PACKAGES = ("torch", "triton", "megatron-core", "transformer-engine", "torchtitan", "transformers", "liger-kernel")
PLAIN = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
ROPE = 500000.0


def fused_attention(device: str):
    """SDPA in the order that kernels/attention.py has it."""
    return sdpa_kernel(PLAIN, set_priority=True) if device == "cuda" else contextlib.nullcontext()


def ours(shape: Shape, device: str, flags: set[str]):
    import config
    from build import build
    from data.batch import Batch
    from parallel import spec
    from parallel.mesh import Mesh
    from runtime.guard import Guard
    from train import train_step
    cfg = config.build(config.Config, {
        "model": shape.model(), "optim": {"lr": ADAMW["lr"], "warmup": 0, "decay": "constant"},
        "train": {"seq_len": shape.seq, "micro_batch": shape.batch, "global_batch": shape.batch, "dtype": "fp8" if "fp8" in flags else "bf16",
                  "steps": 1000, "deterministic": False, "device": device, "cuda_graphs": "graphs" in flags}})
    if device == "cuda":  # train.py draws the initial weights on the host, which would cost more than all steps here
        spec.draw = lambda box, out, seed, std: out.normal_(0.0, std)
    run = build(cfg, Mesh.single(), torch.device(device), None, 1000)
    guard, done, rows = Guard(), iter(range(1, 1 << 30)), torch.arange(shape.batch, device=device)
    positions = torch.arange(shape.seq, device=device).expand(shape.batch, -1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        number = next(done)
        return train_step(run, number, [Batch(x, y, positions, None, rows, number)], guard, lambda *_: None)[0]

    return step, sum(s.numel for b in run.buckets for s in b.slots)


def autocast(model: nn.Module, device: str, loss):
    """The usual loop: loss(model, x, y) in bf16 over fp32 weights."""
    model.to(device).train()  # in fp32 from the start; a table of complex numbers stays one
    optim = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optim.zero_grad(set_to_none=True)
        with fused_attention(device):
            with torch.autocast(device, torch.bfloat16):
                value = loss(model, x, y)
            value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        return value.detach()

    return step, sum(p.numel() for p in model.parameters())


def nanogpt(shape: Shape, device: str, flags: set[str]):
    with torch.device(device):
        model = others.NanoGPT(shape)
    loss = others.compiled(model.blocks) if "compile" in flags else cross_entropy
    return autocast(model, device, lambda m, x, y: loss(m(x), y))


def transformers(shape: Shape, device: str, flags: set[str]):
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
    kinds = (Qwen3MoeForCausalLM, Qwen3MoeConfig) if shape.experts else (LlamaForCausalLM, LlamaConfig)
    mixture = {"num_experts": shape.experts, "num_experts_per_tok": shape.top_k, "moe_intermediate_size": shape.ffn, "norm_topk_prob": True,
               "head_dim": shape.hidden // shape.heads, "experts_implementation": "grouped_mm"} if shape.experts else {}
    if "liger" in flags:
        from liger_kernel import transformers as liger
        (liger.apply_liger_kernel_to_qwen3_moe if shape.experts else liger.apply_liger_kernel_to_llama)(fused_linear_cross_entropy=True)
    with torch.device(device):
        model = kinds[0](kinds[1](
            **mixture, vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.ffn, num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads, num_key_value_heads=shape.kv or shape.heads, max_position_embeddings=shape.seq, rms_norm_eps=1e-5,
            tie_word_embeddings=False, use_cache=False, attn_implementation="sdpa"))
    if "liger" in flags:  # the fused loss shifts its labels itself: one token in seq less than the others
        return autocast(model, device, lambda m, x, y: m(input_ids=x, labels=x, use_cache=False).loss)
    return autocast(model, device, lambda m, x, y: cross_entropy(m(input_ids=x, use_cache=False).logits, y))


def torchtitan(shape: Shape, device: str, flags: set[str]):
    model = others.torchtitan(shape, device)
    loss = others.compiled(model.layers.values(), not shape.experts) if "compile" in flags else cross_entropy
    return autocast(model, device, lambda m, x, y: loss(m(x), y))


def megatron(shape: Shape, device: str, flags: set[str]):
    te = "local" not in flags
    if device != "cuda":
        raise ImportError("Megatron-core needs a GPU")
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from parallel import comm
    comm.alone(device)
    parallel_state.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(1)
    mixture = {"num_moe_experts": shape.experts, "moe_router_topk": shape.top_k, "moe_ffn_hidden_size": shape.ffn, "moe_grouped_gemm": te,
               "moe_permute_fusion": te, "moe_router_fusion": te, "moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": "none"}
    cfg = TransformerConfig(
        num_layers=shape.layers, hidden_size=shape.hidden, num_attention_heads=shape.heads, num_query_groups=shape.kv or shape.heads,
        ffn_hidden_size=shape.ffn, gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False, normalization="RMSNorm", hidden_dropout=0.0,
        attention_dropout=0.0, bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, bias_activation_fusion=True,
        bias_dropout_fusion=True, apply_rope_fusion=te, gradient_accumulation_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False,
        cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te" if te else "native", **(mixture if shape.experts else {}))
    experts = {"num_experts": shape.experts or None, "moe_grouped_gemm": te and bool(shape.experts)}
    layer = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(**experts) if te else \
        gpt_layer_specs.get_gpt_layer_local_spec(**experts, normalization="RMSNorm")

    def attend(self, q, k, v, *_, **__):
        heads = F.scaled_dot_product_attention(*(t.permute(1, 2, 0, 3) for t in (q, k, v)), is_causal=True, enable_gqa=q.shape[2] != k.shape[2])
        return heads.permute(2, 0, 1, 3).flatten(2)
    if not te:
        DotProductAttention.forward = attend
    model = GPTModel(config=cfg, transformer_layer_spec=layer, vocab_size=shape.vocab, max_sequence_length=shape.seq, position_embedding_type="rope",
                     share_embeddings_and_output_weights=False).to(device)
    count = sum(p.numel() for p in model.parameters())
    model = DistributedDataParallel(cfg, DistributedDataParallelConfig(grad_reduce_in_fp32=True), Float16Module(cfg, model))
    optim = get_megatron_optimizer(OptimizerConfig(
        optimizer="adam", lr=ADAMW["lr"], min_lr=ADAMW["lr"], weight_decay=ADAMW["weight_decay"], adam_beta1=ADAMW["betas"][0],
        adam_beta2=ADAMW["betas"][1], bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0), [model])
    for group in optim.param_groups:
        group["lr"] = ADAMW["lr"]
    positions = torch.arange(shape.seq, device=device).expand(shape.batch, -1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        model.zero_grad_buffer()
        optim.zero_grad()
        with fused_attention(device):
            loss = model(x, positions, None, labels=y).float().mean()
            loss.backward()
        model.finish_grad_sync()
        optim.step()
        return loss.detach()

    return step, count


def clock(step, batches: list, device: str, warm: int, steps: int, say) -> dict:
    """Milliseconds of each of `steps` steps, which run back to back; the last loss; the peak of memory in GiB."""
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)

    def now():
        if device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    for i in range(warm):
        loss = step(*batches[i % len(batches)])
        if i == 0:
            wait()
            say(at="the first step")
    wait()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    stamps = [now()]
    for i in range(steps):
        loss = step(*batches[(warm + i) % len(batches)])
        stamps.append(now())
    wait()
    ms = [a.elapsed_time(b) if device == "cuda" else 1000 * (b - a) for a, b in zip(stamps, stamps[1:])]
    return {"ms": statistics.median(ms), "spread": (max(ms) - min(ms)) / statistics.median(ms), "loss": float(loss),
            "gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None}


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return {**found, "CUDA": torch.version.cuda or "none"}


def main(name: str, settings: dict) -> None:
    out, begun = os.fdopen(os.dup(1), "w"), time.perf_counter()
    os.dup2(2, 1)  # what libraries print does not mix with the protocol

    def say(**line) -> None:
        print(json.dumps({**line, "s": round(time.perf_counter() - begun, 1)}), file=out, flush=True)

    shape, device = Shape(**settings["shape"]), settings["device"]
    torch.manual_seed(1234)
    base, *flags = name.split("+")
    make = {"ours": ours, "nanogpt": nanogpt, "transformers": transformers, "torchtitan": torchtitan, "megatron-core": megatron}[base]
    try:
        step, parameters = make(shape, device, set(flags))
        say(at="building")
        stream = torch.Generator(device).manual_seed(7)
        draw = functools.partial(torch.randint, shape.vocab, (shape.batch, shape.seq + 1), generator=stream, device=device)
        batches = [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in (draw() for _ in range(4))]
        say(done=clock(step, batches, device, settings["warm"], settings["steps"], say) | {"parameters": parameters, "versions": versions()})
    except ImportError as e:
        say(error=f"not installed ({e.name})" if e.name else (str(e).splitlines() or ["ImportError"])[0])
    except torch.OutOfMemoryError:
        say(error="out of memory")
    except Exception as e:
        say(error=f"{type(e).__name__}: {(str(e).strip().splitlines() or [''])[0][:160]}")
        traceback.print_exc()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
    sys.stderr.flush()
    os._exit(0)  # a library's threads and exit hooks are not part of the race
