"""One contestant of the race: a process of its own that trains its model one step at a time when told to.

    python -m scripts.bench.peer NAME '{"dtype": "bf16", "threads": 2, "shape": {...}, "job": {...}}'

Speaks JSON lines on the real standard output: first what it is, then, for each line "N" it reads, N steps' times.
Every contestant runs forward, loss with fp32 softmax, backward, clipping to norm 1 and AdamW on the same batches.
ours+compile: with train.compile; others' +compile: their blocks and the loss. picotron, torchtitan (0.2), litgpt: from PYTHONPATH
where they are not installed; picotron clips no gradients, as its own train.py. transformers+grouped: a mixture's experts by
torch's grouped_mm, not one by one. transformers+malloc (any peer): with our malloc settings, to see what they are worth.
"""
import json
import os
import resource
import sys
import time
import types
from dataclasses import dataclass

if sys.argv[1].startswith("ours") or sys.argv[1].endswith("+malloc"):
    import runtime  # noqa: F401  before torch: what train.py sets for OpenMP and malloc; the others run as their users run them
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.bench import others
from scripts.bench.shape import Shape

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


@dataclass(frozen=True)
class Job:
    """rank of ranks, which meet at an address and split the work by data (dp) or by tensors (tp)."""
    rank: int = 0
    ranks: int = 1
    split: str = "dp"
    meet: str = ""

    def join(self):
        from parallel import comm
        return comm.join("cpu", self.rank, self.ranks, 120.0, self.meet)


def ours(shape: Shape, dtype: str, job: Job, compile: bool = False):
    """train.py's own step."""
    import config
    from build import build
    from data.batch import Batch
    from parallel.layout import Layout
    from parallel.mesh import Mesh
    from runtime.guard import Guard
    from train import train_step
    tree = {"model": shape.model(),
            "train": {"seq_len": shape.seq, "micro_batch": shape.batch, "global_batch": shape.batch * (job.ranks if job.split == "dp" else 1),
                      "dtype": dtype, "compile": compile, "steps": 1000},
            "optim": {"lr": ADAMW["lr"], "warmup": 0, "decay": "constant"},
            "parallel": {"tp": job.ranks if job.split == "tp" else 1}}
    cfg = config.build(config.Config, tree)
    mesh = Mesh.bind(Layout(job.ranks, tp=cfg.parallel.tp), job.join())
    run = build(cfg, mesh, torch.device("cpu"), None, 1000)
    guard, done = Guard(), iter(range(1, 1 << 30))
    positions = torch.arange(shape.seq).expand(shape.batch, -1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        return train_step(run, next(done), [Batch(x, y, positions)], guard, lambda *_: None)[0]

    return step, sum(s.numel for b in run.buckets for s in b.slots)


def plain(model: nn.Module, dtype: str, job: Job, logits, compiled=()):
    """The usual loop around a module: logits(model, x) [b, s, v]; with several ranks, under DistributedDataParallel. compiled: its
    blocks, which then are, and the loss with them."""
    for t in (*model.train().parameters(), *model.buffers()):
        t.data = t.data.to(DTYPES[dtype]) if t.is_floating_point() else t.data  # torchtitan's complex table stays one
    cross_entropy = others.compiled(compiled) if compiled else others.cross_entropy
    if job.ranks > 1:
        if job.split != "dp":
            raise ImportError("tensor parallelism in this adapter", name="tensor parallelism in this adapter")
        job.join()
        model = nn.parallel.DistributedDataParallel(model)
    optim = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optim.zero_grad(set_to_none=True)
        loss = cross_entropy(logits(model, x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        return loss.detach()

    return step, sum(p.numel() for p in model.parameters())


def picotron(shape: Shape, dtype: str, job: Job):
    """Its CPU mode: SDPA, its own data-parallel buckets and tensor-parallel layers."""
    os.environ.update(RANK=str(job.rank), LOCAL_RANK=str(job.rank), WORLD_SIZE=str(job.ranks), DEVICE="cpu", FLASH_ATTEN="0", CONTEXT_PARALLEL="0",
                      DTYPE={"bf16": "bfloat16", "fp32": "float32"}[dtype])
    for name in ("", ".flash_attn_interface", ".layers", ".layers.rotary", ".ops", ".ops.triton", ".ops.triton.layer_norm"):
        sys.modules["flash_attn" + name] = types.ModuleType("flash_attn" + name)  # imported, never called here
    for name, what in ((".flash_attn_interface", "flash_attn_func"), (".layers.rotary", "apply_rotary_emb"),
                       (".ops.triton.layer_norm", "layer_norm_fn")):
        setattr(sys.modules["flash_attn" + name], what, None)
    from picotron import process_group_manager
    from picotron.data_parallel.data_parallel import DataParallelBucket
    from picotron.model import Llama
    from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel
    job.join()
    tp = job.ranks if job.split == "tp" else 1
    process_group_manager.setup_process_group_manager(tp_size=tp, cp_size=1, pp_size=1, dp_size=job.ranks // tp)
    model = Llama(types.SimpleNamespace(
        hidden_size=shape.hidden, num_attention_heads=shape.heads, num_key_value_heads=shape.heads, intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers, vocab_size=shape.vocab, max_position_embeddings=shape.seq, rms_norm_eps=1e-5, rope_theta=500000.0))
    if tp > 1:
        model = apply_tensor_parallel(model)
        model.reset_parameters()
    model.to(DTYPES[dtype]).train()
    if job.ranks > tp:
        model = DataParallelBucket(model)
    optim = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optim.zero_grad()
        loss = F.cross_entropy(model(input_ids=x).flatten(0, 1).float(), y.flatten())
        loss.backward()
        optim.step()
        if job.ranks > tp:
            model.reset()
        return loss.detach()

    return step, sum(p.numel() for p in model.parameters())


def transformers(shape: Shape, dtype: str, job: Job, compile: bool = False, experts: str = "eager"):
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
    Model, Settings = (MixtralForCausalLM, MixtralConfig) if shape.experts else (LlamaForCausalLM, LlamaConfig)
    mixture = {"num_local_experts": shape.experts, "num_experts_per_tok": shape.top_k, "experts_implementation": experts} if shape.experts else {}
    model = Model(Settings(
        **mixture, vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.ffn, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.heads, max_position_embeddings=shape.seq,
        rms_norm_eps=1e-5, tie_word_embeddings=False, use_cache=False, attn_implementation="sdpa"))
    return plain(model, dtype, job, lambda m, x: m(input_ids=x, use_cache=False).logits, model.model.layers if compile else ())


def litgpt(shape: Shape, dtype: str, job: Job, compile: bool = False):
    from litgpt.config import Config
    from litgpt.model import GPT
    model = GPT(Config(
        name="race", block_size=shape.seq, vocab_size=shape.vocab, padded_vocab_size=shape.vocab, n_layer=shape.layers,
        n_head=shape.heads, n_query_groups=shape.heads, n_embd=shape.hidden, intermediate_size=shape.ffn,
        rotary_percentage=1.0, parallel_residual=False, bias=False, norm_class_name="RMSNorm", norm_eps=1e-5,
        mlp_class_name="LLaMAMLP"))
    return plain(model, dtype, job, lambda m, x: m(x), model.transformer.h if compile else ())


def nanogpt(shape: Shape, dtype: str, job: Job, compile: bool = False):
    model = others.NanoGPT(shape)
    return plain(model, dtype, job, lambda m, x: m(x), model.blocks if compile else ())


def torchtitan(shape: Shape, dtype: str, job: Job, compile: bool = False):
    model = others.torchtitan(shape, "cpu")
    return plain(model, dtype, job, lambda m, x: m(x), model.layers.values() if compile else ())


def floor(shape: Shape, dtype: str, job: Job):
    """The step's matrix products alone: y = x W^T, dx = dy W, dW = dy^T x of every linear."""
    def operands(m, n):
        x, w, dy = (torch.randn(*size).to(DTYPES[dtype]) for size in ((shape.tokens, n), (m, n), (shape.tokens, m)))
        return x, w, dy, torch.empty_like(dy), torch.empty_like(x), torch.empty_like(w)

    share = job.ranks if job.split == "tp" else 1
    sets = [(times, operands(m // share, n)) for m, n, times in shape.gemms()]

    def step(*_) -> Tensor:
        for times, (x, w, dy, y, dx, dw) in sets:
            for _ in range(times):
                torch.mm(x, w.t(), out=y)
                torch.mm(dy, w, out=dx)
                torch.mm(dy.t(), x, out=dw)
        return torch.tensor(float("nan"))

    return step, 0


def peer(name: str, shape: Shape, dtype: str, job: Job):
    """-> (step(x, y) -> loss, parameters). Raises ImportError where its package is not installed."""
    base, _, flag = name.partition("+")
    if flag == "grouped":
        return transformers(shape, dtype, job, experts="grouped_mm")
    if base == "picotron" or base == "floor":
        return {"picotron": picotron, "floor": floor}[base](shape, dtype, job)
    make = {"ours": ours, "transformers": transformers, "litgpt": litgpt, "nanogpt": nanogpt, "torchtitan": torchtitan}[base]
    return make(shape, dtype, job, compile=flag == "compile")


def peak() -> int:
    """MiB that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main(name: str, settings: dict) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print does not mix with the protocol

    def say(**line) -> None:
        print(json.dumps(line), file=out, flush=True)

    torch.set_num_threads(settings["threads"])
    torch.manual_seed(1234)
    shape, job = Shape(**settings["shape"]), Job(**settings["job"])
    try:
        step, parameters = peer(name, shape, settings["dtype"], job)
    except ImportError as e:
        return say(error=f"not installed ({e.name})")
    say(parameters=parameters)
    stream = torch.Generator().manual_seed(7 + (job.rank if job.split == "dp" else 0))
    for line in sys.stdin:
        wall, cpu, loss = [], [], None
        for _ in range(int(line)):
            ids = torch.randint(0, shape.vocab, (shape.batch, shape.seq + 1), generator=stream)
            x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
            begun, used = time.perf_counter(), time.process_time()
            loss = step(x, y)
            wall.append(time.perf_counter() - begun)
            cpu.append(time.process_time() - used)
        say(wall=wall, cpu=cpu, loss=float(loss), peak=peak())


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
