"""y_i = x_i W_i^T for each of several experts with consecutive rows.

On a CPU it is a loop of GEMMs, on a GPU one launch, after one that builds the table of tiles (row_tiles). The
kernel is ours, or on Hopper, in bf16 and with rows in order, that of torch's library, which is expected to be
faster there (kernels/grouped_library.py). The rows may be split among the experts in any way. An expert
without rows costs nothing, except zeroing its gradient if it is the step's first. The weight gradients go
through accumulate_grad (kernels/grad.py), so the W of a pipeline schedule may compute them later.

A launch has as many programs as run concurrently. They take tiles in turn from a table on the device
(row_tiles): if `counts` is a tensor there, the host never learns how the rows are split (after MegaBlocks,
arXiv 2211.15841).

Rows need not be in expert order. The GEMMs read those of tokens in place, and write to where they belong
(after ScatterMoE, arXiv 2403.08245): a copy in expert order is neither written nor kept for the backward.
Rows in order are read through the copy engine (TMA), single rows by asynchronous copies of 16 bytes.
"""
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.expert_order import host_counts
from kernels.grad import accumulate_grad
from kernels.grouped_library import library_multiplies, multiply_by_library
from kernels.linear import ALIGNED, skewed, write_wgrad
from kernels.permute import RowOrder, sum_rows
from kernels.tiles import inside_matrix, tile_offsets, write_tile
from kernels.triton_ import (
    TensorDescriptor,
    ceil_div,
    kernel_is_available,
    num_processors,
    power_of_2,
    tl,
    triton,
)

STEP = 32  # rows, see pad_to_step
# M: rows of an expert, which has few; N: outputs, K: inputs
TILE = {"M": 128, "N": 128, "K": 64, "num_warps": 8, "num_stages": 3}  # 98 KB: two programs per processor
PROGRAMS = 2  # per processor, each striding over the tiles
WGRAD = {"M": 128, "N": 128, "K": 64, "num_warps": 8, "num_stages": 3}  # M: outputs, N: inputs, K: rows


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    counts: Sequence[int] | Tensor,
    gather: RowOrder | None = None,
    combine: RowOrder | None = None,
) -> Tensor:
    """x [m, n] -> [m, o]. weight [experts * o, n] has o rows per expert.

    counts is the number of rows of each expert. The rows of x are in expert order, or `gather` maps them to
    rows of x [t, n]. With combine, the result is the sum [t, o] of each token's rows.
    Raises ValueError if both are given.
    """
    if gather is not None and combine is not None:
        raise ValueError("a grouped product gathers rows or combines them, not both")
    return _GroupedLinear.apply(x, weight, counts, gather, combine)


def pad_to_step(x: Tensor, n: int) -> int:
    """Return the number of rows missing to the next multiple of STEP if oneDNN multiplies, else 0.

    oneDNN compiles a GEMM for each new number of rows (0.4 ms on a CPU that multiplies 128 rows by
    512 x 1408 in 1 ms), and a router hardly ever repeats a number.
    """
    return -n % STEP if x.dtype == torch.bfloat16 and x.device.type == "cpu" else 0


def round_up_rows(rows: Tensor) -> Tensor:
    """Append zeros up to the next multiple of STEP rows (see pad_to_step)."""
    zeros = pad_to_step(rows, len(rows))
    return F.pad(rows, (0, 0, 0, zeros)) if zeros else rows


def grouped_forward(
    x: Tensor, weight: Tensor, counts: Sequence[int], source: Tensor | None = None
) -> Tensor:
    """x [m, n], weight [e, o, n], or a transposed view of this shape -> [m, o].

    source [m] maps each row to a row of x [t, n].
    """
    m = x.shape[0] if source is None else len(source)
    y = x.new_empty(m, weight.shape[1])
    start = 0
    for expert_weight, count in zip(weight, counts):
        if count:
            # may include rows of the next experts, which are overwritten later
            end = start + count + pad_to_step(x, count)
            rows = slice(start, min(end, m))
            expert_x = x[rows] if source is None else x.index_select(0, source[rows])
            torch.mm(expert_x, expert_weight.t(), out=y[rows])
        start += count
    return y


def grouped_dgrad(
    dy: Tensor, weight: Tensor, counts: Sequence[int], source: Tensor | None = None
) -> Tensor:
    """dy [m, o], weight [e, o, n] -> dx [m, n]. source [m] maps each row to a row of dy [t, o]."""
    return grouped_forward(dy, weight.transpose(1, 2), counts, source)


def grouped_wgrad(
    into: Tensor,
    dy: Tensor,
    x: Tensor,
    counts: Sequence[int],
    add: bool,
    dy_source: Tensor | None = None,
    x_source: Tensor | None = None,
) -> Tensor:
    """into [e, o, n] = (or, add: +=) dy_i^T x_i, in the dtype of `into`. dy [m, o], x [m, n].

    dy_source, x_source [m] map each row to a row of dy [t, o], or of x [t, n].
    """
    start = 0
    for expert_into, n in zip(into, counts):
        if n:
            rows = slice(start, start + n)
            expert_dy = dy[rows] if dy_source is None else dy.index_select(0, dy_source[rows])
            expert_x = x[rows] if x_source is None else x.index_select(0, x_source[rows])
            write_wgrad(expert_into, round_up_rows(expert_dy), round_up_rows(expert_x), add)
        elif not add:
            expert_into.zero_()
        start += n
    return into


# ---- Triton ----------------------------------------------------------------------------------------------

@triton.jit
def row_tiles_kernel(COUNTS, OFFSETS, TILES, experts, M: tl.constexpr, EXPERTS: tl.constexpr):
    """Compute each expert's place in OFFSETS [experts + 1], and its tiles of M rows in TILES.

    One program per expert.

    COUNTS [experts] are their rows. TILES: see RowTiles. EXPERTS: the experts, rounded up to a power of two.
    """
    expert = tl.program_id(0)
    others = tl.arange(0, EXPERTS)
    counts = tl.load(COUNTS + others, others < experts, 0).to(tl.int32)
    tiles = tl.cdiv(counts, M)
    is_before = others < expert
    start = tl.sum(tl.where(is_before, counts, 0), 0)
    end = start + tl.sum(tl.where(others == expert, counts, 0), 0)
    tl.store(OFFSETS + expert + 1, end)
    if expert == 0:
        tl.store(OFFSETS, 0)
        tl.store(TILES, tl.sum(tiles, 0))

    entry = TILES + (1 + tl.sum(tl.where(is_before, tiles, 0), 0)) * 4
    for row in range(start, end, M):
        tl.store(entry, expert)
        tl.store(entry + 1, row)
        tl.store(entry + 2, end)
        entry += 4


@triton.jit
def grouped_kernel(
    X, WEIGHT, Y, TILES, SOURCE, inner, outer, height,
    BACK: tl.constexpr,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Compute every num_programs-th tile [M, N] of Y [m, outer] = X [m, inner] times its expert's weight.

    X and WEIGHT are descriptors. WEIGHT is [experts * height, ...], in blocks of [N, K], and in the backward
    (BACK) of [K, N]. A tile may read rows of the next expert, but does not write them. Concurrent programs
    have adjacent tiles: all columns of some rows.
    GATHER: row j of the GEMM is row SOURCE[j] of X, which is a pointer then. SCATTER: it becomes that row of
    Y.
    """
    tiles_across = tl.cdiv(outer, N)
    num_tiles = tl.load(TILES) * tiles_across
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        entry = TILES + (1 + tile // tiles_across) * 4
        expert = tl.load(entry)
        row = tl.load(entry + 1)
        end = tl.load(entry + 2)
        column = tile % tiles_across * N

        rows = row + tl.arange(0, M)
        places = rows  # where they are read or written
        if GATHER or SCATTER:
            places = tl.load(SOURCE + rows, rows < end, 0)
        inner_range = tl.arange(0, K)
        if GATHER:
            x_pointers = X + tile_offsets(places, inner_range, inner)

        first = expert * height  # row of the expert in WEIGHT
        total = tl.zeros((M, N), tl.float32)
        for k in range(0, inner, K):
            # 0 beyond `inner`, so the weight's block does not matter there
            if GATHER:
                x = tl.load(x_pointers + k, (k + inner_range < inner)[None, :], 0.0)
            else:
                x = X.load([row, k])
            if BACK:
                weight = WEIGHT.load([first + k, column])
            else:
                weight = WEIGHT.load([first + column, k]).T
            total = tl.dot(x, weight, total)  # [M, K] times [K, N]

        columns = column + tl.arange(0, N)
        if SCATTER:
            pointers = Y + tile_offsets(places, columns, outer)
        else:
            pointers = Y + tile_offsets(rows, columns, outer)
        tl.store(pointers, total, inside_matrix(rows, columns, end, outer))


@triton.jit
def write_tile_in_parts(
    INTO, part, row, column, num_rows, num_columns, ADD: tl.constexpr, PARTS: tl.constexpr
):
    """Run write_tile in PARTS pieces, a power of two: loading all the values to accumulate onto at once would
    take too many registers."""
    if PARTS > 1:
        height: tl.constexpr = part.shape[0]
        width: tl.constexpr = part.shape[1] // 2
        halves = tl.permute(tl.reshape(part, (height, 2, width)), (0, 2, 1))
        left, right = tl.split(halves)  # [M, N / 2] each
        half: tl.constexpr = PARTS // 2
        write_tile_in_parts(INTO, left, row, column, num_rows, num_columns, ADD=ADD, PARTS=half)
        write_tile_in_parts(INTO, right, row, column + width, num_rows, num_columns, ADD=ADD, PARTS=half)
    else:
        write_tile(INTO, part, row, column, num_rows, num_columns, ADD=ADD)


@triton.jit
def grouped_wgrad_kernel(
    DY, X, INTO, OFFSETS, experts, o, n,
    ADD: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Compute every num_programs-th tile [M, N] of INTO [o, n] = (or, ADD: +=) DY^T X of all experts.

    DY and X are descriptors of [m, o] and [m, n]. Without ADD, an expert without rows gets zeros.
    """
    tiles_across = tl.cdiv(n, N)
    tiles = tl.cdiv(o, M) * tiles_across  # per expert
    for tile in range(tl.program_id(0), tiles * experts, tl.num_programs(0)):
        expert = tile // tiles
        row = tile % tiles // tiles_across * M
        column = tile % tiles_across * N  # `tiles` is a multiple of tiles_across
        start = tl.load(OFFSETS + expert)
        end = tl.load(OFFSETS + expert + 1)
        if end > start or not ADD:
            # full blocks of K rows
            total = tl.zeros((M, N), tl.float32)
            full_end = start + (end - start) // K * K
            for k in range(start, full_end, K):
                dy = DY.load([k, row])  # [K, M]
                x = X.load([k, column])  # [K, N]
                total = tl.dot(dy.T, x, total)

            # the last block, masking the rows of the next expert (one zero factor suffices: a non-finite dy
            # spoils the step anyway)
            if full_end < end:
                inside = (full_end + tl.arange(0, K) < end)[:, None]
                dy = DY.load([full_end, row])
                x = X.load([full_end, column])
                x = tl.where(inside, x, tl.zeros_like(x))
                total = tl.dot(dy.T, x, total)

            into = INTO + expert.to(tl.int64) * o * n
            write_tile_in_parts(into, total, row, column, o, n, ADD=ADD, PARTS=4)


@triton.jit
def gathered_wgrad_kernel(
    DY, X, SOURCE, INTO, OFFSETS, experts, o, n,
    GATHER_DY: tl.constexpr,
    ADD: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Like grouped_wgrad_kernel, but row j of X is its row SOURCE[j], or (GATHER_DY) that of DY.

    The gathered one is a pointer to [t, n] or [t, o], the other a descriptor. Indices of the next K rows are
    loaded before the product of the current ones, which hides their latency.
    """
    tiles_across = tl.cdiv(n, N)
    tiles = tl.cdiv(o, M) * tiles_across  # per expert
    steps = tl.arange(0, K)
    for tile in range(tl.program_id(0), tiles * experts, tl.num_programs(0)):
        expert = tile // tiles
        row = tile % tiles // tiles_across * M
        column = tile % tiles_across * N  # `tiles` is a multiple of tiles_across
        outputs = row + tl.arange(0, M)
        inputs = column + tl.arange(0, N)
        start = tl.load(OFFSETS + expert)
        end = tl.load(OFFSETS + expert + 1)
        if end > start or not ADD:
            total = tl.zeros((M, N), tl.float32)
            source = tl.load(SOURCE + start + steps, start + steps < end, 0)
            for k in range(start, end, K):
                # the gathered operand is 0 beyond `end`, where the other has rows of the next expert (a
                # non-finite number there spoils the step anyway)
                inside = k + steps < end
                if GATHER_DY:
                    pointers = DY + tile_offsets(source, outputs, o)
                    dy = tl.load(pointers, inside[:, None] & (outputs < o)[None, :], 0.0)  # [K, M]
                    x = X.load([k, column])  # [K, N]
                else:
                    pointers = X + tile_offsets(source, inputs, n)
                    x = tl.load(pointers, inside[:, None] & (inputs < n)[None, :], 0.0)
                    dy = DY.load([k, row])
                source = tl.load(SOURCE + k + K + steps, k + K + steps < end, 0)
                total = tl.dot(dy.T, x, total)

            into = INTO + expert.to(tl.int64) * o * n
            write_tile_in_parts(into, total, row, column, o, n, ADD=ADD, PARTS=4)


def triton_fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels can multiply x [m, n] and weight [e, o, n].

    fp32 is left to the library's GEMMs, which are exact.
    """
    why = skewed(x, weight)
    if x.dtype != weight.dtype:
        why = "x and weight differ in dtype"
    elif why is None and weight.shape[1] * weight.itemsize % ALIGNED:  # the backward reads rows of outputs
        why = "outputs that are not aligned"
    if x.dtype == torch.float32 or x.numel() == 0:
        return False
    return kernel_is_available("grouped GEMM", x, weight, why=why)


class RowTiles(NamedTuple):
    """Tiling of the experts' rows, on the device.

    offsets int32 [experts + 1] is where the rows of each expert start. tiles int32 [1 + most tiles, 4] has
    the number of tiles in the first row, then for each tile its expert, its first row and the end of the
    expert's.
    """
    offsets: Tensor
    tiles: Tensor


def row_tiles(counts: Sequence[int] | Tensor, rows: int, device: torch.device) -> RowTiles:
    """Tile `rows` rows, split over the experts by counts. One launch, and no host sync."""
    if not isinstance(counts, Tensor):
        counts = torch.as_tensor(counts, dtype=torch.int32).to(device, non_blocking=True)
    experts = len(counts)
    offsets = torch.empty(experts + 1, dtype=torch.int32, device=device)
    most = ceil_div(rows, TILE["M"]) + experts  # an expert has at most one partial tile
    tiles = torch.empty(1 + most, 4, dtype=torch.int32, device=device)
    row_tiles_kernel[(experts,)](
        counts, offsets, tiles, experts,
        M=TILE["M"],
        EXPERTS=power_of_2(experts),
        num_warps=1,
    )
    return RowTiles(offsets, tiles)


def launch_grouped(
    x: Tensor,
    weight: Tensor,
    rows: RowTiles,
    back: bool = False,
    gather: Tensor | None = None,
    scatter: Tensor | None = None,
) -> Tensor:
    """Run grouped_forward: x [m, n], weight [e, o, n] -> [m, o]; or, back, grouped_dgrad: [m, o] -> [m, n].

    gather [m] maps each row to a row of x [t, ...]. scatter [m], a permutation, maps it to a row of the
    result.
    """
    source = scatter if gather is None else gather
    m = len(x) if source is None else len(source)
    experts, o, n = weight.shape
    inner, outer = (o, n) if back else (n, o)
    y = x.new_empty(m, outer)
    most_tiles = (len(rows.tiles) - 1) * ceil_div(outer, TILE["N"])
    weight_block = [TILE["K"], TILE["N"]] if back else [TILE["N"], TILE["K"]]
    grouped_kernel[(min(most_tiles, PROGRAMS * num_processors(x.device)),)](
        x if gather is not None else TensorDescriptor.from_tensor(x, [TILE["M"], TILE["K"]]),
        TensorDescriptor.from_tensor(weight.view(experts * o, n), weight_block),
        y, rows.tiles,
        rows.tiles if source is None else source,  # not read without an order
        inner=inner,
        outer=outer,
        height=o,
        BACK=back,
        GATHER=gather is not None,
        SCATTER=scatter is not None,
        **TILE,
    )
    return y


def launch_wgrad(
    into: Tensor,
    dy: Tensor,
    x: Tensor,
    offsets: Tensor,
    add: bool,
    dy_source: Tensor | None = None,
    x_source: Tensor | None = None,
) -> Tensor:
    """Run grouped_wgrad: into [e, o, n] = (or, add: +=) dy_i^T x_i. dy [m, o], x [m, n].

    dy_source, x_source [m] map each row to a row of dy or x; at most one of them is given.
    """
    experts, o, n = into.shape
    tiles = experts * ceil_div(o, WGRAD["M"]) * ceil_div(n, WGRAD["N"])
    grid = (min(tiles, PROGRAMS * num_processors(dy.device)),)
    if dy_source is None:
        dy_or_descriptor = TensorDescriptor.from_tensor(dy, [WGRAD["K"], WGRAD["M"]])
    else:
        dy_or_descriptor = dy
    if x_source is None:
        x_or_descriptor = TensorDescriptor.from_tensor(x, [WGRAD["K"], WGRAD["N"]])
    else:
        x_or_descriptor = x

    source = x_source if dy_source is None else dy_source
    if source is None:
        grouped_wgrad_kernel[grid](
            dy_or_descriptor, x_or_descriptor, into, offsets, experts, o, n,
            ADD=add,
            **WGRAD,
        )
    else:
        gathered_wgrad_kernel[grid](
            dy_or_descriptor, x_or_descriptor, source, into, offsets, experts, o, n,
            GATHER_DY=dy_source is not None,
            ADD=add,
            **WGRAD,
        )
    return into


def accumulate_wgrad(
    ctx,
    dy: Tensor,
    x: Tensor,
    dy_source: Tensor | None = None,
    x_source: Tensor | None = None,
) -> Tensor | None:
    """Accumulate dW of all experts (kernels/grad.py). dy [m, o], x [m, n]; the sources as for grouped_wgrad.

    ctx is that of the forward, with weight, experts, triton and counts: the rows of each expert, or with
    triton the offsets of a RowTiles.
    """
    shape = ctx.experts, dy.shape[1], x.shape[1]
    write_products = launch_wgrad if ctx.triton else grouped_wgrad

    def compute(into: Tensor | None, add: bool) -> Tensor:
        by_expert = dy.new_empty(shape) if into is None else into.view(shape)
        write_products(by_expert, dy, x, ctx.counts, add, dy_source, x_source)
        return by_expert.view(-1, x.shape[1])
    return accumulate_grad(ctx.weight, compute)


# ---- autograd --------------------------------------------------------------------------------------------

def multiply_rows(
    ctx,
    x: Tensor,
    weight: Tensor,
    back: bool = False,
    gather: Tensor | None = None,
    scatter: Tensor | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """Run launch_grouped, by the loop, the kernel or the library. With slots, the result is the sum of each
    token's rows.

    ctx is that of the forward, with counts, triton, rows and every_slot_filled.
    """
    lies_in_order = gather is None and scatter is None
    if ctx.triton and lies_in_order and library_multiplies(x.device, x.dtype):
        y = multiply_by_library(x, weight, ctx.rows.offsets, back)
    elif ctx.triton:
        y = launch_grouped(x, weight, ctx.rows, back, gather, scatter)
    else:
        product = grouped_dgrad if back else grouped_forward
        y = product(x, weight, ctx.counts, gather)
        if scatter is not None:
            y = torch.empty_like(y).index_copy_(0, scatter, y)
    return y if slots is None else sum_rows(y, slots, ctx.every_slot_filled)


class _GroupedLinear(torch.autograd.Function):
    """The backward combines rows that the forward gathered, and gathers rows that it combined.

    If each token has one row, combining is scattering, which needs no inverse of the order.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        counts: Sequence[int] | Tensor,
        gather: RowOrder | None,
        combine: RowOrder | None,
    ) -> Tensor:
        # layout of the rows
        order = combine if gather is None else gather
        num_rows = len(x) if order is None else len(order.source)
        source = slots = None
        if order is not None:
            x = x.contiguous()
            source = order.source
            slots = None if order.is_permutation else order.slots
            ctx.every_slot_filled = order.every_slot_filled
        ctx.gathers = gather is not None
        ctx.combines = combine is not None

        # choice of the implementation
        by_expert = weight.view(len(counts), -1, x.shape[1])
        ctx.weight = weight  # the Parameter itself, which has main_grad
        ctx.experts = len(counts)
        ctx.triton = num_rows > 0 and triton_fits(x, by_expert)
        if ctx.triton:
            ctx.rows = row_tiles(counts, num_rows, x.device)
            ctx.counts = ctx.rows.offsets
        else:
            ctx.counts = host_counts(counts, num_rows)

        if not ctx.combines:
            ctx.save_for_backward(x, source, slots)
            return multiply_rows(ctx, x, by_expert, gather=source)
        ctx.save_for_backward(x, source, None)
        scatter = source if slots is None else None
        return multiply_rows(ctx, x, by_expert, scatter=scatter, slots=slots)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, source, slots = ctx.saved_tensors
        dy = dy.contiguous()
        dx = None
        if ctx.needs_input_grad[0]:
            by_expert = ctx.weight.view(ctx.experts, -1, x.shape[1])
            gather = source if ctx.combines else None
            scatter = source if ctx.gathers and slots is None else None
            dx = multiply_rows(
                ctx, dy, by_expert, back=True, gather=gather, scatter=scatter, slots=slots)
        dw = accumulate_wgrad(
            ctx, dy, x,
            dy_source=source if ctx.combines else None,
            x_source=source if ctx.gathers else None,
        )
        return dx, dw, None, None, None
