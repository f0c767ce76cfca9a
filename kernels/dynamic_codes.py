"""Numbers in 8 bits beside the largest of their block: dynamic quantization (arXiv 2110.02861, section 2.2).

A code stands for a value between -1 and 1, or 0 and 1, times the block's scale, its largest magnitude. The
256 values are dense near 1 and reach down to 1e-7: decade e below 1 is divided linearly into 2^(6 - e) parts
(twice as many without a sign), each standing for its middle. Beside these there are 0 and 1, so the largest
number of a block has no error unless it is negative (-0.993 is the least value).
"""
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

DECADES = 7


class CodeBook(NamedTuple):
    """values [256], ascending. borders [255]: between two neighbours. zero: the code of 0."""
    values: Tensor
    borders: Tensor
    zero: int


@lru_cache(maxsize=8)
def code_book(signed: bool, dtype: torch.dtype, device: torch.device) -> CodeBook:
    """Return the values that 8 bits stand for."""
    values = [0.0, 1.0]
    for decade in range(DECADES):
        parts = 2 ** (DECADES - 1 - decade) * (1 if signed else 2)
        edges = [0.1 + 0.9 * i / parts for i in range(parts + 1)]
        middles = [(a + b) / 2 * 10.0**-decade for a, b in zip(edges, edges[1:])]
        values += middles + [-value for value in middles] * signed
    ascending = torch.tensor(sorted(values), dtype=torch.float64)
    borders = (ascending[1:] + ascending[:-1]) / 2
    return CodeBook(ascending.to(device, dtype), borders.to(device, dtype), sorted(values).index(0.0))


def encode(x: Tensor, block: int, signed: bool) -> tuple[Tensor, Tensor]:
    """x [n] -> (codes uint8 [n], scales [n / block]), each number as the nearest value of its block."""
    rows = x.view(-1, block)
    scales = rows.abs().amax(1)
    relative = rows / torch.where(scales > 0, scales, 1.0)[:, None]
    borders = code_book(signed, x.dtype, x.device).borders
    codes = torch.bucketize(relative, borders, out_int32=True).to(torch.uint8)
    return codes.flatten(), scales


def decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """codes uint8 [n], scales [n / block] -> numbers [n] in the dtype of the scales."""
    book = code_book(signed, scales.dtype, scales.device)
    relative = book.values[codes.int()].view(len(scales), -1)  # [blocks, block]
    return (relative * scales[:, None]).flatten()
