"""Rotary positions (arXiv 2104.09864) in the rotate-half form: channel i turns with channel i + d/2; `halves` brings channels
whose pairs are neighbours (DeepSeek's) into it.

The llama3 scaling of the wavelengths follows the Llama 3.1 release (arXiv 2407.21783, section 3.4.2); yarn is arXiv 2309.00071.
"""
import math

import torch
from torch import Tensor

from kernels.grad import wide
from kernels.jit import jit


def frequencies(dim: int, theta: float, factor: float | None = None, low: float = 1.0, high: float = 4.0,
                original: int = 8192, kind: str = "llama3") -> Tensor:
    """Radians a position, fp64 [dim/2]; with `factor`, scaled: long waves slowed, short ones kept, a ramp between, over the
    turns within the original context (llama3) or over the channels between those with `high` and `low` turns (yarn)."""
    freq = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if factor is None:
        return freq
    if kind == "yarn":
        first, last = (dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (high, low))
        first, last = max(math.floor(first), 0), min(math.ceil(last), dim - 1)
        keep = 1 - ((torch.arange(dim // 2, dtype=torch.float64) - first) / max(last - first, 1e-3)).clamp(0, 1)
    else:
        turns = original * freq / (2 * math.pi)  # how often a channel turns within the original context
        keep = ((turns - low) / (high - low)).clamp(0, 1)
    return freq * (keep + (1 - keep) / factor)


def mscale(factor: float | None, weight: float) -> float:
    """YaRN's growth of the attention logits with the length: 1 + weight ln(factor) / 10, 1 where nothing is made longer."""
    return 1.0 if factor is None or factor <= 1 else 1 + 0.1 * weight * math.log(factor)


def tables(positions: Tensor, freq: Tensor, dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """positions [b, s] -> cos, sin [b, s, 1, d/2] in at least fp32, times `scale`."""
    angle = positions[..., None, None].to(torch.float64) * freq
    return (angle.cos() * scale).to(wide(dtype)), (angle.sin() * scale).to(wide(dtype))


def halves(x: Tensor) -> Tensor:
    """[..., d], channels 2i and 2i + 1 a pair -> [..., d], channels i and i + d/2."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def rope(x: Tensor, cos: Tensor, sin: Tensor, fused: bool = False) -> Tensor:
    """x [b, s, h, d], cos and sin [b, s, 1, d/2] -> [b, s, h, d]."""
    return _Rope.apply(x, cos, sin, fused)


def split_rope(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv: int, fused: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [b, s, heads + 2 kv, d], heads of q, k, v in this order -> q [b, s, heads, d], k and v [b, s, kv, d]; q and k turned.

    The results lie head by head in memory, as batched GEMMs like them: split, turn and transposition are one pass, and so
    is the way back.
    """
    return _SplitRope.apply(qkv, cos, sin, heads, kv, fused)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The definition. x [b, s, h, d] -> the same shape and dtype."""
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat((torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)), -1).to(x.dtype)


def split_forward(qkv: Tensor, cos: Tensor, sin: Tensor, turned: int) -> Tensor:
    """[b, s, h, d], the first `turned` heads to be turned -> [b, h, s, d]."""
    b, s, h, d = qkv.shape
    out = qkv.new_empty(b, h, s, d)
    out[:, :turned] = rotate(qkv[:, :, :turned], cos, sin).transpose(1, 2)
    out[:, turned:] = qkv[:, :, turned:].transpose(1, 2)
    return out


def split_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Three times [b, s, h, d] in any memory order -> [b, s, heads + 2 kv, d]."""
    return torch.cat((rotate(dq, cos, -sin), rotate(dk, cos, -sin), dv), 2)  # a rotation's transpose is the rotation back


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, fused):
        ctx.save_for_backward(cos, sin)
        ctx.fused = fused
        return jit(rotate, fused)(x, cos, sin)

    @staticmethod
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        return jit(rotate, ctx.fused)(dy, cos, -sin), None, None, None


class _SplitRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cos, sin, heads, kv, fused):
        ctx.save_for_backward(cos, sin)
        ctx.fused = fused
        return jit(split_forward, fused)(qkv, cos, sin, heads + kv).transpose(1, 2).split((heads, kv, kv), 2)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        return jit(split_backward, ctx.fused)(dq, dk, dv, *ctx.saved_tensors), *[None] * 5
