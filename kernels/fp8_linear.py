"""y = x W^T + b whose three products run in fp8.

Everything else is as in kernels/linear.py: regions, recomputed inputs, accumulate_grad.

    recipe       x, W    dy      a scale of x and dy      of W         source
    tensorwise   e4m3    e5m2    the tensor               the tensor   arXiv 2209.05433
    rowwise      e4m3    e5m2    a row of an operand      a row        torchao
    blockwise    e4m3    e4m3    1 x 128                  128 x 128    DeepSeek-V3, arXiv 2412.19437, 3.3
    mxfp8        e4m3    e4m3    1 x 32, a power of two   1 x 32       arXiv 2506.08027; OCP Microscaling v1.0

nvfp4 has operands of 4 bits (kernels/nvfp4_linear.py).

The products are y = x W^T, dx = dy W and dW = dy^T x. The rows of dW's operands run along the tokens: so a
rowwise scale belongs to a feature over all tokens of the microbatch, a blockwise one to a feature over 128
tokens, and one of mxfp8 to a feature over 32.

Scales are computed from the tensor itself, just in time. A tensor that is sharded over ranks has the scales
of the whole tensor: if a scale spans several shards, the ranks exchange their maxima (Fp8Scaling). A block
never spans shards.

Each of the three matrices is an operand of two products, along its rows in one and along its columns in the
other, and is quantized for both from one read. x: the columns are saved for the backward, in 8 bits. If x is
recomputed, the forward writes no columns; it saves the inputs of their scales, and the backward writes them.
W: once, until its values change (kernels/fp8_weight.py).
"""
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.fp8 import E4M3, E5M2, Maxima, find_maxima
from kernels.fp8_gemm import (
    Operand,
    QuantizedMatrix,
    QuantizedPair,
    Recipe,
    quantize_operand,
    quantize_operand_pair,
    scaled_product,
    write_scaled_product,
)
from kernels.fp8_weight import WeightsTogether, kept_maxima, quantize_once
from kernels.grad import accumulate_grad, accumulate_summed_grad, accumulation_dtype
from kernels.linear import LinearRegion, RecomputeFunction, get_source, recompute_input, start_reduce_grads

RECIPES = {
    "tensorwise": Recipe("tensor", "tensor", E5M2),
    "rowwise": Recipe("row", "row", E5M2),
    "blockwise": Recipe("group", "block", E4M3),
    "mxfp8": Recipe("mx", "mx", E4M3),
}
# replaces the maxima in place by those over the ranks that hold the other shards
Share = Callable[[Tensor], object]


class Casts(NamedTuple):
    """How x and dy are quantized. kernels/unproven/fp8_formula.py has other casts, of another Matrix.

    matrix(x [..., n]) is a Matrix [t, n]. The others take one: find_maxima and quantize_pair are as in
    kernels/fp8.py, quantize and quantize_transposed return one of the pair.
    """
    matrix: Callable[[Tensor], Any]
    find_maxima: Callable[..., Maxima]
    quantize: Callable[..., QuantizedMatrix]
    quantize_transposed: Callable[..., QuantizedMatrix]
    quantize_pair: Callable[..., QuantizedPair]


def matrix_of(x: Tensor) -> Tensor:
    """x [..., n] -> [t, n]."""
    return x.flatten(0, -2)


def quantize_transposed(
    x: Tensor, kind: str, dtype: torch.dtype, side: int, largest: Tensor | None
) -> QuantizedMatrix:
    """x [t, n] -> the quantized [n, t]."""
    return quantize_operand(x.t(), kind, dtype, side, largest)


class Products(NamedTuple):
    """How the quantized matrices are multiplied: kernels/fp8_gemm.py has the arguments of both.

    kernels/unproven/mx_gemm.py has other products.
    """
    product: Callable[[Operand, Operand, torch.dtype], Tensor]
    write: Callable[[Tensor | None, Operand, Operand, torch.dtype, bool], Tensor]


CASTS = Casts(matrix_of, find_maxima, quantize_operand, quantize_transposed, quantize_operand_pair)
PRODUCTS = Products(scaled_product, write_scaled_product)
Matrix = Any  # of a Casts; with CASTS a Tensor [t, n]


@dataclass(frozen=True)
class Fp8Scaling:
    """How a linear is quantized.

    recipe is one of RECIPES, side the side of a block.
    outs, ins and tokens are set if ranks shard the weight's outputs, its inputs, or the microbatch's tokens.
    all_parts covers the ranks of `tokens` and those of the features at once, if both exist.
    together holds the weights with which the maxima of this one are exchanged; None to exchange them alone.
    """
    recipe: str
    side: int
    outs: Share | None = None
    ins: Share | None = None
    tokens: Share | None = None
    all_parts: Share | None = None
    together: WeightsTogether | None = None
    casts: Casts = CASTS
    products: Products = PRODUCTS

    @property
    def activation_kind(self) -> str:
        """Return the kind of the scales of x and dy."""
        return RECIPES[self.recipe].activation_kind

    @property
    def weight_kind(self) -> str:
        """Return the kind of the scales of W."""
        return RECIPES[self.recipe].weight_kind

    @property
    def gradient_dtype(self) -> torch.dtype:
        return RECIPES[self.recipe].gradient_dtype

    def of_pass(self) -> "Fp8Scaling":
        """Return the scaling of one forward and its backward."""
        return self

    def input_maxima(self, x: Matrix, *, both: bool) -> Maxima:
        """Return the maxima of x [t, n]; with both, also along the tokens."""
        kind = self.activation_kind
        if kind == "row" and not both and self.ins is None:
            return Maxima()  # the cast reads whole rows and finds the maxima itself
        return shared_maxima(
            self.casts.find_maxima(x, kind, both=both), kind,
            rows=self.tokens,
            columns=self.ins,
            all_parts=self.all_parts,
            both=both,
        )

    def gradient_maxima(self, dy: Matrix) -> Maxima:
        """Return the maxima of dy [t, m]."""
        kind = self.activation_kind
        return shared_maxima(
            self.casts.find_maxima(dy, kind, both=True), kind,
            rows=self.tokens,
            columns=self.outs,
            all_parts=self.all_parts,
            both=True,
        )

    def inputs(self, x: Matrix, maxima: Maxima) -> Operand:
        """Quantize x [t, n] for y only."""
        return self.casts.quantize(x, self.activation_kind, E4M3, self.side, maxima.rows)

    def inputs_by_token(self, x: Matrix, maxima: Maxima) -> Operand:
        """Quantize x [t, n] -> its transpose [n, t], for dW only."""
        return self.casts.quantize_transposed(x, self.activation_kind, E4M3, self.side, maxima.columns)

    def inputs_in_both(self, x: Matrix, maxima: Maxima) -> QuantizedPair:
        """Quantize x [t, n] for y, and its transpose for dW."""
        return self.casts.quantize_pair(x, self.activation_kind, E4M3, self.side, maxima)

    def gradient_in_both(self, dy: Matrix) -> QuantizedPair:
        """Quantize dy [t, m] for dx, and its transpose for dW."""
        maxima = self.gradient_maxima(dy)
        return self.casts.quantize_pair(dy, self.activation_kind, self.gradient_dtype, self.side, maxima)

    def weight(self, w: Tensor) -> QuantizedPair:
        """Quantize w [m, n] for y, and its transpose for dx; cached until its values change."""
        kind = self.weight_kind
        return quantize_once(
            w,
            lambda: self.weight_maxima(w, kind),
            lambda maxima: quantize_operand_pair(w, kind, E4M3, self.side, maxima),
        )

    def weight_maxima(self, w: Tensor, kind: str) -> Maxima:
        """Return the uncached maxima of w, exchanged along with those of the weights in `together`."""
        if self.together is not None:
            self.together.exchange()
            kept = kept_maxima(w)
            if kept is not None:
                return kept
        maxima = find_maxima(w, kind, both=True)
        return shared_maxima(maxima, kind, rows=self.outs, columns=self.ins, both=True)

    def restored(self, *saved: Tensor) -> Operand:
        """Return the operand of which a forward has saved the tensors."""
        return QuantizedMatrix(*saved, self.activation_kind, self.side)


def own_maxima(w: Tensor, kind: str, divides_outputs: bool) -> tuple[Maxima, Tensor]:
    """Return (shared_maxima of a weight [m, n] before the exchange, the numbers in it that are exchanged).

    kind is tensor or row. divides_outputs: ranks shard the outputs, else the inputs.
    """
    maxima = find_maxima(w, kind, both=True)
    assert maxima.rows is not None and maxima.columns is not None, "blocks share no scales"
    if kind == "tensor":
        largest = maxima.rows.amax().view(1, 1)
        return Maxima(largest, largest), largest
    return maxima, maxima.columns if divides_outputs else maxima.rows


def shared_maxima(
    maxima: Maxima,
    kind: str,
    *,
    rows: Share | None,
    columns: Share | None,
    all_parts: Share | None = None,
    both: bool,
) -> Maxima:
    """Return the maxima of x [m, n] over all ranks that hold parts of it, from those of this rank's part.

    rows and columns are set if other ranks hold other rows, or other columns. A row spans the ranks with
    other columns, and vice versa. all_parts covers both in one exchange. both: include those of the
    transpose.
    """
    if kind == "tensor" and maxima.rows is not None:
        spanned = spanned_by(rows, columns, all_parts)
        if spanned:
            largest = maxima.rows.amax().view(1, 1)
            for share in spanned:
                share(largest)
            return Maxima(largest, largest)
    if kind == "row" and columns is not None and maxima.rows is not None:
        columns(maxima.rows)
    if kind == "row" and both and rows is not None and maxima.columns is not None:
        rows(maxima.columns)
    return maxima


def spanned_by(rows: Share | None, columns: Share | None, all_parts: Share | None) -> list[Share]:
    """Return the exchanges by which a number of the whole matrix reaches all ranks: see shared_maxima."""
    spanned = [share for share in (rows, columns) if share is not None]
    return [all_parts] if len(spanned) == 2 and all_parts is not None else spanned


def scaled_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    region: LinearRegion | None,
    scaling: Fp8Scaling,
) -> Tensor:
    """Like linear in kernels/linear.py: x [..., n], weight [m, n], bias [m] -> [..., m]."""
    function, args = get_source(x)
    grad_enabled = torch.is_grad_enabled()
    of_pass = scaling.of_pass() if grad_enabled else scaling
    return _ScaledLinear.apply(x, weight, bias, region, of_pass, grad_enabled, function, *args)


def tensors_of(operand: Operand) -> list[Tensor]:
    """Return the tensors of an operand, in order."""
    return [part for part in operand if isinstance(part, Tensor)]


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
        matrix = scaling.casts.matrix(gathered)  # [t, n]
        maxima = scaling.input_maxima(matrix, both=grad_enabled)
        if grad_enabled and function is None and weight.requires_grad:
            quantized_x, by_token = scaling.inputs_in_both(matrix, maxima)
            ctx.save_for_backward(*tensors_of(by_token))
        else:
            quantized_x = scaling.inputs(matrix, maxima)
            ctx.save_for_backward(maxima.columns, *args)
        quantized_weight = scaling.weight(weight)
        y = scaling.products.product(quantized_x, quantized_weight.ahead, x.dtype)
        y = y.view(*gathered.shape[:-1], -1)

        ctx.weight, ctx.bias = weight, bias  # the Parameters themselves, which have main_grad
        ctx.region = region
        ctx.scaling = scaling
        ctx.function = function
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        scaling = ctx.scaling
        matrix = scaling.casts.matrix(dy)  # [t, m]

        # exchanges with other ranks overlap with the GEMMs
        wait_x: Callable[[], Tensor] | None = None
        if ctx.function is not None and ctx.weight.requires_grad:
            wait_x = recompute_input(ctx.function, ctx.region, *ctx.saved_tensors[1:])
        quantized_dy, dy_by_token = scaling.gradient_in_both(matrix)
        dx = None
        if ctx.needs_input_grad[0]:
            transposed_weight = scaling.weight(ctx.weight).back
            dx = scaling.products.product(quantized_dy, transposed_weight, dy.dtype)
            dx = dx.view(*dy.shape[:-1], -1)
        wait_dx = start_reduce_grads(ctx.region, dx)

        dw = None
        if ctx.weight.requires_grad:
            dw = accumulate_wgrad(ctx, dy_by_token, dy.dtype, wait_x)
        db = None
        if ctx.bias is not None:
            flat_dy = matrix_of(dy)  # [t, m]
            db = accumulate_summed_grad(ctx.bias, flat_dy.sum(0, dtype=accumulation_dtype(dy.dtype)))
        return wait_dx(), dw, db, *[None] * (len(ctx.needs_input_grad) - 3)


def accumulate_wgrad(
    ctx, dy_by_token: Operand, dtype: torch.dtype, wait_x: Callable[[], Tensor] | None
) -> Tensor | None:
    """Accumulate the weight gradient, given dy in 8 bits, its dtype before that, and the linear's input, or
    None if it was saved. ctx is that of _ScaledLinear."""
    scaling = ctx.scaling
    if wait_x is not None:
        maxima = Maxima(columns=ctx.saved_tensors[0])
        x_by_token = scaling.inputs_by_token(scaling.casts.matrix(wait_x()), maxima)
    else:
        x_by_token = scaling.restored(*ctx.saved_tensors)

    def write_wgrad(into: Tensor | None, add: bool) -> Tensor:
        return scaling.products.write(into, dy_by_token, x_by_token, dtype, add)
    return accumulate_grad(ctx.weight, write_wgrad)
