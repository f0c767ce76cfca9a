"""RMSNorm (arXiv 1910.07467) and LayerNorm (arXiv 1607.06450), each with an optional residual add in front.

norm(x, weight) normalises x; with `residual` it returns (norm(x + residual), x + residual), so the sum is read once.
Statistics in fp32 or better. On a GPU each direction is one pass over memory; the weight's gradient is summed by each program
over its rows, and then over programs in a fixed order.
"""
import torch
from torch import Tensor

from kernels.grad import give_sum, wide
from kernels.jit import jit
from kernels.triton_ import ceil_div, fits, power_of_2, processors, tl, triton

TILE = 4096  # elements a program works on at a time: short rows go several together
FORWARD, BACKWARD = 512, 256  # elements of a row a warp: the backward holds more of them at once
LONGEST = 1 << 15  # a row lies in one program's registers
PROGRAMS = 4  # of the backward a multiprocessor: enough loads in flight, few partial sums


def rms_norm(x: Tensor, weight: Tensor, eps: float, fused: bool = False) -> Tensor:
    """x [..., d], weight [d] -> [..., d]."""
    return _Norm.apply(x, None, weight, None, eps, fused)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, fused: bool = False) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual)."""
    return _Norm.apply(x, residual, weight, None, eps, fused)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, fused: bool = False) -> Tensor:
    """x [..., d], weight and bias [d] -> [..., d]."""
    return _Norm.apply(x, None, weight, bias, eps, fused)[0]


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float,
                   fused: bool = False) -> tuple[Tensor, Tensor]:
    """(layer_norm(x + residual), x + residual)."""
    return _Norm.apply(x, residual, weight, bias, eps, fused)


def norm_forward(x, residual, weight, bias, eps: float):
    """-> y, x + residual, 1/deviation [..., 1], mean [..., 1] or None (RMSNorm)."""
    if residual is not None:
        x = x + residual
    f = x.to(wide(x.dtype))
    mean = None if bias is None else f.mean(-1, keepdim=True)
    centred = f if mean is None else f - mean
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = (centred * scale).mul_(weight.to(f.dtype))
    return (y if bias is None else y.add_(bias.to(f.dtype))).to(x.dtype), x, scale, mean


def norm_backward(dy, dres, x, weight, scale, mean):
    """-> dx (the residual branch's gradient `dres` added), dweight and dbias in fp32."""
    rows = tuple(range(dy.dim() - 1))
    g, w = dy.to(scale.dtype), weight.to(scale.dtype)
    hat = (x.to(scale.dtype) if mean is None else x.to(scale.dtype) - mean) * scale
    g_hat, g_w = g * hat, g * w
    slope = (g_hat @ w / w.shape[0])[..., None]  # mean of g w hat over the row
    dx = g_w.addcmul_(hat, slope, value=-1)
    if mean is not None:
        dx -= (g @ w / w.shape[0])[..., None]
    dx *= scale
    if dres is not None:
        dx += dres
    return dx.to(x.dtype), g_hat.sum(rows), None if mean is None else g.sum(rows)


# ---- Triton ------------------------------------------------------------------------------------------------------------------

@triton.jit
def forward_kernel(X, RESIDUAL, WEIGHT, BIAS, Y, TOTAL, SCALE, MEAN, n, d, eps,
                   PAIR: tl.constexpr, LAYER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows, cols = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (rows < n)[:, None] & (cols < d)[None, :]
    at = rows[:, None] * d + cols[None, :]
    x = tl.load(X + at, inside, 0.0).to(tl.float32)
    if PAIR:
        total = (x + tl.load(RESIDUAL + at, inside, 0.0).to(tl.float32)).to(X.dtype.element_ty)
        tl.store(TOTAL + at, total, inside)
        x = total.to(tl.float32)  # what the backward will read
    if LAYER:
        mean = tl.sum(x, 1) / d
        x = tl.where(inside, x - mean[:, None], 0.0)
        tl.store(MEAN + rows, mean, rows < n)
    scale = tl.rsqrt(tl.sum(x * x, 1) / d + eps)
    tl.store(SCALE + rows, scale, rows < n)
    y = x * scale[:, None] * tl.load(WEIGHT + cols, cols < d, 0.0).to(tl.float32)[None, :]
    if LAYER:
        y += tl.load(BIAS + cols, cols < d, 0.0).to(tl.float32)[None, :]
    tl.store(Y + at, y.to(Y.dtype.element_ty), inside)


@triton.jit
def backward_kernel(DY, DRES, X, WEIGHT, SCALE, MEAN, DX, DWEIGHT, DBIAS, n, d,
                    PAIR: tl.constexpr, LAYER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    program, cols = tl.program_id(0), tl.arange(0, BLOCK)
    weight = tl.load(WEIGHT + cols, cols < d, 0.0).to(tl.float32)[None, :]
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)
    dbias = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(program * ROWS, n, tl.num_programs(0) * ROWS):
        rows = first + tl.arange(0, ROWS)
        inside = (rows < n)[:, None] & (cols < d)[None, :]
        at = rows.to(tl.int64)[:, None] * d + cols[None, :]
        g = tl.load(DY + at, inside, 0.0).to(tl.float32)
        x = tl.load(X + at, inside, 0.0).to(tl.float32)
        scale = tl.load(SCALE + rows, rows < n, 0.0)[:, None]
        if LAYER:
            x = tl.where(inside, x - tl.load(MEAN + rows, rows < n, 0.0)[:, None], 0.0)
            dbias += g
        hat, gw = x * scale, g * weight
        dweight += g * hat
        dx = gw - hat * (tl.sum(gw * hat, 1) / d)[:, None]
        if LAYER:
            dx -= (tl.sum(gw, 1) / d)[:, None]
        dx *= scale
        if PAIR:
            dx += tl.load(DRES + at, inside, 0.0).to(tl.float32)
        tl.store(DX + at, dx.to(DX.dtype.element_ty), inside)
    at = program.to(tl.int64) * d + cols
    tl.store(DWEIGHT + at, tl.sum(dweight, 0), cols < d)
    if LAYER:
        tl.store(DBIAS + at, tl.sum(dbias, 0), cols < d)


def tile(d: int, each: int) -> dict:
    """Launch parameters for rows of d elements, of which a warp has `each`."""
    block = power_of_2(d)
    return {"ROWS": max(1, TILE // block), "BLOCK": block, "num_warps": min(16, max(4, block // each))}


def launch_forward(x, residual, weight, bias, eps: float):
    """What norm_forward returns, as one kernel; the statistics are [rows]."""
    d, shape = x.shape[-1], x.shape
    x, residual = (None if t is None else t.contiguous() for t in (x, residual))
    n, meta = x.numel() // d, tile(d, FORWARD)
    y, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
    scale = x.new_empty(n, dtype=torch.float32)
    mean = None if bias is None else torch.empty_like(scale)
    forward_kernel[(ceil_div(n, meta["ROWS"]),)](x, residual, weight, bias, y, total, scale, mean, n, d, eps,
                                                 PAIR=residual is not None, LAYER=bias is not None, **meta)
    return y.view(shape), total, scale, mean


def launch_backward(dy, dres, x, weight, scale, mean):
    """What norm_backward returns, as one kernel and the sum of its programs' shares."""
    d, meta = x.shape[-1], tile(x.shape[-1], BACKWARD)
    dy, dres = (None if t is None else t.contiguous() for t in (dy, dres))
    n, dx = x.numel() // d, torch.empty_like(x)
    programs = min(PROGRAMS * processors(x.device), ceil_div(n, meta["ROWS"]))
    dweight = scale.new_empty(programs, d)
    dbias = None if mean is None else torch.empty_like(dweight)
    backward_kernel[(programs,)](dy, dres, x, weight, scale, mean, dx, dweight, dbias, n, d,
                                 PAIR=dres is not None, LAYER=mean is not None, **meta)
    return dx, dweight.sum(0), None if mean is None else dbias.sum(0)


def triton_fits(x, *others) -> bool:
    d = x.shape[-1]
    return x.numel() > 0 and fits("norm", x, *others, why=f"rows of {d} are longer than {LONGEST}" if d > LONGEST else None)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps, fused):
        ctx.triton = triton_fits(x, residual, weight, bias)
        forward = launch_forward if ctx.triton else jit(norm_forward, fused)
        y, total, scale, mean = forward(x, residual, weight, bias, eps)
        ctx.save_for_backward(total, scale, mean)
        ctx.weight, ctx.bias, ctx.pair, ctx.fused = weight, bias, residual is not None, fused
        ctx.set_materialize_grads(False)
        return (y, total) if ctx.pair else (y,)

    @staticmethod
    def backward(ctx, dy, dres=None):
        x, scale, mean = ctx.saved_tensors
        if dy is None:
            return dres, dres, None, None, None, None
        backward = launch_backward if ctx.triton else jit(norm_backward, ctx.fused)
        dx, dw, db = backward(dy, dres, x, ctx.weight, scale, mean)
        dw = give_sum(ctx.weight, dw)
        db = None if ctx.bias is None else give_sum(ctx.bias, db)
        return dx, dx if ctx.pair else None, dw, db, None, None
