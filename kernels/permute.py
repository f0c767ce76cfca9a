"""Tokens to the rows of their experts (a gather), and back (a sum). Each is the backward of the other.

    rows[j] = x[source[j]]                      permute
    x[i]    = sum over k of rows[slots[i, k]]   unpermute

Sums are in fp32 or better and in the order of k: no atomics, and bitwise reproducible. Grouped GEMMs read and
write rows in such an order without these copies (kernels/grouped_gemm.py).
"""
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.grad import accumulation_dtype
from kernels.tiles import block_range, inside_matrix, load_fp32, tile_offsets
from kernels.triton_ import ceil_div, kernel_is_available, power_of_2, tl, triton

TILE = 2048  # elements that a program moves
MAX_WIDTH = 2048  # channels of a row that one program moves


class RowOrder(NamedTuple):
    """Mapping of m rows in expert order to t rows in token order: the arguments of permute.

    source [m] is in [0, t). slots [t, k] in [0, m) is the inverse, with -1 for missing rows unless
    every_slot_filled.
    """
    source: Tensor
    slots: Tensor
    every_slot_filled: bool = True

    @property
    def is_permutation(self) -> bool:
        """Whether the m rows are a permutation of the t rows."""
        return self.every_slot_filled and self.slots.shape[1] == 1


def permute(x: Tensor, source: Tensor, slots: Tensor, every_slot_filled: bool = True) -> Tensor:
    """rows[j] = x[source[j]]. x [t, d], source [m] in [0, t) -> [m, d].

    slots [t, k] in [0, m) are the rows of each token, for the backward.
    every_slot_filled is False if some slots have no row; they hold -1.
    """
    return _Permute.apply(x, source, slots, every_slot_filled)


def unpermute(rows: Tensor, source: Tensor, slots: Tensor, every_slot_filled: bool = True) -> Tensor:
    """x[i] = the sum of rows[slots[i]]. rows [m, d] -> [t, d]. The rest is as for permute."""
    return _Unpermute.apply(rows, source, slots, every_slot_filled)


def sum_rows(rows: Tensor, slots: Tensor, every_slot_filled: bool) -> Tensor:
    """Sum the rows of each token. rows [m, d], slots [t, k] -> [t, d]. The rest is as for permute."""
    if rows.numel() and kernel_is_available("unpermute", rows):
        return launch_sum_rows(rows, slots, True)
    if every_slot_filled and slots.shape[1] == 1:
        return rows.index_select(0, slots[:, 0])

    acc_dtype = accumulation_dtype(rows.dtype)
    if every_slot_filled and rows.device.type == "cpu" and rows.dtype == acc_dtype:
        # one pass; in bf16 it would round after each addition
        starts = torch.arange(0, slots.numel(), slots.shape[1])
        sum_mode = 0
        sums, *_ = torch.embedding_bag(rows, slots.flatten(), starts, mode=sum_mode)
        return sums

    out = rows.new_zeros(slots.shape[0], rows.shape[1], dtype=acc_dtype)
    if len(rows) == 0:
        return out.to(rows.dtype)
    for slot in slots.unbind(1):
        if every_slot_filled:
            out += rows.index_select(0, slot)
        else:
            part = rows.index_select(0, slot.clamp(min=0))
            out += part.masked_fill_((slot < 0)[:, None], 0.0)
    return out.to(rows.dtype)


def gather_rows(x: Tensor, source: Tensor) -> Tensor:
    """x[source]. x [t, d], source [m] -> [m, d]."""
    if x.numel() and kernel_is_available("permute", x):
        return launch_sum_rows(x, source[:, None], False)
    return x.index_select(0, source)


# ---- Triton ------------------------------------------------------------------------------------------------

@triton.jit
def sum_kernel(
    ROWS, SLOTS, OUT, t, d, slots_stride_t, slots_stride_k,
    HAS_EMPTY: tl.constexpr,
    SLOTS_PER_TOKEN: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """OUT[i] = sum of ROWS[SLOTS[i, k]] over k, in this order. HAS_EMPTY: -1 marks a slot without a row."""
    tokens = block_range(tl.program_id(0), TOKENS)
    columns = block_range(tl.program_id(1), BLOCK)
    inside = inside_matrix(tokens, columns, t, d)

    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    for k in range(SLOTS_PER_TOKEN):
        slot_pointers = SLOTS + tokens.to(tl.int64) * slots_stride_t + k * slots_stride_k
        slots = tl.load(slot_pointers, tokens < t, 0)  # [TOKENS]
        has_row = inside
        if HAS_EMPTY:
            has_row = inside & (slots >= 0)[:, None]
        total += load_fp32(ROWS + tile_offsets(slots, columns, d), has_row)
    tl.store(OUT + tile_offsets(tokens, columns, d), total, inside)


def launch_sum_rows(rows: Tensor, slots: Tensor, has_empty: bool) -> Tensor:
    """Run sum_rows as one kernel; with k = 1, a gather. has_empty: -1 marks a slot without a row."""
    rows = rows.contiguous()
    d = rows.shape[1]
    t, slots_per_token = slots.shape
    out = rows.new_empty(t, d)
    if t:
        block = min(MAX_WIDTH, power_of_2(d))
        tokens = max(1, TILE // block)
        grid = ceil_div(t, tokens), ceil_div(d, block)
        sum_kernel[grid](
            rows, slots, out, t, d, *slots.stride(),
            HAS_EMPTY=has_empty,
            SLOTS_PER_TOKEN=slots_per_token,
            TOKENS=tokens,
            BLOCK=block,
            num_warps=4,
        )
    return out


# ---- autograd ----------------------------------------------------------------------------------------------

class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, source: Tensor, slots: Tensor, every_slot_filled: bool) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.every_slot_filled = every_slot_filled
        return gather_rows(x, source)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (slots,) = ctx.saved_tensors
        return sum_rows(dy, slots, ctx.every_slot_filled), None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, source: Tensor, slots: Tensor, every_slot_filled: bool) -> Tensor:
        ctx.save_for_backward(source)
        return sum_rows(rows, slots, every_slot_filled)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (source,) = ctx.saved_tensors
        return gather_rows(dy, source), None, None, None
