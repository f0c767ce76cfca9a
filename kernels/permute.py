"""Tokens to their experts' rows and back: a gather and the sum that undoes it, each the other's gradient.

    rows[j] = x[source[j]]                      permute
    x[i]    = sum over k of rows[slots[i, k]]   unpermute

Sums are taken in fp32 or better, in the order of k: no atomics, the same bits every time.
"""
import torch
from torch import Tensor

from kernels.grad import wide
from kernels.triton_ import ceil_div, fits, power_of_2, tl, triton

TILE = 2048  # elements a program moves
WIDEST = 2048  # channels of a row that one program moves


def permute(x: Tensor, source: Tensor, slots: Tensor, whole: bool = True) -> Tensor:
    """x [t, d], source [m] in [0, t), slots [t, k] in [0, m): every row's place under its token; -1, where not `whole`, for a
    place that has no row -> [m, d]."""
    return _Permute.apply(x, source, slots, whole)


def unpermute(rows: Tensor, source: Tensor, slots: Tensor, whole: bool = True) -> Tensor:
    """rows [m, d] -> [t, d]."""
    return _Unpermute.apply(rows, source, slots, whole)


def sum_rows(rows: Tensor, slots: Tensor, whole: bool) -> Tensor:
    """rows [m, d], slots [t, k] -> [t, d]."""
    if rows.numel() and fits("unpermute", rows):
        return launch(rows, slots, True)
    if slots.shape[1] == 1 and whole:
        return rows.index_select(0, slots[:, 0])
    if whole and rows.device.type == "cpu" and rows.dtype == wide(rows.dtype):  # one pass; in bf16 it would round in between
        starts = torch.arange(0, slots.numel(), slots.shape[1])
        return torch.embedding_bag(rows, slots.flatten(), starts, mode=0)[0]  # 0: sum
    out = rows.new_zeros(slots.shape[0], rows.shape[1], dtype=wide(rows.dtype))
    if len(rows):
        for slot in slots.unbind(1):
            part = rows.index_select(0, slot if whole else slot.clamp(min=0))
            out += part if whole else part.masked_fill_((slot < 0)[:, None], 0.0)
    return out.to(rows.dtype)


def take_rows(x: Tensor, source: Tensor) -> Tensor:
    """x [t, d], source [m] -> [m, d]."""
    return launch(x, source[:, None], False) if x.numel() and fits("permute", x) else x.index_select(0, source)


# ---- Triton ------------------------------------------------------------------------------------------------------------------

@triton.jit
def sum_kernel(ROWS, SLOTS, OUT, t, d, slots_t, slots_k, HOLES: tl.constexpr, EACH: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """OUT[i] = the sum over k < EACH of ROWS[SLOTS[i, k]], in this order; HOLES: -1 is no row."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (token < t)[:, None] & (column < d)[None, :]
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    for k in range(EACH):
        slot = tl.load(SLOTS + token.to(tl.int64) * slots_t + k * slots_k, token < t, 0).to(tl.int64)
        there = inside
        if HOLES:
            there = inside & (slot >= 0)[:, None]
        total += tl.load(ROWS + slot[:, None] * d + column[None, :], there, 0.0).to(tl.float32)
    tl.store(OUT + token.to(tl.int64)[:, None] * d + column[None, :], total.to(OUT.dtype.element_ty), inside)


def launch(rows: Tensor, slots: Tensor, holes: bool) -> Tensor:
    """rows [m, d], slots [t, k] -> [t, d]; with k = 1 a gather."""
    rows, d, (t, each) = rows.contiguous(), rows.shape[1], slots.shape
    out = rows.new_empty(t, d)
    block = min(WIDEST, power_of_2(d))
    tokens = max(1, TILE // block)
    if t:
        sum_kernel[(ceil_div(t, tokens), ceil_div(d, block))](rows, slots, out, t, d, *slots.stride(), HOLES=holes, EACH=each,
                                                              TOKENS=tokens, BLOCK=block, num_warps=4)
    return out


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, source, slots, whole):
        ctx.save_for_backward(slots)
        ctx.whole = whole
        return take_rows(x, source)

    @staticmethod
    def backward(ctx, dy):
        return sum_rows(dy, *ctx.saved_tensors, ctx.whole), None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, source, slots, whole):
        ctx.save_for_backward(source)
        return sum_rows(rows, slots, whole)

    @staticmethod
    def backward(ctx, dy):
        return take_rows(dy, ctx.saved_tensors[0]), None, None, None
