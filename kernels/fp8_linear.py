"""y = x W^T + b whose three products run in fp8, everything else as in kernels/linear.py (regions, `remade` inputs, `give`).

    recipe       x, W              dy     a scale of x and dy               of W                    sources
    tensorwise   e4m3              e5m2   the tensor                        the tensor              arXiv 2209.05433
    rowwise      e4m3              e5m2   a row of an operand               a row                   torchao
    blockwise    e4m3              e4m3   1 x 128                           128 x 128               DeepSeek-V3, arXiv 2412.19437, 3.3
    product      y = x W^T   dx = dy W   dW = dy^T x: rows of its operands run along the tokens, so rowwise scales are a feature's
                 over all tokens of the microbatch and blockwise ones a feature's over 128 tokens

Scales come from the tensor at hand (just in time). What is cut over ranks has the scales of the whole: the largest elements
are exchanged where a scale spans the cut (`Scaling`); a block never does. x is quantized twice from its own dtype, along the
features for y and along the tokens for dW; only the latter is kept for the backward, in 8 bits. W is quantized in every
forward and backward: (2 + 1) m n bytes of traffic beside 2 t m n FLOPs.
"""
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.fp8 import E4M3, E5M2, largest_of
from kernels.fp8_gemm import Quantized, add_product, product, quantize
from kernels.grad import give, give_sum, wide
from kernels.linear import again

RECIPES = {"tensorwise": ("tensor", "tensor", E5M2), "rowwise": ("row", "row", E5M2), "blockwise": ("group", "block", E4M3)}  # x and dy; W; dy in
Share = Callable[[Tensor], object]  # in place: the largest over the ranks that hold other parts


@dataclass(frozen=True)
class Scaling:
    """How a linear is quantized. outs, ins, tokens: where ranks share the weight's outputs, its inputs, the microbatch's tokens."""
    recipe: str
    side: int
    outs: Share | None = None
    ins: Share | None = None
    tokens: Share | None = None

    def scale(self, x: Tensor, kind: str, dtype: torch.dtype, rows: Share | None, columns: Share | None, largest: Tensor | None = None) -> Quantized:
        """x [m, n] quantized; rows, columns: who holds others of them. largest: known from before."""
        across = {"tensor": (rows, columns), "row": (columns,)}.get(kind, ())
        if largest is None and (any(across) or kind == "tensor"):
            largest = largest_of(x, kind, self.side)
            for share in filter(None, across):
                share(largest)
        return quantize(x, kind, dtype, self.side, largest)

    def inputs(self, x: Tensor) -> Quantized:
        """x [t, n] for y."""
        return self.scale(x, RECIPES[self.recipe][0], E4M3, self.tokens, self.ins)

    def inputs_by_token(self, x: Tensor, largest: Tensor | None = None) -> Quantized:
        """x [t, n] -> [n, t] for dW."""
        return self.scale(x.t(), RECIPES[self.recipe][0], E4M3, self.ins, self.tokens, largest)

    def weight(self, w: Tensor) -> Quantized:
        """w [m, n] for y."""
        return self.scale(w, RECIPES[self.recipe][1], E4M3, self.outs, self.ins)

    def weight_back(self, w: Tensor, largest: Tensor | None = None) -> Quantized:
        """w [m, n] -> [n, m] for dx."""
        return self.scale(w.t(), RECIPES[self.recipe][1], E4M3, self.ins, self.outs, largest)

    def gradient(self, dy: Tensor) -> Quantized:
        """dy [t, m] for dx."""
        kind, _, dtype = RECIPES[self.recipe]
        return self.scale(dy, kind, dtype, self.tokens, self.outs)

    def gradient_by_token(self, dy: Tensor, largest: Tensor | None = None) -> Quantized:
        """dy [t, m] -> [m, t] for dW."""
        kind, _, dtype = RECIPES[self.recipe]
        return self.scale(dy.t(), kind, dtype, self.outs, self.tokens, largest)


def known(one: Quantized) -> Tensor | None:
    """A tensor's largest element is its transpose's."""
    return one.largest if one.kind == "tensor" else None


def scaled_linear(x: Tensor, weight: Tensor, bias: Tensor | None, region, scaling: Scaling) -> Tensor:
    """As kernels/linear.py's linear. x [..., n], weight [m, n], bias [m] -> [..., m]."""
    function, args = getattr(x, "source", (None, ()))
    return _ScaledLinear.apply(x, weight, bias, region, scaling, torch.is_grad_enabled(), function, *args)


class _ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, region, scaling, learn, function, *args):
        full = x if region is None else region.enter(x)
        flat = full.flatten(0, -2)  # [t, n]
        one, w = scaling.inputs(flat), scaling.weight(weight)
        y = product(one, w, x.dtype).view(*full.shape[:-1], -1)
        if learn:
            by_token = scaling.inputs_by_token(flat, known(one))
            ctx.save_for_backward(*(args if function else by_token[:2]), *(t for t in (by_token.largest, known(w)) if t is not None))
            ctx.kept, ctx.told = len(args) if function else 2, (by_token.largest is not None, known(w) is not None)
        ctx.weight, ctx.bias, ctx.region, ctx.scaling, ctx.function = weight, bias, region, scaling, function
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx, dy):
        scaling, region, saved = ctx.scaling, ctx.region, ctx.saved_tensors
        kept, rest = saved[:ctx.kept], iter(saved[ctx.kept:])
        largest, weight_largest = (next(rest) if told else None for told in ctx.told)
        dy2 = dy.flatten(0, -2)  # [t, m]
        coming = ctx.function and again(ctx.function, region, *kept)
        one, dx, going = scaling.gradient(dy2), None, None
        if ctx.needs_input_grad[0]:
            dx = product(one, scaling.weight_back(ctx.weight, weight_largest), dy.dtype).view(*dy.shape[:-1], -1)
            going = None if region is None else region.start_leave(dx)
        by_token = scaling.gradient_by_token(dy2, known(one))
        x = scaling.inputs_by_token(coming().flatten(0, -2), largest) if coming else Quantized(*kept, RECIPES[scaling.recipe][0], scaling.side)
        dw = give(ctx.weight, lambda into: add_product(into, by_token, x, dy.dtype))
        db = None if ctx.bias is None else give_sum(ctx.bias, dy2.sum(0, dtype=wide(dy.dtype)))
        return (dx if going is None else going()), dw, db, *[None] * (len(ctx.needs_input_grad) - 3)

