"""Embedding lookup whose gradient is added row by row into the fp32 buffer: no dense [v, d] gradient in between."""
import torch
from torch import Tensor

from kernels.grad import give, wide


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """ids [b, s] in [0, v), weight [v, d] -> [b, s, d]."""
    return _Embedding.apply(ids, weight)


def add_rows(into: Tensor | None, ids: Tensor, dy: Tensor, shape: torch.Size) -> Tensor:
    """into[ids] += dy. ids [t], dy [t, d], into [v, d]; None: a new gradient."""
    if into is None:
        into = dy.new_zeros(shape, dtype=wide(dy.dtype))
        return into.index_add_(0, ids, dy.to(into.dtype)).to(dy.dtype)
    return into.index_add_(0, ids, dy.to(into.dtype))


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight):
        ctx.save_for_backward(ids)
        ctx.weight, ctx.shape = weight, weight.shape  # the backward needs no values: ZeRO-3 does not gather them for it
        return weight[ids]

    @staticmethod
    def backward(ctx, dy):
        (ids,) = ctx.saved_tensors
        return None, give(ctx.weight, lambda into: add_rows(into, ids.reshape(-1), dy.reshape(-1, ctx.shape[1]), ctx.shape))
