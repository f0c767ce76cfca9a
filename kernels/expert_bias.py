"""Biases of several experts: each row gets those of its experts.

    y[i] = x[i] + sum over e of members[i, e] bias[e]

A row in expert order is a member of one expert, with weight 1. A row that sums the outputs of a token's
experts is a member of each of them, with their weights (parallel/expert/dispatch.py).

Both directions are GEMMs with `members`, which has one column per expert: no atomics, no row counts on the
host, and sums in fp32 or better.
"""
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.grad import accumulate_grad, write_or_add
from kernels.linear import multiply_into_fp32
from kernels.permute import RowOrder


def members_of(
    counts: Sequence[int] | Tensor,
    num_rows: int,
    like: Tensor,
    weight: Tensor | None = None,
    order: RowOrder | None = None,
) -> Tensor:
    """Return members [num_rows, experts], on the device of `like`.

    counts is the number of rows of each expert. weight [num_rows] is 1 by default, in the dtype of `like`.
    With order, the result is [t, experts], for the sums of each token's rows.
    """
    if not isinstance(counts, Tensor):
        counts = torch.as_tensor(counts, dtype=torch.int64).to(like.device, non_blocking=True)
    row = torch.arange(num_rows, device=like.device)
    expert_of_row = torch.searchsorted(counts.cumsum(0), row, right=True)
    height = num_rows
    if order is not None:
        row = order.source
        height = len(order.slots)
    if weight is None:
        weight = like.new_ones(num_rows)
    nobody = weight.new_zeros(height, len(counts))
    return nobody.index_put((row, expert_of_row), weight)


def add_expert_bias(x: Tensor, bias: Tensor, members: Tensor, first: int = 0) -> Tensor:
    """Add to x [m, n] in place, and return it. members is [m, experts].

    bias [experts * o] has o numbers per expert, for the columns first .. first + o - 1 of x.
    """
    return _AddExpertBias.apply(x, bias, members, first)


class _AddExpertBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor, members: Tensor, first: int) -> Tensor:
        by_expert = bias.view(members.shape[1], -1)
        ctx.columns = slice(first, first + by_expert.shape[1])
        ctx.bias = bias  # the Parameter itself, which has main_grad
        ctx.members_dtype = members.dtype
        members = members.to(x.dtype)
        ctx.save_for_backward(members)
        ctx.mark_dirty(x)
        x[:, ctx.columns].addmm_(members, by_expert)
        return x

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        (members,) = ctx.saved_tensors
        mine = dy[:, ctx.columns]

        def compute(into: Tensor | None, add: bool) -> Tensor:
            grad = multiply_into_fp32(members.t(), mine).flatten()
            return grad.to(ctx.bias.dtype) if into is None else write_or_add(into, grad, add)

        dmembers = None
        if ctx.needs_input_grad[2]:
            by_expert = ctx.bias.detach().view(members.shape[1], -1)
            dmembers = multiply_into_fp32(mine, by_expert.t()).to(ctx.members_dtype)
        return dy, accumulate_grad(ctx.bias, compute), dmembers, None
