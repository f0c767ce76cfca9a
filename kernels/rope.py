"""Rotary position embedding (RoPE, arXiv 2104.09864), rotate-half form: channels i and i + d/2 are a pair.

`pairs_to_halves` converts from the other form, in which neighbouring channels rotate together (DeepSeek). The
llama3 scaling of the wavelengths follows the Llama 3.1 release (arXiv 2407.21783, section 3.4.2); yarn is
arXiv 2309.00071.

On a GPU the merged q, k, v are rotated in place. So are their gradients, if the backward of attention wrote
them side by side; otherwise one kernel reads them where they are, and writes the merged gradient. An fp8
linear that produced q, k, v computes that gradient itself (kernels/fp8_rope.py).
"""
import functools
import math

import torch
from torch import Tensor

from kernels.fp8_origin import Origin, Reader, unwritten
from kernels.grad import accumulation_dtype
from kernels.jit import jit
from kernels.tiles import inside_matrix, load_fp32, tile_offsets
from kernels.triton_ import by_channel, kernel_is_available, power_of_2, tl, triton

WITHOUT_FP64 = ("mps",)  # devices without fp64: Apple's GPUs compute in fp32 at most
TILE = 2048  # pairs of channels that a program rotates at a time


def angle_dtype(device: torch.device | None) -> torch.dtype:
    """Return fp64 if the device has it. In fp32 an angle of 8,192 radians is wrong by up to 5e-4."""
    return torch.float32 if device is not None and device.type in WITHOUT_FP64 else torch.float64


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
    """Return the radians per position of each pair of channels, [dim/2] in angle_dtype.

    factor is how many times longer than `original` tokens the context is; None for no scaling. Long waves are
    slowed by the factor, short waves are kept, and a linear ramp connects them. The ramp runs over the
    channels' number of rotations within the original context, from `low` to `high` (kind llama3; a step if
    they are equal), or over the channels between those with `high` and `low` rotations (kind yarn; truncate:
    between whole channels). Kind linear slows all waves.
    slowed divides the frequency of each pair (LongRoPE); with it, no other scaling applies.
    """
    exponents = torch.arange(0, dim, 2, dtype=angle_dtype(device), device=device) / dim
    plain = theta ** -exponents
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
    reader: Reader | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a merged projection into q, k and v, and rotate q and k.

    qkv [b, s, heads + 2 kv, d] or [b, s, (heads + 2 kv) d], with the heads of q, k and v in this order; cos
    and sin [b, s, 1, d/2] -> q [b, s, heads, d], k and v [b, s, kv, d].
    reader is the fp8 linear that produced qkv and is the sole consumer of its gradient. The gradient is left
    to it, unless it has blockwise scales (kernels/fp8_origin.py).

    On a CPU the results are stored head by head, as batched GEMMs prefer them: split, rotation and
    transposition are one pass, and so is their backward. On a GPU the results are views of qkv, which is
    rotated in place: another operation that needs the old qkv in its backward gets autograd's error.
    """
    return _SplitRope.apply(qkv, cos, sin, heads, kv, compiled, reader)


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
def copy_heads(
    X, Y, heads, x_stride, y_stride,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the first WIDTH channels of the heads of one token of X to Y. HEADS at a time."""
    channels = tl.arange(0, BLOCK)
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)
        inside = inside_matrix(head, channels, heads, WIDTH)
        values = tl.load(X + tile_offsets(head, channels, x_stride), inside)
        tl.store(Y + tile_offsets(head, channels, y_stride), values, inside)


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


@triton.jit
def merge_gradients_kernel(
    DQ, DK, DV, DQKV, COS, SIN, s, heads, kv,
    table_strides, dq_strides, dk_strides, dv_strides, dqkv_strides,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one token's gradient of the merged projection, from those of q and k, rotated back, and of v.

    heads: of q; kv: of k and of v. HEADS and KV_HEADS of them at a time. Strides as in rope_kernel.
    """
    token = tl.program_id(0).to(tl.int64)
    batch = token // s
    position = token % s
    table_offset = batch * table_strides[0] + position * table_strides[1]
    cos, sin = load_angles(COS + table_offset, SIN + table_offset, tl.arange(0, BLOCK), HALF=HALF)
    DQ += batch * dq_strides[0] + position * dq_strides[1]
    DK += batch * dk_strides[0] + position * dk_strides[1]
    DV += batch * dv_strides[0] + position * dv_strides[1]
    DQKV += batch * dqkv_strides[0] + position * dqkv_strides[1]
    stride = dqkv_strides[2]
    turn_heads(
        DQ, DQKV, cos, sin, heads, dq_strides[2], stride,
        HALF=HALF, INVERSE=True, HEADS=HEADS, BLOCK=BLOCK,
    )
    turn_heads(
        DK, DQKV + heads * stride, cos, sin, kv, dk_strides[2], stride,
        HALF=HALF, INVERSE=True, HEADS=KV_HEADS, BLOCK=BLOCK,
    )
    copy_heads(
        DV, DQKV + (heads + kv) * stride, kv, dv_strides[2], stride,
        WIDTH=2 * HALF, HEADS=KV_HEADS, BLOCK=2 * BLOCK,
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
    """Run split_backward in Triton: in place if dq, dk and dv are adjacent in memory, else reading them where
    they are, in one pass."""
    b, s, heads, d = dq.shape
    kv = dk.shape[2]
    dqkv = side_by_side(dq, dk, dv)
    if dqkv is not None:
        rotated = dqkv[:, :, :heads + kv]
        launch_rope(rotated, rotated, cos, sin, inverse=True)
        return dqkv

    dqkv = dq.new_empty(b, s, heads + 2 * kv, d)
    dq, dk, dv = by_channel(dq), by_channel(dk), by_channel(dv)
    cos = per_sequence(cos, b)
    sin = per_sequence(sin, b)
    block = power_of_2(d // 2)
    if dqkv.numel():
        merge_gradients_kernel[(b * s,)](
            dq, dk, dv, dqkv, cos, sin, s, heads, kv,
            cos.stride()[:2], dq.stride()[:3], dk.stride()[:3], dv.stride()[:3], dqkv.stride()[:3],
            HALF=d // 2,
            HEADS=heads_of_tile(heads, block),
            KV_HEADS=heads_of_tile(kv, block),
            BLOCK=block,
            num_warps=4,
        )
    return dqkv


def side_by_side(*parts: Tensor) -> Tensor | None:
    """Return the contiguous [b, s, sum of heads, d] that these parts form, in this order, or None."""
    first = parts[0]
    b, s, _, d = first.shape
    total = sum(x.shape[2] for x in parts)
    strides = (s * total * d, total * d, d, 1)
    storage = first.untyped_storage().data_ptr()
    offset = first.storage_offset()
    for part in parts:
        if part.stride() != strides or part.storage_offset() != offset:
            return None
        if part.untyped_storage().data_ptr() != storage:
            return None
        offset += part.shape[2] * d
    return first.as_strided((b, s, total, d), strides)


# ---- gradient computed by an fp8 linear (kernels/fp8_rope.py) ----------------------------------------------

def computes_gradient(reader: Reader, dq: Tensor, dk: Tensor, dv: Tensor) -> bool:
    """Whether the casts of a linear can compute the gradient of its result from these [b, s, heads, d]."""
    are_alike = all(x.stride(-1) == 1 and x.dtype == dq.dtype for x in (dq, dk, dv))
    return reader.kind in ("tensor", "row") and are_alike and reader.takes(dq, dk, dv)


def unwritten_gradient(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, shape: tuple[int, ...]
) -> Tensor:
    """Return split_backward as an unwritten tensor, left to the linear that reads it."""
    b, s, heads, d = dq.shape
    matrix = b * s, (heads + 2 * dk.shape[2]) * d
    tables = per_sequence(cos, b), per_sequence(sin, b)
    return unwritten(Origin("rope_backward", matrix, (dq, dk, dv, *tables)), shape, like=dq)


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


class _SplitRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: int,
        kv: int,
        compiled: bool,
        reader: Reader | None,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.compiled = compiled
        ctx.triton = kernel_is_available("rope", qkv, cos)
        ctx.reader = reader
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
        if ctx.triton and ctx.reader is not None and computes_gradient(ctx.reader, dq, dk, dv):
            dqkv = unwritten_gradient(dq, dk, dv, cos, sin, ctx.shape)
        else:
            backward = rope_backward if ctx.triton else jit(split_backward, ctx.compiled)
            dqkv = backward(dq, dk, dv, cos, sin).view(ctx.shape)
        return dqkv, None, None, None, None, None, None
