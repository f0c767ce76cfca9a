"""Rows that travel to their experts in 8 bits (parallel.compress_tokens fp8; DeepSeek-V3, arXiv 2412.19437,
section 3.3.3).

Two of the four exchanges of rows are in e4m3: those to the experts, which take tokens in the forward, and in
the backward the gradients of what the experts returned. Each row has a scale for every 128 channels; the last
block may have fewer (kernels/fp8.py, kind group). What comes from the experts, and probabilities, are exact.
In either exchange a row of d channels, of c bytes each, has

    d + ceil(d / 128) g bytes instead of d c    g: bytes of a scale, 4 (fp64: 8)

An element x of a block whose largest is |X| has the scale s = |X| / 448, and arrives as y with

    |y - x| <= max(|x| / 16, s / 1024)     half of the last of e4m3's three mantissa bits, or of its smallest
                                           step 2^-9
    |y - x| <= |X| / 28                    half of that bit at 448: 16 s

and is then rounded to the compute dtype. A non-finite element arrives as NaN.

A row whose expert is on the rank of its token is rounded, too: so the layout does not change what experts
read.
"""
import torch
from torch import Tensor

from kernels import fp8
from kernels.fp8 import E4M3
from kernels.grad import accumulation_dtype
from parallel.expert.dispatch import RowExchange
from parallel.wire.comm import PendingExchange


def encode_rows(rows: Tensor) -> Tensor:
    """rows [m, d] -> bytes [m, d + ceil(d / 128) g]: the codes of a row, followed by its scales."""
    codes, scale = fp8.quantize(rows, "group", E4M3)
    scale = scale.clone(memory_format=torch.contiguous_format)  # also strides of sizes of 1
    return torch.cat([codes.view(torch.uint8), scale.view(torch.uint8)], 1)


def decode_rows(message: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Decode a result of encode_rows, of rows in this dtype -> [m, width]."""
    codes = message[:, :width].view(E4M3)
    scale_bytes = message[:, width:].clone(memory_format=torch.contiguous_format)  # aligned
    return fp8.dequantize(codes, scale_bytes.view(accumulation_dtype(dtype)), "group", dtype)


class ArrivingCodes(PendingExchange):
    """An exchange of encoded rows in flight. Its `result` holds the bytes, which wait() decodes."""

    def __init__(self, exchange: PendingExchange, width: int, dtype: torch.dtype) -> None:
        super().__init__(exchange.result, exchange.transfer, exchange.source)
        self.width = width
        self.dtype = dtype

    def wait(self) -> Tensor:
        """Wait until the exchange has finished, and return the rows [r, width]."""
        return decode_rows(super().wait(), self.width, self.dtype)


class CodedRowExchange(RowExchange):
    """A RowExchange that sends rows to the experts in 8 bits, and back in their own dtype."""

    def start_sending(self, rows: Tensor, order: range) -> tuple[Tensor, ...]:
        """Start sending all rows [m, d]. Return a tensor in the shape of each chunk, without its values."""
        messages = super().start_sending(encode_rows(rows), order)
        width = rows.shape[1]
        for chunk in order:
            self.under_way[chunk] = ArrivingCodes(self.under_way[chunk], width, rows.dtype)
        empty = rows.new_empty(())
        return tuple(empty.expand(len(message), width) for message in messages)
