"""The coordinate check of muP (arXiv 2203.03466, appendix D.1): does training move every activation as far at every width?

A recipe's model is trained for a few steps at widths that double, once in the standard parametrization and once with
model.mup_base at the smallest width. Everything that may grow grows with the width (heads, not head_dim); depth, vocabulary,
batch and rate stay. What is measured is the mean |coordinate| of each kind of activation on one batch, and of its change since
the start; what is judged are the exponents of their growth with the width, fitted in logarithms. Under muP none of the changes may grow or vanish,
and no size may grow; without it the logits must be seen to grow, or the check could see nothing.
"""
import os
from dataclasses import replace
from math import log2
from pathlib import Path

import torch
from torch import Tensor

import config
import rules
from build import build
from config import Config, ConfigError, kv_heads, moe_ffn
from data.batch import Batch
from kernels.linear import linear
from parallel.mesh import Mesh
from runtime.guard import Guard
from train import train_step

WIDTHS, HEAD_DIM, LAYERS, VOCAB = (64, 128, 256, 512, 1024), 16, 2, 32
STEPS, BATCH, SEQ, RATE = 5, 8, 32, 2e-3
BOUND = 0.25  # of |exponent| under muP
GROWS = 0.5  # at least, of the logits' change without it


def widened(cfg: Config, width: int, mup: bool, base: int) -> Config:
    """The recipe at this width: fp32, one process, tiny in every direction that is not the width."""
    m = cfg.model
    heads, times = width // HEAD_DIM, width / m.hidden
    group = min(m.heads // kv_heads(m), base // HEAD_DIM)
    grown = {key: None if getattr(m, key) is None else max(1, round(getattr(m, key) * times)) for key in ("ffn", "moe_ffn", "kv_rank", "q_rank")}
    small = {"layers": max(LAYERS, m.first_dense + m.moe_every) if m.experts else LAYERS, "hidden": width, "heads": heads, "vocab": VOCAB, "vocab_multiple": 32, "context": SEQ,
             "kv_heads": None if m.kv_heads is None else heads // group, "head_dim": None if m.kv_rank else HEAD_DIM,
             "nope_dim": HEAD_DIM // 2, "rope_dim": HEAD_DIM // 2, "v_dim": HEAD_DIM, "dropout": 0.0, "mtp": 0, "jitter": 0.0, "capacity": None, "pad": False,
             "rope_original": SEQ, "mup_base": base if mup else None, "mup_head_dim": None}
    return replace(cfg, model=replace(m, **grown, **small), parallel=config.Parallel(), data=config.Data(),
                   train=replace(cfg.train, steps=STEPS, tokens=None, flops=None, dtype="fp32", seq_len=SEQ, micro_batch=BATCH, global_batch=BATCH, device="cpu"),
                   optim=replace(cfg.optim, lr=RATE, min_lr=None, warmup=0, decay="constant"))


def batch(seed: int, step: int) -> Batch:
    """Tokens that can be learned: each follows from the one before, but for a coin."""
    stream = torch.Generator().manual_seed(1000 * seed + step)
    ids = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=stream)
    coins = torch.randint(2, ids.shape, generator=stream)
    for i in range(SEQ):
        ids[:, i + 1] = (5 * ids[:, i] + 7 + coins[:, i]) % VOCAB
    positions = torch.arange(SEQ).expand(BATCH, SEQ)
    return Batch(ids[:, :-1], ids[:, 1:].contiguous(), positions, None, torch.arange(BATCH), step)


@torch.no_grad()
def activations(stage, probe: Batch) -> dict[str, Tensor]:
    """{kind: every value of it on the probe}; attention and MLP of all blocks."""
    seen: dict[str, list[Tensor]] = {}

    def keep(kind: str):
        def hook(module, args, out) -> None:
            value = linear(args[0], module.weight) if kind == "router" else out[0] if isinstance(out, tuple) else out
            seen.setdefault(kind, []).append(value.flatten())
        return hook
    places = [(stage.embed, "embedding")]
    for block in stage.blocks:
        places += [(block.attn, "attention"), (block.mlp, "mlp"), (block, "residual")] + ([(block.mlp.router, "router")] if block.moe else [])
    hooks = [module.register_forward_hook(keep(kind)) for module, kind in places]
    logits = stage.logits(probe.tokens, probe.positions)
    for hook in hooks:
        hook.remove()
    return {kind: torch.cat(values) for kind, values in seen.items()} | {"logits": logits.flatten()}


def measure(cfg: Config) -> dict[str, tuple[float, float]]:
    """{kind: (mean |coordinate|, mean |its change|)} after STEPS steps."""
    rules.validate(cfg, fits=None)
    run = build(cfg, Mesh.single(), torch.device("cpu"), None, STEPS)
    probe, guard = batch(cfg.train.seed, 0), Guard()
    first = activations(run.stages[0], probe)
    for step in range(1, STEPS + 1):
        loss, _, _ = train_step(run, step, [batch(cfg.train.seed, step)], guard, lambda *where: None)
    last = activations(run.stages[0], probe)
    return {kind: (float(last[kind].abs().mean()), float((last[kind] - first[kind]).abs().mean())) for kind in last}


def exponent(widths: tuple[int, ...], values: list[float]) -> float:
    """a of the line log v = a log width + b that lies nearest."""
    x, y = [log2(w) for w in widths], [log2(max(v, 1e-30)) for v in values]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y)) / sum((a - mx) ** 2 for a in x)
