"""Autograd pairs: what moves activations between ranks, and what its gradient does (arXiv 1909.08053, 2205.05198).

Each pair is conjugate: where the forward copies, the backward sums, and the other way round. A group of one rank makes
every one of them the identity.
"""
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel import comm
from parallel.comm import Group


def enter(x: Tensor, group: Group, sequence: bool) -> Tensor:
    """Into a tensor-parallel region. [b, s, d] (sequence: [b, s/tp, d], gathered) -> [b, s, d]; backward sums over tp."""
    if group.size == 1:
        return x
    return _GatherSum.apply(x, group) if sequence else _CopySum.apply(x, group)


def leave(x: Tensor, group: Group, sequence: bool) -> Tensor:
    """Out of it. Partial sums [b, s, d] -> their sum [b, s, d] (sequence: this rank's [b, s/tp, d] of it)."""
    if group.size == 1:
        return x
    return _SumScatter.apply(x, group) if sequence else _SumCopy.apply(x, group)


@dataclass(frozen=True)
class Region:
    """`enter` for a linear (kernels/linear.py), which runs the exchanges of its backward beside its GEMMs: the gradient of
    its input travels while that of its weight is computed."""
    group: Group
    sequence: bool

    def enter(self, x: Tensor) -> Tensor:
        return gather_dim1(x, self.group) if self.sequence else x

    def start_enter(self, x: Tensor) -> Callable[[], Tensor]:
        if not self.sequence:
            return lambda: x
        x = x.transpose(0, 1).contiguous()  # [s/tp, b, ...]
        work = comm.start_gather(x, self.group, x.new_empty(self.group.size * x.shape[0], *x.shape[1:]))
        return lambda: work.wait().transpose(0, 1)

    def start_leave(self, dx: Tensor) -> Callable[[], Tensor]:
        """dx is scratch afterwards."""
        if not self.sequence:
            return comm.start_sum(dx, self.group).wait
        work = comm.start_scatter_sum(dx.transpose(0, 1).contiguous(), self.group)
        return lambda: work.wait().transpose(0, 1).contiguous()


def gather_dim1(x: Tensor, group: Group) -> Tensor:
    """[b, s/n, ...] -> [b, s, ...]."""
    b, s = x.shape[:2]
    parts = comm.gather(x.transpose(0, 1), group)  # [s, b, ...]: ranks lie one after the other along dim 0
    return parts.transpose(0, 1).contiguous() if b > 1 else parts.view(b, s * group.size, *x.shape[2:])


def scatter_sum_dim1(x: Tensor, group: Group) -> Tensor:
    """[b, s, ...] -> this rank's [b, s/n, ...] of the sum."""
    return comm.scatter_sum(x.transpose(0, 1), group).transpose(0, 1).contiguous()


def take_dim1(x: Tensor, group: Group) -> Tensor:
    """This rank's share of dim 1, of a tensor that every rank has whole (data, not activations: no gradient)."""
    return x if group.size == 1 else x.chunk(group.size, 1)[group.index]


def split_dim1(x: Tensor, group: Group) -> Tensor:
    """This rank's [b, s/n, ...] of an activation [b, s, ...] that every rank has whole; zeros fill up what n does not divide."""
    return x if group.size == 1 else _SplitGather.apply(x, group)


def join_dim1(x: Tensor, group: Group, s: int) -> Tensor:
    """The way back, without the filling: every rank gets [b, s, ...], and uses it alike."""
    return x if group.size == 1 else _GatherSplit.apply(x, group, s)


def share(x: Tensor, group: Group) -> Tensor:
    size = -(-x.shape[1] // group.size)
    part = x[:, group.index * size:(group.index + 1) * size]
    return torch.cat((part, part.new_zeros(x.shape[0], size - part.shape[1], *x.shape[2:])), 1) if part.shape[1] < size else part.contiguous()


class _SplitGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.s = group, x.shape[1]
        return share(x, group)

    @staticmethod
    def backward(ctx, dy):
        return gather_dim1(dy, ctx.group)[:, :ctx.s], None


class _GatherSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, s):
        ctx.group = group
        return gather_dim1(x, group)[:, :s]

    @staticmethod
    def backward(ctx, dy):
        return share(dy, ctx.group), None, None


class _CopySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return comm.sum_(dy.clone(), ctx.group), None


class _SumCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return comm.sum_(x.clone(), group)

    @staticmethod
    def backward(ctx, dy):
        return dy, None


class _GatherSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gather_dim1(x, group)

    @staticmethod
    def backward(ctx, dy):
        return scatter_sum_dim1(dy, ctx.group), None


class _SumScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return scatter_sum_dim1(x, group)

    @staticmethod
    def backward(ctx, dy):
        return gather_dim1(dy, ctx.group), None
