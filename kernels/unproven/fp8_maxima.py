"""Allocate and reduce the maxima that a producer finds on its way, for the scales of a cast."""
import torch
from torch import Tensor

from kernels.fp8 import STRIP, Maxima
from kernels.triton_ import ceil_div


def empty_maxima(like: Tensor, m: int, n: int, kind: str) -> tuple[Tensor, Tensor | None]:
    """Allocate maxima for a kernel with one program per strip of STRIP rows of [m, n].

    kind tensor: (one per strip, None). kind row: (one per row, one per column and strip).
    """
    strips = ceil_div(m, STRIP)
    of_rows = like.new_empty(strips if kind == "tensor" else (m, 1), dtype=torch.float32)
    of_columns = like.new_empty(strips, n, dtype=torch.float32) if kind == "row" else None
    return of_rows, of_columns


def reduce_strip_maxima(of_rows: Tensor | None, of_columns: Tensor | None) -> Maxima:
    """Reduce the programs' maxima: over rows, and over the columns in the rows of each program."""
    if of_columns is None:
        return Maxima(of_rows, of_rows)
    return Maxima(of_rows, of_columns.amax(0)[:, None])


def empty_maxima_of_programs(
    x: Tensor, kind: str | None, programs: int
) -> tuple[Tensor | None, Tensor | None]:
    """Allocate what store_maxima and add_maxima write for matrices like x [..., d]: of rows, of columns."""
    d = x.shape[-1]
    if kind == "tensor":
        return x.new_empty(programs, dtype=torch.float32), None
    if kind == "row":
        rows = x.new_empty(x.numel() // d, 1, dtype=torch.float32)
        return rows, x.new_empty(programs, d, dtype=torch.float32)
    return None, None
