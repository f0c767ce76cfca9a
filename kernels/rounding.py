"""Stochastic rounding of fp32 to bf16: up with the probability that makes the mean right, so that updates far below half a step of
bf16 are not lost but happen now and then (arXiv 1502.02551; for optimizer states in bf16: arXiv 2010.06192).

The random bits are a function of (salt, the element's index in its global tensor) alone: a counter-based generator in the
sense of Salmon et al., 2011. So any rank rounds any element alike. inf, NaN and what bf16 holds exactly stay as they are.
"""
import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.triton_ import tl, triton


def signed(x: int) -> int:
    """The int64 with the bits of x."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


def mix(x: Tensor) -> Tensor:
    """Bijective scrambling of int64: the 64-bit finalizer of splitmix64, in arithmetic that wraps the same way on every device."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * signed(factor)
    return x ^ (x >> 31 & (1 << 33) - 1)


def salt(seed: int, step: int, key: str) -> int:
    """int64: which stream of bits the elements of a tensor take in a step."""
    digest = hashlib.sha256(f"round/{seed}/{step}/{key}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


@dataclass(frozen=True)
class Place:
    """Where a flat run lies in its tensor: its element i is element base + j // width * stride + j % width there, j = i + skip."""
    salt: int
    base: int
    width: int
    stride: int
    skip: int = 0

    def bits(self, start: int, n: int, device: torch.device) -> Tensor:
        """int64 [n]: random bits of the run's elements start .. start + n - 1."""
        j = torch.arange(self.skip + start, self.skip + start + n, device=device)
        at = j if self.width == self.stride else torch.div(j, self.width, rounding_mode="floor") * self.stride + j % self.width
        return mix(at + signed(self.salt + self.base))


def rounded(x: Tensor, bits: Tensor) -> Tensor:
    """x [n], fp32 or fp64 -> bf16, each element up or down; the low 16 of `bits` [n], int64, say which."""
    x = x.float()
    near = x.view(torch.int32) + (bits & 0xFFFF).to(torch.int32) & -0x10000  # a carry runs on into the exponent, as it should
    return torch.where(x.isfinite(), near.view(torch.float32), x).bfloat16()


# ---- Triton ------------------------------------------------------------------------------------------------------------------

@triton.jit
def place_bits(at, salt, base, width, stride, skip, ROWS: tl.constexpr):
    at += skip
    if ROWS:
        at = at // width * stride + at % width
    x = (at + base + salt).to(tl.uint64)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def round_to_bf16(x, bits):
    raw = x.to(tl.uint32, bitcast=True)
    near = (raw + (bits & 0xFFFF).to(tl.uint32)) & 0xFFFF0000
    return tl.where((raw & 0x7F800000) == 0x7F800000, x, near.to(tl.float32, bitcast=True)).to(tl.bfloat16)
