"""RMSNorm (arXiv 1910.07467) and LayerNorm (arXiv 1607.06450), each with an optional residual add in front.

add_norm normalizes x + residual over the last dim, and returns the sum, too. The sum is read once, and the
backward adds its gradient in the same pass.

Statistics are in fp32 or better. On a GPU each direction is one pass over memory: each program sums the
weight's gradient over its rows, and a second sum over the programs has a fixed order.
"""
import torch
from torch import Tensor

from kernels.grad import accumulate_summed_grad, accumulation_dtype
from kernels.jit import jit
from kernels.tiles import block_range, inside_matrix, load_fp32, tile_offsets
from kernels.triton_ import ceil_div, kernel_is_available, num_processors, power_of_2, tl, triton

TILE = 4096  # elements that a program processes at a time: several rows if they are short
FORWARD_PER_WARP = 512  # elements of a row
BACKWARD_PER_WARP = 256  # fewer, because the backward holds more values per element at once
MAX_ROW = 1 << 15  # a row must fit the registers of one program
PROGRAMS = 4  # programs of the backward per multiprocessor: enough loads in flight, few partial sums


def rms_norm(x: Tensor, weight: Tensor, eps: float, compiled: bool = False) -> Tensor:
    """x [..., d], weight [d] -> [..., d]."""
    return add_norm(x, None, weight, None, eps, compiled)[0]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, compiled: bool = False) -> Tensor:
    """x [..., d], weight and bias [d] -> [..., d]."""
    return add_norm(x, None, weight, bias, eps, compiled)[0]


def add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (norm(x + residual), x + residual), or (norm(x), x) without a residual.

    LayerNorm, or RMSNorm if bias is None. x and residual [..., d], weight and bias [d].
    """
    return _Norm.apply(x, residual, weight, bias, eps, compiled)


# ---- reference ---------------------------------------------------------------------------------------------

def norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """LayerNorm, or RMSNorm if bias is None.

    Returns y [..., d], x + residual [..., d], 1 / deviation [..., 1], and the mean [..., 1] (RMSNorm: None).
    """
    if residual is not None:
        x = x + residual
    values = x.to(accumulation_dtype(x.dtype))
    mean = None
    if bias is not None:
        mean = values.mean(-1, keepdim=True)
        values = values - mean
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)

    y = (values * scale).mul_(weight.to(values.dtype))
    if bias is not None:
        y.add_(bias.to(values.dtype))
    return y.to(x.dtype), x, scale, mean


def norm_backward(
    dy: Tensor, dresidual: Tensor | None, x: Tensor, weight: Tensor, scale: Tensor, mean: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of norm_forward, given its results x + residual, scale and mean.

    dresidual, the gradient of the result x + residual, is added to dx if given.
    Returns dx in the dtype of x; dweight [d] and dbias [d] (RMSNorm: None) in fp32 or better.
    """
    batch_dims = tuple(range(dy.dim() - 1))
    dy = dy.to(scale.dtype)
    weight = weight.to(scale.dtype)
    d = weight.shape[0]
    values = x.to(scale.dtype)
    if mean is not None:
        values = values - mean
    x_hat = values * scale
    dweight_rows = dy * x_hat  # [..., d]
    dx_hat = dy * weight

    row_mean = (dweight_rows @ weight / d)[..., None]  # the mean of dx_hat x_hat
    dx = dx_hat.addcmul_(x_hat, row_mean, value=-1)
    if mean is not None:
        dx -= (dy @ weight / d)[..., None]
    dx *= scale
    if dresidual is not None:
        dx += dresidual

    dweight = dweight_rows.sum(batch_dims)
    dbias = None if mean is None else dy.sum(batch_dims)
    return dx.to(x.dtype), dweight, dbias


# ---- Triton ------------------------------------------------------------------------------------------------
# n rows of d elements; a program processes ROWS of them at a time, padded to BLOCK elements. HAS_RESIDUAL:
# there is a residual, or its gradient. LAYER: LayerNorm, else RMSNorm.

@triton.jit
def row_statistics(x, inside, d, eps, LAYER: tl.constexpr) -> "tuple[tl.tensor, tl.tensor]":
    """Return (mean, 1 / deviation) [ROWS] of rows x [ROWS, BLOCK] of d elements; RMSNorm's mean is 0."""
    mean = tl.zeros((x.shape[0],), tl.float32)
    if LAYER:
        mean = tl.sum(x, 1) / d
        x = tl.where(inside, x - mean[:, None], 0.0)
    mean_square = tl.sum(x * x, 1) / d
    return mean, tl.rsqrt(mean_square + eps)


@triton.jit
def normalized(x, mean, scale, WEIGHT, BIAS, columns, d, LAYER: tl.constexpr):
    """Normalize x [ROWS, COLUMNS]: the elements in `columns` of rows with these statistics."""
    if LAYER:
        x -= mean[:, None]
    y = x * scale[:, None] * load_fp32(WEIGHT + columns, columns < d)[None, :]
    if LAYER:
        y += load_fp32(BIAS + columns, columns < d)[None, :]
    return y


@triton.jit
def add_rows(X, RESIDUAL, TOTAL, offsets, inside, HAS_RESIDUAL: tl.constexpr):
    """Return some rows of X + RESIDUAL in fp32, rounded as the backward reads them from TOTAL."""
    x = load_fp32(X + offsets, inside)
    if HAS_RESIDUAL:
        residual = load_fp32(RESIDUAL + offsets, inside)
        total = (x + residual).to(X.dtype.element_ty)
        tl.store(TOTAL + offsets, total, inside)
        x = total.to(tl.float32)
    return x


@triton.jit
def forward_kernel(
    X, RESIDUAL, WEIGHT, BIAS, Y, TOTAL, SCALE, MEAN, n, d, eps,
    HAS_RESIDUAL: tl.constexpr,
    LAYER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute for ROWS rows Y, TOTAL = X + RESIDUAL, SCALE = 1 / deviation, and MEAN."""
    rows = block_range(tl.program_id(0).to(tl.int64), ROWS)
    columns = tl.arange(0, BLOCK)
    inside = inside_matrix(rows, columns, n, d)
    offsets = tile_offsets(rows, columns, d)

    x = add_rows(X, RESIDUAL, TOTAL, offsets, inside, HAS_RESIDUAL=HAS_RESIDUAL)  # [ROWS, BLOCK]
    mean, scale = row_statistics(x, inside, d, eps, LAYER=LAYER)
    tl.store(SCALE + rows, scale, rows < n)
    if LAYER:
        tl.store(MEAN + rows, mean, rows < n)
    y = normalized(x, mean, scale, WEIGHT, BIAS, columns, d, LAYER=LAYER)
    tl.store(Y + offsets, y, inside)


@triton.jit
def input_gradient(dx_hat, x_hat, scale, d, LAYER: tl.constexpr):
    """Return dx [ROWS, BLOCK] of some rows of d elements each.

    x_hat [ROWS, BLOCK] holds the normalized rows, dx_hat their gradient. scale = 1 / deviation [ROWS, 1].
    """
    along_x_hat = tl.sum(dx_hat * x_hat, 1) / d  # [ROWS]
    dx = dx_hat - x_hat * along_x_hat[:, None]
    if LAYER:
        mean_dx_hat = tl.sum(dx_hat, 1) / d
        dx -= mean_dx_hat[:, None]
    return dx * scale


@triton.jit
def backward_kernel(
    DY, DRESIDUAL, X, WEIGHT, SCALE, MEAN, DX, DWEIGHT, DBIAS, n, d,
    HAS_RESIDUAL: tl.constexpr,
    LAYER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Process every num_programs-th tile of ROWS rows: DX, and one program's share of DWEIGHT and DBIAS
    [programs, d]."""
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    weight = load_fp32(WEIGHT + columns, columns < d)[None, :]
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)
    dbias = tl.zeros((ROWS, BLOCK), tl.float32)

    for first in range(program * ROWS, n, tl.num_programs(0) * ROWS):
        rows = first + tl.arange(0, ROWS)
        inside = inside_matrix(rows, columns, n, d)
        offsets = tile_offsets(rows, columns, d)

        # normalized rows of the forward
        dy = load_fp32(DY + offsets, inside)  # [ROWS, BLOCK]
        x = load_fp32(X + offsets, inside)
        scale = tl.load(SCALE + rows, rows < n, 0.0)[:, None]
        if LAYER:
            mean = tl.load(MEAN + rows, rows < n, 0.0)[:, None]
            x = tl.where(inside, x - mean, 0.0)
            dbias += dy
        x_hat = x * scale

        # their gradients
        dx_hat = dy * weight
        dweight += dy * x_hat
        dx = input_gradient(dx_hat, x_hat, scale, d, LAYER=LAYER)
        if HAS_RESIDUAL:
            dx += load_fp32(DRESIDUAL + offsets, inside)
        tl.store(DX + offsets, dx, inside)

    # this program's row of the partial sums
    offsets = program.to(tl.int64) * d + columns
    tl.store(DWEIGHT + offsets, tl.sum(dweight, 0), columns < d)
    if LAYER:
        tl.store(DBIAS + offsets, tl.sum(dbias, 0), columns < d)


def launch_meta(d: int, per_warp: int) -> dict[str, int]:
    """Return the launch parameters for rows of d elements, `per_warp` for each warp."""
    block = power_of_2(d)
    warps = min(16, max(4, block // per_warp))
    return {"ROWS": max(1, TILE // block), "BLOCK": block, "num_warps": warps}


def launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Run norm_forward as one kernel; 1 / deviation and the mean are [rows]."""
    shape = x.shape
    d = shape[-1]
    n = x.numel() // d
    x = x.contiguous()
    total = x
    if residual is not None:
        residual = residual.contiguous()
        total = torch.empty_like(x)
    y = torch.empty_like(x)
    scale = x.new_empty(n, dtype=torch.float32)
    mean = None if bias is None else torch.empty_like(scale)

    meta = launch_meta(d, FORWARD_PER_WARP)
    grid = (ceil_div(n, meta["ROWS"]),)
    forward_kernel[grid](
        x, residual, weight, bias, y, total, scale, mean, n, d, eps,
        HAS_RESIDUAL=residual is not None,
        LAYER=bias is not None,
        **meta,
    )
    return y.view(shape), total, scale, mean


def launch_backward(
    dy: Tensor,
    dresidual: Tensor | None,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    mean: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run norm_backward as one kernel, and the sums over its programs."""
    d = x.shape[-1]
    n = x.numel() // d
    dy = dy.contiguous()
    if dresidual is not None:
        dresidual = dresidual.contiguous()

    meta = launch_meta(d, BACKWARD_PER_WARP)
    programs = min(PROGRAMS * num_processors(x.device), ceil_div(n, meta["ROWS"]))
    dx = torch.empty_like(x)
    dweight = scale.new_empty(programs, d)
    dbias = None if mean is None else torch.empty_like(dweight)
    backward_kernel[(programs,)](
        dy, dresidual, x, weight, scale, mean, dx, dweight, dbias, n, d,
        HAS_RESIDUAL=dresidual is not None,
        LAYER=mean is not None,
        **meta,
    )
    return dx, dweight.sum(0), None if dbias is None else dbias.sum(0)


def triton_supports(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the Triton kernels support the call; on a GPU, report once on stderr why not."""
    if x.numel() == 0:
        return False
    d = x.shape[-1]
    why = f"rows of {d} are longer than {MAX_ROW}" if d > MAX_ROW else None
    return kernel_is_available("norm", x, *others, why=why)


class _Norm(torch.autograd.Function):
    """Returns (y, x + residual), or (y, x) without a residual."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        compiled: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.triton = triton_supports(x, residual, weight, bias)
        forward = launch_forward if ctx.triton else jit(norm_forward, compiled)
        y, total, scale, mean = forward(x, residual, weight, bias, eps)

        ctx.save_for_backward(total, scale, mean)
        ctx.weight = weight
        ctx.bias = bias
        ctx.has_residual = residual is not None
        ctx.compiled = compiled
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    def backward(ctx, dy: Tensor | None, dresidual: Tensor | None) -> tuple[Tensor | None, ...]:
        x, scale, mean = ctx.saved_tensors
        if dy is None:  # y is unused
            return dresidual, dresidual if ctx.has_residual else None, None, None, None, None

        backward = launch_backward if ctx.triton else jit(norm_backward, ctx.compiled)
        dx, dweight, dbias = backward(dy, dresidual, x, ctx.weight, scale, mean)
        dweight = accumulate_summed_grad(ctx.weight, dweight)
        if dbias is not None:
            dbias = accumulate_summed_grad(ctx.bias, dbias)
        return dx, dx if ctx.has_residual else None, dweight, dbias, None, None
