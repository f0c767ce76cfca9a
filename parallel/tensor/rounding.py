"""Random bits by which the gradients of a block's linears round stochastically (kernels/nvfp4_linear.py).

A counter-based generator: bits are a function of seed, step, tensor, sequence, position and output feature
(parallel/rng.py). So they are the same when a block runs again, when a run resumes, and on any rank that
computes an element.
"""
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from kernels.rounding import salt
from parallel.rng import DropoutRng
from parallel.sharding.boxes import Box
from parallel.tensor.layers import ColumnLinear, RowLinear


class GradientRounding:
    """The generator of the pass that a block runs. A linear takes it in its forward, for its backward."""

    def __init__(self) -> None:
        self.rng: DropoutRng | None = None

    def start_pass(self, boxes: tuple[Box, ...]) -> Callable[[], Tensor]:
        """Return a function that draws int64 [t, m], for the m outputs of a weight with these boxes.

        Raises ValueError before a block has set the generator.
        """
        if self.rng is None:
            raise ValueError("a gradient that is rounded stochastically needs the generator of its pass")
        return partial(element_bits, self.rng, boxes)


def element_bits(rng: DropoutRng, boxes: tuple[Box, ...]) -> Tensor:
    """Return int64 [b s, m]: 64 random bits for each token and output feature, in the order of the boxes."""
    of_outputs: list[Tensor] = []
    for box in boxes:
        features = box.start[0] + torch.arange(box.size[0], device=rng.positions.device)
        of_outputs.append(rng.hashes(salt(0, 0, box.key), features))
    return torch.cat(of_outputs, -1).flatten(0, 1)


def round_gradients(block: nn.Module) -> GradientRounding:
    """Give all linears of a block in NVFP4 their random bits, and return what holds the generator."""
    rounding = GradientRounding()
    for layer in block.modules():
        if isinstance(layer, (ColumnLinear, RowLinear)) and layer.scaling is not None:
            start_pass = partial(rounding.start_pass, layer.weight.spec.boxes)
            layer.scaling = replace(layer.scaling, start_pass=start_pass)
    return rounding
