"""Rotary positions (arXiv 2104.09864) in the rotate-half form: channel i turns with channel i + d/2.

The llama3 scaling of the wavelengths follows the Llama 3.1 release (arXiv 2407.21783, section 3.4.2).
"""
import math

import torch
from torch import Tensor

from kernels.grad import wide


def frequencies(dim: int, theta: float, factor: float | None = None, low: float = 1.0, high: float = 4.0,
                original: int = 8192) -> Tensor:
    """Radians a position, fp64 [dim/2]; with `factor`, llama3-scaled: long waves slowed, short ones kept, a ramp between."""
    freq = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if factor is None:
        return freq
    turns = original * freq / (2 * math.pi)  # how often a channel turns within the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return freq * (keep + (1 - keep) / factor)


def tables(positions: Tensor, freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """positions [b, s] -> cos, sin [b, s, 1, d/2] in at least fp32."""
    angle = positions[..., None, None].to(torch.float64) * freq
    return angle.cos().to(wide(dtype)), angle.sin().to(wide(dtype))


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [b, s, h, d], cos and sin [b, s, 1, d/2] -> [b, s, h, d]."""
    return _Rope.apply(x, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        return rotate(dy, cos, -sin), None, None  # a rotation's transpose is the rotation back
