"""Output head and cross entropy in one: the logits live one chunk of rows at a time and are never kept.

Both gradients are made during the forward, while a chunk's logits are there (the idea of Liger-Kernel and of arXiv
2411.09009), so the backward costs no second GEMM over the vocabulary. The weight's gradient is therefore complete when the
forward returns: a pipeline's W of the head is empty.
"""
from typing import Callable

import torch
from torch import Tensor

from kernels.grad import give, wide
from kernels.linear import add_wgrad

IGNORE = -100  # a target that is not counted


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor | float, vocab: int, *,
                         start: int = 0, merge: Callable = lambda lse, picked: (lse, picked), chunk: int = 512) -> Tensor:
    """scale * sum over counted tokens of (logsumexp(logits) - logits[target]), a scalar in fp32 or better.

    hidden [t, d]; weight [v, d]: rows start.. of the (padded) vocabulary; targets [t], IGNORE where not counted;
    vocab: rows from here on are padding and take no part. merge: sums the partial statistics of a vocabulary that is
    split over ranks: (lse, target's logit, both [rows]) -> the same over all ranks.
    """
    return _LinearCrossEntropy.apply(hidden, weight, targets, scale, vocab, start, merge, chunk, torch.is_grad_enabled())


def chunk_loss(hidden, weight, targets, vocab: int, start: int, merge):
    """One chunk: -> loss of each row [r] (0 where not counted), softmax minus one-hot [r, v] (0 where not counted)."""
    logits = (hidden @ weight.t()).to(wide(hidden.dtype))  # [r, v]
    if start + weight.shape[0] > vocab:
        logits[:, max(vocab - start, 0):] = float("-inf")
    counted = targets != IGNORE
    column = targets - start
    here = counted & (column >= 0) & (column < weight.shape[0])
    column = column.clamp(0, weight.shape[0] - 1)[:, None]
    picked = logits.gather(1, column)[:, 0].where(here, 0.0)
    lse, picked = merge(torch.logsumexp(logits, 1), picked)
    grad = logits.sub_(lse[:, None]).exp_()
    grad.scatter_add_(1, column, -here.to(grad.dtype)[:, None])
    grad.mul_(counted[:, None])
    return (lse - picked).where(counted, 0.0), grad


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, scale, vocab, start, merge, chunk, learn):
        loss = hidden.new_zeros((), dtype=wide(hidden.dtype))
        dh = torch.empty_like(hidden) if learn else None
        dw = None
        for first in range(0, hidden.shape[0], chunk):
            rows = slice(first, first + chunk)
            one, grad = chunk_loss(hidden[rows], weight, targets[rows], vocab, start, merge)
            loss += one.sum() * scale
            if learn:
                grad = grad.mul_(scale).to(hidden.dtype)
                torch.mm(grad, weight, out=dh[rows])
                part = give(weight, lambda into: add_wgrad(into, grad, hidden[rows]))
                dw = part if dw is None else dw + part
        ctx.save_for_backward(dh, dw)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        # The loss is the end of the graph: its own gradient is 1 and the scale was applied above. A weight whose gradient
        # went to main_grad could not be scaled any more, so only the plain-tensor form honours another value.
        dh, dw = ctx.saved_tensors
        return dh * dloss.to(dh.dtype), None if dw is None else dw * dloss.to(dw.dtype), *[None] * 7
