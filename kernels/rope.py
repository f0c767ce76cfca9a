"""Rotary position embedding (RoPE, arXiv 2104.09864), rotate-half form: channels i and i + d/2 are a pair.

`pairs_to_halves` converts from the other form, in which neighbouring channels rotate together (DeepSeek). The
llama3 scaling of the wavelengths follows the Llama 3.1 release (arXiv 2407.21783, section 3.4.2); yarn is
arXiv 2309.00071.

On a GPU the merged q, k, v are rotated in place.
"""
import functools
import math

import torch
from torch import Tensor

from kernels.grad import accumulation_dtype
from kernels.jit import jit
from kernels.tiles import inside_matrix, load_fp32, tile_offsets
from kernels.triton_ import by_channel, kernel_is_available, power_of_2, tl, triton

WITHOUT_FP64 = ("mps",)  # devices without fp64: Apple's GPUs compute in fp32 at most
TILE = 2048  # pairs of channels that a program rotates at a time


def angle_dtype(device: torch.device | None) -> torch.dtype:
    """Return fp64 if the device has it. In fp32 an angle of 8,192 radians is wrong by up to 5e-4."""
    return torch.float32 if device is not None and device.type in WITHOUT_FP64 else torch.float64


def plain_frequencies(dim: int, theta: float, device: torch.device | None = None) -> Tensor:
    """Return the radians per position of each pair of channels, [dim/2] in angle_dtype."""
    exponents = torch.arange(0, dim, 2, dtype=angle_dtype(device), device=device) / dim
    return theta ** -exponents


def frequencies(
    dim: int,
    theta: float,
    factor: float | None = None,
    low: float = 1.0,
    high: float = 4.0,
    original: int = 8192,
    kind: str = "llama3",
    truncate: bool = True,
    slowed: tuple[float, ...] | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Return plain_frequencies, changed for a longer context than the model was trained on.

    factor is how many times longer than `original` tokens the context is; None for no scaling. Long waves are
    slowed by the factor, short waves are kept, and a linear ramp connects them. The ramp runs over the
    channels' number of rotations within the original context, from `low` to `high` (kind llama3; a step if
    they are equal), or over the channels between those with `high` and `low` rotations (kind yarn; truncate:
    between whole channels). Kind linear slows all waves.
    slowed divides the frequency of each pair (LongRoPE); with it, no other scaling applies.
    """
    plain = plain_frequencies(dim, theta, device)
    if slowed is not None:
        return plain / numbers_on(device, slowed)
    if factor is None:
        return plain
    if kind == "linear":
        return plain / factor
    if kind == "yarn":
        kept = yarn_kept_share(dim, theta, low, high, original, truncate, device)
    else:
        rotations = original * plain / (2 * math.pi)  # within the original context
        kept = (rotations >= low).to(plain)
        if low < high:
            kept = ((rotations - low) / (high - low)).clamp(0, 1)
    return plain * (kept + (1 - kept) / factor)


@functools.lru_cache(maxsize=64)
def numbers_on(device: torch.device | None, numbers: tuple[float, ...]) -> Tensor:
    """Return the numbers in angle_dtype, cached on the device: a copy from the host makes it wait."""
    return torch.tensor(numbers, dtype=angle_dtype(device), device=device)


def longrope_scale(factor: float, original: int) -> float:
    """Return LongRoPE's factor of cos and sin, for a context of `factor` times `original` tokens."""
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def yarn_kept_share(
    dim: int,
    theta: float,
    low: float,
    high: float,
    original: int,
    truncate: bool,
    device: torch.device | None,
) -> Tensor:
    """Return the share of its plain frequency that each pair keeps under YaRN: [dim/2] in [0, 1]."""

    def channel(rotations: float) -> float:
        """Return the (fractional) pair of channels that rotates this often within the original context."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = channel(high), channel(low)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    channels = torch.arange(dim // 2, dtype=angle_dtype(device), device=device)
    return 1 - ((channels - first) / max(last - first, 1e-3)).clamp(0, 1)


def yarn_mscale(factor: float | None, weight: float) -> float:
    """Return YaRN's scale of the attention logits: 1 + weight ln(factor) / 10, or 1 without extension."""
    if factor is None or factor <= 1:
        return 1.0
    return 1 + 0.1 * weight * math.log(factor)


def cos_sin_tables(
    positions: Tensor, freq: Tensor, dtype: torch.dtype, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return cos and sin [b, s, 1, d/2] of the angles, times `scale`, in at least fp32, given positions [b,
    s] and freq [d/2]."""
    table_dtype = accumulation_dtype(dtype)
    angle = positions[..., None, None].to(freq.dtype) * freq
    cos = (angle.cos() * scale).to(table_dtype)
    sin = (angle.sin() * scale).to(table_dtype)
    return cos, sin


def pairs_to_halves(x: Tensor) -> Tensor:
    """[..., d] with channels 2i and 2i + 1 as pairs -> [..., d] with channels i and i + d/2 as pairs."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, compiled: bool = False) -> Tensor:
    """Rotate all heads of x. x [b, s, h, d], cos and sin [b, s, 1, d/2] -> [b, s, h, d]."""
    return _Rope.apply(x, cos, sin, compiled)


def split_heads_and_apply_rope(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv: int,
    compiled: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a merged projection into q, k and v, and rotate q and k.

    qkv [b, s, heads + 2 kv, d] or [b, s, (heads + 2 kv) d], with the heads of q, k and v in this order; cos
    and sin [b, s, 1, d/2] -> q [b, s, heads, d], k and v [b, s, kv, d].

    On a CPU the results are stored head by head, as batched GEMMs prefer them: split, rotation and
    transposition are one pass, and so is their backward. On a GPU the results are views of qkv, which is
    rotated in place: another operation that needs the old qkv in its backward gets autograd's error.
    """
    return SplitRope.apply(qkv, cos, sin, heads, kv, compiled)


# ---- reference ---------------------------------------------------------------------------------------------

def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Reference. x [b, s, h, d], cos and sin [b, s, 1, d/2] -> the shape and dtype of x."""
    left, right = x.to(cos.dtype).chunk(2, -1)
    new_left = torch.addcmul(left * cos, right, sin, value=-1)
    new_right = torch.addcmul(right * cos, left, sin)
    return torch.cat((new_left, new_right), -1).to(x.dtype)


def split_forward(qkv: Tensor, cos: Tensor, sin: Tensor, rotated: int) -> Tensor:
    """Rotate the first `rotated` heads: [b, s, h, d] -> [b, h, s, d]."""
    b, s, h, d = qkv.shape
    out = qkv.new_empty(b, h, s, d)
    q_and_k = rotate(qkv[:, :, :rotated], cos, sin)  # [b, s, rotated, d]
    v = qkv[:, :, rotated:]
    out[:, :rotated] = q_and_k.transpose(1, 2)
    out[:, rotated:] = v.transpose(1, 2)
    return out


def split_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the gradient of qkv [b, s, heads + 2 kv, d], from those of q, k and v in any memory order."""
    # the transpose of a rotation is the rotation by the negative angle
    dq = rotate(dq, cos, -sin)
    dk = rotate(dk, cos, -sin)
    return torch.cat((dq, dk, dv), 2)


# ---- Triton ------------------------------------------------------------------------------------------------

@triton.jit
def load_angles(COS, SIN, pairs, HALF: tl.constexpr):
    """Load cos and sin [1, BLOCK] of a token's pairs of channels; COS and SIN point to its table rows."""
    cos = tl.load(COS + pairs, pairs < HALF, 0.0)
    sin = tl.load(SIN + pairs, pairs < HALF, 0.0)
    return cos[None, :], sin[None, :]


@triton.jit
def turn(left, right, cos, sin):
    """Rotate both channels of some pairs by their angles: all four in fp32."""
    return left * cos - right * sin, right * cos + left * sin


@triton.jit
def turn_back(left, right, cos, sin):
    """Invert turn: the transpose of a rotation is the rotation by the negative angle."""
    return left * cos + right * sin, right * cos - left * sin


@triton.jit
def turn_heads(
    X, Y, cos, sin, heads, x_stride, y_stride,
    HALF: tl.constexpr,
    INVERSE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotate the heads of one token of X, `x_stride` apart, into Y. HEADS at a time."""
    pairs = tl.arange(0, BLOCK)
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)
        inside = inside_matrix(head, pairs, heads, HALF)
        source = X + tile_offsets(head, pairs, x_stride)
        target = Y + tile_offsets(head, pairs, y_stride)
        left = load_fp32(source, inside)  # [HEADS, BLOCK]
        right = load_fp32(source + HALF, inside)

        if INVERSE:
            new_left, new_right = turn_back(left, right, cos, sin)
        else:
            new_left, new_right = turn(left, right, cos, sin)
        tl.store(target, new_left, inside)
        tl.store(target + HALF, new_right, inside)


@triton.jit
def rope_kernel(
    X, Y, COS, SIN, s, heads, table_strides, x_strides, y_strides,
    HALF: tl.constexpr,
    INVERSE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotate the heads of one token of X into Y.

    table_strides are those of COS and SIN over sequences and tokens; x_strides and y_strides also over heads.
    """
    token = tl.program_id(0).to(tl.int64)
    batch = token // s
    position = token % s
    table_offset = batch * table_strides[0] + position * table_strides[1]
    cos, sin = load_angles(COS + table_offset, SIN + table_offset, tl.arange(0, BLOCK), HALF=HALF)
    X += batch * x_strides[0] + position * x_strides[1]
    Y += batch * y_strides[0] + position * y_strides[1]
    turn_heads(
        X, Y, cos, sin, heads, x_strides[2], y_strides[2],
        HALF=HALF, INVERSE=INVERSE, HEADS=HEADS, BLOCK=BLOCK,
    )


def heads_of_tile(heads: int, block: int, tile: int = TILE) -> int:
    """Return how many heads a program processes at a time. A head takes `block` of `tile`."""
    return max(1, min(tile // block, power_of_2(heads)))


def launch_rope(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Write x with its heads rotated to y, which may be x, and return y.

    x and y [b, s, h, d] have adjacent channels; cos and sin are [b or 1, s, 1, d/2].
    """
    b, s, h, d = x.shape
    cos = per_sequence(cos, b)
    sin = per_sequence(sin, b)
    block = power_of_2(d // 2)
    if x.numel():
        rope_kernel[(b * s,)](
            x, y, cos, sin, s, h, cos.stride()[:2], x.stride()[:3], y.stride()[:3],
            HALF=d // 2,
            INVERSE=inverse,
            HEADS=heads_of_tile(h, block),
            BLOCK=block,
            num_warps=4,
        )
    return y


def per_sequence(table: Tensor, b: int) -> Tensor:
    """Return cos or sin [b or 1, s, 1, d/2] as the kernel reads it: expanded to b, with adjacent channels."""
    return by_channel(table).expand(b, -1, -1, -1)


def rope_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Run split_backward in Triton."""
    b, s, heads, d = dq.shape
    kv = dk.shape[2]
    dqkv = dq.new_empty(b, s, heads + 2 * kv, d)
    launch_rope(by_channel(dq), dqkv[:, :, :heads], cos, sin, inverse=True)
    launch_rope(by_channel(dk), dqkv[:, :, heads:heads + kv], cos, sin, inverse=True)
    dqkv[:, :, heads + kv:] = dv
    return dqkv


# ---- autograd ----------------------------------------------------------------------------------------------

class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor, compiled: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.compiled = compiled
        ctx.triton = kernel_is_available("rope", x, cos)
        if ctx.triton:
            x = by_channel(x)
            return launch_rope(x, torch.empty_like(x), cos, sin)
        return jit(rotate, compiled)(x, cos, sin)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        if ctx.triton:
            dy = by_channel(dy)
            dx = launch_rope(dy, torch.empty_like(dy), cos, sin, inverse=True)
        else:
            dx = jit(rotate, ctx.compiled)(dy, cos, -sin)
        return dx, None, None, None


class SplitRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: int,
        kv: int,
        compiled: bool,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.compiled = compiled
        ctx.triton = kernel_is_available("rope", qkv, cos)
        ctx.shape = qkv.shape
        rotated = heads + kv
        if not ctx.triton:
            by_head = qkv.flatten(2).unflatten(2, (heads + 2 * kv, -1))  # [b, s, h, d]
            out = jit(split_forward, compiled)(by_head, cos, sin, rotated)  # [b, h, s, d]
            return out.transpose(1, 2).split((heads, kv, kv), 2)

        if qkv.is_leaf or qkv.stride(-1) != 1:  # a leaf belongs to the caller, and must not change
            qkv = qkv.clone(memory_format=torch.contiguous_format)
        torch.autograd.graph.increment_version(qkv)
        by_head = qkv.detach().flatten(2).unflatten(2, (heads + 2 * kv, -1))
        q_and_k = by_head[:, :, :rotated]
        launch_rope(q_and_k, q_and_k, cos, sin)
        return by_head.split((heads, kv, kv), 2)

    @staticmethod
    def backward(ctx, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        backward = rope_backward if ctx.triton else jit(split_backward, ctx.compiled)
        dqkv = backward(dq, dk, dv, cos, sin).view(ctx.shape)
        return dqkv, None, None, None, None, None
