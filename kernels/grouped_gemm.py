"""y_i = x_i W_i^T for each of several experts, whose rows lie one after the other: a loop of GEMMs, the reference.

Rows may be shared out in any way: an expert with none costs nothing and gets no gradient (its main_grad keeps what it has).
The weights' gradients are given, not returned (kernels/grad.py): a pipeline's W may make them later.
"""
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.grad import give
from kernels.linear import add_wgrad


def grouped_linear(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """x [m, n]: counts[i] rows of expert i, in order; weight [experts * o, n]: o rows of each expert -> [m, o]."""
    return _GroupedLinear.apply(x, weight, list(counts))


def grouped_forward(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """x [m, n], weight [e, o, n] -> [m, o]."""
    y = x.new_empty(x.shape[0], weight.shape[1])
    for rows, w, out in zip(x.split(counts), weight, y.split(counts)):
        if len(rows):
            torch.mm(rows, w.t(), out=out)
    return y


def grouped_dgrad(dy: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """dy [m, o], weight [e, o, n] -> dx [m, n]."""
    dx = dy.new_empty(dy.shape[0], weight.shape[2])
    for rows, w, out in zip(dy.split(counts), weight, dx.split(counts)):
        if len(rows):
            torch.mm(rows, w, out=out)
    return dx


def grouped_wgrad(into: Tensor, dy: Tensor, x: Tensor, counts: Sequence[int]) -> Tensor:
    """into [e, o, n] += dy_i^T x_i, in its own dtype. dy [m, o], x [m, n]."""
    for part, rows, inputs in zip(into, dy.split(counts), x.split(counts)):
        if len(rows):
            add_wgrad(part, rows, inputs)
    return into


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, counts):
        ctx.save_for_backward(x)
        ctx.weight, ctx.counts = weight, counts
        return grouped_forward(x, weight.view(len(counts), -1, x.shape[1]), counts)

    @staticmethod
    def backward(ctx, dy):
        (x,), counts, dy = ctx.saved_tensors, ctx.counts, dy.contiguous()
        split = (len(counts), dy.shape[1], x.shape[1])
        dx = grouped_dgrad(dy, ctx.weight.view(split), counts) if ctx.needs_input_grad[0] else None

        def compute(into):
            made = dy.new_zeros(split) if into is None else into.view(split)
            return grouped_wgrad(made, dy, x, counts).view(-1, x.shape[1])
        return dx, give(ctx.weight, compute), None
