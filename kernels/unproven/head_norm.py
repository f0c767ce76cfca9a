"""RMSNorm of each head of queries and keys, then rotary positions (Qwen3, arXiv 2505.09388, section 2; the
norm is from arXiv 2302.05442, section 2).

Each direction is one pass over memory. The forward reads the merged q, k, v and writes new q and k; v stays
in place. The backward reads the gradients of q, k and v where attention wrote them, rotates them back,
recomputes the statistics of each head, and writes the gradient of the merged projection. Only the
projection's output is saved. Each program sums the weights' gradients over its tokens; a second sum over the
programs has a fixed order.
"""
import torch
from torch import Tensor

from kernels.grad import accumulate_summed_grad
from kernels.norm import rms_norm
from kernels.rope import (
    apply_rope,
    heads_of_tile,
    load_angles,
    per_sequence,
    turn,
    turn_back,
)
from kernels.tiles import inside_matrix, load_fp32, tile_offsets
from kernels.triton_ import by_channel, kernel_is_available, num_processors, power_of_2, tl, triton
from kernels.unproven.heads import copy_heads

TILE = 1024  # pairs of channels that a program processes at a time
PROGRAMS = 4  # programs of the backward on each multiprocessor, as in kernels/norm.py


def split_normalize_and_rotate(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    heads: int,
    kv: int,
    eps: float,
    compiled: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a merged projection into q, k and v; normalize each head of q and k, and rotate it.

    qkv [b, s, heads + 2 kv, d], with the heads of q, k and v in this order; weights [d]; cos and sin
    [b, s, 1, d/2] -> q [b, s, heads, d], k and v [b, s, kv, d]. v is a view of qkv.
    """
    if qkv.numel() and kernel_is_available("head norm", qkv, q_weight, k_weight, cos):
        return _SplitNormRope.apply(qkv, q_weight, k_weight, cos, sin, heads, kv, eps)
    q, k, v = qkv.split((heads, kv, kv), dim=2)
    q = rms_norm(q, q_weight, eps, compiled)
    k = rms_norm(k, k_weight, eps, compiled)
    q = apply_rope(q, cos, sin, compiled)
    k = apply_rope(k, cos, sin, compiled)
    return q, k, v


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


# ---- Triton ------------------------------------------------------------------------------------------------
# Heads of 2 HALF channels, loaded as BLOCK >= HALF pairs. A helper processes the heads of q or those of k of
# one token, HEADS at a time.

@triton.jit
def head_scale(left, right, eps, HALF: tl.constexpr):
    """Return 1 / root mean square of each head, [HEADS, 1]."""
    squares = tl.sum(left * left + right * right, 1)
    return tl.rsqrt(squares / (2 * HALF) + eps)[:, None]


@triton.jit
def normalize_and_turn(
    X, Y, WEIGHT, cos, sin, heads, eps, x_stride, y_stride,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalize and rotate the heads of one token of X, `x_stride` apart, into Y."""
    pairs = tl.arange(0, BLOCK)
    weight_left = load_fp32(WEIGHT + pairs, pairs < HALF)[None, :]
    weight_right = load_fp32(WEIGHT + HALF + pairs, pairs < HALF)[None, :]
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)
        inside = inside_matrix(head, pairs, heads, HALF)
        source = X + tile_offsets(head, pairs, x_stride)
        target = Y + tile_offsets(head, pairs, y_stride)
        left = load_fp32(source, inside)  # [HEADS, BLOCK]
        right = load_fp32(source + HALF, inside)

        scale = head_scale(left, right, eps, HALF=HALF)
        left, right = turn(left * scale * weight_left, right * scale * weight_right, cos, sin)
        tl.store(target, left, inside)
        tl.store(target + HALF, right, inside)


@triton.jit
def normalized_gradients(
    DY, X, DX, WEIGHT, cos, sin, dweight_left, dweight_right, heads, eps, dy_stride, x_stride, dx_stride,
    IN_PLACE: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Backward of normalize_and_turn: write DX, and return the two dweights [HEADS, BLOCK] with this token's
    heads added. IN_PLACE: DX is DY."""
    pairs = tl.arange(0, BLOCK)
    weight_left = load_fp32(WEIGHT + pairs, pairs < HALF)[None, :]
    weight_right = load_fp32(WEIGHT + HALF + pairs, pairs < HALF)[None, :]
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)
        inside = inside_matrix(head, pairs, heads, HALF)

        # gradient of the norm's output
        gradient = DY + tile_offsets(head, pairs, dy_stride)
        dy_left = load_fp32(gradient, inside)  # [HEADS, BLOCK]
        dy_right = load_fp32(gradient + HALF, inside)
        dy_left, dy_right = turn_back(dy_left, dy_right, cos, sin)

        # normalized heads of the forward
        source = X + tile_offsets(head, pairs, x_stride)
        left = load_fp32(source, inside)
        right = load_fp32(source + HALF, inside)
        scale = head_scale(left, right, eps, HALF=HALF)
        left *= scale
        right *= scale

        # their gradients
        dweight_left += dy_left * left
        dweight_right += dy_right * right
        dy_left *= weight_left
        dy_right *= weight_right
        along = tl.sum(dy_left * left + dy_right * right, 1)[:, None] / (2 * HALF)
        if IN_PLACE:
            tl.debug_barrier()  # all threads have read the elements that may now be overwritten
        target = DX + tile_offsets(head, pairs, dx_stride)
        tl.store(target, (dy_left - left * along) * scale, inside)
        tl.store(target + HALF, (dy_right - right * along) * scale, inside)
    return dweight_left, dweight_right


@triton.jit
def head_norm_kernel(
    X, Y, Q_WEIGHT, K_WEIGHT, COS, SIN, s, heads, kv, eps, table_strides, x_strides, y_strides,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalize and rotate the queries and keys of one token of X into Y.

    table_strides are those of COS and SIN over sequences and tokens; x_strides and y_strides also over heads.
    """
    token = tl.program_id(0).to(tl.int64)
    batch = token // s
    position = token % s
    table_offset = batch * table_strides[0] + position * table_strides[1]
    cos, sin = load_angles(COS + table_offset, SIN + table_offset, tl.arange(0, BLOCK), HALF=HALF)
    X += batch * x_strides[0] + position * x_strides[1]
    Y += batch * y_strides[0] + position * y_strides[1]
    normalize_and_turn(
        X, Y, Q_WEIGHT, cos, sin, heads, eps, x_strides[2], y_strides[2],
        HALF=HALF, HEADS=HEADS, BLOCK=BLOCK,
    )
    X += heads * x_strides[2]
    Y += heads * y_strides[2]
    normalize_and_turn(
        X, Y, K_WEIGHT, cos, sin, kv, eps, x_strides[2], y_strides[2],
        HALF=HALF, HEADS=KV_HEADS, BLOCK=BLOCK,
    )


@triton.jit
def store_dweight(DWEIGHT, dweight_left, dweight_right, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """DWEIGHT [2 HALF] = the sum over heads of both dweights [HEADS, BLOCK]."""
    pairs = tl.arange(0, BLOCK)
    tl.store(DWEIGHT + pairs, tl.sum(dweight_left, 0), pairs < HALF)
    tl.store(DWEIGHT + HALF + pairs, tl.sum(dweight_right, 0), pairs < HALF)


@triton.jit
def head_norm_backward_kernel(
    DQ, DK, DV, X, Q_WEIGHT, K_WEIGHT, COS, SIN, DQKV, DWEIGHTS, tokens, s, heads, kv, eps,
    table_strides, dq_strides, dk_strides, dv_strides, x_strides, dqkv_strides,
    IN_PLACE: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Process every num_programs-th token: compute DQKV, from queries and keys in X, and one program's share
    of DWEIGHTS [2, programs, d], for q and for k.

    IN_PLACE: DQ, DK and DV are the parts of DQKV. Strides as in head_norm_kernel.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    pairs = tl.arange(0, BLOCK)
    dq_weight_left = tl.zeros((HEADS, BLOCK), tl.float32)
    dq_weight_right = tl.zeros((HEADS, BLOCK), tl.float32)
    dk_weight_left = tl.zeros((KV_HEADS, BLOCK), tl.float32)
    dk_weight_right = tl.zeros((KV_HEADS, BLOCK), tl.float32)

    for token in range(program, tokens, programs):
        batch = (token // s).to(tl.int64)
        position = (token % s).to(tl.int64)
        table_offset = batch * table_strides[0] + position * table_strides[1]
        cos, sin = load_angles(COS + table_offset, SIN + table_offset, pairs, HALF=HALF)
        x = X + batch * x_strides[0] + position * x_strides[1]
        dx = DQKV + batch * dqkv_strides[0] + position * dqkv_strides[1]
        dq = DQ + batch * dq_strides[0] + position * dq_strides[1]
        dk = DK + batch * dk_strides[0] + position * dk_strides[1]

        dq_weight_left, dq_weight_right = normalized_gradients(
            dq, x, dx, Q_WEIGHT, cos, sin, dq_weight_left, dq_weight_right, heads, eps,
            dq_strides[2], x_strides[2], dqkv_strides[2],
            IN_PLACE=IN_PLACE, HALF=HALF, HEADS=HEADS, BLOCK=BLOCK,
        )
        x += heads * x_strides[2]
        dx += heads * dqkv_strides[2]
        dk_weight_left, dk_weight_right = normalized_gradients(
            dk, x, dx, K_WEIGHT, cos, sin, dk_weight_left, dk_weight_right, kv, eps,
            dk_strides[2], x_strides[2], dqkv_strides[2],
            IN_PLACE=IN_PLACE, HALF=HALF, HEADS=KV_HEADS, BLOCK=BLOCK,
        )
        if not IN_PLACE:
            dv = DV + batch * dv_strides[0] + position * dv_strides[1]
            dx += kv * dqkv_strides[2]
            copy_heads(
                dv, dx, kv, dv_strides[2], dqkv_strides[2],
                WIDTH=2 * HALF, HEADS=KV_HEADS, BLOCK=2 * BLOCK,
            )

    # this program's rows of the partial sums
    row = DWEIGHTS + program.to(tl.int64) * 2 * HALF
    store_dweight(row, dq_weight_left, dq_weight_right, HALF=HALF, BLOCK=BLOCK)
    row += programs.to(tl.int64) * 2 * HALF
    store_dweight(row, dk_weight_left, dk_weight_right, HALF=HALF, BLOCK=BLOCK)


def launch_meta(heads: int, kv: int, d: int) -> dict[str, int]:
    """Return the launch parameters for heads of d channels."""
    block = power_of_2(d // 2)
    return {
        "HALF": d // 2,
        "HEADS": heads_of_tile(heads, block, TILE),
        "KV_HEADS": heads_of_tile(kv, block, TILE),
        "BLOCK": block,
        "num_warps": 4,
    }


def launch_head_norm(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    heads: int,
    kv: int,
    eps: float,
) -> Tensor:
    """Return q and k, normalized and rotated, adjacent in memory: [b, s, heads + kv, d].

    qkv [b, s, heads + 2 kv, d] with adjacent channels, weights [d], cos and sin [b or 1, s, 1, d/2].
    """
    b, s, _, d = qkv.shape
    cos = per_sequence(cos, b)
    sin = per_sequence(sin, b)
    queries_keys = qkv[:, :, :heads + kv]
    qk = torch.empty_like(queries_keys, memory_format=torch.contiguous_format)
    head_norm_kernel[(b * s,)](
        queries_keys, qk, q_weight, k_weight, cos, sin, s, heads, kv, eps,
        cos.stride()[:2], qkv.stride()[:3], qk.stride()[:3],
        **launch_meta(heads, kv, d),
    )
    return qk


def launch_head_norm_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of qkv [b, s, heads + 2 kv, d], and of both weights [d], these in fp32.

    dq [b, s, heads, d], dk and dv [b, s, kv, d]: if they are adjacent in memory, that of qkv overwrites
    them.
    """
    b, s, heads, d = dq.shape
    kv = dk.shape[2]
    cos = per_sequence(cos, b)
    sin = per_sequence(sin, b)
    dqkv = side_by_side(dq, dk, dv)
    is_in_place = dqkv is not None
    if dqkv is None:
        dqkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)  # [b, s, heads + 2 kv, d]
        dq, dk, dv = by_channel(dq), by_channel(dk), by_channel(dv)

    programs = min(PROGRAMS * num_processors(qkv.device), b * s)
    dweights = qkv.new_empty(2, programs, d, dtype=torch.float32)
    queries_keys = qkv[:, :, :heads + kv]
    head_norm_backward_kernel[(programs,)](
        dq, dk, dv, queries_keys, q_weight, k_weight, cos, sin, dqkv, dweights, b * s, s, heads, kv, eps,
        cos.stride()[:2], dq.stride()[:3], dk.stride()[:3], dv.stride()[:3], qkv.stride()[:3],
        dqkv.stride()[:3],
        IN_PLACE=is_in_place,
        **launch_meta(heads, kv, d),
    )
    dq_weight, dk_weight = dweights.sum(1)
    return dqkv, dq_weight, dk_weight


# ---- autograd ----------------------------------------------------------------------------------------------

class _SplitNormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        qkv: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: int,
        kv: int,
        eps: float,
    ) -> tuple[Tensor, ...]:
        qkv = by_channel(qkv)
        ctx.save_for_backward(qkv, cos, sin)
        ctx.weights = q_weight, k_weight
        ctx.eps = eps
        qk = launch_head_norm(qkv, q_weight, k_weight, cos, sin, heads=heads, kv=kv, eps=eps)
        q, k = qk.split((heads, kv), 2)
        return q, k, qkv.detach()[:, :, heads + kv:]

    @staticmethod
    def backward(ctx, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        qkv, cos, sin = ctx.saved_tensors
        q_weight, k_weight = ctx.weights
        dqkv, dq_weight, dk_weight = launch_head_norm_backward(
            dq, dk, dv, qkv, q_weight, k_weight, cos, sin, ctx.eps)
        dq_weight = accumulate_summed_grad(q_weight, dq_weight)
        dk_weight = accumulate_summed_grad(k_weight, dk_weight)
        return dqkv, dq_weight, dk_weight, None, None, None, None, None
