"""Embedding lookup. The backward adds rows into the fp32 gradient buffer, without a dense [v, d] gradient.

torch adds them on a GPU with atomics, in a different order every time. The kernel here sorts the ids, and one
program sums all rows of an id in token order, which is bitwise reproducible.
"""
import torch
from torch import Tensor

from kernels.grad import accumulate_grad, accumulation_dtype
from kernels.tiles import block_range, inside_matrix, load_fp32, tile_offsets
from kernels.triton_ import ceil_div, kernel_is_available, power_of_2, tl, triton

TILE = 8192  # elements that a program reads at a time
MAX_WIDTH = 1024  # channels of a row that one program sums
MAX_ROWS = 64  # rows that it reads at a time


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """ids [b, s] in [0, v), weight [v, d] -> [b, s, d]."""
    return _Embedding.apply(ids, weight)


def add_rows(into: Tensor | None, ids: Tensor, dy: Tensor, shape: torch.Size) -> Tensor:
    """Compute into[ids] += dy and return `into`. ids [t], dy [t, d], into [v, d].

    With into None, return a new gradient of `shape`, in the dtype of dy; the sum is in fp32 or better.
    """
    if into is None:
        total = dy.new_zeros(shape, dtype=accumulation_dtype(dy.dtype))
        return add_rows(total, ids, dy, shape).to(dy.dtype)
    why = None if into.is_contiguous() else "a gradient that is not contiguous"
    if ids.numel() and kernel_is_available("embedding gradient", dy, into, why=why):
        return launch_add_rows(into, ids, dy)
    return into.index_add_(0, ids, dy.to(into.dtype))


# ---- Triton ------------------------------------------------------------------------------------------------

@triton.jit
def add_rows_kernel(
    DY, IDS, ORDER, ENDS, INTO, t, d,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute INTO[id] += the sum of the rows of DY [t, d] that belong to the id.

    IDS [t] is sorted. ORDER [t] holds their tokens, ascending for equal ids. ENDS [t] is where the run of
    equal ids ends. Program number i does work if a run begins at position i.
    """
    first = tl.program_id(0)
    columns = block_range(tl.program_id(1), BLOCK)
    own_id = tl.load(IDS + first)
    previous_id = tl.load(IDS + first - 1, first > 0, other=-1)
    is_start = own_id != previous_id
    end = tl.where(is_start, tl.load(ENDS + first), first).to(tl.int32)

    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(first, end, ROWS):
        places = start + tl.arange(0, ROWS)
        tokens = tl.load(ORDER + places, places < end, other=0)  # [ROWS]
        inside = inside_matrix(places, columns, end, d)
        total += tl.sum(load_fp32(DY + tile_offsets(tokens, columns, d), inside), 0)

    pointers = INTO + own_id.to(tl.int64) * d + columns
    is_own = is_start & (columns < d)
    tl.store(pointers, load_fp32(pointers, is_own) + total, is_own)


def launch_add_rows(into: Tensor, ids: Tensor, dy: Tensor) -> Tensor:
    """Run add_rows as one kernel. ids [t], dy [t, d], into [v, d]."""
    t, d = dy.shape
    sorted_ids, order = ids.sort(stable=True)
    ends = torch.searchsorted(sorted_ids, sorted_ids, right=True)
    block = min(MAX_WIDTH, power_of_2(d))
    grid = t, ceil_div(d, block)
    add_rows_kernel[grid](
        dy.contiguous(), sorted_ids, order, ends, into, t, d,
        ROWS=min(MAX_ROWS, TILE // block),
        BLOCK=block,
        num_warps=8,
    )
    return into


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight  # not for its values: the backward needs none, and ZeRO-3 does not gather them
        ctx.shape = weight.shape
        return weight[ids]

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[None, Tensor | None]:
        (ids,) = ctx.saved_tensors
        shape = ctx.shape

        def compute(into: Tensor | None, add: bool) -> Tensor:
            if into is not None and not add:  # most rows get no gradient
                into.zero_()
            return add_rows(into, ids.reshape(-1), dy.reshape(-1, shape[1]), shape)

        return None, accumulate_grad(ctx.weight, compute)
