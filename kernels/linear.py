"""y = x W^T + b, whose weight gradient is accumulated into fp32 by the backward itself (see kernels/grad.py).

Under tensor parallelism x may come from other ranks, and its gradient goes to them: a `region` (parallel/collectives.py)
brings x before the GEMM, and in the backward takes the gradient of x away while the weight gradient is computed.
An x that is cheap to make again (`remade`) is not kept for the backward, only what it is made from (arXiv 2205.05198).
"""
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.grad import give, give_sum, wide
from kernels.triton_ import TensorDescriptor, ceil_div, chip, fits, tl, triton

BLOCK = 1 << 20  # elements of a weight gradient that a CPU makes and adds while they are in its cache
TILE = {"M": 128, "N": 256, "K": 64, "GROUP": 8, "num_warps": 8, "num_stages": 3}  # of the GPU's GEMM: outputs, inputs, tokens
ALIGNED = 16  # bytes: what the copy engine (TMA) wants of a base and a row


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
    if triton_fits(into, dy, x):
        return launch_wgrad(into, dy, x)
    # No CPU library adds a bf16 product to fp32, and torch widens a whole operand before it adds: so, in blocks of rows.
    rows = max(1, BLOCK // into.shape[1]) if into.device.type == "cpu" else len(into)
    for part, columns in zip(into.split(rows), dy.split(rows, 1)):
        part.add_(columns.t() @ x)
    return into


# ---- Triton ------------------------------------------------------------------------------------------------------------------

@triton.jit
def add_tile(INTO, part, row, column, m, n, M: tl.constexpr, N: tl.constexpr):
    """INTO [m, n] += part [M, N], whose corner lies at (row, column)."""
    rows, columns = row + tl.arange(0, M), column + tl.arange(0, N)
    at = INTO + rows.to(tl.int64)[:, None] * n + columns[None, :]
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    tl.store(at, (tl.load(at, inside).to(tl.float32) + part).to(INTO.dtype.element_ty), inside)


@triton.jit
def wgrad_kernel(DY, X, INTO, t, m, n, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr):
    """One tile of INTO [m, n] += DY^T X, in fp32. DY, X: descriptors of [t, m] and [t, n], in blocks of [K, M] and [K, N]."""
    # tiles that run side by side form a square, GROUP rows high: they share what the cache holds
    tiles_m, tiles_n = tl.cdiv(m, M), tl.cdiv(n, N)
    band = tl.program_id(0) // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - band * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * tiles_n)
    row, column = (band * GROUP + within % height) * M, within // height * N
    total = tl.zeros((M, N), tl.float32)
    for k in range(0, t, K):  # what lies beyond the tensors reads as 0
        total = tl.dot(DY.load([k, row]).T, X.load([k, column]), total)
    left, right = tl.split(tl.permute(tl.reshape(total, (M, 2, N // 2)), (0, 2, 1)))  # in halves: all at once does not fit the registers
    add_tile(INTO, left, row, column, m, n, M, N // 2)
    add_tile(INTO, right, row, column + N // 2, m, n, M, N // 2)


def skewed(*tensors: Tensor) -> str | None:
    """Why the copy engine cannot read one of these matrices; None: it can."""
    if chip(tensors[0].device) < 9:
        return "a copy engine (TMA) is in chips from Hopper on"
    odd = [t for t in tensors if t.stride(-1) != 1 or t.stride(-2) * t.itemsize % ALIGNED or t.data_ptr() % ALIGNED]
    return f"rows that are not aligned to {ALIGNED} bytes" if odd else None


def triton_fits(into: Tensor, dy: Tensor, x: Tensor) -> bool:
    why = skewed(dy, x) or (None if into.is_contiguous() else "an accumulator that is not contiguous")
    return dy.numel() > 0 and into.numel() > 0 and fits("weight gradient", dy, x, into, why=why)


def launch_wgrad(into: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    (t, m), n, tile = dy.shape, x.shape[1], TILE
    wgrad_kernel[(ceil_div(m, tile["M"]) * ceil_div(n, tile["N"]),)](
        TensorDescriptor(dy, dy.shape, dy.stride(), [tile["K"], tile["M"]]), TensorDescriptor(x, x.shape, x.stride(), [tile["K"], tile["N"]]),
        into, t, m, n, **tile)
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
