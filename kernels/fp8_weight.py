"""A weight in 8 bits, quantized once for all its GEMMs until its values change.

The owner of the values (parallel/sharding/weights.py) gives a parameter its QuantizedWeight, and invalidates
it: drop() when the values change, free() when they leave the device for a while (ZeRO-3). A plain tensor has
no such owner: it is quantized for every GEMM, so a kernel works standalone.

If ranks hold parts of a weight and share its scales, they exchange its maxima once, too: those of all weights
of a block in one message (WeightsTogether).
"""
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.fp8 import Maxima
from kernels.fp8_gemm import QuantizedPair


class QuantizedWeight:
    """Cache of a weight and its transpose in 8 bits, and of the maxima for their scales.

    A None entry is computed by the next GEMM.
    """

    def __init__(self) -> None:
        self.pair: QuantizedPair | None = None
        self.maxima: Maxima | None = None

    def free(self) -> None:
        """Free the copies: the weight leaves the device, and will return with the same values."""
        self.pair = None

    def drop(self) -> None:
        """Drop everything: the values of the weight change."""
        self.pair = None
        self.maxima = None


def quantize_once(
    weight: Tensor, find_maxima: Callable[[], Maxima], quantize: Callable[[Maxima], QuantizedPair]
) -> QuantizedPair:
    """Return quantize(find_maxima()), or its cached result."""
    kept: QuantizedWeight | None = getattr(weight, "quantized", None)
    if kept is None:
        return quantize(find_maxima())
    if kept.maxima is None:
        kept.maxima = find_maxima()
    if kept.pair is None:
        kept.pair = quantize(kept.maxima)
    return kept.pair


def kept_maxima(weight: Tensor) -> Maxima | None:
    """Return the weight's cached maxima; None if not computed yet, or not cached."""
    kept: QuantizedWeight | None = getattr(weight, "quantized", None)
    return None if kept is None else kept.maxima


class WeightsTogether:
    """Weights whose maxima the ranks exchange in one message, when the first of them is needed.

    They are on the device at the same time, and their values change together.
    """

    def __init__(self, share: Callable[[Tensor], object]) -> None:
        """`share` replaces numbers in place by their maxima over the ranks."""
        self.share = share
        self.members: list[tuple[Tensor, Callable[[], tuple[Maxima, Tensor]]]] = []

    def add(self, weight: Tensor, find_own: Callable[[], tuple[Maxima, Tensor]]) -> None:
        """find_own returns the maxima of this rank's part, and the numbers in it that other ranks share."""
        self.members.append((weight, find_own))

    def exchange(self) -> None:
        """Find the maxima of all weights without cached ones. Collective, if there are any."""
        messages: list[Tensor] = []
        for weight, find_own in self.members:
            kept: QuantizedWeight | None = getattr(weight, "quantized", None)
            if kept is not None and kept.maxima is None:
                kept.maxima, message = find_own()
                messages.append(message)
        if not messages:
            return
        joined = torch.cat([message.flatten() for message in messages])
        self.share(joined)
        sizes = [message.numel() for message in messages]
        for message, shared in zip(messages, joined.split(sizes)):
            message.copy_(shared.view_as(message))
