"""Rotary positions (arXiv 2104.09864) in the rotate-half form: channel i turns with channel i + d/2; `halves` brings channels
whose pairs are neighbours (DeepSeek's) into it.

The llama3 scaling of the wavelengths follows the Llama 3.1 release (arXiv 2407.21783, section 3.4.2); yarn is arXiv 2309.00071.
On a GPU the merged q, k, v are turned in place, and so are their gradients where attention's backward wrote them side by side.
"""
import math

import torch
from torch import Tensor

from kernels.grad import wide
from kernels.jit import jit
from kernels.triton_ import fits, power_of_2, tl, triton

TILE = 2048  # pairs of channels a program turns at a time


def frequencies(dim: int, theta: float, factor: float | None = None, low: float = 1.0, high: float = 4.0,
                original: int = 8192, kind: str = "llama3", device: torch.device | None = None) -> Tensor:
    """Radians a position, fp64 [dim/2]; with `factor`, scaled: long waves slowed, short ones kept, a ramp between, over the
    turns within the original context (llama3) or over the channels between those with `high` and `low` turns (yarn)."""
    freq = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
    if factor is None:
        return freq
    if kind == "yarn":
        first, last = (dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (high, low))
        first, last = max(math.floor(first), 0), min(math.ceil(last), dim - 1)
        keep = 1 - ((torch.arange(dim // 2, dtype=torch.float64, device=device) - first) / max(last - first, 1e-3)).clamp(0, 1)
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
    is the way back. On a GPU they are views of qkv, turned in place: whoever still needs the old qkv gets autograd's error.
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


# ---- Triton ------------------------------------------------------------------------------------------------------------------

@triton.jit
def turn_kernel(X, Y, COS, SIN, s, heads, turned, cos_b, cos_s, x_b, x_s, x_h, y_b, y_s, y_h,
                HALF: tl.constexpr, BACK: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """One token: heads 0..turned of X are turned into Y, the others copied."""
    token = tl.program_id(0).to(tl.int64)
    b, i = token // s, token % s
    pair = tl.arange(0, BLOCK)
    cos = tl.load(COS + b * cos_b + i * cos_s + pair, pair < HALF, 0.0)[None, :]
    sin = tl.load(SIN + b * cos_b + i * cos_s + pair, pair < HALF, 0.0)[None, :]
    if BACK:
        sin = -sin  # a rotation's transpose is the rotation back
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)
        inside = (head < heads)[:, None] & (pair < HALF)[None, :]
        from_, to = X + b * x_b + i * x_s + head[:, None] * x_h + pair, Y + b * y_b + i * y_s + head[:, None] * y_h + pair
        left, right = tl.load(from_, inside, 0.0).to(tl.float32), tl.load(from_ + HALF, inside, 0.0).to(tl.float32)
        turns = (head < turned)[:, None]
        tl.store(to, tl.where(turns, left * cos - right * sin, left).to(Y.dtype.element_ty), inside)
        tl.store(to + HALF, tl.where(turns, right * cos + left * sin, right).to(Y.dtype.element_ty), inside)


def launch(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor, turned: int, back: bool = False) -> Tensor:
    """y = x with its first heads turned; y may be x. [b, s, h, d], channels adjacent. cos, sin [b or 1, s, 1, d/2]."""
    b, s, h, d = x.shape
    cos, sin = (t.expand(b, -1, -1, -1) if t.stride(-1) == 1 else t.contiguous() for t in (cos, sin))
    block = power_of_2(d // 2)
    heads = max(1, min(TILE // block, power_of_2(h)))
    if x.numel():
        turn_kernel[(b * s,)](x, y, cos, sin, s, h, turned, *cos.stride()[:2], *x.stride()[:3], *y.stride()[:3],
                              HALF=d // 2, BACK=back, HEADS=heads, BLOCK=block, num_warps=4)
    return y


def turned_back(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What split_backward returns: in place where the three lie side by side, in one pass otherwise."""
    parts, heads = (dq, dk, dv), [t.shape[2] for t in (dq, dk, dv)]
    b, s, _, d = dq.shape
    whole = side_by_side(*parts)
    if whole is not None:
        turned = whole[:, :, :heads[0] + heads[1]]
        launch(turned, turned, cos, sin, heads[0] + heads[1], True)
        return whole
    whole = dq.new_empty(b, s, sum(heads), d)
    for part, into, turn in zip(parts, whole.split(heads, 2), (True, True, False)):
        launch(part if part.stride(-1) == 1 else part.contiguous(), into, cos, sin, part.shape[2] if turn else 0, True)
    return whole


def side_by_side(*parts: Tensor) -> Tensor | None:
    """The contiguous [b, s, sum of heads, d] whose heads the parts are, in this order; None: they are not."""
    b, s, _, d = parts[0].shape
    total, at = sum(t.shape[2] for t in parts), parts[0].storage_offset()
    for part in parts:
        if part.stride() != (s * total * d, total * d, d, 1) or part.storage_offset() != at \
                or part.untyped_storage().data_ptr() != parts[0].untyped_storage().data_ptr():
            return None
        at += part.shape[2] * d
    return parts[0].as_strided((b, s, total, d), parts[0].stride())


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, fused):
        ctx.save_for_backward(cos, sin)
        ctx.fused, ctx.triton = fused, fits("rope", x, cos)
        if ctx.triton:
            x = x if x.stride(-1) == 1 else x.contiguous()
            return launch(x, torch.empty_like(x), cos, sin, x.shape[2])
        return jit(rotate, fused)(x, cos, sin)

    @staticmethod
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        if ctx.triton:
            dy = dy if dy.stride(-1) == 1 else dy.contiguous()
            return launch(dy, torch.empty_like(dy), cos, sin, dy.shape[2], True), None, None, None
        return jit(rotate, ctx.fused)(dy, cos, -sin), None, None, None


class _SplitRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cos, sin, heads, kv, fused):
        ctx.save_for_backward(cos, sin)
        ctx.fused, ctx.triton = fused, fits("rope", qkv, cos)
        if ctx.triton:
            if qkv.is_leaf or qkv.stride(-1) != 1:  # a leaf is its owner's
                qkv = qkv.clone(memory_format=torch.contiguous_format)
            torch.autograd.graph.increment_version(qkv)
            turned = qkv.detach()[:, :, :heads + kv]
            launch(turned, turned, cos, sin, heads + kv)
            return qkv.detach().split((heads, kv, kv), 2)
        return jit(split_forward, fused)(qkv, cos, sin, heads + kv).transpose(1, 2).split((heads, kv, kv), 2)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        if ctx.triton:
            return turned_back(dq, dk, dv, *ctx.saved_tensors), *[None] * 5
        return jit(split_backward, ctx.fused)(dq, dk, dv, *ctx.saved_tensors), *[None] * 5
