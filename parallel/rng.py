"""Dropout whose mask depends on (seed, step, layer, site, sequence, position, channel), not on the layout.

A counter-based generator: an element's coordinates are hashed (kernels/rounding.py), so any rank can compute
any part of any mask.
"""
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.rounding import as_signed, hash_bits

RANDOM_BITS = 53  # bits of a random number: a double represents these exactly
NUM_VALUES = 1 << RANDOM_BITS  # random numbers are 0 .. NUM_VALUES - 1
UINT64 = 1 << 64

# odd numbers with irregular bits, which map close seeds and steps to distant keys
SEED_FACTOR = 0x9E3779B97F4A7C15
STEP_FACTOR = as_signed(0xD1B54A32D192ED03)


@dataclass(frozen=True)
class DropoutRng:
    """Inputs of the dropout masks of one forward pass.

    sequence_ids [b] is each sequence's index in the step's global batch, positions [s] each token's position
    in its sequence. step is an int, or an int64 scalar whose value a captured step changes
    (parallel/pipeline/graphs.py).
    """
    seed: int
    step: int | Tensor
    sequence_ids: Tensor
    positions: Tensor

    def keep_mask(self, site: int, width: int, rate: float, first: int = 0) -> Tensor:
        """Return a mask, bool [b, s, width], of the channels from `first` on: False with probability `rate`.

        site is a distinct number for each place in the model that draws.
        """
        threshold = int(rate * NUM_VALUES)
        return self.bits(site, width, first) >= threshold

    def uniform(self, site: int, width: int, half_width: float, dtype: torch.dtype) -> Tensor:
        """Return [b, s, width], uniform in [1 - half_width, 1 + half_width)."""
        spacing = 2 * half_width / NUM_VALUES
        return 1 - half_width + self.bits(site, width).to(dtype) * spacing

    def bits(self, site: int, width: int, first: int = 0) -> Tensor:
        """Return int64 [b, s, width], uniform in [0, 2^53), of the channels from `first` on."""
        channels = torch.arange(first, first + width, device=self.positions.device)
        hashes = self.hashes(site, channels)
        return hashes >> (64 - RANDOM_BITS) & (NUM_VALUES - 1)

    def hashes(self, site: int, channels: Tensor) -> Tensor:
        """Return int64 [b, s, c]: 64 random bits for each element of these channels [c]."""
        step = self.step
        if not isinstance(step, Tensor):  # filled on the device: a copy would block the host
            step = torch.full((), step, device=self.sequence_ids.device)
        seed_and_site = (self.seed * SEED_FACTOR + site) % UINT64
        key = hash_bits(step * STEP_FACTOR + as_signed(seed_and_site))

        of_sequence = hash_bits(key + self.sequence_ids[:, None])  # [b, 1]
        of_token = hash_bits(of_sequence + self.positions)  # [b, s]
        return hash_bits(of_token[..., None] + channels)  # [b, s, c]


def dropout(x: Tensor, rate: float, rng: DropoutRng | None, site: int, first: int = 0) -> Tensor:
    """Zero elements of x [b, s, d] at `rate` and scale the others up.

    first: the channel that x begins with, if a rank has some of the channels. Return x itself at rate 0, or
    without rng (evaluation).
    """
    if rate == 0.0 or rng is None:
        return x
    mask = rng.keep_mask(site, x.shape[-1], rate, first)
    return x * mask * (1 / (1 - rate))
