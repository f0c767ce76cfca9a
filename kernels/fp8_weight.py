"""A weight in 8 bits, quantized once for all products that it takes part in until its values change.

The owner of the values (parallel/sharding/weights.py) gives a parameter its QuantizedWeight, and says when
what that keeps is no longer true: drop() where the values change, free() where they leave the device for a
while (ZeRO-3). A plain tensor has no such owner: it is quantized for every product, so a kernel works alone.

Where ranks hold parts of a weight and share its scales, they exchange its largest elements once, too: those
of all weights of a block in one message (WeightsTogether).
"""
from collections.abc import Callable

import torch
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


def kept_maxima(weight: Tensor) -> Maxima | None:
    """What is kept of the weight's maxima; None: nothing yet, or nobody keeps it."""
    kept: QuantizedWeight | None = getattr(weight, "quantized", None)
    return None if kept is None else kept.maxima


class WeightsTogether:
    """Weights whose largest elements the ranks exchange in one message, when the first of them is needed.

    They are on the device at the same time, and their values change together.
    """

    def __init__(self, share: Callable[[Tensor], object]) -> None:
        """share: replaces numbers in place by their maxima over the ranks."""
        self.share = share
        self.members: list[tuple[Tensor, Callable[[], tuple[Maxima, Tensor]]]] = []

    def add(self, weight: Tensor, find_own: Callable[[], tuple[Maxima, Tensor]]) -> None:
        """find_own: the maxima of this rank's part, and those numbers of them that other ranks share."""
        self.members.append((weight, find_own))

    def exchange(self) -> None:
        """Finds the maxima of all weights of which none are kept. Collective, if there are any."""
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
