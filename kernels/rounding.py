"""Stochastic rounding of fp32 to bf16: up or down, with probabilities that make it unbiased.

Updates far below half a bf16 step are then not lost, but applied occasionally (arXiv 1502.02551; for
optimizer states in bf16: arXiv 2010.06192).

The random bits are a function of a salt and the element's index in its global tensor: a counter-based
generator in the sense of Salmon et al., 2011. So every rank rounds an element identically. inf, NaN and
values that bf16 represents exactly do not change.
"""
import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.triton_ import tl, triton


def as_signed(x: int) -> int:
    """Return the int64 with the bits of x."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


def hash_bits(x: Tensor) -> Tensor:
    """Bijective hash of int64: splitmix64's 64-bit finalizer. It wraps identically on every device."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        shifted = x >> shift & (1 << 64 - shift) - 1  # a logical shift: no sign extension
        x = (x ^ shifted) * as_signed(factor)
    return x ^ (x >> 31 & (1 << 33) - 1)


def salt(seed: int, step: int, key: str) -> int:
    """Return an int64 that selects the random bits of tensor `key` in a step."""
    digest = hashlib.sha256(f"round/{seed}/{step}/{key}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


@dataclass(frozen=True)
class ElementIndex:
    """Positions in their tensor of the elements of a flat range.

    The range is a part of a rectangle of rows of `width` elements, in a tensor whose rows have `stride`
    elements.
    base is the tensor index of the rectangle's first element, skip the number of its elements before the
    range. So element i of the range has index base + j // width * stride + j % width, where j = i + skip.
    """
    salt: int
    base: int
    width: int
    stride: int
    skip: int = 0

    def bits(self, start: int, n: int, device: torch.device) -> Tensor:
        """Return int64 [n]: random bits of the elements start .. start + n - 1 of the range."""
        first = self.skip + start
        index = torch.arange(first, first + n, device=device)
        if self.width != self.stride:
            row = torch.div(index, self.width, rounding_mode="floor")
            index = row * self.stride + index % self.width
        return hash_bits(index + as_signed(self.salt + self.base))


def stochastic_round(x: Tensor, bits: Tensor) -> Tensor:
    """x [n], fp32 or fp64 -> bf16, each element up or down. The low 16 of `bits` [n], int64, decide which."""
    x = x.float()
    # The sum carries into bf16's last bit with the right probability, also if it carries into the exponent.
    raw = x.view(torch.int32) + (bits & 0xFFFF).to(torch.int32)
    rounded = (raw & -0x10000).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).bfloat16()


# ---- Triton ----------------------------------------------------------------------------------------------

@triton.jit
def place_bits(index, salt, base, width, stride, skip, ROWS: tl.constexpr):
    """Compute ElementIndex.bits, for any elements `index` of the range. ROWS: width and stride differ."""
    index += skip
    if ROWS:
        index = index // width * stride + index % width
    x = (index + base + salt).to(tl.uint64)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def round_to_bf16(x, bits):
    """Like stochastic_round."""
    raw = x.to(tl.uint32, bitcast=True)
    rounded = (raw + (bits & 0xFFFF).to(tl.uint32)) & 0xFFFF0000
    not_finite = (raw & 0x7F800000) == 0x7F800000
    return tl.where(not_finite, x, rounded.to(tl.float32, bitcast=True)).to(tl.bfloat16)
