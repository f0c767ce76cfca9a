"""How kernels accumulate weight gradients.

A kernel's backward does not return the gradient of a weight to autograd, which would keep it in the compute
dtype and deliver it only after the whole backward of a layer. It calls accumulate_grad, which adds the
gradient in place to the weight's flat fp32 buffer (`main_grad`, a view that parallel/sharding/gradients.py
makes), or defers it, when a pipeline schedule splits the backward into input gradients (I) and weight
gradients (W) (arXiv 2401.10241).

A plain tensor without `main_grad` gets its gradient through autograd as usual. So every kernel also works
alone, in a test or a notebook.
"""
from collections.abc import Callable
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

Compute = Callable[[Tensor | None], Tensor | None]  # computes the gradient of a weight, see accumulate_grad


class DeferredWeightGrads(Protocol):
    """The deferred weight gradients of a pipeline stage (parallel/pipeline/executor.py)."""

    @property
    def deferring(self) -> bool:
        """Whether gradients are deferred now, because the stage runs an I."""
        ...

    def put(self, weight: "AccumulatingWeight", compute: Compute) -> None:
        """Keeps `compute` until the microbatch's W, which calls it with weight.main_grad."""
        ...


class AccumulatingWeight(Protocol):
    """A weight whose gradient the kernels accumulate. The attributes are set on the Parameter."""

    @property
    def main_grad(self) -> Tensor | None:
        """The buffer [weight.shape] to add to, in fp32 or better: a view of the flat gradients of a bucket.

        None outside of a backward, when ZeRO-2 and 3 have no such buffer.
        """
        ...

    @property
    def weight_grad_store(self) -> DeferredWeightGrads | None:
        """Where the gradient may be deferred to. None, or no such attribute: it is never deferred."""
        ...


def accumulates(weight: object) -> TypeGuard[AccumulatingWeight]:
    """Whether the weight has a buffer for its gradient. A plain tensor has none."""
    return getattr(weight, "main_grad", None) is not None


def accumulate_grad(weight: Tensor, compute: Compute) -> Tensor | None:
    """Adds the gradient that `compute` computes to weight.main_grad, now or in the W of a pipeline schedule.

    compute: compute(buffer) adds the gradient to the fp32 buffer [weight.shape]; compute(None) returns it.
    Returns what the autograd Function must return for the weight: None, or the gradient of a plain tensor.
    """
    if not weight.requires_grad:
        return None
    if not accumulates(weight):
        return compute(None)
    store: DeferredWeightGrads | None = getattr(weight, "weight_grad_store", None)
    if store is not None and store.deferring:
        store.put(weight, compute)
    else:
        compute(weight.main_grad)
    return None


def accumulate_summed_grad(weight: Tensor, grad: Tensor) -> Tensor | None:
    """accumulate_grad for a gradient that exists already.

    Norm weights and biases have one: it is small, and a by-product of the input gradient.
    """
    def compute(into: Tensor | None) -> Tensor:
        if into is None:
            return grad.to(weight.dtype)
        return into.add_(grad.view_as(into))
    return accumulate_grad(weight, compute)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and accumulation: fp32, or fp64 if the inputs are fp64."""
    return torch.promote_types(dtype, torch.float32)
