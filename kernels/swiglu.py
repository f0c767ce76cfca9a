"""The MLP's activations: SwiGLU (arXiv 2002.05202) on a merged [gate | up] input, and GELU in its tanh form (arXiv 1606.08415)."""
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.grad import wide
from kernels.jit import jit


def swiglu(gate_up: Tensor, fused: bool = False) -> Tensor:
    """silu(gate) * up. gate_up [..., 2f], the first half gate -> [..., f]."""
    return _Activation.apply(gate_up, jit(swiglu_forward, fused), jit(swiglu_backward, fused))


def weighted_swiglu(gate_up: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up * weight: a router's probability, applied where it costs least. gate_up [m, 2f], weight [m] -> [m, f].
    Never compiled: m is another one each time."""
    return _Weighted.apply(gate_up, weight)


def gelu(x: Tensor, fused: bool = False) -> Tensor:
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))). x [..., f] -> [..., f]."""
    return _Activation.apply(x, jit(gelu_forward, fused), jit(gelu_backward, fused))


def swiglu_forward(gate_up: Tensor) -> Tensor:
    gate, up = (t.to(wide(t.dtype)) for t in gate_up.chunk(2, -1))
    return (F.silu(gate) * up).to(gate_up.dtype)


def swiglu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = (t.to(wide(t.dtype)) for t in gate_up.chunk(2, -1))
    g, s = dy.to(gate.dtype), torch.sigmoid(gate)
    silu = gate * s
    dgate = (1 - s).mul_(silu).add_(s).mul_(up).mul_(g)  # silu' = s + silu (1 - s)
    return torch.cat((dgate.to(dy.dtype), silu.mul_(g).to(dy.dtype)), -1)


def gelu_forward(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    f, c = x.to(wide(x.dtype)), math.sqrt(2 / math.pi)
    t = torch.tanh(c * (f + 0.044715 * f**3))
    slope = 0.5 * (1 + t) + 0.5 * f * (1 - t * t) * c * (1 + 3 * 0.044715 * f * f)
    return (dy.to(f.dtype) * slope).to(x.dtype)


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


def weighted_forward(gate_up: Tensor, weight: Tensor) -> Tensor:
    gate, up = (t.to(wide(t.dtype)) for t in gate_up.chunk(2, -1))
    return F.silu(gate).mul_(up).mul_(weight[:, None].to(gate.dtype)).to(gate_up.dtype)


def weighted_backward(dy: Tensor, gate_up: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """-> dgate_up, dweight."""
    gate, up = (t.to(wide(t.dtype)) for t in gate_up.chunk(2, -1))
    g, s, w = dy.to(gate.dtype), torch.sigmoid(gate), weight[:, None].to(gate.dtype)
    silu, out = gate * s, torch.empty_like(gate_up)
    dgate, dup = out.chunk(2, -1)
    slope = s.mul_(1 - silu).add_(silu).mul_(up)  # silu' = s + silu (1 - s)
    dgate.copy_(slope.mul_(g).mul_(w))
    silu.mul_(g)
    dweight = torch.linalg.vecdot(silu, up)
    dup.copy_(silu.mul_(w))
    return out, dweight.to(weight.dtype)


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, weight):
        ctx.save_for_backward(gate_up, weight)
        return weighted_forward(gate_up, weight)

    @staticmethod
    def backward(ctx, dy):
        return weighted_backward(dy, *ctx.saved_tensors)
