"""Embedding lookup. The backward adds rows into the fp32 gradient buffer, without a dense [v, d] gradient."""
import torch
from torch import Tensor

from kernels.grad import accumulate_grad, accumulation_dtype


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """ids [b, s] in [0, v), weight [v, d] -> [b, s, d]."""
    return _Embedding.apply(ids, weight)


def add_rows(into: Tensor | None, ids: Tensor, dy: Tensor, shape: torch.Size) -> Tensor:
    """into[ids] += dy, and returns `into`. ids [t], dy [t, d], into [v, d].

    into None: returns a new gradient of `shape`, in the dtype of dy; the sum is in fp32 or better.
    """
    if into is not None:
        return into.index_add_(0, ids, dy.to(into.dtype))
    total = dy.new_zeros(shape, dtype=accumulation_dtype(dy.dtype))
    total.index_add_(0, ids, dy.to(total.dtype))
    return total.to(dy.dtype)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight  # not for its values: the backward needs none, and ZeRO-3 does not gather them
        ctx.shape = weight.shape
        return weight[ids]

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[None, Tensor | None]:
        (ids,) = ctx.saved_tensors
        shape = ctx.shape

        def compute(into: Tensor | None) -> Tensor:
            return add_rows(into, ids.reshape(-1), dy.reshape(-1, shape[1]), shape)

        return None, accumulate_grad(ctx.weight, compute)
