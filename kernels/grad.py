"""Accumulation of weight gradients in kernels.

A kernel's backward does not return the gradient of a weight to autograd, which would keep it in the compute
dtype and deliver it only after the whole backward of a layer. It calls accumulate_grad, which writes the
gradient directly into the weight's flat fp32 buffer (`main_grad`, a view created by
parallel/sharding/gradients.py), or defers it: when a pipeline schedule splits the backward into input
gradients (I) and weight gradients (W) (arXiv 2401.10241), or until a layer has started an exchange to overlap
with (LateWeightGrads).

The first gradient of a step overwrites the buffer, and each later one is added. So no buffer is zeroed before
a step. `grad_is_written` next to the buffer says which case applies; only write_grad sets it, and BucketGrads
clears it. Buffers that no kernel has written are zeroed before they are read (zero_unwritten there).

A plain tensor without `main_grad` gets its gradient through autograd as usual. So every kernel also works
standalone, in a test or a notebook.
"""
from collections.abc import Callable
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

# Computes the gradient of a weight: compute(buffer, add), see accumulate_grad.
Compute = Callable[[Tensor | None, bool], Tensor | None]


class DeferredWeightGrads(Protocol):
    """Weight gradients that are computed later: those of a pipeline stage (parallel/pipeline/executor.py), or
    of a layer (LateWeightGrads)."""

    @property
    def deferring(self) -> bool:
        """Whether gradients are deferred now, because the stage runs an I, or an exchange comes first."""
        ...

    def put(self, weight: "AccumulatingWeight", compute: Compute) -> None:
        """Store `compute` until the microbatch's W, or the start of the exchange; then call write_grad."""
        ...


class AccumulatingWeight(Protocol):
    """A weight whose gradient the kernels accumulate. The attributes are set on the Parameter.

    grad_is_written: main_grad holds gradients of this step. Otherwise its content is stale.
    """
    grad_is_written: bool

    @property
    def main_grad(self) -> Tensor | None:
        """Return the buffer [weight.shape], in fp32 or better: a view of the flat gradients of a bucket.

        None outside of a backward if ZeRO-2 or 3 has freed the buffer.
        """
        ...

    @property
    def weight_grad_store(self) -> DeferredWeightGrads | None:
        """Return where the gradient may be deferred to. None, or no such attribute, for never."""
        ...

    @property
    def late_grads(self) -> "LateWeightGrads | None":
        """Return the same for the backward of a layer."""
        ...


class LateWeightGrads:
    """Weight gradients of a layer that wait until its backward has started an exchange, and overlap with it.

    The backward calls begin() before the GEMMs, and finish() after the start. Until then their operands stay
    alive.
    """

    def __init__(self) -> None:
        self.deferring = False
        self.waiting: list[tuple[AccumulatingWeight, Compute]] = []

    def put(self, weight: AccumulatingWeight, compute: Compute) -> None:
        self.waiting.append((weight, compute))

    def begin(self) -> None:
        self.deferring = True

    def finish(self) -> None:
        """Compute the pending gradients, in order of arrival."""
        self.deferring = False
        waiting, self.waiting = self.waiting, []
        for weight, compute in waiting:
            write_grad(weight, compute)


def accumulates(weight: object) -> TypeGuard[AccumulatingWeight]:
    """Whether the weight has a gradient buffer. A plain tensor has none."""
    return getattr(weight, "main_grad", None) is not None


def accumulate_grad(weight: Tensor, compute: Compute) -> Tensor | None:
    """Put the result of `compute` into weight.main_grad: now, in the W of a pipeline schedule, or after the
    start of an exchange.

    compute(buffer, add) overwrites all elements of the fp32 buffer [weight.shape], or (add) adds to them.
    compute(None, False) returns the gradient.
    Return the autograd Function's return value for the weight: None, or the gradient of a plain tensor.
    """
    if not weight.requires_grad:
        return None
    if not accumulates(weight):
        return compute(None, False)
    store: DeferredWeightGrads | None = getattr(weight, "weight_grad_store", None)
    late: LateWeightGrads | None = getattr(weight, "late_grads", None)
    if store is not None and store.deferring:  # until the W, regardless of the layer
        store.put(weight, compute)
    elif late is not None and late.deferring:
        late.put(weight, compute)
    else:
        write_grad(weight, compute)
    return None


def write_grad(weight: AccumulatingWeight, compute: Compute) -> None:
    """Run `compute` on weight.main_grad: the first of a step overwrites, and the others add."""
    compute(weight.main_grad, weight.grad_is_written)
    weight.grad_is_written = True


def accumulate_summed_grad(weight: Tensor, grad: Tensor) -> Tensor | None:
    """Run accumulate_grad on an existing gradient.

    Norm weights and biases have one: it is small, and a by-product of the input gradient.
    """
    def compute(into: Tensor | None, add: bool) -> Tensor:
        if into is None:
            return grad.to(weight.dtype)
        return write_or_add(into, grad.view_as(into), add)
    return accumulate_grad(weight, compute)


def read_weight(weight: Tensor) -> Tensor:
    """Return the weight in fp32 or better, as a tensor for any operation: its gradient goes where
    accumulate_grad puts it. For a few numbers; torch would keep a parameter's gradient to itself."""
    return _ReadWeight.apply(weight)


class _ReadWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor) -> Tensor:
        ctx.weight = weight
        dtype = accumulation_dtype(weight.dtype)
        return weight.view_as(weight) if weight.dtype == dtype else weight.to(dtype)

    @staticmethod
    def backward(ctx, dweight: Tensor) -> Tensor | None:
        return accumulate_summed_grad(ctx.weight, dweight)


def write_or_add(into: Tensor, grad: Tensor, add: bool) -> Tensor:
    """Compute into = grad, or (add) into += grad. Return `into`."""
    return into.add_(grad) if add else into.copy_(grad)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics and accumulation: fp32, or fp64 if the inputs are fp64."""
    return torch.promote_types(dtype, torch.float32)
