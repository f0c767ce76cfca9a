"""8-bit exchanges: qgZ for gradients and qwZ for weights (ZeRO++, arXiv 2306.10209).

    scale = largest |x| of a block / LARGEST
    code  = x / scale, rounded to an integer (int8) or to e4m3 (fp8: kernels/fp8.py)
    x     ~ code * scale

A code and its share of a scale take 1 + 4/block bytes, compared to 4 in fp32 and 2 in bf16. For n elements
over N ranks:

    reduce-scatter   one all-to-all of n: the parts of a chunk go to its owner, which sums them in fp32
    all-reduce       that, then an all-gather of n: the sums are rounded again
    all-gather       an all-gather of n

Nothing is summed in 8 bits. Every rank, including the owner, keeps what the others receive, so replicas stay
bitwise equal. Rounding moves an element by at most error_bound(); the error of a sum is at most the sum of
its contributions' bounds, plus the result's in an all-reduce. A block lies inside one parameter
(parallel/sharding/packing.py), so a norm that is replicated over tp has the same scales on each rank. A block
with a non-finite element arrives as NaN on every rank, where the guard against non-finite steps catches it.
"""
import torch
from torch import Tensor

from kernels import fp8
from kernels.fp8 import E4M3, MIN_ABSOLUTE_MAXIMUM
from kernels.grad import accumulation_dtype
from parallel.wire import comm
from parallel.wire.comm import Group

LARGEST = {"int8": 127.0, "fp8": fp8.MAX_VALUE[E4M3]}
CODECS = {"int8": torch.int8, "fp8": E4M3}  # one-byte dtypes of codes
SCALE_BYTES = 4
E4M3_ROUNDING = 1 / 16  # relative: half of the last of three mantissa bits
E4M3_SUBNORMAL = 1 / 1024  # absolute, below 2^-6: codes are 2^-9 apart


def encode(x: Tensor, codec: str, block: int) -> Tensor:
    """x [rows, n] -> bytes [rows, n + 4 n / block]: the codes of a row, followed by its scales.

    n is a multiple of block.
    """
    blocks = x.float().unflatten(1, (-1, block))  # [rows, n / block, block]
    codes, scale = quantize_fp8(blocks) if codec == "fp8" else quantize_int8(blocks)
    code_bytes = codes.flatten(1).view(torch.uint8)
    scale_bytes = scale.flatten(1).view(torch.uint8)
    return torch.cat([code_bytes, scale_bytes], 1)


def quantize_fp8(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, n / block, block] -> (codes in e4m3, fp32 scales [rows, n / block, 1]).

    Uses the reference on every device: the Triton kernel need not spread NaN over a block.
    """
    codes, scale = fp8.quantize_reference(blocks.flatten(0, 1), "row", E4M3)
    shape = blocks.shape[:2]
    return codes.view(*shape, -1), scale.view(*shape, -1)


def quantize_int8(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, n / block, block] -> (codes in int8, fp32 scales [rows, n / block, 1])."""
    limit = LARGEST["int8"]
    largest = blocks.abs().amax(2, keepdim=True)
    scale = largest.clamp(min=MIN_ABSOLUTE_MAXIMUM) / limit
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    codes = (blocks / scale).clamp(-limit, limit).round()
    return codes.to(torch.int8), scale


def decode(message: Tensor, codec: str, block: int, dtype: torch.dtype) -> Tensor:
    """Decode a result of encode, bytes [rows, n + 4 n / block] -> [rows, n] in dtype, fp32 or fp64."""
    num_blocks = message.shape[1] // (block + SCALE_BYTES)
    n = num_blocks * block
    codes = message[:, :n].view(CODECS[codec]).to(dtype)
    scale = message[:, n:].view(torch.float32).to(dtype)
    blocks = codes.unflatten(1, (-1, block)) * scale[..., None]
    return blocks.flatten(1)


def error_bound(x: Tensor, codec: str, block: int) -> Tensor:
    """Bound |decode(encode(x)) - x| for x [rows, n]: half a code for each element, in exact arithmetic."""
    largest = x.abs().unflatten(1, (-1, block)).amax(2)
    scale = largest.clamp(min=MIN_ABSOLUTE_MAXIMUM) / LARGEST[codec]
    if codec == "int8":
        return (scale / 2).repeat_interleave(block, 1)
    subnormal = (scale * E4M3_SUBNORMAL).repeat_interleave(block, 1)
    return torch.maximum(subnormal, x.abs() * E4M3_ROUNDING)


def quantized_copy(x: Tensor, rows: int, codec: str, block: int) -> Tensor:
    """Return full weights x [n] as all ranks see them, with equal shards on `rows` ranks. Purely local."""
    dtype = accumulation_dtype(x.dtype)
    message = encode(x.view(rows, -1), codec, block)
    return decode(message, codec, block, dtype).view(-1)


class CompressedReduceScatter:
    """A reduce-scatter in flight: x [n] of each rank -> this rank's [n / size] of the sum.

    One all-to-all of n codes and their scales. x may be modified once it has started.
    """

    def __init__(self, x: Tensor, group: Group, codec: str, block: int) -> None:
        self.codec = codec
        self.block = block
        self.dtype = x.dtype
        message = encode(x.view(group.size, -1), codec, block)  # row r: for rank r
        one_row_each = [1] * group.size
        self.work = comm.start_all_to_all(message, one_row_each, one_row_each, group)

    def wait(self) -> Tensor:
        """Return this rank's [n / size] of the sum, accumulated in rank order."""
        first, *others = self.work.wait().split(1)
        total = self.decode_row(first)
        for row in others:
            total.add_(self.decode_row(row))
        return total

    def decode_row(self, row: Tensor) -> Tensor:
        """Decode the bytes [1, ...] of one rank -> [n / size]."""
        return decode(row, self.codec, self.block, self.dtype)[0]


class CompressedAllGather:
    """An all-gather in flight: x [n / size] of each rank -> out [n] on every rank.

    One all-gather of n codes and their scales. wait() writes `out`.
    """

    def __init__(self, x: Tensor, group: Group, out: Tensor, codec: str, block: int) -> None:
        self.codec = codec
        self.block = block
        self.out = out
        self.num_rows = group.size
        message = encode(x[None], codec, block)[0]
        messages = message.new_empty(group.size * len(message))
        self.work = comm.start_all_gather(message, group, out=messages)

    def wait(self) -> Tensor:
        """Return `out`, which holds the values of all ranks."""
        messages = self.work.wait().view(self.num_rows, -1)
        shards = self.out.view(self.num_rows, -1)
        dtype = accumulation_dtype(self.out.dtype)
        for message, shard in zip(messages.split(1), shards):
            values = decode(message, self.codec, self.block, dtype)
            shard.copy_(values[0])
        return self.out


class CompressedAllReduce:
    """An in-place all-reduce of x [n] in flight: a reduce-scatter, then an all-gather, both of n codes."""

    def __init__(self, x: Tensor, group: Group, codec: str, block: int) -> None:
        self.x = x
        self.group = group
        self.codec = codec
        self.block = block
        self.first = CompressedReduceScatter(x, group, codec, block)
        self.second: CompressedAllGather | None = None

    def start_next_phase(self) -> CompressedAllGather:
        """Wait for the reduce-scatter and start the all-gather, unless already started."""
        if self.second is None:
            total = self.first.wait()
            self.second = CompressedAllGather(
                total, self.group, self.x, codec=self.codec, block=self.block
            )
        return self.second

    def wait(self) -> Tensor:
        """Return x, which holds the sum."""
        return self.start_next_phase().wait()
