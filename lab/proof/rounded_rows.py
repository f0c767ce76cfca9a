"""What parallel.compress_tokens does to numbers, by its formula: shares no line with kernels/fp8.py.

A row has a scale for every 128 channels (arXiv 2412.19437, section 3.3.2), and each element becomes the
nearest number of e4m3 times that. In one process no row travels: with `rounded_rows`, its mixtures round the
tokens that experts read, and the gradients of what they return, as the exchanges do.
"""
import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from config import Config
from model import moe
from parallel.expert.dispatch import Combine, Dispatch

BLOCK = 128  # channels that share a scale
LARGEST = 448.0  # number of e4m3
SMALLEST_NORMAL = 2.0**-6
MANTISSA_BITS = 3
SMALLEST_BLOCK = 2.0**-100  # smaller ones count as this


def nearest_e4m3(x: np.ndarray) -> np.ndarray:
    """Return the nearest numbers of e4m3, of two equally near ones the even."""
    _, exponent = np.frexp(np.maximum(np.abs(x), SMALLEST_NORMAL))  # mantissas in 0.5 .. 1
    step = np.ldexp(np.ones_like(x), exponent - 1 - MANTISSA_BITS)
    return np.clip(np.round(x / step) * step, -LARGEST, LARGEST)


def largest_of_blocks(rows: np.ndarray) -> np.ndarray:
    """Return the largest magnitude of each element's block, for rows [m, d] -> [m, d]."""
    largest = np.empty_like(rows)
    for start in range(0, rows.shape[1], BLOCK):
        block = slice(start, start + BLOCK)
        largest[:, block] = np.abs(rows[:, block]).max(1, keepdims=True)
    return largest


def rounded(rows: Tensor) -> Tensor:
    """Return what arrives of rows [m, d], computed in fp32, or for fp64 in fp64 up to e4m3's fp32."""
    x = rows.detach().to(torch.promote_types(rows.dtype, torch.float32)).numpy()
    number = x.dtype.type
    factor = number(LARGEST) / np.maximum(largest_of_blocks(x), number(SMALLEST_BLOCK))
    scaled = (x * factor).astype(np.float32)  # fp64 becomes e4m3 by way of fp32
    arrived = nearest_e4m3(scaled).astype(x.dtype) * (1 / factor)
    return torch.from_numpy(arrived).to(rows.dtype)


def error_bound(rows: Tensor) -> Tensor:
    """Bound the error of rows [m, d] that have arrived, in fp64.

    Half of the last of e4m3's digits: 1/16 of an element, or half a step of 2^-9 scales; at most half of the
    last digit of the block's largest element, 16 scales. Scale, product and result round in fp32 (fp64: the
    product alone, before it becomes e4m3), and the result once to the dtype.
    """
    x = np.abs(rows.detach().double().numpy())
    largest = largest_of_blocks(x)
    half_a_digit = np.minimum(np.maximum(x / 16, largest / LARGEST / 1024), largest / 28)
    own, wide = (torch.finfo(dtype) for dtype in (rows.dtype, torch.promote_types(rows.dtype, torch.float32)))
    roundings = own.eps / 2 * (x + half_a_digit) + own.tiny * own.eps / 2 + 4 * wide.eps / 2 * x
    if rows.dtype == torch.float64:
        roundings += torch.finfo(torch.float32).eps / 2 * x
    return torch.from_numpy(half_a_digit + roundings)


# ---- in one process ----------------------------------------------------------------------------------------

class _RoundForward(torch.autograd.Function):
    """Round in the forward; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return rounded(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


class _RoundBackward(torch.autograd.Function):
    """Round the gradient; the values pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return rounded(dy)


class RoundedDispatch(Dispatch):
    """A Dispatch in one process whose experts read rounded tokens."""

    def __init__(self, x: Tensor, *others: Any) -> None:
        super().__init__(_RoundForward.apply(x), *others)


class RoundedCombine(Combine):
    """A Combine in one process whose experts get rounded gradients."""

    def tokens(self) -> Tensor:
        return _RoundBackward.apply(super().tokens())


@contextlib.contextmanager
def rounded_rows(cfg: Config) -> Iterator[None]:
    """Round in the mixtures of a run in one process, if cfg has parallel.compress_tokens."""
    with contextlib.ExitStack() as stack:
        if cfg.parallel.compress_tokens != "none":
            stack.enter_context(mock.patch.object(moe, "Dispatch", RoundedDispatch))
            stack.enter_context(mock.patch.object(moe, "Combine", RoundedCombine))
        yield
