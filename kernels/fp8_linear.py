"""y = x W^T + b whose three products run in fp8.

Everything else is as in kernels/linear.py: regions, recomputed inputs, accumulate_grad.

    recipe       x, W    dy      a scale of x and dy      of W         source
    tensorwise   e4m3    e5m2    the tensor               the tensor   arXiv 2209.05433
    rowwise      e4m3    e5m2    a row of an operand      a row        torchao
    blockwise    e4m3    e4m3    1 x 128                  128 x 128    DeepSeek-V3, arXiv 2412.19437, 3.3

The products are y = x W^T, dx = dy W and dW = dy^T x. The rows of the operands of dW run along the tokens: so
a rowwise scale is that of a feature over all tokens of the microbatch, a blockwise one that of a feature over
128 tokens.

Scales are computed from the tensor itself, just in time. A tensor that is sharded over ranks has the scales
of the whole tensor: where a scale spans several shards, the ranks exchange their largest elements
(Fp8Scaling). A block never spans shards. x is quantized twice from its own dtype, along the features for y
and along the tokens for dW; only the latter is saved for the backward, in 8 bits. W is quantized in every
forward and backward: (2 + 1) m n bytes of traffic beside 2 t m n FLOPs.
"""
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.fp8 import E4M3, E5M2, absolute_maximum
from kernels.fp8_gemm import QuantizedMatrix, Recipe, quantize_operand, scaled_product, write_scaled_product
from kernels.grad import accumulate_grad, accumulate_summed_grad, accumulation_dtype
from kernels.linear import LinearRegion, RecomputeFunction, recompute_input, source_of, start_reduce_grads

RECIPES = {
    "tensorwise": Recipe("tensor", "tensor", E5M2),
    "rowwise": Recipe("row", "row", E5M2),
    "blockwise": Recipe("group", "block", E4M3),
}
# replaces the largest elements in place by those over the ranks that hold the other shards
Share = Callable[[Tensor], object]


@dataclass(frozen=True)
class Fp8Scaling:
    """How a linear is quantized.

    recipe: one of RECIPES. side: of a block.
    outs, ins, tokens: set where ranks shard the outputs of the weight, its inputs, the microbatch's tokens.
    """
    recipe: str
    side: int
    outs: Share | None = None
    ins: Share | None = None
    tokens: Share | None = None

    def quantize(
        self,
        x: Tensor,
        kind: str,
        dtype: torch.dtype,
        *,
        rows: Share | None,
        columns: Share | None,
        largest: Tensor | None = None,
    ) -> QuantizedMatrix:
        """x [m, n], quantized. rows, columns: set where other ranks hold other rows, or other columns.

        largest: max |x| for each scale, if it is known.
        """
        spanned: tuple[Share | None, ...] = ()  # what a scale spans
        if kind == "tensor":
            spanned = rows, columns
        elif kind == "row":
            spanned = (columns,)
        shares = [share for share in spanned if share is not None]

        if largest is None and (shares or kind == "tensor"):
            largest = absolute_maximum(x, kind, self.side)
            for share in shares:
                share(largest)
        return quantize_operand(x, kind, dtype, self.side, largest)

    def inputs(self, x: Tensor) -> QuantizedMatrix:
        """x [t, n], for y."""
        kind = RECIPES[self.recipe].activation_kind
        return self.quantize(x, kind, E4M3, rows=self.tokens, columns=self.ins)

    def inputs_by_token(self, x: Tensor, largest: Tensor | None = None) -> QuantizedMatrix:
        """x [t, n] -> its transpose [n, t], for dW."""
        kind = RECIPES[self.recipe].activation_kind
        return self.quantize(x.t(), kind, E4M3, rows=self.ins, columns=self.tokens, largest=largest)

    def weight(self, w: Tensor) -> QuantizedMatrix:
        """w [m, n], for y."""
        kind = RECIPES[self.recipe].weight_kind
        return self.quantize(w, kind, E4M3, rows=self.outs, columns=self.ins)

    def weight_back(self, w: Tensor, largest: Tensor | None = None) -> QuantizedMatrix:
        """w [m, n] -> its transpose [n, m], for dx."""
        kind = RECIPES[self.recipe].weight_kind
        return self.quantize(w.t(), kind, E4M3, rows=self.ins, columns=self.outs, largest=largest)

    def gradient(self, dy: Tensor) -> QuantizedMatrix:
        """dy [t, m], for dx."""
        recipe = RECIPES[self.recipe]
        kind, dtype = recipe.activation_kind, recipe.gradient_dtype
        return self.quantize(dy, kind, dtype, rows=self.tokens, columns=self.outs)

    def gradient_by_token(self, dy: Tensor, largest: Tensor | None = None) -> QuantizedMatrix:
        """dy [t, m] -> its transpose [m, t], for dW."""
        recipe = RECIPES[self.recipe]
        kind, dtype = recipe.activation_kind, recipe.gradient_dtype
        return self.quantize(dy.t(), kind, dtype, rows=self.outs, columns=self.tokens, largest=largest)


def known_maximum(matrix: QuantizedMatrix) -> Tensor | None:
    """The `largest` of the transpose, if it is the same: that is so where the tensor has a single scale."""
    return matrix.largest if matrix.kind == "tensor" else None


def scaled_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    region: LinearRegion | None,
    scaling: Fp8Scaling,
) -> Tensor:
    """As kernels/linear.py's linear: x [..., n], weight [m, n], bias [m] -> [..., m]."""
    function, args = source_of(x)
    return _ScaledLinear.apply(x, weight, bias, region, scaling, torch.is_grad_enabled(), function, *args)


class _ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        region: LinearRegion | None,
        scaling: Fp8Scaling,
        grad_enabled: bool,
        function: RecomputeFunction | None,
        *args: Tensor,
    ) -> Tensor:
        gathered = x if region is None else region.enter(x)
        flat_x = gathered.flatten(0, -2)  # [t, n]
        quantized_x = scaling.inputs(flat_x)
        quantized_weight = scaling.weight(weight)
        y = scaled_product(quantized_x, quantized_weight, x.dtype).view(*gathered.shape[:-1], -1)

        if grad_enabled:
            by_token = scaling.inputs_by_token(flat_x, known_maximum(quantized_x))
            inputs = args if function else (by_token.q, by_token.scale)
            ctx.save_for_backward(*inputs, by_token.largest, known_maximum(quantized_weight))
        ctx.weight, ctx.bias = weight, bias  # the Parameters themselves, which have main_grad
        ctx.region = region
        ctx.scaling = scaling
        ctx.function = function
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, largest, weight_largest = ctx.saved_tensors
        scaling = ctx.scaling
        flat_dy = dy.flatten(0, -2)  # [t, m]

        # the exchanges with other ranks run beside the products
        wait_x: Callable[[], Tensor] | None = None
        if ctx.function is not None:
            wait_x = recompute_input(ctx.function, ctx.region, *inputs)
        quantized_dy = scaling.gradient(flat_dy)
        dx = None
        if ctx.needs_input_grad[0]:
            transposed_weight = scaling.weight_back(ctx.weight, weight_largest)
            dx = scaled_product(quantized_dy, transposed_weight, dy.dtype).view(*dy.shape[:-1], -1)
        wait_dx = start_reduce_grads(ctx.region, dx)

        dy_by_token = scaling.gradient_by_token(flat_dy, known_maximum(quantized_dy))
        if wait_x is not None:
            x_by_token = scaling.inputs_by_token(wait_x().flatten(0, -2), largest)
        else:
            q, scale = inputs
            kind = RECIPES[scaling.recipe].activation_kind
            x_by_token = QuantizedMatrix(q, scale, kind, scaling.side)

        dtype = dy.dtype  # a function that named dy would hold it until the W of a schedule

        def write_wgrad(into: Tensor | None, add: bool) -> Tensor:
            return write_scaled_product(into, dy_by_token, x_by_token, dtype, add)
        dw = accumulate_grad(ctx.weight, write_wgrad)
        db = None
        if ctx.bias is not None:
            db = accumulate_summed_grad(ctx.bias, flat_dy.sum(0, dtype=accumulation_dtype(dy.dtype)))
        return wait_dx(), dw, db, *[None] * (len(ctx.needs_input_grad) - 3)
