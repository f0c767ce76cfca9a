"""Tokens to their experts' rows and back: a gather and the sum that undoes it, each the other's gradient.

    rows[j] = x[source[j]]                      permute
    x[i]    = sum over k of rows[slots[i, k]]   unpermute

Sums are taken in fp32 or better, in the order of k: no atomics, the same bits every time.
"""
import torch
from torch import Tensor

from kernels.grad import wide


def permute(x: Tensor, source: Tensor, slots: Tensor, whole: bool = True) -> Tensor:
    """x [t, d], source [m] in [0, t), slots [t, k] in [0, m): every row's place under its token; -1, where not `whole`, for a
    place that has no row -> [m, d]."""
    return _Permute.apply(x, source, slots, whole)


def unpermute(rows: Tensor, source: Tensor, slots: Tensor, whole: bool = True) -> Tensor:
    """rows [m, d] -> [t, d]."""
    return _Unpermute.apply(rows, source, slots, whole)


def sum_rows(rows: Tensor, slots: Tensor, whole: bool) -> Tensor:
    """rows [m, d], slots [t, k] -> [t, d]."""
    if slots.shape[1] == 1 and whole:
        return rows[slots[:, 0]]
    out = rows.new_zeros(slots.shape[0], rows.shape[1], dtype=wide(rows.dtype))
    if len(rows):
        for slot in slots.unbind(1):
            part = rows.index_select(0, slot if whole else slot.clamp(min=0))
            out += part if whole else part.masked_fill_((slot < 0)[:, None], 0.0)
    return out.to(rows.dtype)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, source, slots, whole):
        ctx.save_for_backward(slots)
        ctx.whole = whole
        return x[source]

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
        return dy[ctx.saved_tensors[0]], None, None, None
