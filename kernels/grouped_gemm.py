"""y_i = x_i W_i^T for each of several experts, whose rows lie one after the other: a loop of GEMMs, or on a GPU one launch.

Rows may be shared out in any way: an expert with none costs nothing and gets no gradient (its main_grad keeps what it has).
The weights' gradients are given, not returned (kernels/grad.py): a pipeline's W may make them later.
The launch is as large as any sharing-out could need, and its programs find their expert from offsets on the device: where
`counts` is a tensor there, the host never learns how the rows are shared out (after MegaBlocks, arXiv 2211.15841).
"""
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.grad import give
from kernels.linear import ALIGNED, add_tile, add_wgrad, skewed
from kernels.triton_ import TensorDescriptor, ceil_div, fits, power_of_2, tl, triton

STEP = 32  # rows: see odd
TILE = {"M": 128, "N": 128, "K": 64, "num_warps": 8, "num_stages": 4}  # rows of an expert, outputs, inputs: experts have few rows
WGRAD = {"M": 128, "N": 128, "K": 64, "num_warps": 8, "num_stages": 3}  # outputs, inputs, rows


def grouped_linear(x: Tensor, weight: Tensor, counts: Sequence[int] | Tensor) -> Tensor:
    """x [m, n]: counts[i] rows of expert i, in order; weight [experts * o, n]: o rows of each expert -> [m, o]."""
    return _GroupedLinear.apply(x, weight, counts)


def odd(x: Tensor, n: int) -> int:
    """Rows to the next multiple of STEP where oneDNN multiplies, else 0: it compiles a product for each number of rows that it
    has not met (0.4 ms on a CPU that multiplies 128 rows by 512 x 1408 in one), and a router hardly ever repeats one."""
    return -n % STEP if x.dtype == torch.bfloat16 and x.device.type == "cpu" else 0


def filled(rows: Tensor) -> Tensor:
    zeros = odd(rows, len(rows))
    return F.pad(rows, (0, 0, 0, zeros)) if zeros else rows


def grouped_forward(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """x [m, n], weight [e, o, n] or such a one's transpose -> [m, o]."""
    y, start, m = x.new_empty(x.shape[0], weight.shape[1]), 0, x.shape[0]
    for w, n in zip(weight, counts):
        if n:
            rows = slice(start, min(start + n + odd(x, n), m))  # those of the next experts, too, which write theirs later
            torch.mm(x[rows], w.t(), out=y[rows])
        start += n
    return y


def grouped_dgrad(dy: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """dy [m, o], weight [e, o, n] -> dx [m, n]."""
    return grouped_forward(dy, weight.transpose(1, 2), counts)


def grouped_wgrad(into: Tensor, dy: Tensor, x: Tensor, counts: Sequence[int]) -> Tensor:
    """into [e, o, n] += dy_i^T x_i, in its own dtype. dy [m, o], x [m, n]."""
    for part, rows, inputs, n in zip(into, dy.split(counts), x.split(counts), counts):
        if n:
            add_wgrad(part, filled(rows), filled(inputs))
    return into


# ---- Triton ------------------------------------------------------------------------------------------------------------------

@triton.jit
def whose(OFFSETS, experts, tile, M: tl.constexpr, EXPERTS: tl.constexpr):
    """Of the tiles of M rows that the experts need one after the other: (is there such a tile, its expert, its first row, where the
    expert's rows end)."""
    e = tl.arange(0, EXPERTS)
    start, stop = tl.load(OFFSETS + e, e < experts, 0), tl.load(OFFSETS + e + 1, e < experts, 0)
    tiles = tl.cdiv(stop - start, M)
    before = tl.cumsum(tiles, 0) - tiles  # tiles of the experts before this one
    mine = (tile >= before) & (tile < before + tiles)
    return (tl.sum(mine.to(tl.int32), 0) > 0, tl.sum(tl.where(mine, e, 0), 0), tl.sum(tl.where(mine, start + (tile - before) * M, 0), 0),
            tl.sum(tl.where(mine, stop, 0), 0))


@triton.jit
def grouped_kernel(X, WEIGHT, Y, OFFSETS, experts, inner, outer, height, BACK: tl.constexpr,
                   M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr):
    """Y [m, outer] = X [m, inner] times its expert's weight. X, WEIGHT: descriptors; WEIGHT [experts * height, ...] in blocks of
    [N, K], or for the way BACK [K, N]. A tile may read rows of the next expert; it does not write them."""
    tiles_n = tl.cdiv(outer, N)
    tile, column = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n * N
    there, expert, row, end = whose(OFFSETS, experts, tile, M, EXPERTS)
    if there:
        total = tl.zeros((M, N), tl.float32)
        for k in range(0, inner, K):
            x = X.load([row, k])  # 0 beyond `inner`: what the weight's block holds there does not count
            if BACK:
                total = tl.dot(x, WEIGHT.load([expert * height + k, column]), total)
            else:
                total = tl.dot(x, WEIGHT.load([expert * height + column, k]).T, total)
        rows, columns = row + tl.arange(0, M), column + tl.arange(0, N)
        tl.store(Y + rows.to(tl.int64)[:, None] * outer + columns[None, :], total.to(Y.dtype.element_ty),
                 (rows < end)[:, None] & (columns < outer)[None, :])


@triton.jit
def grouped_wgrad_kernel(DY, X, INTO, OFFSETS, o, n, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """A tile of one expert's INTO [o, n] += DY^T X over its rows. DY, X: descriptors of [m, o] and [m, n]."""
    expert = tl.program_id(1)
    start, stop = tl.load(OFFSETS + expert), tl.load(OFFSETS + expert + 1)
    if stop > start:
        row, column = tl.program_id(0) // tl.cdiv(n, N) * M, tl.program_id(0) % tl.cdiv(n, N) * N
        total = tl.zeros((M, N), tl.float32)
        whole = start + (stop - start) // K * K
        for k in range(start, whole, K):
            total = tl.dot(DY.load([k, row]).T, X.load([k, column]), total)
        if whole < stop:  # the next expert's rows are no part of this sum
            inside = (whole + tl.arange(0, K) < stop)[:, None]
            dy, x = DY.load([whole, row]), X.load([whole, column])
            total = tl.dot(tl.where(inside, dy, tl.zeros_like(dy)).T, tl.where(inside, x, tl.zeros_like(x)), total)
        add_tile(INTO + expert.to(tl.int64) * o * n, total, row, column, o, n, M, N)


def triton_fits(x: Tensor, weight: Tensor) -> bool:
    """x [m, n], weight [e, o, n]. fp32 goes to the library's GEMMs, which are exact."""
    width = weight.shape[1] * weight.itemsize  # of the outputs' rows, which the backward reads
    odd = "x and weight differ in dtype" if x.dtype != weight.dtype else skewed(x, weight) or (width % ALIGNED and "outputs that are not aligned")
    return x.dtype != torch.float32 and x.numel() > 0 and fits("grouped GEMM", x, weight, why=odd)


def offsets_of(counts: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """int32 [experts + 1] on the device; counts from the host go there without a stop."""
    counts = torch.as_tensor(counts, dtype=torch.int32).to(device, non_blocking=True)
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


def launch(x: Tensor, weight: Tensor, offsets: Tensor, back: bool = False) -> Tensor:
    """x [m, n], weight [e, o, n] -> [m, o]; back: x [m, o] -> [m, n]."""
    (m, inner), (e, o, n) = x.shape, weight.shape
    outer, tile, flat = n if back else o, TILE, weight.view(e * o, n)
    y = x.new_empty(m, outer)
    grouped_kernel[((ceil_div(m, tile["M"]) + e) * ceil_div(outer, tile["N"]),)](  # an expert has at most one tile that is not full
        TensorDescriptor(x, x.shape, x.stride(), [tile["M"], tile["K"]]),
        TensorDescriptor(flat, flat.shape, flat.stride(), [tile["K"], tile["N"]] if back else [tile["N"], tile["K"]]),
        y, offsets, e, inner, outer, o, BACK=back, EXPERTS=power_of_2(e), **tile)
    return y


def launch_wgrad(into: Tensor, dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """into [e, o, n] += dy_i^T x_i. dy [m, o], x [m, n]."""
    (e, o, n), tile = into.shape, WGRAD
    grouped_wgrad_kernel[(ceil_div(o, tile["M"]) * ceil_div(n, tile["N"]), e)](
        TensorDescriptor(dy, dy.shape, dy.stride(), [tile["K"], tile["M"]]), TensorDescriptor(x, x.shape, x.stride(), [tile["K"], tile["N"]]),
        into, offsets, o, n, **tile)
    return into


def shares(counts: Sequence[int] | Tensor, triton: bool, device: torch.device) -> list[int] | Tensor:
    """The rows of each expert as the products read them: the kernels by offsets on the device, the loops by numbers on the host."""
    if triton:
        return offsets_of(counts, device)
    return counts.tolist() if isinstance(counts, Tensor) else list(counts)


def give_wgrad(ctx, dy: Tensor, x: Tensor) -> Tensor | None:
    """dW of all experts, given (kernels/grad.py). dy [m, o], x [m, n]; ctx: of the forward, with weight, experts, counts, triton."""
    split = (ctx.experts, dy.shape[1], x.shape[1])

    def compute(into: Tensor | None) -> Tensor:
        made = dy.new_zeros(split) if into is None else into.view(split)
        return (launch_wgrad if ctx.triton else grouped_wgrad)(made, dy, x, ctx.counts).view(-1, x.shape[1])
    return give(ctx.weight, compute)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, counts):
        ctx.save_for_backward(x)
        split = weight.view(len(counts), -1, x.shape[1])
        ctx.weight, ctx.triton = weight, triton_fits(x, split)
        ctx.experts, ctx.counts = len(counts), shares(counts, ctx.triton, x.device)
        return launch(x, split, ctx.counts) if ctx.triton else grouped_forward(x, split, ctx.counts)

    @staticmethod
    def backward(ctx, dy):
        (x,), dy, dx = ctx.saved_tensors, dy.contiguous(), None
        if ctx.needs_input_grad[0]:
            split = ctx.weight.view(ctx.experts, -1, x.shape[1])
            dx = launch(dy, split, ctx.counts, True) if ctx.triton else grouped_dgrad(dy, split, ctx.counts)
        return dx, give_wgrad(ctx, dy, x), None
