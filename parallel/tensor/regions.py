"""The boundaries of a tensor-parallel region: how activations and their gradients move between ranks.

The forward and backward of a boundary are conjugate (arXiv 1909.08053, 2205.05198): if the forward copies,
the backward all-reduces, and if it all-gathers, the backward reduce-scatters. In a group of one rank each is
the identity. `sequence` means that, under sequence parallelism, activations outside of the region are sharded
along the sequence.
"""
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.linear import product
from parallel.tensor.overlap import gather_and_multiply, multiply_and_scatter
from parallel.wire import comm
from parallel.wire.comm import Group


def enter_region(x: Tensor, group: Group, sequence: bool) -> Tensor:
    """x [b, s, d] (sequence: [b, s/tp, d], all-gathered) -> [b, s, d]. The backward sums over tp."""
    if group.size == 1:
        return x
    return _GatherScatter.apply(x, group) if sequence else _CopyReduce.apply(x, group)


def leave_region(x: Tensor, group: Group, sequence: bool) -> Tensor:
    """Sum partial results [b, s, d] over tp -> [b, s, d] (sequence: this rank's [b, s/tp, d])."""
    if group.size == 1:
        return x
    return _ScatterGather.apply(x, group) if sequence else _ReduceCopy.apply(x, group)


def scatter_to_tp(x: Tensor, group: Group) -> Tensor:
    """Return this rank's [b, s/n, ...] of an activation [b, s, ...] that every rank has in full.

    If n does not divide s, the last parts are padded with zeros.
    """
    return x if group.size == 1 else _SplitGather.apply(x, group)


def gather_from_tp(x: Tensor, group: Group, s: int) -> Tensor:
    """Invert scatter_to_tp: every rank gets [b, s, ...], and must use it identically."""
    return x if group.size == 1 else _GatherSplit.apply(x, group, s)


@dataclass(frozen=True)
class TensorParallelRegion:
    """The boundaries of a region for a linear layer (kernels/linear.py), without autograd.

    The layer overlaps the exchanges of its backward with its GEMMs: the gradient of its input is sent while
    the gradient of its weight is computed. is_async (only with sequence) overlaps its other exchanges too
    (parallel/tensor/overlap.py).
    """
    group: Group
    sequence: bool
    is_async: bool = False

    def enter(self, x: Tensor) -> Tensor:
        """[b, s, d] (sequence: [b, s/tp, d]) -> [b, s, d]."""
        return all_gather_sequence(x, self.group) if self.sequence else x

    def enter_and_multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """x as for enter, weight [m, d], bias [m] -> enter(x) [b, s, d], and its product [b, s, m]."""
        if self.is_async:
            return gather_and_multiply(x, weight, bias, self.group)
        entered = self.enter(x)
        return entered, product(entered, weight, bias)

    def multiply_and_leave(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [b, s, n/tp], weight [m, n/tp] -> this rank's part [b, s/tp, m] of the sum of x W^T over tp.

        Only for an async region: others use leave_region, which full recompute skips.
        """
        return multiply_and_scatter(x, weight, self.group)

    def start_gather_inputs(self, x: Tensor) -> Callable[[], Tensor]:
        """Start enter(x). Return a function that waits for the result."""
        if not self.sequence:
            return lambda: x
        return comm.start_all_gather_each(x, self.group).wait

    def start_reduce_grads(self, dx: Tensor) -> Callable[[], Tensor]:
        """Start reducing the gradient dx [b, s, d] over tp, to each rank's part under sequence parallelism.

        Return a function that waits for the result. dx is scratch memory afterwards.
        """
        if not self.sequence:
            return comm.start_all_reduce(dx, self.group).wait
        return comm.start_reduce_scatter_each(dx, self.group).wait


# ---- without gradients -------------------------------------------------------------------------------------


def all_gather_sequence(x: Tensor, group: Group) -> Tensor:
    """[b, s/n, ...] -> [b, s, ...]."""
    return comm.all_gather_each(x, group)


def reduce_scatter_sequence(x: Tensor, group: Group) -> Tensor:
    """[b, s, ...] -> this rank's [b, s/n, ...] of the sum."""
    return comm.reduce_scatter_each(x, group)


def local_chunk(x: Tensor, group: Group) -> Tensor:
    """Return this rank's part of dim 1 of data (no gradient) that every rank has in full."""
    return x if group.size == 1 else x.chunk(group.size, 1)[group.index]


def padded_chunk(x: Tensor, group: Group) -> Tensor:
    """Return this rank's part of dim 1, zero-padded so that all parts are equally long."""
    size = -(-x.shape[1] // group.size)
    part = x[:, group.index * size:(group.index + 1) * size]
    if part.shape[1] == size:
        return part.contiguous()
    zeros = part.new_zeros(x.shape[0], size - part.shape[1], *x.shape[2:])
    return torch.cat((part, zeros), 1)


# ---- autograd functions, named by forward and backward -----------------------------------------------------


class _CopyReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        return comm.all_reduce_sum(dy.clone(), ctx.group), None


class _ReduceCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        return comm.all_reduce_sum(x.clone(), group)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _GatherScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather_sequence(x, group)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_sequence(dy, ctx.group), None


class _ScatterGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return reduce_scatter_sequence(x, group)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        return all_gather_sequence(dy, ctx.group), None


class _SplitGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        ctx.s = x.shape[1]
        return padded_chunk(x, group)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        return all_gather_sequence(dy, ctx.group)[:, :ctx.s], None


class _GatherSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group, s: int) -> Tensor:
        ctx.group = group
        return all_gather_sequence(x, group)[:, :s]

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None]:
        return padded_chunk(dy, ctx.group), None, None
