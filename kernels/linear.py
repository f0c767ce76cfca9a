"""y = x W^T + b, whose weight gradient is accumulated into fp32 by the backward itself (see kernels/grad.py).

Under tensor parallelism x may come from other ranks, and its gradient goes to them: a `region` (parallel/collectives.py)
brings x before the GEMM, and in the backward takes the gradient of x away while the weight gradient is computed.
An x that is cheap to make again (`remade`) is not kept for the backward, only what it is made from (arXiv 2205.05198).
"""
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.grad import give, give_sum, wide

BLOCK = 1 << 20  # elements of a weight gradient that a CPU makes and adds while they are in its cache


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, region=None) -> Tensor:
    """x [..., n], weight [m, n], bias [m] -> [..., m], in x's dtype: a router in fp32 reads weights of a lower one.

    region: None, or an object whose enter(x) is the x that is multiplied, start_enter(x) the same under way, and
    start_leave(dx) the gradient of the x that was given, under way; both are called to wait for the tensor."""
    function, args = getattr(x, "source", (None, ()))
    return _Linear.apply(x, weight, bias, region, function, *args)


def linears(x: Tensor, weights: list[Tensor], biases: list[Tensor | None], rows: list[slice], region=None) -> Tensor:
    """Several linears of one x, side by side: [..., n] -> [..., sum of the rows]. rows: of each weight (and bias), those that
    are used here; the gradient of the others is zero. region: see linear."""
    function, args = getattr(x, "source", (None, ()))
    return _Linears.apply(x, region, function, rows, *weights, *biases, *args)


def remade(y: Tensor, function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """y, which function(*args) gives again, bit for bit and without gradients: a linear that y meets keeps args instead."""
    y.source = function, tuple(x.detach() for x in args)
    return y


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
    def forward(ctx, x, weight, bias, region, function, *args):
        full = x if region is None else region.enter(x)
        ctx.save_for_backward(*(args if function else (full,)))
        ctx.weight, ctx.bias = weight, bias  # the Parameter objects: `give` looks for their main_grad
        ctx.region, ctx.function, ctx.args = region, function, len(args)
        return F.linear(full, weight.to(full.dtype), bias)

    @staticmethod
    def backward(ctx, dy):
        coming = again(ctx.function, ctx.region, *ctx.saved_tensors)
        dx = dy @ ctx.weight.to(dy.dtype) if ctx.needs_input_grad[0] else None
        going = None if ctx.region is None or dx is None else ctx.region.start_leave(dx)
        x = coming()
        dy2, x2 = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])  # [t, m], [t, n]
        dw = give(ctx.weight, lambda into: add_wgrad(into, dy2, x2))
        db = None if ctx.bias is None else give_sum(ctx.bias, dy2.sum(0, dtype=wide(dy.dtype)))
        return (dx if going is None else going()), dw, db, None, None, *[None] * ctx.args


def again(function, region, *saved: Tensor) -> Callable[[], Tensor]:
    """What gives the x of the forward: kept, or made from what was kept, and then on its way from the other ranks."""
    if function is None:
        return lambda: saved[0]
    x = function(*saved)
    return (lambda: x) if region is None else region.start_enter(x)


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, region, function, rows, *tensors):
        n = len(rows)
        full = x if region is None else region.enter(x)
        ctx.save_for_backward(*(tensors[2 * n:] if function else (full,)))
        ctx.weights, ctx.biases, ctx.rows, ctx.count = tensors[:n], tensors[n:2 * n], rows, len(tensors)
        ctx.region, ctx.function = region, function
        return torch.cat([F.linear(full, w[r], None if b is None else b[r]) for w, b, r in zip(ctx.weights, ctx.biases, rows)], -1)

    @staticmethod
    def backward(ctx, dy):
        coming = again(ctx.function, ctx.region, *ctx.saved_tensors)
        parts = dy.split([len(range(len(w))[r]) for w, r in zip(ctx.weights, ctx.rows)], -1)
        dx = sum(part @ w[r] for part, w, r in zip(parts, ctx.weights, ctx.rows))
        going = None if ctx.region is None else ctx.region.start_leave(dx)
        x = coming()
        x2, dws, dbs = x.reshape(-1, x.shape[-1]), [], []
        for part, w, b, r in zip(parts, ctx.weights, ctx.biases, ctx.rows):
            dws.append(give(w, within(w, r, lambda into, dy2=part.reshape(-1, part.shape[-1]): add_wgrad(into, dy2, x2))))
            db = part.reshape(-1, part.shape[-1]).sum(0, dtype=wide(dy.dtype))
            dbs.append(None if b is None else give(b, within(b, r, lambda into, db=db: into.add_(db))))
        return (dx if going is None else going()), None, None, None, *dws, *dbs, *[None] * (ctx.count - 2 * len(dws))


def within(weight: Tensor, rows: slice, add: Callable[[Tensor], object]) -> Callable:
    """For give: the gradient of these rows of a weight is what add(room for them) adds."""
    def compute(into: Tensor | None) -> Tensor:
        whole = torch.zeros_like(weight) if into is None else into
        add(whole[rows])
        return whole
    return compute
