"""y = x W^T + b whose three products run in NVFP4, as arXiv 2509.25149 trains (section 4).

    product       operands            blocks               rounding           before
    y = x W^T     x, W                1 x 16, 16 x 16      nearest, nearest
    dx = dy W     dy, W^T             1 x 16, 16 x 16      random, nearest
    dW = dy^T x   dy^T, x^T           1 x 16, 1 x 16       random, nearest    Hadamard transform of both

W and W^T have the same numbers, so the backward differentiates what the forward computed (4.3). The Hadamard
transform mixes 16 tokens, and an outlier with them (4.2). Gradients round up or down with probabilities that
make them unbiased (4.4), except for those that saturate: the largest of a block, where its scale rounds down.
The random bits are a function of seed, step, sequence, position and output feature, and so the same when a
forward is repeated, when a run resumes, and under every layout (parallel/tensor/rounding.py).

The scales of a tensor are those of the whole of it, before and after the transform. Ranks that hold its parts
exchange both maxima at once.

Everything else is as in kernels/fp8_linear.py, which runs the products through an Nvfp4Scaling. No kernel of
ours multiplies NVFP4: a GPU takes each element times the scale of its block in bf16, which is exact, and adds
the products in fp32; then come the scales of the tensors. kernels/unproven/nvfp4_gemm.py has other products.
"""
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.fp8 import Maxima, absolute_maximum
from kernels.fp8_gemm import QuantizedPair
from kernels.fp8_linear import Fp8Scaling, Matrix, Products, spanned_by
from kernels.fp8_weight import quantize_once
from kernels.grad import write_or_add
from kernels.linear import library_adds_in_fp32
from kernels.nvfp4 import DRAW_BITS, Nvfp4Matrix, hadamard, quantize
from kernels.triton_ import print_once

CHIP = (10, 0)  # the first capability whose tensor cores multiply NVFP4

Bits = Callable[[], Tensor]  # int64 [t, m]: 64 random bits for each element of dy


def products_of(multiply: Callable[[Nvfp4Matrix, Nvfp4Matrix], Tensor]) -> Products:
    """Return the products of an Fp8Scaling, from one without the scales of the tensors (unscaled_product)."""
    def product(a: Nvfp4Matrix, b: Nvfp4Matrix, dtype: torch.dtype) -> Tensor:
        return (multiply(a, b) * (a.tensor_scale * b.tensor_scale)).to(dtype)

    def write(
        into: Tensor | None, a: Nvfp4Matrix, b: Nvfp4Matrix, dtype: torch.dtype, add: bool
    ) -> Tensor:
        if into is None:
            return product(a, b, dtype)
        return write_or_add(into, product(a, b, into.dtype), add)

    return Products(product, write)


def unscaled_product(a: Nvfp4Matrix, b: Nvfp4Matrix) -> Tensor:
    """a [m, k], b [n, k] -> a b^T without the scales of the tensors, in their dtype."""
    dtype, device = a.tensor_scale.dtype, a.codes.device
    if device.type == "cuda" and dtype == torch.float32:
        print_once(f"nvfp4: {obstacle_to_chip(device)}; torch rounds to 4 bits and multiplies in 16: the "
                   "same numbers, slower than bf16")
        if library_adds_in_fp32(device, torch.bfloat16):
            left, right = a.unscaled(torch.bfloat16), b.unscaled(torch.bfloat16)
            return torch.mm(left, right.t(), out_dtype=torch.float32)
    return a.unscaled(dtype) @ b.unscaled(dtype).t()


def obstacle_to_chip(device: torch.device) -> str:
    """Return why the tensor cores do not multiply NVFP4."""
    if torch.cuda.get_device_capability(device) < CHIP:
        return f"{torch.cuda.get_device_name(device)} has no products of it (sm_100 or newer has)"
    return "the chip's own products, which no GPU has confirmed, are part of train.unproven"


PRODUCTS = products_of(unscaled_product)


@dataclass(frozen=True)
class Nvfp4Scaling(Fp8Scaling):
    """How a linear is quantized to NVFP4. Maxima are those of the tensor (rows), and of it after the Hadamard
    transform (columns).

    start_pass is called in each forward that has a backward, and returns the random bits of its dy.
    """
    products: Products = PRODUCTS
    start_pass: Callable[[], Bits] | None = None
    bits: Bits | None = None  # of this pass

    @property
    def weight_kind(self) -> str:
        return "tensor"

    def of_pass(self) -> "Nvfp4Scaling":
        """Return the scaling of one forward and its backward, with its random bits."""
        return self if self.start_pass is None else replace(self, bits=self.start_pass())

    def input_maxima(self, x: Matrix, *, both: bool) -> Maxima:
        return self.shared(x, self.ins, both)

    def gradient_maxima(self, dy: Matrix) -> Maxima:
        return self.shared(dy, self.outs, both=True)

    def shared(self, x: Tensor, features: Callable | None, both: bool) -> Maxima:
        """Return the maxima of x [t, n] over all ranks; `features` covers those with other columns."""
        matrices = (x, hadamard(x, self.side)) if both else (x,)
        numbers = torch.stack([absolute_maximum(matrix, "tensor") for matrix in matrices])  # [1 or 2, 1, 1]
        for share in spanned_by(self.tokens, features, self.all_parts):
            share(numbers)
        return Maxima(*numbers)

    def inputs(self, x: Matrix, maxima: Maxima) -> Nvfp4Matrix:
        return quantize(x, given(maxima.rows), side=self.side)

    def inputs_by_token(self, x: Matrix, maxima: Maxima) -> Nvfp4Matrix:
        return quantize(hadamard(x, self.side).t(), given(maxima.columns), side=self.side)

    def inputs_in_both(self, x: Matrix, maxima: Maxima) -> QuantizedPair:
        return QuantizedPair(self.inputs(x, maxima), self.inputs_by_token(x, maxima))

    def gradient_in_both(self, dy: Matrix) -> QuantizedPair:
        """Round stochastically. Raises ValueError without random bits."""
        if self.bits is None:
            raise ValueError("nvfp4: the gradient of a linear needs random bits (Nvfp4Scaling.start_pass)")
        maxima = self.gradient_maxima(dy)
        bits = self.bits()
        ahead = quantize(dy, given(maxima.rows), side=self.side, bits=bits)
        back = quantize(
            hadamard(dy, self.side).t(),
            given(maxima.columns),
            side=self.side,
            bits=(bits >> DRAW_BITS).t(),
        )
        return QuantizedPair(ahead, back)

    def weight(self, w: Tensor) -> QuantizedPair:
        def quantized(maxima: Maxima) -> QuantizedPair:
            ahead = quantize(w, given(maxima.rows).amax().view(1, 1), rows=self.side, side=self.side)
            return QuantizedPair(ahead, ahead.transposed())

        return quantize_once(w, lambda: self.weight_maxima(w, self.weight_kind), quantized)

    def restored(self, *saved: Tensor) -> Nvfp4Matrix:
        return Nvfp4Matrix(*saved)


def given(maximum: Tensor | None) -> Tensor:
    assert maximum is not None, "the scale of the tensor needs its maximum"
    return maximum
