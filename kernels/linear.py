"""y = x W^T + b, whose weight gradient is accumulated into fp32 by the backward itself (see kernels/grad.py)."""
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.grad import give, give_sum, wide

BLOCK = 1 << 20  # elements of a weight gradient that a CPU makes and adds while they are in its cache


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., n], weight [m, n], bias [m] -> [..., m], in x's dtype: a router in fp32 reads weights of a lower one."""
    return _Linear.apply(x, weight, bias)


def add_wgrad(into: Tensor | None, dy: Tensor, x: Tensor) -> Tensor | None:
    """into += dy^T x, in `into`'s dtype. dy [t, m], x [t, n], into [m, n]; None: return dy^T x."""
    if into is None:
        return dy.t() @ x
    if into.dtype == dy.dtype:
        return into.addmm_(dy.t(), x)
    # No CPU library adds a bf16 product to fp32, and torch widens a whole operand before it adds: so, in blocks of rows.
    rows = max(1, BLOCK // into.shape[1]) if into.device.type == "cpu" else len(into)
    for part, columns in zip(into.split(rows), dy.split(rows, 1)):
        part.add_(columns.t() @ x)
    return into


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias = weight, bias  # the Parameter objects: `give` looks for their main_grad
        return F.linear(x, weight.to(x.dtype), bias)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dy2, x2 = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])  # [t, m], [t, n]
        dx = dy @ ctx.weight.to(dy.dtype) if ctx.needs_input_grad[0] else None
        dw = give(ctx.weight, lambda into: add_wgrad(into, dy2, x2))
        db = None if ctx.bias is None else give_sum(ctx.bias, dy2.sum(0, dtype=wide(dy.dtype)))
        return dx, dw, db
