"""Sums and gathers that travel in 8 bits: ZeRO++'s qgZ for gradients and qwZ for weights (arXiv 2306.10209).

    scale = max |x| of a block / LARGEST      code = x / scale, rounded to a whole number (int8) or to e4m3 (fp8: kernels/fp8.py)      x ~ code scale

n elements over N ranks; a code and its part of a scale are 1 + 4/block bytes, against 4 in fp32 and 2 in bf16:

    scattered sum   one all-to-all of n: every rank's part of a chunk goes to the chunk's owner, who adds up in fp32 what came
    sum             that, then an all-gather of n: the sums are rounded once more
    gather          an all-gather of n

Nothing is added up in 8 bits. Every rank, the owner too, keeps what the others see, so replicas stay the same bit for bit. A
rounding moves an element by at most `bound`, so a sum's error is at most the bounds of the contributions added up, plus (sum)
that of the result. A block lies inside one parameter (parallel/packing.py): a norm that tp ranks hold alike meets the same
scales on each. A block with anything in it that is not finite arrives as NaN, on every rank: the guard sees it.
"""
import torch
from torch import Tensor

from kernels import fp8
from kernels.fp8 import E4M3, FLOOR
from kernels.grad import wide
from parallel import comm
from parallel.comm import Group

LARGEST = {"int8": 127.0, "fp8": fp8.LARGEST[E4M3]}
CODES = {"int8": torch.int8, "fp8": E4M3}
SCALE = 4  # bytes of a scale


def encode(x: Tensor, kind: str, block: int) -> Tensor:
    """x [rows, n], n a multiple of block -> bytes [rows, n + 4 n / block]: a row's codes, then its scales."""
    parts = x.float().unflatten(1, (-1, block))
    if kind == "fp8":  # by the definition on every device: it spreads what is not finite over its block, the Triton kernel need not
        codes, scale = (part.view(*parts.shape[:2], -1) for part in fp8.reference(parts.flatten(0, 1), "row", E4M3))
    else:
        largest = parts.abs().amax(2, keepdim=True)
        scale = torch.where(largest.isfinite(), largest.clamp(min=FLOOR) / LARGEST[kind], torch.nan)
        codes = (parts / scale).clamp(-LARGEST[kind], LARGEST[kind]).round().to(CODES[kind])
    return torch.cat([codes.flatten(1).view(torch.uint8), scale.flatten(1).view(torch.uint8)], 1)


def decode(message: Tensor, kind: str, block: int, dtype: torch.dtype) -> Tensor:
    """The way back: [rows, n] in dtype, fp32 or fp64."""
    n = message.shape[1] // (block + SCALE) * block
    codes, scale = message[:, :n].view(CODES[kind]), message[:, n:].view(torch.float32)
    return (codes.to(dtype).unflatten(1, (-1, block)) * scale.to(dtype)[..., None]).flatten(1)


def bound(x: Tensor, kind: str, block: int) -> Tensor:
    """How far decode(encode(x)) may be from x [rows, n], an element, before any rounding in fp32: half a code."""
    scale = x.abs().unflatten(1, (-1, block)).amax(2).clamp(min=FLOOR) / LARGEST[kind]
    half = (scale / 2 if kind == "int8" else scale / 1024).repeat_interleave(block, 1)  # e4m3: 2^-9 apart below 2^-6
    return half if kind == "int8" else torch.maximum(half, x.abs() / 16)  # above: three bits behind the first


def seen(x: Tensor, rows: int, kind: str, block: int) -> Tensor:
    """Whole weights as all ranks see them where `rows` ranks own equal shares."""
    return decode(encode(x.view(rows, -1), kind, block), kind, block, wide(x.dtype)).view(-1)


class ScatteredSum:
    """x [n] of each rank -> this rank's [n / size] of the sum, under way; x is free at once."""

    def __init__(self, x: Tensor, group: Group, kind: str, block: int) -> None:
        self.kind, self.block, self.dtype = kind, block, x.dtype
        each = [1] * group.size
        self.work = comm.start_all_to_all(encode(x.view(group.size, -1), kind, block), each, each, group)

    def wait(self) -> Tensor:
        total = None
        for row in self.work.wait().split(1):  # in the order of ranks
            part = decode(row, self.kind, self.block, self.dtype)
            total = part if total is None else total.add_(part)
        return total[0]


class Gather:
    """x [n / size] of each rank -> out [n] on every rank, under way. out is written by wait()."""

    def __init__(self, x: Tensor, group: Group, out: Tensor, kind: str, block: int) -> None:
        self.kind, self.block, self.out, self.rows = kind, block, out, group.size
        message = encode(x[None], kind, block)[0]
        self.work = comm.start_gather(message, group, out=message.new_empty(group.size * len(message)))

    def wait(self) -> Tensor:
        for row, out in zip(self.work.wait().view(self.rows, -1).split(1), self.out.view(self.rows, -1)):
            out.copy_(decode(row, self.kind, self.block, wide(out.dtype))[0])
        return self.out


class Sum:
    """In place: x [n] summed over the group, on every rank, in two hops: turn() waits for the first and starts the second."""

    def __init__(self, x: Tensor, group: Group, kind: str, block: int) -> None:
        self.x, self.group, self.kind, self.block = x, group, kind, block
        self.first, self.second = ScatteredSum(x, group, kind, block), None

    def turn(self) -> None:
        if self.second is None:
            self.second = Gather(self.first.wait(), self.group, self.x, self.kind, self.block)

    def wait(self) -> Tensor:
        self.turn()
        return self.second.wait()
