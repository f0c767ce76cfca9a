"""Each kernel's forward and backward, eager and compiled, beside the plain torch way to write it."""
import time

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import norm, rope
from kernels.attention import attention
from kernels.cross_entropy import linear_cross_entropy
from kernels.linear import linear
from kernels.swiglu import swiglu
from scripts.bench import gpu
from scripts.bench.shape import Shape, show

REPEATS = 5


def main(args) -> int:
    if args.device == "cuda":
        return gpu.main(args)
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[args.dtype])
    rows = [row(name, *case, args.dtype) for name, case in cases(Shape.race(), dtype).items() if args.only in name]
    show(rows, args.json, kernels=f"{args.dtype}, {args.threads} threads, forward and backward, ms, fastest of {REPEATS}")
    return 0


def cases(s: Shape, dtype: torch.dtype) -> dict[str, tuple]:
    """{name: (inputs that need gradients, ours(*inputs), plain(*inputs), ours compiled or None)}"""
    def make(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype).mul_(0.5).requires_grad_()

    t, d, h = s.tokens, s.hidden, s.heads
    q, k, v = (make(s.batch, s.seq, h, d // h) for _ in "qkv")
    x, w, head, gate_up = make(t, d), make(d), make(s.vocab, d), make(t, 2 * s.ffn)
    targets = torch.randint(s.vocab, (t,))
    cos, sin = rope.tables(torch.arange(s.seq).expand(s.batch, -1), rope.frequencies(d // h, 5e5), dtype)

    def plain_rope(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        c, n = cos.to(x.dtype), sin.to(x.dtype)
        return torch.cat((a * c - b * n, b * c + a * n), -1)

    def plain_attention(q, k, v):
        return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)

    return {
        "attention": ((q, k, v), lambda q, k, v: attention(q, k, v, None), plain_attention, None),
        "rms_norm": ((x, w), lambda x, w: norm.rms_norm(x, w, 1e-5), lambda x, w: F.rms_norm(x, (d,), w, 1e-5),
                     lambda x, w: norm.rms_norm(x, w, 1e-5, True)),
        "rope": ((q,), lambda q: rope.rope(q, cos, sin), plain_rope, lambda q: rope.rope(q, cos, sin, True)),
        "swiglu": ((gate_up,), swiglu, lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], lambda x: swiglu(x, True)),
        "linear": ((x, head), linear, F.linear, None),
        "cross_entropy": ((x, head), lambda x, w: linear_cross_entropy(x, w, targets, 1 / t, s.vocab),
                          lambda x, w: F.cross_entropy(F.linear(x, w).float(), targets), None),
    }


def row(name: str, inputs: tuple, ours, plain, fused, dtype: str) -> dict:
    base, mine = clock(plain, inputs), clock(ours, inputs)
    twin = None if fused is None else clock(fused, inputs)
    return {"kernel": name, "plain": f"{base:.2f}", "ours": f"{mine:.2f}", "x": f"{base / mine:.2f}",
            "compiled": "-" if twin is None else f"{twin:.2f}", "compiled x": "-" if twin is None else f"{base / twin:.2f}"}


def clock(function, inputs: tuple) -> float:
    """Milliseconds of one forward and backward, the fastest of REPEATS after a first one."""
    times = []
    for _ in range(REPEATS + 1):
        begun = time.perf_counter()
        out = function(*inputs)
        out.backward(torch.ones_like(out))
        times.append(time.perf_counter() - begun)
        for x in inputs:
            x.grad = None
    return 1000 * min(times[1:])
