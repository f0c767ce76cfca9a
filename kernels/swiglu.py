"""The MLP's activations: SwiGLU (arXiv 2002.05202) on a merged [gate | up] input, and GELU in its tanh form (arXiv 1606.08415)."""
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.grad import wide
from kernels.jit import jit
from kernels.triton_ import ceil_div, fits, tl, triton

BLOCK = 2048  # channels of one token, a program: two 128-bit loads of bf16 a thread
WARPS = 4
ROWS = 256  # of a weighted SwiGLU that a CPU works on at a time: they stay in its cache between the operations on them
CUBIC, SLOPE = 0.044715, math.sqrt(2 / math.pi)  # of GELU's tanh form


def swiglu(gate_up: Tensor, fused: bool = False) -> Tensor:
    """silu(gate) * up. gate_up [..., 2f], the first half gate -> [..., f]."""
    if fits("swiglu", gate_up):
        return _Activation.apply(gate_up, launch_swiglu, launch_swiglu_backward)
    return _Activation.apply(gate_up, jit(swiglu_forward, fused), jit(swiglu_backward, fused))


def weighted_swiglu(gate_up: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up * weight: a router's probability, applied where it costs least. gate_up [m, 2f], weight [m] -> [m, f].
    Never compiled: m is another one each time."""
    return _Weighted.apply(gate_up, weight)


def gelu(x: Tensor, fused: bool = False) -> Tensor:
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))). x [..., f] -> [..., f]."""
    if fits("gelu", x):
        return _Activation.apply(x, launch_gelu, launch_gelu_backward)
    return _Activation.apply(x, jit(gelu_forward, fused), jit(gelu_backward, fused))


def swiglu_forward(gate_up: Tensor) -> Tensor:
    gate, up = (t.to(wide(t.dtype)) for t in gate_up.chunk(2, -1))
    return (F.silu(gate) * up).to(gate_up.dtype)


def swiglu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = (t.to(wide(t.dtype)) for t in gate_up.chunk(2, -1))
    g = dy.to(gate.dtype)
    dgate = torch.ops.aten.silu_backward(g * up, gate)
    return torch.cat((dgate.to(dy.dtype), F.silu(gate).mul_(g).to(dy.dtype)), -1)


def gelu_forward(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    f = x.to(wide(x.dtype))
    t = torch.tanh(SLOPE * (f + CUBIC * f**3))
    slope = 0.5 * (1 + t) + 0.5 * f * (1 - t * t) * SLOPE * (1 + 3 * CUBIC * f * f)
    return (dy.to(f.dtype) * slope).to(x.dtype)


def weighted_forward(gate_up: Tensor, weight: Tensor) -> Tensor:
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    for into, both, w in zip(*(t.split(ROWS) for t in (out, gate_up, weight[:, None]))):
        gate, up = (t.to(wide(t.dtype)) for t in both.chunk(2, -1))
        torch.mul(F.silu(gate).mul_(up), w.to(gate.dtype), out=into)
    return out


def weighted_backward(dy: Tensor, gate_up: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """-> dgate_up, dweight."""
    out, dweight = torch.empty_like(gate_up), torch.empty_like(weight)
    for into, dw, d, both, w in zip(*(t.split(ROWS) for t in (out, dweight, dy, gate_up, weight[:, None]))):
        gate, up = (t.to(wide(t.dtype)) for t in both.chunk(2, -1))
        (dgate, dup), g, w = into.chunk(2, -1), d.to(gate.dtype), w.to(gate.dtype)
        raw = F.silu(gate).mul_(g)
        dw.copy_(torch.linalg.vecdot(raw, up))
        torch.mul(raw, w, out=dup)
        dgate.copy_(torch.ops.aten.silu_backward(torch.mul(g, up, out=raw).mul_(w), gate))
    return out, dweight


# ---- Triton ------------------------------------------------------------------------------------------------------------------

@triton.jit
def swiglu_kernel(GATE_UP, WEIGHT, Y, f, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(GATE_UP + row * 2 * f + cols, cols < f).to(tl.float32)
    up = tl.load(GATE_UP + row * 2 * f + f + cols, cols < f).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    if WEIGHTED:
        y *= tl.load(WEIGHT + row).to(tl.float32)
    tl.store(Y + row * f + cols, y.to(Y.dtype.element_ty), cols < f)


@triton.jit
def swiglu_backward_kernel(DY, GATE_UP, DGATE_UP, f, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row * 2 * f + cols
    gate = tl.load(GATE_UP + at, cols < f).to(tl.float32)
    up = tl.load(GATE_UP + f + at, cols < f).to(tl.float32)
    g = tl.load(DY + row * f + cols, cols < f).to(tl.float32)
    s = tl.sigmoid(gate)
    silu = gate * s
    tl.store(DGATE_UP + at, (g * up * (s + silu * (1 - s))).to(DGATE_UP.dtype.element_ty), cols < f)
    tl.store(DGATE_UP + f + at, (g * silu).to(DGATE_UP.dtype.element_ty), cols < f)


@triton.jit
def weighted_backward_kernel(DY, GATE_UP, WEIGHT, DGATE_UP, DWEIGHT, f, BLOCK: tl.constexpr):
    """One row whole: the weight's gradient is a sum over it."""
    row = tl.program_id(0).to(tl.int64)
    weight, total = tl.load(WEIGHT + row).to(tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(0, f, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        at = row * 2 * f + cols
        gate = tl.load(GATE_UP + at, cols < f, 0.0).to(tl.float32)
        up = tl.load(GATE_UP + f + at, cols < f, 0.0).to(tl.float32)
        g = tl.load(DY + row * f + cols, cols < f, 0.0).to(tl.float32)
        s = tl.sigmoid(gate)
        silu = gate * s
        total += g * silu * up
        g *= weight
        tl.store(DGATE_UP + at, (g * up * (s + silu * (1 - s))).to(DGATE_UP.dtype.element_ty), cols < f)
        tl.store(DGATE_UP + f + at, (g * silu).to(DGATE_UP.dtype.element_ty), cols < f)
    tl.store(DWEIGHT + row, tl.sum(total, 0).to(DWEIGHT.dtype.element_ty))


@triton.jit
def gelu_kernel(X, Y, n, CUBIC: tl.constexpr, SLOPE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, at < n).to(tl.float32)
    y = x * tl.sigmoid(2 * SLOPE * (x + CUBIC * x * x * x))  # (1 + tanh u)/2 = sigmoid(2u)
    tl.store(Y + at, y.to(Y.dtype.element_ty), at < n)


@triton.jit
def gelu_backward_kernel(DY, X, DX, n, CUBIC: tl.constexpr, SLOPE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, at < n).to(tl.float32)
    s = tl.sigmoid(2 * SLOPE * (x + CUBIC * x * x * x))
    slope = s + x * s * (1 - s) * 2 * SLOPE * (1 + 3 * CUBIC * x * x)
    tl.store(DX + at, (tl.load(DY + at, at < n).to(tl.float32) * slope).to(DX.dtype.element_ty), at < n)


def launch_swiglu(gate_up: Tensor, weight: Tensor | None = None) -> Tensor:
    gate_up, f = gate_up.contiguous(), gate_up.shape[-1] // 2
    y = gate_up.new_empty(*gate_up.shape[:-1], f)
    if y.numel():
        swiglu_kernel[(y.numel() // f, ceil_div(f, BLOCK))](gate_up, gate_up if weight is None else weight.contiguous(), y, f,
                                                            WEIGHTED=weight is not None, BLOCK=BLOCK, num_warps=WARPS)
    return y


def launch_swiglu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    dy, gate_up, f = dy.contiguous(), gate_up.contiguous(), dy.shape[-1]
    dx = torch.empty_like(gate_up)
    if dy.numel():
        swiglu_backward_kernel[(dy.numel() // f, ceil_div(f, BLOCK))](dy, gate_up, dx, f, BLOCK=BLOCK, num_warps=WARPS)
    return dx


def launch_weighted_backward(dy: Tensor, gate_up: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """What weighted_backward returns."""
    dy, gate_up, weight = dy.contiguous(), gate_up.contiguous(), weight.contiguous()
    dx, dw = torch.empty_like(gate_up), torch.empty_like(weight)
    if dy.numel():
        weighted_backward_kernel[(len(dy),)](dy, gate_up, weight, dx, dw, dy.shape[1], BLOCK=BLOCK, num_warps=WARPS)
    return dx, dw


def launch_gelu(x: Tensor) -> Tensor:
    x = x.contiguous()
    y, n = torch.empty_like(x), x.numel()
    if n:
        gelu_kernel[(ceil_div(n, BLOCK),)](x, y, n, CUBIC=CUBIC, SLOPE=SLOPE, BLOCK=BLOCK, num_warps=WARPS)
    return y


def launch_gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    dy, x = dy.contiguous(), x.contiguous()
    dx, n = torch.empty_like(x), x.numel()
    if n:
        gelu_backward_kernel[(ceil_div(n, BLOCK),)](dy, x, dx, n, CUBIC=CUBIC, SLOPE=SLOPE, BLOCK=BLOCK, num_warps=WARPS)
    return dx


class _Activation(torch.autograd.Function):
    """Keeps only the input: the output is recomputed inside the backward's expression."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.save_for_backward(x)
        ctx.slope = backward
        return forward(x)

    @staticmethod
    def backward(ctx, dy):
        return ctx.slope(dy, *ctx.saved_tensors), None, None


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, weight):
        ctx.save_for_backward(gate_up, weight)
        ctx.triton = fits("swiglu", gate_up, weight)
        return (launch_swiglu if ctx.triton else weighted_forward)(gate_up, weight)

    @staticmethod
    def backward(ctx, dy):
        return (launch_weighted_backward if ctx.triton else weighted_backward)(dy, *ctx.saved_tensors)
