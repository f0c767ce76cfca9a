"""NVFP4: elements of 4 bits (E2M1), an E4M3 scale for each block of 16, and an fp32 scale of the tensor.

Appendix B of arXiv 2509.25149, with `largest` = max |x| of the tensor and block_largest that of a block:

    encode       = 6 * 448 / largest                        the tensor's scale is 1 / encode, in fp32
    scale        = e4m3(block_largest / 6 * encode)
    q            = e2m1(x / (scale / encode))               what is larger than 6 saturates
    dequantized  = q * scale / encode

Each operation rounds once in fp32 (fp64 for fp64, the proofs of scripts.verify). Elements and scales round to
nearest even; gradients, up or down by random bits. A block below 2^-10 / 448 of the largest becomes zeros:
its scale is 0. If an element is not finite, nothing of the tensor is, by its scale: E2M1 has neither infinity
nor NaN.

q * scale has six significant bits, so bf16 holds it exactly (unscaled).
"""
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.fp8 import E4M3, MAX_VALUE, MIN_ABSOLUTE_MAXIMUM
from kernels.grad import accumulation_dtype
from kernels.rounding import hash_bits

SIDE = 16  # elements that share a scale, and rows and columns of a weight's block; proofs have smaller ones
LARGEST = 6.0  # of E2M1, whose numbers are 0, 0.5, 1, 1.5, 2, 3, 4, 6: codes 0 .. 7, and 8 more with a sign
SIGN = 8  # bit of a code
DRAW_BITS = 24  # random bits by which an element is rounded: fp32 represents their fraction exactly
SIGNS_SALT = 0x4E56465034  # of the signs of the Hadamard transform, which never change


class Nvfp4Matrix(NamedTuple):
    """A matrix [m, n] in NVFP4.

    codes uint8 [m, n/2]: two elements a byte, the first in its low bits. scale, in E4M3: [m, n/16], or
    [m/16, n/16] for blocks of 16 rows. tensor_scale [1, 1] in fp32 or fp64.
    """
    codes: Tensor
    scale: Tensor
    tensor_scale: Tensor

    def unscaled(self, dtype: torch.dtype) -> Tensor:
        """Return the elements with the scales of their blocks, but not that of the tensor: [m, n]."""
        q = e2m1_numbers(unpack(self.codes), dtype)
        scale = self.scale.to(dtype)
        rows, columns = (size // blocks for size, blocks in zip(q.shape, scale.shape))
        blocks = q.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
        return (blocks * scale[:, None, :, None]).view(q.shape)

    def dequantized(self) -> Tensor:
        """Return [m, n] in the dtype of the tensor's scale."""
        return self.unscaled(self.tensor_scale.dtype) * self.tensor_scale

    def transposed(self) -> "Nvfp4Matrix":
        """Return the transpose of a matrix in blocks of 16 rows: the same numbers."""
        codes = pack(unpack(self.codes).t().contiguous())
        return Nvfp4Matrix(codes, self.scale.t().contiguous(), self.tensor_scale)


def quantize(
    x: Tensor, largest: Tensor, *, rows: int = 1, side: int = SIDE, bits: Tensor | None = None
) -> Nvfp4Matrix:
    """x [m, n] -> NVFP4, in blocks of `rows` rows (1 or 16) and `side` columns.

    largest: max |x| of the tensor, [1, 1] in fp32 or fp64; x may be a part of it. m is a multiple of `rows`,
    and n of `side`. x may be transposed; all results are contiguous. With bits, int64 [m, n], whose low 24
    are random, elements round stochastically.
    """
    dtype = accumulation_dtype(x.dtype)
    bound = largest.to(dtype).clamp(min=MIN_ABSOLUTE_MAXIMUM)
    encode = torch.full_like(bound, LARGEST * MAX_VALUE[E4M3]) / bound
    tensor_scale = 1 / encode

    # one scale a block
    blocks = x.to(dtype).reshape(len(x) // rows, rows, -1, side)
    block_largest = blocks.abs().amax((1, 3))  # [m/rows, n/16]
    scale = (block_largest / LARGEST * encode).clamp(max=MAX_VALUE[E4M3]).to(E4M3)

    # elements
    read = scale.to(dtype)
    factor = torch.where(read == 0, 0.0, 1 / (read * tensor_scale))
    scaled = (blocks * factor[:, None, :, None]).view(x.shape)
    codes = pack(e2m1_codes(scaled, bits))
    return Nvfp4Matrix(codes.contiguous(), scale.contiguous(), tensor_scale)


def e2m1_codes(x: Tensor, bits: Tensor | None = None) -> Tensor:
    """x [m, n] -> its codes, uint8: to nearest even, or (bits) stochastically. What exceeds 6 saturates.

    The numbers below 2 are 0.5 apart, those from 2 on 1, and those from 4 on 2: code 2 i + k is that of
    k steps in interval i. NaN gets any code.
    """
    size = x.abs().clamp(max=LARGEST).nan_to_num()
    interval = (size >= 2).to(torch.uint8) + (size >= 4).to(torch.uint8)
    steps = torch.where(size < 2, 2 * size, torch.where(size < 4, size, size / 2))  # exact
    if bits is None:
        count = steps.round()  # half to even
    else:
        below = steps.floor()
        draw = (bits & (1 << DRAW_BITS) - 1).to(x.dtype) * 2.0**-DRAW_BITS  # in [0, 1)
        count = below + (draw < steps - below)
    return (count.to(torch.uint8) + 2 * interval) | torch.signbit(x).to(torch.uint8) * SIGN


def e2m1_numbers(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Invert e2m1_codes: in dtype."""
    code = (codes & SIGN - 1).to(dtype)
    size = torch.where(code < 4, code / 2, torch.where(code < 6, code - 2, 2 * code - 8))
    return torch.where(codes >= SIGN, -size, size)


def pack(codes: Tensor) -> Tensor:
    """[m, n] -> [m, n/2]: two codes a byte, as torch.float4_e2m1fn_x2 has them."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """Invert pack."""
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(1)


def hadamard(x: Tensor, side: int = SIDE) -> Tensor:
    """x [t, n] -> the random Hadamard transform of every 16 rows, in fp32 or fp64 (arXiv 2509.25149, 4.2).

    H diag(s) / 4, with the Hadamard matrix H [16, 16] and one vector of signs s for all layers and steps. It
    is orthogonal, so (T a)^T (T b) = a^T b. Sums run in the same order for every shape.
    """
    signs = hash_bits(torch.arange(side, device=x.device) + SIGNS_SALT) & 1
    blocks = x.to(accumulation_dtype(x.dtype)).unflatten(0, (-1, side))
    mixed = blocks * (1 - 2 * signs)[:, None]  # [t/16, 16, n]
    apart = 1
    while apart < side:
        first, second = mixed.unflatten(1, (-1, 2, apart)).unbind(2)
        mixed = torch.stack((first + second, first - second), 2).flatten(1, 3)
        apart *= 2
    return mixed.flatten(0, 1) / side**0.5
