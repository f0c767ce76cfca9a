"""y = x W^T + b with a backward that accumulates the weight gradient in fp32 itself (kernels/grad.py).

Under tensor parallelism x may come from other ranks, and its gradient goes to them: a `region`
(parallel/tensor/regions.py) all-gathers x before the GEMM, and in the backward it reduces the gradient of x
while the weight gradient is computed. An x that is cheap to recompute (recompute_output) is not saved for the
backward, only its inputs are (arXiv 2205.05198).
"""
from collections.abc import Callable
from functools import cache
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.grad import Compute, accumulate_grad, accumulate_summed_grad, accumulation_dtype, write_or_add
from kernels.tiles import program_tile, write_tile
from kernels.triton_ import TensorDescriptor, ceil_div, chip_name, kernel_is_available, print_once, tl, triton

BLOCK = 1 << 20  # elements of a weight gradient that a CPU computes and adds while they are in cache
# for the GPU's GEMM. M: outputs, N: inputs, K: tokens, GROUP: see wgrad_kernel
TILE = {"M": 128, "N": 256, "K": 64, "GROUP": 8, "num_warps": 8, "num_stages": 3}
ALIGNED = 16  # bytes: alignment of bases and rows that the copy engine (TMA) requires

RecomputeFunction = Callable[..., Tensor]


class LinearRegion(Protocol):
    """Interface of a linear's region; parallel/tensor/regions.py implements it."""

    def enter(self, x: Tensor) -> Tensor:
        """Return the input of the GEMM, given that of the linear."""
        ...

    def enter_and_multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the input of the GEMM and its output, product(enter(x), weight, bias)."""
        ...

    def multiply_and_leave(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return this rank's part of the sum over all ranks of product(x, weight)."""
        ...

    def start_gather_inputs(self, x: Tensor) -> Callable[[], Tensor]:
        """Start `enter`. The returned function waits for its result."""
        ...

    def start_reduce_grads(self, dx: Tensor) -> Callable[[], Tensor]:
        """Start computing the gradient of the linear's input from that of the GEMM's input.

        The returned function waits for it.
        """
        ...


class RecomputedTensor(Protocol):
    """A tensor returned by recompute_output. source is (function, arguments) that compute it."""
    source: tuple[RecomputeFunction, tuple[Tensor, ...]]


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, region: LinearRegion | None = None
) -> Tensor:
    """x [..., n], weight [m, n], bias [m] -> [..., m], in x's dtype.

    The weight may have another dtype: a router in fp32 reads weights of a lower one.
    region exchanges x and its gradient with other ranks, if given.
    """
    if region is None and not hasattr(x, "source"):
        return _Linear.apply(x, weight, bias)
    function, args = get_source(x)
    return _LinearInRegion.apply(x, weight, bias, region, function, *args)


def linear_out_of_region(x: Tensor, weight: Tensor, region: LinearRegion) -> Tensor:
    """x [b, s, n], weight [m, n] -> this rank's part of the sum of x W^T over the region's ranks.

    x and weight are sharded along the contracted features.
    """
    function, args = get_source(x)
    return _LinearOutOfRegion.apply(x, weight, region, function, *args)


def linear_of_several(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    rows: list[slice],
    region: LinearRegion | None = None,
) -> Tensor:
    """Run several linears on one x, concatenating the outputs: x [..., n] -> [..., sum of the rows].

    rows selects the rows of each weight (and bias); the gradient of the others is zero.
    region: see linear.
    """
    function, args = get_source(x)
    return _Linears.apply(x, region, function, rows, *weights, *biases, *args)


def recompute_output(y: Tensor, function: RecomputeFunction, *args: Tensor) -> Tensor:
    """Mark y as the result of function(*args), and return it. A linear of y saves args instead of y.

    function must recompute y bit for bit, without gradients.
    """
    cast(RecomputedTensor, y).source = function, tuple(arg.detach() for arg in args)
    return y


def get_source(x: Tensor) -> tuple[RecomputeFunction | None, tuple[Tensor, ...]]:
    """Return the source of a tensor returned by recompute_output; (None, ()) for any other."""
    return getattr(x, "source", (None, ()))


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x [..., n], weight [m, n], bias [m] -> x W^T + b [..., m], written to a contiguous `out` if given."""
    weight = weight.to(x.dtype)
    if out is None:
        return F.linear(x, weight, bias)
    flat_x = x.reshape(-1, x.shape[-1])
    flat_out = out.view(-1, out.shape[-1])
    if bias is None:
        torch.mm(flat_x, weight.t(), out=flat_out)
    else:
        torch.addmm(bias, flat_x, weight.t(), out=flat_out)
    return out


def write_wgrad(into: Tensor | None, dy: Tensor, x: Tensor, add: bool) -> Tensor | None:
    """Compute into = dy^T x, or (add) into += dy^T x, in the dtype of `into`. With into None, return dy^T x.

    dy [t, m], x [t, n], into [m, n].
    """
    if into is None:
        return dy.t() @ x
    if into.dtype != dy.dtype:
        return write_wide_wgrad(into, dy, x, add)
    if add:
        return into.addmm_(dy.t(), x)
    return torch.mm(dy.t(), x, out=into)


def write_wide_wgrad(into: Tensor, dy: Tensor, x: Tensor, add: bool) -> Tensor:
    """Run write_wgrad for dy and x in a narrower dtype than that of `into`."""
    if library_adds_in_fp32(dy.device, dy.dtype) and into.dtype == torch.float32:
        return write_by_library(into, dy, x, add)
    if triton_fits(into, dy, x):
        return launch_wgrad(into, dy, x, add)
    # No CPU library gives a bf16 product in fp32, and torch widens a whole operand before it adds.
    # So the product is computed in blocks of rows.
    rows = max(1, BLOCK // into.shape[1]) if into.device.type == "cpu" else len(into)
    for part, columns in zip(into.split(rows), dy.split(rows, 1)):
        write_or_add(part, columns.t() @ x, add)
    return into


# ---- the GPU's library -------------------------------------------------------------------------------------

def write_by_library(into: Tensor, dy: Tensor, x: Tensor, add: bool) -> Tensor:
    """into = dy^T x, or (add) into += dy^T x: operands in 16 bits, into in fp32, without a copy of it.

    NVIDIA's library only.
    """
    if add:
        return torch.addmm(into, dy.t(), x, out_dtype=torch.float32, out=into)
    return torch.mm(dy.t(), x, out_dtype=torch.float32, out=into)


def multiply_into_fp32(a: Tensor, b: Tensor) -> Tensor:
    """a [m, n], b [n, o] -> a b [m, o], or a batch of both, in fp32 or better; without copies if the library
    can do so."""
    if a.dtype == b.dtype and library_adds_in_fp32(a.device, a.dtype):
        multiply = torch.mm if a.dim() == 2 else torch.bmm
        return multiply(a, b, out_dtype=torch.float32)
    dtype = accumulation_dtype(a.dtype)
    return a.to(dtype) @ b.to(dtype)


@cache
def library_adds_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether write_by_library works on this device: tried once, on a small product with a known result.

    If not (ROCm, a torch that requires the dtype of the operands), a line says so.
    """
    if device.type != "cuda":
        return False
    why = obstacle_to_library(device, dtype)
    if why is not None:
        print_once(f"weight gradient in {dtype}: torch.addmm does not add to fp32 here ({why}); our own "
                   "kernel runs instead, or else a product that is rounded before it is added")
    return why is None


def obstacle_to_library(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why write_by_library cannot be used; None if it can."""
    into = torch.full((16, 8), 2.0**-12, device=device)  # lost if 256 is rounded to 16 bits
    unwritten = torch.full_like(into, float("nan"))
    dy = torch.full((32, 16), 2.0, device=device, dtype=dtype)
    x = torch.full((32, 8), 4.0, device=device, dtype=dtype)
    address = into.data_ptr()
    try:
        result = write_by_library(into, dy, x, add=True)
        write_by_library(unwritten, dy, x, add=False)
    except (RuntimeError, TypeError) as error:
        return str(error).splitlines()[0]
    is_in_place = result.data_ptr() == into.data_ptr() == address
    is_exact = bool((into == 256.0 + 2.0**-12).all() and (unwritten == 256.0).all())
    return None if is_in_place and is_exact else "a wrong result"


# ---- Triton ----------------------------------------------------------------------------------------------

@triton.jit
def wgrad_kernel(
    DY, X, INTO, t, m, n,
    ADD: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute one tile [M, N] of INTO [m, n] = (or, ADD: +=) DY^T X, in fp32.

    DY and X are descriptors of [t, m] and [t, n], in blocks of [K, M] and [K, N].
    """
    row, column = program_tile(m, n, M=M, N=N, GROUP=GROUP)
    total = tl.zeros((M, N), tl.float32)
    for token in range(0, t, K):  # out of bounds, a load returns 0
        dy = DY.load([token, row])  # [K, M]
        x = X.load([token, column])  # [K, N]
        total = tl.dot(dy.T, x, total)

    # in two halves: the whole tile and its previous values do not fit the registers
    halves = tl.reshape(total, (M, 2, N // 2))
    left, right = tl.split(tl.permute(halves, (0, 2, 1)))  # [M, N / 2] each
    write_tile(INTO, left, row, column, num_rows=m, num_columns=n, ADD=ADD)
    write_tile(INTO, right, row, column + N // 2, num_rows=m, num_columns=n, ADD=ADD)


def skewed(*tensors: Tensor) -> str | None:
    """Return why the copy engine cannot read one of these matrices, or None if it can."""
    if chip_name(tensors[0].device) < 9:
        return "TMA needs Hopper or newer"
    for tensor in tensors:
        row_bytes = tensor.stride(-2) * tensor.itemsize
        if tensor.stride(-1) != 1 or row_bytes % ALIGNED or tensor.data_ptr() % ALIGNED:
            return f"rows that are not aligned to {ALIGNED} bytes"
    return None


def triton_fits(into: Tensor, dy: Tensor, x: Tensor) -> bool:
    """Whether the kernel can compute dy^T x into `into`."""
    why = skewed(dy, x)
    if why is None and not into.is_contiguous():
        why = "an accumulator that is not contiguous"
    if dy.numel() == 0 or into.numel() == 0:
        return False
    return kernel_is_available("weight gradient", dy, x, into, why=why)


def launch_wgrad(into: Tensor, dy: Tensor, x: Tensor, add: bool) -> Tensor:
    """into [m, n] = (or, add: +=) dy^T x. dy [t, m], x [t, n]."""
    t, m = dy.shape
    n = x.shape[1]
    tiles = ceil_div(m, TILE["M"]) * ceil_div(n, TILE["N"])
    wgrad_kernel[(tiles,)](
        TensorDescriptor.from_tensor(dy, [TILE["K"], TILE["M"]]),
        TensorDescriptor.from_tensor(x, [TILE["K"], TILE["N"]]),
        into, t, m, n,
        ADD=add,
        **TILE,
    )
    return into


# ---- autograd --------------------------------------------------------------------------------------------

class _Linear(torch.autograd.Function):
    """A linear whose input and output are on this rank."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None)
        ctx.weight, ctx.bias = weight, bias  # the Parameters themselves, which have main_grad
        return F.linear(x, weight.to(x.dtype), bias)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        dx = dy @ ctx.weight.to(dy.dtype) if ctx.needs_input_grad[0] else None
        return dx, *weight_grads(ctx.weight, ctx.bias, dy, lambda: x)


def weight_grads(
    weight: Tensor, bias: Tensor | None, dy: Tensor, wait_x: Callable[[], Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """Accumulate the gradients of weight and bias, given dy [..., m]. wait_x returns the GEMM's input
    [..., n]; a frozen weight does not call it.

    Returns accumulate_grad's results.
    """
    flat_dy = dy.reshape(-1, dy.shape[-1])  # [t, m]
    dw = None
    if weight.requires_grad:
        x = wait_x()
        flat_x = x.reshape(-1, x.shape[-1])  # [t, n]
        dw = accumulate_grad(weight, lambda into, add: write_wgrad(into, flat_dy, flat_x, add))
    if bias is None:
        return dw, None
    return dw, accumulate_summed_grad(bias, flat_dy.sum(0, dtype=accumulation_dtype(dy.dtype)))


class _LinearInRegion(torch.autograd.Function):
    """A linear that exchanges its input with other ranks, or recomputes it in the backward."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        region: LinearRegion | None,
        function: RecomputeFunction | None,
        *args: Tensor,
    ) -> Tensor:
        if region is None:
            gathered, y = x, product(x, weight, bias)
        else:
            gathered, y = region.enter_and_multiply(x, weight, bias)
        if weight.requires_grad:
            ctx.save_for_backward(*(args if function else (gathered,)))
        ctx.weight, ctx.bias = weight, bias  # the Parameters themselves, which have main_grad
        ctx.region = region
        ctx.function = function
        ctx.num_args = len(args)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        # exchanges with other ranks overlap with the GEMMs
        wait_x = no_input
        if ctx.weight.requires_grad:
            wait_x = recompute_input(ctx.function, ctx.region, *ctx.saved_tensors)
        dx = dy @ ctx.weight.to(dy.dtype) if ctx.needs_input_grad[0] else None
        wait_dx = start_reduce_grads(ctx.region, dx)

        dw, db = weight_grads(ctx.weight, ctx.bias, dy, wait_x)
        return wait_dx(), dw, db, None, None, *[None] * ctx.num_args


def no_input() -> Tensor:
    raise RuntimeError("a frozen weight has kept no input")


def recompute_input(
    function: RecomputeFunction | None, region: LinearRegion | None, *saved: Tensor
) -> Callable[[], Tensor]:
    """Start recomputing the GEMM's input of the forward. The returned function waits for it.

    function recomputes the linear's input from `saved`; with None, `saved` is the GEMM's input itself.
    """
    if function is None:
        return lambda: saved[0]
    x = function(*saved)
    return (lambda: x) if region is None else region.start_gather_inputs(x)


def start_reduce_grads(region: LinearRegion | None, dx: Tensor | None) -> Callable[[], Tensor | None]:
    """Run LinearRegion.start_reduce_grads, if there is a region. Return a function that waits for it."""
    if region is None or dx is None:
        return lambda: dx
    return region.start_reduce_grads(dx)


class _LinearOutOfRegion(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        region: LinearRegion,
        function: RecomputeFunction | None,
        *args: Tensor,
    ) -> Tensor:
        if weight.requires_grad:
            ctx.save_for_backward(*(args if function else (x,)))
        ctx.weight = weight  # the Parameter itself, which has main_grad
        ctx.region = region
        ctx.function = function
        ctx.num_args = len(args)
        return region.multiply_and_leave(x, weight)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        wait_x = no_input
        if ctx.weight.requires_grad:
            wait_x = recompute_input(ctx.function, None, *ctx.saved_tensors)
        dy, dx = ctx.region.enter_and_multiply(dy, ctx.weight.t(), None)  # dy of all ranks' parts

        dw, _ = weight_grads(ctx.weight, None, dy, wait_x)
        return dx, dw, None, None, *[None] * ctx.num_args


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        region: LinearRegion | None,
        function: RecomputeFunction | None,
        rows: list[slice],
        *tensors: Tensor | None,
    ) -> Tensor:
        """`tensors` holds the weights, their biases, and the arguments of `function`."""
        count = len(rows)
        weights = cast(tuple[Tensor, ...], tensors[:count])
        biases = tensors[count:2 * count]
        args = tensors[2 * count:]

        gathered = x if region is None else region.enter(x)
        ctx.save_for_backward(*(args if function else (gathered,)))
        ctx.weights, ctx.biases = weights, biases
        ctx.rows = rows
        ctx.region = region
        ctx.function = function
        ctx.num_args = len(args)
        outputs: list[Tensor] = []
        for weight, bias, part in zip(weights, biases, rows):
            part_bias = None if bias is None else bias[part]
            outputs.append(F.linear(gathered, weight[part], part_bias))
        return torch.cat(outputs, -1)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        # exchanges with other ranks overlap with the GEMMs
        wait_x = recompute_input(ctx.function, ctx.region, *ctx.saved_tensors)
        sizes = [len(range(len(weight))[part]) for weight, part in zip(ctx.weights, ctx.rows)]
        dys = dy.split(sizes, -1)
        products = (part_dy @ weight[part] for part_dy, weight, part in zip(dys, ctx.weights, ctx.rows))
        dx = cast(Tensor, sum(products))  # there is at least one
        wait_dx = start_reduce_grads(ctx.region, dx)

        x = wait_x()
        flat_x = x.reshape(-1, x.shape[-1])  # [t, n]
        dws: list[Tensor | None] = []
        dbs: list[Tensor | None] = []
        for part_dy, weight, bias, part in zip(dys, ctx.weights, ctx.biases, ctx.rows):
            flat_dy = part_dy.reshape(-1, part_dy.shape[-1])  # [t, rows]
            dws.append(accumulate_grad(weight, wgrad_of_rows(weight, part, flat_dy, flat_x)))
            db = None
            if bias is not None:
                db = accumulate_grad(bias, bias_grad_of_rows(bias, part, flat_dy))
            dbs.append(db)
        return wait_dx(), None, None, None, *dws, *dbs, *[None] * ctx.num_args


def wgrad_of_rows(weight: Tensor, rows: slice, dy: Tensor, x: Tensor) -> Compute:
    """Return a Compute: dy^T x is the gradient of these rows of the weight."""
    return rows_of_weight(weight, rows, lambda into, add: write_wgrad(into, dy, x, add))


def bias_grad_of_rows(bias: Tensor, rows: slice, dy: Tensor) -> Compute:
    """Return a Compute: the sum of dy [t, rows] is the gradient of these rows of the bias."""
    db = dy.sum(0, dtype=accumulation_dtype(dy.dtype))
    return rows_of_weight(bias, rows, lambda into, add: write_or_add(into, db, add))


def rows_of_weight(weight: Tensor, rows: slice, write: Callable[[Tensor, bool], object]) -> Compute:
    """Return a Compute: write(buffer, add) stores the gradient of these rows; that of all others is zero."""
    first, end, _ = rows.indices(len(weight))

    def compute(into: Tensor | None, add: bool) -> Tensor:
        grad = torch.empty_like(weight) if into is None else into
        if not add:
            grad[:first].zero_()
            grad[end:].zero_()
        write(grad[rows], add)
        return grad
    return compute
