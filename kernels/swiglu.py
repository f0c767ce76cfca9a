"""Two MLP activations: SwiGLU (arXiv 2002.05202) on a merged [gate | up] input, and the tanh form of GELU
(arXiv 1606.08415). Arithmetic is in fp32 or better. Only the input is saved for the backward."""
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.grad import accumulation_dtype
from kernels.jit import jit
from kernels.tiles import block_range, load_fp32
from kernels.triton_ import ceil_div, kernel_is_available, tl, triton

BLOCK = 2048  # channels of one token per program: two 128-bit loads of bf16 per thread
WARPS = 4
ROWS = 256  # rows at a time of a weighted SwiGLU on a CPU: they stay in cache across the operations
CUBIC = 0.044715  # of the tanh form of GELU
SLOPE = math.sqrt(2 / math.pi)  # of the tanh form of GELU


def swiglu(gate_up: Tensor, compiled: bool = False) -> Tensor:
    """silu(gate) * up. gate_up [..., 2f], gate first -> [..., f]."""
    if kernel_is_available("swiglu", gate_up):
        return SavedInput.apply(gate_up, launch_swiglu, launch_swiglu_backward)
    return SavedInput.apply(gate_up, jit(swiglu_forward, compiled), jit(swiglu_backward, compiled))


def weighted_swiglu(gate_up: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up * weight. gate_up [m, 2f], weight [m] -> [m, f].

    weight is a router's probability for each row; applying it here is cheapest. Never compiled, because m
    changes with each call.
    """
    return _WeightedSwiGLU.apply(gate_up, weight)


def gelu(x: Tensor, compiled: bool = False) -> Tensor:
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))). x [..., f] -> [..., f]."""
    if kernel_is_available("gelu", x):
        return SavedInput.apply(x, launch_gelu, launch_gelu_backward)
    return SavedInput.apply(x, jit(gelu_forward, compiled), jit(gelu_backward, compiled))


# ---- reference ---------------------------------------------------------------------------------------------

def split_gate_up(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """[..., 2f] -> gate and up [..., f], in fp32 or better."""
    acc_dtype = accumulation_dtype(gate_up.dtype)
    gate, up = gate_up.chunk(2, -1)
    return gate.to(acc_dtype), up.to(acc_dtype)


def swiglu_forward(gate_up: Tensor) -> Tensor:
    gate, up = split_gate_up(gate_up)
    return (F.silu(gate) * up).to(gate_up.dtype)


def swiglu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = split_gate_up(gate_up)
    dtype = dy.dtype
    dy = dy.to(gate.dtype)
    dgate = torch.ops.aten.silu_backward(dy * up, gate)
    dup = F.silu(gate).mul_(dy)
    return torch.cat((dgate.to(dtype), dup.to(dtype)), -1)


def gelu_forward(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    dtype = x.dtype
    x = x.to(accumulation_dtype(dtype))
    tanh = torch.tanh(SLOPE * (x + CUBIC * x**3))
    # d/dx of x / 2 (1 + tanh u), where u = SLOPE (x + CUBIC x^3)
    slope = 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * SLOPE * (1 + 3 * CUBIC * x * x)
    return (dy.to(x.dtype) * slope).to(dtype)


def weighted_forward(gate_up: Tensor, weight: Tensor) -> Tensor:
    """weighted_swiglu in plain torch."""
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    for start in range(0, len(out), ROWS):
        rows = slice(start, start + ROWS)
        gate, up = split_gate_up(gate_up[rows])
        row_weight = weight[rows, None].to(gate.dtype)
        torch.mul(F.silu(gate).mul_(up), row_weight, out=out[rows])
    return out


def weighted_backward(dy: Tensor, gate_up: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate_up and of weight, in their dtypes."""
    dgate_up = torch.empty_like(gate_up)
    dweight = torch.empty_like(weight)
    for start in range(0, len(dy), ROWS):
        rows = slice(start, start + ROWS)
        gate, up = split_gate_up(gate_up[rows])
        dgate, dup = dgate_up[rows].chunk(2, -1)
        row_dy = dy[rows].to(gate.dtype)
        row_weight = weight[rows, None].to(gate.dtype)

        raw = F.silu(gate).mul_(row_dy)  # the gradient of up, without the weight
        dweight[rows].copy_(torch.linalg.vecdot(raw, up))
        torch.mul(raw, row_weight, out=dup)
        dsilu = torch.mul(row_dy, up, out=raw).mul_(row_weight)
        dgate.copy_(torch.ops.aten.silu_backward(dsilu, gate))
    return dgate_up, dweight


# ---- Triton ------------------------------------------------------------------------------------------------

@triton.jit
def silu_times(gate, up):
    return gate * tl.sigmoid(gate) * up


@triton.jit
def swiglu_gradients(dy, gate, up) -> "tuple[tl.tensor, tl.tensor]":
    """Return the gradients of gate and up."""
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    dgate = dy * up * (sigmoid + silu * (1 - sigmoid))
    return dgate, dy * silu


@triton.jit
def swiglu_kernel(GATE_UP, WEIGHT, Y, f, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """Process BLOCK channels of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = block_range(tl.program_id(1), BLOCK)
    inside = columns < f
    GATE = GATE_UP + row * 2 * f
    gate = load_fp32(GATE + columns, inside, other=None)
    UP = GATE_UP + row * 2 * f + f
    up = load_fp32(UP + columns, inside, other=None)

    y = silu_times(gate, up)
    if WEIGHTED:
        y *= tl.load(WEIGHT + row).to(tl.float32)
    tl.store(Y + row * f + columns, y, inside)


@triton.jit
def swiglu_backward_kernel(DY, GATE_UP, DGATE_UP, f, BLOCK: tl.constexpr):
    """Process BLOCK channels of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = block_range(tl.program_id(1), BLOCK)
    inside = columns < f
    offsets = row * 2 * f + columns  # of the gate; `up` is f elements later
    gate = load_fp32(GATE_UP + offsets, inside, other=None)
    up = load_fp32(GATE_UP + f + offsets, inside, other=None)
    dy = load_fp32(DY + row * f + columns, inside, other=None)

    dgate, dup = swiglu_gradients(dy, gate, up)
    tl.store(DGATE_UP + offsets, dgate, inside)
    tl.store(DGATE_UP + f + offsets, dup, inside)


@triton.jit
def weighted_backward_kernel(DY, GATE_UP, WEIGHT, DGATE_UP, DWEIGHT, f, BLOCK: tl.constexpr):
    """Process one whole row, because the gradient of its weight is a sum over the row."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(WEIGHT + row).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, f, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < f
        offsets = row * 2 * f + columns  # of the gate; `up` is f elements later
        gate = load_fp32(GATE_UP + offsets, inside)
        up = load_fp32(GATE_UP + f + offsets, inside)
        dy = load_fp32(DY + row * f + columns, inside)

        # gradient of the weight
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        total += dy * silu * up

        # gradient of the input
        dy *= weight
        dgate = dy * up * (sigmoid + silu * (1 - sigmoid))
        tl.store(DGATE_UP + offsets, dgate, inside)
        dup = dy * silu
        tl.store(DGATE_UP + f + offsets, dup, inside)
    tl.store(DWEIGHT + row, tl.sum(total, 0))


@triton.jit
def gelu_kernel(
    X, Y, n,
    CUBIC: tl.constexpr,
    SLOPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Process BLOCK of n elements."""
    offsets = block_range(tl.program_id(0).to(tl.int64), BLOCK)
    x = load_fp32(X + offsets, offsets < n, other=None)
    sigmoid = tl.sigmoid(2 * SLOPE * (x + CUBIC * x * x * x))  # (1 + tanh u) / 2 = sigmoid(2 u)
    tl.store(Y + offsets, x * sigmoid, offsets < n)


@triton.jit
def gelu_backward_kernel(
    DY, X, DX, n,
    CUBIC: tl.constexpr,
    SLOPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Process BLOCK of n elements."""
    offsets = block_range(tl.program_id(0).to(tl.int64), BLOCK)
    x = load_fp32(X + offsets, offsets < n, other=None)
    sigmoid = tl.sigmoid(2 * SLOPE * (x + CUBIC * x * x * x))
    # d/dx of x sigmoid(2 u), where u = SLOPE (x + CUBIC x^3)
    slope = sigmoid + x * sigmoid * (1 - sigmoid) * 2 * SLOPE * (1 + 3 * CUBIC * x * x)
    dy = load_fp32(DY + offsets, offsets < n, other=None)
    tl.store(DX + offsets, dy * slope, offsets < n)


def launch_swiglu(gate_up: Tensor, weight: Tensor | None = None) -> Tensor:
    """Run swiglu, or weighted_swiglu, as one kernel."""
    gate_up = gate_up.contiguous()
    f = gate_up.shape[-1] // 2
    y = gate_up.new_empty(*gate_up.shape[:-1], f)
    if y.numel():
        weights = gate_up if weight is None else weight.contiguous()  # not read without a weight
        grid = y.numel() // f, ceil_div(f, BLOCK)
        swiglu_kernel[grid](
            gate_up, weights, y, f,
            WEIGHTED=weight is not None,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return y


def launch_swiglu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """Run swiglu_backward as one kernel."""
    dy, gate_up = dy.contiguous(), gate_up.contiguous()
    f = dy.shape[-1]
    dgate_up = torch.empty_like(gate_up)
    if dy.numel():
        grid = dy.numel() // f, ceil_div(f, BLOCK)
        swiglu_backward_kernel[grid](dy, gate_up, dgate_up, f, BLOCK=BLOCK, num_warps=WARPS)
    return dgate_up


def launch_weighted_backward(dy: Tensor, gate_up: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Run weighted_backward as one kernel."""
    dy = dy.contiguous()
    gate_up = gate_up.contiguous()
    weight = weight.contiguous()
    dgate_up = torch.empty_like(gate_up)
    dweight = torch.empty_like(weight)
    if dy.numel():
        weighted_backward_kernel[(len(dy),)](
            dy, gate_up, weight, dgate_up, dweight, dy.shape[1],
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return dgate_up, dweight


def launch_gelu(x: Tensor) -> Tensor:
    """Run gelu as one kernel."""
    x = x.contiguous()
    n = x.numel()
    y = torch.empty_like(x)
    if n:
        grid = (ceil_div(n, BLOCK),)
        gelu_kernel[grid](
            x, y, n,
            CUBIC=CUBIC,
            SLOPE=SLOPE,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return y


def launch_gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Run gelu_backward as one kernel."""
    dy, x = dy.contiguous(), x.contiguous()
    n = x.numel()
    dx = torch.empty_like(x)
    if n:
        grid = (ceil_div(n, BLOCK),)
        gelu_backward_kernel[grid](
            dy, x, dx, n,
            CUBIC=CUBIC,
            SLOPE=SLOPE,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return dx


# ---- autograd ----------------------------------------------------------------------------------------------

class SavedInput(torch.autograd.Function):
    """Saves only the input: the backward recomputes everything else."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        forward: Callable[[Tensor], Tensor],
        backward: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.input_grad = backward
        return forward(x)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return ctx.input_grad(dy, x), None, None


class _WeightedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        ctx.triton = kernel_is_available("swiglu", gate_up, weight)
        forward = launch_swiglu if ctx.triton else weighted_forward
        return forward(gate_up, weight)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate_up, weight = ctx.saved_tensors
        backward = launch_weighted_backward if ctx.triton else weighted_backward
        return backward(dy, gate_up, weight)
