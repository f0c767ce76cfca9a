"""Where weight gradients go.

A kernel's backward does not return a weight's gradient to autograd, which would keep it in the compute dtype and hand it
over only when the whole backward of a layer is done. It calls `give`, and the gradient is added in place to the weight's
flat fp32 buffer (`main_grad`, a view that parallel/grads.py lays out), or is put off when a pipeline schedule has cut the
backward into I (inputs) and W (weights) (arXiv 2401.10241). A plain tensor without `main_grad` gets its gradient through
autograd as usual, so every kernel also works alone, in a test or a notebook.
"""
from collections.abc import Callable

import torch
from torch import Tensor


def give(weight: Tensor, compute: Callable[[Tensor | None], Tensor | None]) -> Tensor | None:
    """Add the gradient that `compute(into)` makes to `weight.main_grad`.

    compute: called with the fp32 buffer [weight.shape] to add to, or with None to return the gradient instead.
    Returns what the autograd Function should return for the weight.
    """
    if not weight.requires_grad:
        return None
    into = getattr(weight, "main_grad", None)
    if into is None:
        return compute(None)
    later = getattr(weight, "later", None)  # the stage's list of deferred weight gradients, while it runs an I
    if later is not None and later.open:
        later.put(weight, compute)
    else:
        compute(into)
    return None


def give_sum(weight: Tensor, grad: Tensor) -> Tensor | None:
    """`give` for a gradient that is already there (norm weights, biases: small, by-products of the input gradient)."""
    return give(weight, lambda into: grad.to(weight.dtype) if into is None else into.add_(grad.view_as(into)))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and accumulation: fp32, or fp64 where the inputs are."""
    return torch.promote_types(dtype, torch.float32)
