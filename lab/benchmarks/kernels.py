"""Each kernel's forward and backward, eager and compiled, against plain torch code."""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import norm, rope
from kernels.attention import attention
from kernels.cross_entropy import linear_cross_entropy
from kernels.linear import linear
from kernels.swiglu import swiglu
from lab.benchmarks.shape import Shape, show

REPEATS = 5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NORM_EPS = 1e-5
ROPE_THETA = 5e5

Kernel = Callable[..., Tensor]


@dataclass(frozen=True)
class CpuCase:
    """inputs: tensors with gradients, passed to ours, plain and compiled (None: not measured)."""

    inputs: tuple[Tensor, ...]
    ours: Kernel
    plain: Kernel
    compiled: Kernel | None = None


def main(args: argparse.Namespace) -> int:
    torch.set_num_threads(args.threads)
    cases = make_cases(Shape.race(), DTYPES[args.dtype])
    rows = [table_row(name, case) for name, case in cases.items() if args.only in name]
    title = f"{args.dtype}, {args.threads} threads, forward and backward, ms, fastest of {REPEATS}"
    show(rows, args.json, kernels=title)
    return 0


def make_cases(shape: Shape, dtype: torch.dtype) -> dict[str, CpuCase]:
    """Return {name: case}, at the sizes of one step of the shape."""

    def make(*sizes: int) -> Tensor:
        return torch.randn(sizes, dtype=dtype).mul_(0.5).requires_grad_()

    head_dim = shape.hidden // shape.heads
    q, k, v = (make(shape.batch, shape.seq, shape.heads, head_dim) for _ in "qkv")
    x = make(shape.tokens, shape.hidden)
    norm_weight = make(shape.hidden)
    head_weight = make(shape.vocab, shape.hidden)
    gate_up = make(shape.tokens, 2 * shape.ffn)
    targets = torch.randint(shape.vocab, (shape.tokens,))

    return {
        "attention": CpuCase(
            inputs=(q, k, v),
            ours=lambda q, k, v: attention(q, k, v, None),
            plain=plain_attention,
        ),
        "rms_norm": CpuCase(
            inputs=(x, norm_weight),
            ours=lambda x, weight: norm.rms_norm(x, weight, NORM_EPS),
            plain=lambda x, weight: F.rms_norm(x, (shape.hidden,), weight, NORM_EPS),
            compiled=lambda x, weight: norm.rms_norm(x, weight, NORM_EPS, True),
        ),
        "rope": rope_case(q, shape, dtype),
        "swiglu": CpuCase(
            inputs=(gate_up,),
            ours=swiglu,
            plain=plain_swiglu,
            compiled=lambda x: swiglu(x, True),
        ),
        "linear": CpuCase(inputs=(x, head_weight), ours=linear, plain=F.linear),
        "cross_entropy": CpuCase(
            inputs=(x, head_weight),
            ours=lambda x, weight: linear_cross_entropy(x, weight, targets, 1 / shape.tokens, shape.vocab),
            plain=lambda x, weight: F.cross_entropy(F.linear(x, weight).float(), targets),
        ),
    }


def rope_case(q: Tensor, shape: Shape, dtype: torch.dtype) -> CpuCase:
    """Return the case of RoPE for q [b, s, heads, head_dim]."""
    positions = torch.arange(shape.seq).expand(shape.batch, -1)
    cos, sin = rope.cos_sin_tables(positions, rope.frequencies(q.shape[-1], ROPE_THETA), dtype)

    def plain_rope(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        cosine = cos.to(x.dtype)
        sine = sin.to(x.dtype)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)

    return CpuCase(
        inputs=(q,),
        ours=lambda q: rope.apply_rope(q, cos, sin),
        plain=plain_rope,
        compiled=lambda q: rope.apply_rope(q, cos, sin, True),
    )


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention in plain torch. q, k, v: [b, s, heads, head_dim]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def plain_swiglu(x: Tensor) -> Tensor:
    """Return SwiGLU in plain torch. x: [tokens, 2 ffn], gate and up."""
    return F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]


def table_row(name: str, case: CpuCase) -> dict[str, str]:
    plain = milliseconds(case.plain, case.inputs)
    ours = milliseconds(case.ours, case.inputs)
    row = {"kernel": name, "plain": f"{plain:.2f}", "ours": f"{ours:.2f}", "x": f"{plain / ours:.2f}"}
    if case.compiled is None:
        return row | {"compiled": "-", "compiled x": "-"}
    compiled = milliseconds(case.compiled, case.inputs)
    return row | {"compiled": f"{compiled:.2f}", "compiled x": f"{plain / compiled:.2f}"}


def milliseconds(function: Kernel, inputs: tuple[Tensor, ...]) -> float:
    """Return the time of one forward and backward, the fastest of REPEATS after a warm-up."""
    times = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        out = function(*inputs)
        out.backward(torch.ones_like(out))
        times.append(time.perf_counter() - started)
        for x in inputs:
            x.grad = None
    return 1000 * min(times[1:])
