"""kernels/latent_heads.py in one pass for each direction.

The queries are rotated in place, and the keys of all heads are assembled in one pass; so is the gradient of
each projection, from those of q, k and v where attention wrote them. Channels 2i and 2i + 1 that rotate
together keep their places.
"""
import torch
from torch import Tensor

from kernels import latent_heads
from kernels.rope import heads_of_tile, load_angles, per_sequence, turn, turn_back
from kernels.tiles import inside_matrix, load_fp32, tile_offsets
from kernels.triton_ import by_channel, kernel_is_available, power_of_2, tl, triton
from kernels.unproven.heads import copy_heads

TILE = 2048  # channels that a program processes at a time


def rotate_heads(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    nope_dim: int,
    pairs: bool,
    scale: float = 1.0,
    compiled: bool = False,
) -> Tensor:
    """kernels.latent_heads.rotate_heads, in place: another operation that needs the old x in its backward
    gets autograd's error."""
    if x.numel() and kernel_is_available("latent heads", x, cos):
        return _RotateHeads.apply(x, cos, sin, nope_dim, pairs, scale)
    return latent_heads.rotate_heads(
        x, cos, sin, nope_dim=nope_dim, pairs=pairs, scale=scale, compiled=compiled)


def keys_and_values(
    kv: Tensor,
    rope_key: Tensor,
    angles: tuple[Tensor, Tensor] | None,
    *,
    nope_dim: int,
    pairs: bool,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """kernels.latent_heads.keys_and_values in one pass. If angles is None, this rotate_heads has rotated the
    key."""
    table = None if angles is None else angles[0]
    if kv.numel() and kernel_is_available("latent heads", kv, rope_key, table):
        return _KeysAndValues.apply(kv, rope_key, *(angles or (None, None)), nope_dim, pairs)
    return latent_heads.keys_and_values(
        kv, rope_key, angles, nope_dim=nope_dim, pairs=pairs, compiled=compiled)


# ---- Triton ------------------------------------------------------------------------------------------------
# A head has NOPE channels and then 2 HALF rotated ones, loaded as BLOCK >= HALF pairs. PAIRS: channels 2i and
# 2i + 1 are a pair, else i and i + HALF. A program processes one token, HEADS heads at a time.

@triton.jit
def load_pairs(
    X, head, heads, stride,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Load both channels of all pairs of some heads, `stride` apart, in fp32: two [HEADS, BLOCK]."""
    if PAIRS:
        channels = tl.arange(0, 2 * BLOCK)
        inside = inside_matrix(head, channels, heads, 2 * HALF)
        both = load_fp32(X + tile_offsets(head, channels, stride), inside)
        left, right = tl.split(tl.reshape(both, (head.shape[0], BLOCK, 2)))
    else:
        channels = tl.arange(0, BLOCK)
        inside = inside_matrix(head, channels, heads, HALF)
        pointers = X + tile_offsets(head, channels, stride)
        left = load_fp32(pointers, inside)
        right = load_fp32(pointers + HALF, inside)
    return left, right


@triton.jit
def store_pairs(
    Y, left, right, head, heads, stride,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the pairs that load_pairs loads; left and right are [HEADS, BLOCK]."""
    if PAIRS:
        channels = tl.arange(0, 2 * BLOCK)
        inside = inside_matrix(head, channels, heads, 2 * HALF)
        both = tl.reshape(tl.join(left, right), (head.shape[0], 2 * BLOCK))
        tl.store(Y + tile_offsets(head, channels, stride), both, inside)
    else:
        channels = tl.arange(0, BLOCK)
        inside = inside_matrix(head, channels, heads, HALF)
        pointers = Y + tile_offsets(head, channels, stride)
        tl.store(pointers, left, inside)
        tl.store(pointers + HALF, right, inside)


@triton.jit
def rotate_heads_kernel(
    X, Y, COS, SIN, s, heads, scale, table_strides, x_strides, y_strides,
    ALL: tl.constexpr,
    INVERSE: tl.constexpr,
    NOPE: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    NOPE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Process one token: Y is X times `scale` with its last channels rotated, or (INVERSE) rotated back.

    ALL: X and Y have all channels of a head; else only the rotated ones, and NOPE is 0. table_strides are
    over sequences and tokens; x_strides and y_strides also over heads.
    """
    token = tl.program_id(0).to(tl.int64)
    batch = token // s
    position = token % s
    table_offset = batch * table_strides[0] + position * table_strides[1]
    cos, sin = load_angles(COS + table_offset, SIN + table_offset, tl.arange(0, BLOCK), HALF=HALF)
    X += batch * x_strides[0] + position * x_strides[1]
    Y += batch * y_strides[0] + position * y_strides[1]

    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)
        if ALL:
            channels = tl.arange(0, NOPE_BLOCK)
            inside = inside_matrix(head, channels, heads, NOPE)
            nope = load_fp32(X + tile_offsets(head, channels, x_strides[2]), inside)
            tl.store(Y + tile_offsets(head, channels, y_strides[2]), nope * scale, inside)

        left, right = load_pairs(
            X + NOPE, head, heads, x_strides[2], HALF=HALF, PAIRS=PAIRS, BLOCK=BLOCK)
        if INVERSE:
            left, right = turn_back(left, right, cos, sin)
        else:
            left, right = turn(left, right, cos, sin)
        store_pairs(
            Y + NOPE, left * scale, right * scale, head, heads, y_strides[2],
            HALF=HALF, PAIRS=PAIRS, BLOCK=BLOCK,
        )


@triton.jit
def latent_keys_kernel(
    K_NOPE, ROPE_KEY, K, COS, SIN, s, heads, table_strides, nope_strides, key_strides, k_strides,
    TURN: tl.constexpr,
    NOPE: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    NOPE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Assemble the keys K of all heads of one token. TURN: ROPE_KEY is not rotated yet.

    table_strides and key_strides are over sequences and tokens; nope_strides and k_strides also over heads.
    """
    token = tl.program_id(0).to(tl.int64)
    batch = token // s
    position = token % s
    K_NOPE += batch * nope_strides[0] + position * nope_strides[1]
    ROPE_KEY += batch * key_strides[0] + position * key_strides[1]
    K += batch * k_strides[0] + position * k_strides[1]

    # the shared key
    left, right = load_pairs(ROPE_KEY, tl.arange(0, 1), 1, 0, HALF=HALF, PAIRS=PAIRS, BLOCK=BLOCK)
    if TURN:
        table_offset = batch * table_strides[0] + position * table_strides[1]
        cos, sin = load_angles(COS + table_offset, SIN + table_offset, tl.arange(0, BLOCK), HALF=HALF)
        left, right = turn(left, right, cos, sin)
    left = tl.broadcast_to(left, (HEADS, BLOCK))
    right = tl.broadcast_to(right, (HEADS, BLOCK))

    copy_heads(
        K_NOPE, K, heads, nope_strides[2], k_strides[2], WIDTH=NOPE, HEADS=HEADS, BLOCK=NOPE_BLOCK)
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)
        store_pairs(
            K + NOPE, left, right, head, heads, k_strides[2], HALF=HALF, PAIRS=PAIRS, BLOCK=BLOCK)


@triton.jit
def latent_keys_backward_kernel(
    DK, DV, DKV, DROPE_KEY, COS, SIN, s, heads,
    table_strides, dk_strides, dv_strides, dkv_strides, key_strides,
    TURN: tl.constexpr,
    NOPE: tl.constexpr,
    VALUE: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    NOPE_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute DKV of all heads of one token, and DROPE_KEY, the sum over them. See latent_keys_kernel."""
    token = tl.program_id(0).to(tl.int64)
    batch = token // s
    position = token % s
    DK += batch * dk_strides[0] + position * dk_strides[1]
    DV += batch * dv_strides[0] + position * dv_strides[1]
    DKV += batch * dkv_strides[0] + position * dkv_strides[1]
    DROPE_KEY += batch * key_strides[0] + position * key_strides[1]

    nope, value = tl.arange(0, NOPE_BLOCK), tl.arange(0, VALUE_BLOCK)
    sum_left = tl.zeros((HEADS, BLOCK), tl.float32)
    sum_right = tl.zeros((HEADS, BLOCK), tl.float32)
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)
        left, right = load_pairs(
            DK + NOPE, head, heads, dk_strides[2], HALF=HALF, PAIRS=PAIRS, BLOCK=BLOCK)
        sum_left += left
        sum_right += right

        # channels of each head
        inside = inside_matrix(head, nope, heads, NOPE)
        dk = tl.load(DK + tile_offsets(head, nope, dk_strides[2]), inside)
        tl.store(DKV + tile_offsets(head, nope, dkv_strides[2]), dk, inside)
        inside = inside_matrix(head, value, heads, VALUE)
        dv = tl.load(DV + tile_offsets(head, value, dv_strides[2]), inside)
        tl.store(DKV + NOPE + tile_offsets(head, value, dkv_strides[2]), dv, inside)

    # the shared key
    left = tl.sum(sum_left, 0)[None, :]
    right = tl.sum(sum_right, 0)[None, :]
    if TURN:
        table_offset = batch * table_strides[0] + position * table_strides[1]
        cos, sin = load_angles(COS + table_offset, SIN + table_offset, tl.arange(0, BLOCK), HALF=HALF)
        left, right = turn_back(left, right, cos, sin)
    store_pairs(DROPE_KEY, left, right, tl.arange(0, 1), 1, 0, HALF=HALF, PAIRS=PAIRS, BLOCK=BLOCK)


def launch_meta(heads: int, nope_dim: int, rope_dim: int, pairs: bool) -> dict[str, int]:
    """Return the launch parameters for heads of nope_dim + rope_dim channels."""
    nope_block = power_of_2(max(nope_dim, 1))
    block = power_of_2(rope_dim // 2)
    return {
        "NOPE": nope_dim,
        "HALF": rope_dim // 2,
        "PAIRS": pairs,
        "HEADS": heads_of_tile(heads, max(nope_block, 2 * block), TILE),
        "NOPE_BLOCK": nope_block,
        "BLOCK": block,
        "num_warps": 4,
    }


def launch_rotate_heads(
    x: Tensor,
    y: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    nope_dim: int,
    pairs: bool,
    scale: float,
    inverse: bool = False,
) -> Tensor:
    """Run rotate_heads, or its inverse, into y [b, s, h, nope + rope], which may be x. Return y.

    x and y have adjacent channels; cos and sin are [b or 1, s, 1, rope/2].
    """
    b, s, heads, d = x.shape
    cos = per_sequence(cos, b)
    sin = per_sequence(sin, b)
    result = y
    is_in_place = x.data_ptr() == y.data_ptr()
    if is_in_place and scale == 1:  # the other channels are unchanged
        x, y = x[..., nope_dim:], y[..., nope_dim:]
        d, nope_dim = d - nope_dim, 0
    rotate_heads_kernel[(b * s,)](
        x, y, cos, sin, s, heads, scale, cos.stride()[:2], x.stride()[:3], y.stride()[:3],
        ALL=nope_dim > 0,
        INVERSE=inverse,
        **launch_meta(heads, nope_dim, d - nope_dim, pairs),
    )
    return result


def get_table_strides(cos: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if cos is None else cos.stride()[:2]


def launch_latent_keys(
    kv: Tensor, rope_key: Tensor, cos: Tensor | None, sin: Tensor | None, nope_dim: int, pairs: bool
) -> Tensor:
    """Return the keys of keys_and_values, contiguous. kv and rope_key have adjacent channels."""
    b, s, heads, _ = kv.shape
    rope_dim = rope_key.shape[-1]
    if cos is not None and sin is not None:
        cos, sin = per_sequence(cos, b), per_sequence(sin, b)
    k = kv.new_empty(b, s, heads, nope_dim + rope_dim)
    k_nope = kv[..., :nope_dim]
    latent_keys_kernel[(b * s,)](
        k_nope, rope_key, k, cos, sin, s, heads,
        get_table_strides(cos), k_nope.stride()[:3], rope_key.stride()[:2], k.stride()[:3],
        TURN=cos is not None,
        **launch_meta(heads, nope_dim, rope_dim, pairs),
    )
    return k


def launch_latent_keys_backward(
    dk: Tensor, dv: Tensor, cos: Tensor | None, sin: Tensor | None, nope_dim: int, pairs: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of kv [b, s, h, nope + v] and rope_key [b, s, rope], from those of k and v."""
    b, s, heads, d = dk.shape
    rope_dim, value_dim = d - nope_dim, dv.shape[-1]
    if cos is not None and sin is not None:
        cos, sin = per_sequence(cos, b), per_sequence(sin, b)
    dk, dv = by_channel(dk), by_channel(dv)
    dkv = dk.new_empty(b, s, heads, nope_dim + value_dim)
    drope_key = dk.new_empty(b, s, rope_dim)
    latent_keys_backward_kernel[(b * s,)](
        dk, dv, dkv, drope_key, cos, sin, s, heads,
        get_table_strides(cos), dk.stride()[:3], dv.stride()[:3], dkv.stride()[:3], drope_key.stride()[:2],
        TURN=cos is not None,
        VALUE=value_dim,
        VALUE_BLOCK=power_of_2(value_dim),
        **launch_meta(heads, nope_dim, rope_dim, pairs),
    )
    return dkv, drope_key


# ---- autograd ----------------------------------------------------------------------------------------------

class _RotateHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, cos: Tensor, sin: Tensor, nope_dim: int, pairs: bool, scale: float
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.settings = {"nope_dim": nope_dim, "pairs": pairs, "scale": scale}
        if x.is_leaf or x.stride(-1) != 1:  # a leaf belongs to the caller, and must not change
            x = x.clone(memory_format=torch.contiguous_format)
        torch.autograd.graph.increment_version(x)
        rotated = x.detach()
        return launch_rotate_heads(rotated, rotated, cos, sin, **ctx.settings)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        dy = by_channel(dy)
        dx = torch.empty_like(dy, memory_format=torch.contiguous_format)  # autograd may use dy elsewhere
        launch_rotate_heads(dy, dx, cos, sin, **ctx.settings, inverse=True)
        return dx, None, None, None, None, None


class _KeysAndValues(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        kv: Tensor,
        rope_key: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        nope_dim: int,
        pairs: bool,
    ) -> tuple[Tensor, Tensor]:
        kv = by_channel(kv)
        rope_key = by_channel(rope_key)
        ctx.save_for_backward(cos, sin)
        ctx.nope_dim = nope_dim
        ctx.pairs = pairs
        k = launch_latent_keys(kv, rope_key, cos, sin, nope_dim, pairs)
        return k, kv.detach()[..., nope_dim:]

    @staticmethod
    def backward(ctx, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        dkv, drope_key = launch_latent_keys_backward(dk, dv, cos, sin, ctx.nope_dim, ctx.pairs)
        return dkv, drope_key, None, None, None, None
