"""A weight in 8 bits, quantized once for all products that it takes part in until its values change.

The owner of the values (parallel/sharding/weights.py) gives a parameter its QuantizedWeight, and says when
what that keeps is no longer true: drop() where the values change, free() where they leave the device for a
while (ZeRO-3). A plain tensor has no such owner: it is quantized for every product, so a kernel works alone.
"""
from collections.abc import Callable

from torch import Tensor

from kernels.fp8 import Maxima
from kernels.fp8_gemm import QuantizedPair


class QuantizedWeight:
    """What is kept of a weight: itself and its transpose in 8 bits, and what their scales are computed from.

    None: to be made by the next product.
    """

    def __init__(self) -> None:
        self.pair: QuantizedPair | None = None
        self.maxima: Maxima | None = None

    def free(self) -> None:
        """The weight leaves the device; it will come back with the same values."""
        self.pair = None

    def drop(self) -> None:
        """The values of the weight change."""
        self.pair = None
        self.maxima = None


def quantize_once(
    weight: Tensor, find_maxima: Callable[[], Maxima], quantize: Callable[[Maxima], QuantizedPair]
) -> QuantizedPair:
    """quantize(find_maxima()), or what is kept of it."""
    kept: QuantizedWeight | None = getattr(weight, "quantized", None)
    if kept is None:
        return quantize(find_maxima())
    if kept.maxima is None:
        kept.maxima = find_maxima()
    if kept.pair is None:
        kept.pair = quantize(kept.maxima)
    return kept.pair
