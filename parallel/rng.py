"""Dropout whose mask is a function of (seed, step, layer, site, sequence, position, channel), never of rank or layout.

A counter-based generator: the element's coordinates are hashed (kernels/rounding.py), so any rank can make any piece of any mask.
"""
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.rounding import mix, signed


@dataclass(frozen=True)
class Noise:
    """What dropout depends on in one forward pass. rows [b]: place of each sequence in the step's global batch;
    columns [s]: place of each token in its sequence. step: or an int64 scalar, whose value a captured step is told (runtime/graphs.py)."""
    seed: int
    step: int | Tensor
    rows: Tensor
    columns: Tensor

    def keep(self, site: int, width: int, rate: float) -> Tensor:
        """bool [b, s, width]: False with probability `rate`. site: a number for the place in the network."""
        return self.bits(site, width) >= int(rate * (1 << 53))

    def uniform(self, site: int, width: int, apart: float, dtype: torch.dtype) -> Tensor:
        """[b, s, width] in [1 - apart, 1 + apart)."""
        return 1 - apart + self.bits(site, width).to(dtype) * (2 * apart / (1 << 53))

    def bits(self, site: int, width: int) -> Tensor:
        """int64 [b, s, width] in [0, 2^53)."""
        step = self.step if isinstance(self.step, Tensor) else torch.full((), self.step, device=self.rows.device)  # no copy from the host
        key = step * signed(0xD1B54A32D192ED03) + signed((self.seed * 0x9E3779B97F4A7C15 + site) % (1 << 64))
        token = mix(mix(mix(key) + self.rows[:, None]) + self.columns)  # [b, s]
        bits = mix(token[..., None] + torch.arange(width, device=token.device))
        return bits >> 11 & (1 << 53) - 1


def dropout(x: Tensor, rate: float, noise: Noise | None, site: int) -> Tensor:
    """x [b, s, d]; identity where rate is 0 or noise is None (evaluation)."""
    if rate == 0.0 or noise is None:
        return x
    return x * noise.keep(site, x.shape[-1], rate) * (1 / (1 - rate))
