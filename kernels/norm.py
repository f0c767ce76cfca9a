"""RMSNorm (arXiv 1910.07467) and LayerNorm (arXiv 1607.06450), each with an optional residual add in front.

norm(x, weight) normalises x; with `residual` it returns (norm(x + residual), x + residual), so the sum is read once.
Statistics in fp32 or better.
"""
import torch
from torch import Tensor

from kernels.grad import give_sum, wide


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., d], weight [d] -> [..., d]."""
    return _Norm.apply(x, None, weight, None, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual)."""
    return _Norm.apply(x, residual, weight, None, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x [..., d], weight and bias [d] -> [..., d]."""
    return _Norm.apply(x, None, weight, bias, eps)[0]


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(layer_norm(x + residual), x + residual)."""
    return _Norm.apply(x, residual, weight, bias, eps)


def norm_forward(x, residual, weight, bias, eps: float):
    """-> y, x + residual, 1/deviation [..., 1], mean [..., 1] or None (RMSNorm)."""
    if residual is not None:
        x = x + residual
    f = x.to(wide(x.dtype))
    mean = None if bias is None else f.mean(-1, keepdim=True)
    centred = f if mean is None else f - mean
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = centred * scale * weight.to(f.dtype)
    return (y if bias is None else y + bias.to(f.dtype)).to(x.dtype), x, scale, mean


def norm_backward(dy, dres, x, weight, scale, mean):
    """-> dx (the residual branch's gradient `dres` added), dweight and dbias in fp32."""
    g = dy.to(scale.dtype)
    hat = (x.to(scale.dtype) if mean is None else x.to(scale.dtype) - mean) * scale
    wg = g * weight.to(g.dtype)
    dx = wg - hat * (hat * wg).mean(-1, keepdim=True)
    if mean is not None:
        dx = dx - wg.mean(-1, keepdim=True)
    dx = dx * scale
    if dres is not None:
        dx = dx + dres.to(dx.dtype)
    rows = tuple(range(dy.dim() - 1))
    return dx.to(x.dtype), (g * hat).sum(rows), None if mean is None else g.sum(rows)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps):
        y, total, scale, mean = norm_forward(x, residual, weight, bias, eps)
        ctx.save_for_backward(total, scale, mean)
        ctx.weight, ctx.bias, ctx.fused = weight, bias, residual is not None
        ctx.set_materialize_grads(False)
        return (y, total) if ctx.fused else (y,)

    @staticmethod
    def backward(ctx, dy, dres=None):
        x, scale, mean = ctx.saved_tensors
        if dy is None:
            return dres, dres, None, None, None
        dx, dw, db = norm_backward(dy, dres, x, ctx.weight, scale, mean)
        dw = give_sum(ctx.weight, dw)
        db = None if ctx.bias is None else give_sum(ctx.bias, db)
        return dx, dx if ctx.fused else None, dw, db, None
