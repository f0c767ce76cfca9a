"""RMSNorm (arXiv 1910.07467) and LayerNorm (arXiv 1607.06450), each with an optional residual add in front.

norm(x, weight) normalises x; with `residual` it returns (norm(x + residual), x + residual), so the sum is read once.
Statistics in fp32 or better.
"""
import torch
from torch import Tensor

from kernels.grad import give_sum, wide
from kernels.jit import jit


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


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps, fused):
        y, total, scale, mean = jit(norm_forward, fused)(x, residual, weight, bias, eps)
        ctx.save_for_backward(total, scale, mean)
        ctx.weight, ctx.bias, ctx.pair, ctx.fused = weight, bias, residual is not None, fused
        ctx.set_materialize_grads(False)
        return (y, total) if ctx.pair else (y,)

    @staticmethod
    def backward(ctx, dy, dres=None):
        x, scale, mean = ctx.saved_tensors
        if dy is None:
            return dres, dres, None, None, None, None
        dx, dw, db = jit(norm_backward, ctx.fused)(dy, dres, x, ctx.weight, scale, mean)
        dw = give_sum(ctx.weight, dw)
        db = None if ctx.bias is None else give_sum(ctx.bias, db)
        return dx, dx if ctx.pair else None, dw, db, None, None
