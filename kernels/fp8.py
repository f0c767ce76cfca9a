"""Quantization to 8-bit floats with scales (arXiv 2209.05433): one scale a tensor, a row or a block.

Blocks are those of DeepSeek-V3 (arXiv 2412.19437).

    inverse = LARGEST / max |x|
    q       = x * inverse, rounded to nearest even
    scale   = 1 / inverse, so that x is about q * scale

This is computed in fp32, and each operation rounds once: so for finite inputs the torch definition and the
Triton kernel give the same bits. An element that is not finite is never hidden: it is NaN in q, or its scale
is infinite. fp64 is quantized to the same 8 bits with scales in fp64, for the proofs of scripts.verify. A
transposed view is read without a copy, and its q is contiguous: that is how the operands of a weight gradient
are quantized, whose rows run along the tokens.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.grad import accumulation_dtype
from kernels.tiles import block_range, inside_matrix, load_fp32, tile_offsets
from kernels.triton_ import ceil_div, kernel_is_available, num_processors, power_of_2, tl, triton

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MAX_VALUE = {E4M3: 448.0, E5M2: 57344.0}
# lower bound of max |x|: the inverse of zeros stays finite, and no weight or gradient is that small
MIN_ABSOLUTE_MAXIMUM = 2.0**-100
BLOCK_SIDE = 128  # elements of a group, and rows and columns of a block
# what shares a scale: the tensor, a row, `side` columns of a row, a square of `side` rows and columns
SCALE_KINDS = ("tensor", "row", "group", "block")
TILE = 4096  # elements that a program casts at a time
MAX_ROW = 1 << 15  # columns that one program keeps in registers
PROGRAMS = 4  # programs a multiprocessor, for the largest element of a tensor


def quantize(
    x: Tensor,
    kind: str,
    dtype: torch.dtype = E4M3,
    side: int = BLOCK_SIDE,
    largest: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x [m, n] -> q [m, n] in dtype, and its scales in fp32 (fp64 for fp64).

    kind: one of SCALE_KINDS; group suits activations, block weights. The scales are [1, 1] (tensor), [m, 1]
    (row), [m, n/side] (group) or [m/side, n/side] (block), where the sizes are rounded up.
    largest: max |x| for each scale, in the shape of the scales, if it is known: x may be a part of a larger
    tensor that shares the scales.
    """
    cast = launch_quantize if triton_fits(x, kind, side) else quantize_reference
    return cast(x, kind, dtype, side, largest)


def dequantize(
    q: Tensor,
    scale: Tensor,
    kind: str,
    dtype: torch.dtype = torch.float32,
    side: int = BLOCK_SIDE,
) -> Tensor:
    """The inverse of quantize: [m, n] in dtype."""
    expanded = expand_scale(scale, q.shape, kind, side)
    return (q.to(scale.dtype) * expanded).to(dtype)


def block_shape(kind: str, shape: torch.Size, side: int) -> tuple[int, int]:
    """Number of rows and columns that share a scale."""
    shapes = {
        "tensor": (shape[0], shape[1]),
        "row": (1, shape[1]),
        "group": (1, side),
        "block": (side, side),
    }
    return shapes[kind]


def expand_scale(scale: Tensor, shape: torch.Size, kind: str, side: int = BLOCK_SIDE) -> Tensor:
    """Scales, one a block -> [m, n], one an element."""
    for dim, size in enumerate(block_shape(kind, shape, side)):
        if scale.shape[dim] == 1:
            continue  # broadcast below
        if size > 1:
            scale = scale.repeat_interleave(size, dim)
        scale = scale.narrow(dim, 0, shape[dim])
    return scale.expand(shape)


def absolute_maximum(x: Tensor, kind: str, side: int = BLOCK_SIDE) -> Tensor:
    """max |x| for each scale, in the shape of the scales, in fp32 or fp64."""
    if kind == "tensor" and triton_fits(x, kind, side):
        return launch_absolute_maximum(x).amax().view(1, 1)

    dtype = accumulation_dtype(x.dtype)
    if kind in ("tensor", "row"):
        dim = None if kind == "tensor" else 1
        return torch.linalg.vector_norm(x, float("inf"), dim, keepdim=True, dtype=dtype)  # makes no copy of x

    rows, columns = block_shape(kind, x.shape, side)
    missing_rows = -x.shape[0] % rows
    missing_columns = -x.shape[1] % columns
    padded = F.pad(x.abs(), (0, missing_columns, 0, missing_rows))
    blocks = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))  # [m/rows, rows, n/columns, columns]
    return blocks.amax((1, 3)).to(dtype)


def quantize_reference(
    x: Tensor,
    kind: str,
    dtype: torch.dtype,
    side: int = BLOCK_SIDE,
    largest: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition of quantize, bit for bit."""
    if largest is None:
        largest = absolute_maximum(x, kind, side)
    inverse = inverse_scale(largest, dtype)
    inverses = expand_scale(inverse, x.shape, kind, side)  # [m, n]
    scaled = x.to(accumulation_dtype(x.dtype)) * inverses
    q = scaled.clamp_(-MAX_VALUE[dtype], MAX_VALUE[dtype])
    return q.to(dtype).contiguous(), 1 / inverse


def inverse_scale(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The factor that maps `largest` to the largest number of dtype, in the shape of `largest`."""
    # full_like, because a Python number divided by a tensor rounds twice
    return torch.full_like(largest, MAX_VALUE[dtype]) / largest.clamp(min=MIN_ABSOLUTE_MAXIMUM)


# ---- Triton ----------------------------------------------------------------------------------------------

@triton.jit
def cast_kernel(
    X, Q, SCALE, INVERSE, m, n, x_row, x_column, blocks,
    PER_ROW: tl.constexpr,
    GIVEN: tl.constexpr,
    FLOOR: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Casts one tile X [ROWS, COLUMNS]. Its rows have a scale each (PER_ROW), or all of it has one.

    GIVEN: INVERSE has the inverse scale of each row, or of the tensor. Else the tile computes its scales.
    x_row, x_column: strides of X; Q is contiguous. blocks: number of tiles side by side.
    FLOOR: the least number that counts as the largest of a tile. LARGEST: the largest number of Q's dtype.
    """
    rows = block_range(tl.program_id(0).to(tl.int64), ROWS)
    columns = block_range(tl.program_id(1), COLUMNS)
    inside = inside_matrix(rows, columns, m, n)
    offsets = tile_offsets(rows, columns, n)  # in Q
    pointers = X + rows[:, None] * x_row + columns[None, :] * x_column
    x = load_fp32(pointers, inside)  # [ROWS, COLUMNS]

    # the inverse scales
    if GIVEN and PER_ROW:
        inverse = tl.load(INVERSE + rows, rows < m, 1.0)[:, None]
    elif GIVEN:
        inverse = tl.load(INVERSE)
    elif PER_ROW:
        largest = tl.max(tl.abs(x), 1)
        inverse = tl.div_rn(LARGEST, tl.maximum(largest, FLOOR))  # [ROWS]
        scale_pointers = SCALE + rows * blocks + tl.program_id(1)
        tl.store(scale_pointers, tl.div_rn(1.0, inverse), rows < m)
        inverse = inverse[:, None]
    else:
        largest = tl.max(tl.max(tl.abs(x), 1), 0)
        inverse = tl.div_rn(LARGEST, tl.maximum(largest, FLOOR))
        scale_pointer = SCALE + tl.program_id(0) * blocks + tl.program_id(1)
        tl.store(scale_pointer, tl.div_rn(1.0, inverse))

    # the elements
    q = tl.clamp(x * inverse, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(Q + offsets, q, inside)


@triton.jit
def largest_kernel(X, LARGEST, n, BLOCK: tl.constexpr):
    """LARGEST [programs] = max |x| of the blocks of X [n] that each program reads."""
    largest = tl.zeros((BLOCK,), tl.float32)
    stride = tl.num_programs(0) * BLOCK
    for first in range(tl.program_id(0) * BLOCK, n, stride):
        offsets = first + tl.arange(0, BLOCK)
        x = load_fp32(X + offsets, offsets < n)
        largest = tl.maximum(largest, tl.abs(x))
    tl.store(LARGEST + tl.program_id(0), tl.max(largest, 0))


def triton_fits(x: Tensor, kind: str, side: int) -> bool:
    """Whether the kernels quantize x."""
    why = None
    if x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) < (8, 9):
        why = "fp8 is in chips from sm_89 on"
    elif x.numel() >= 2**31:
        why = f"a tensor of {tuple(x.shape)} is too large"
    elif kind in ("group", "block") and (side & side - 1 or side > BLOCK_SIDE):
        why = f"blocks of {side} are no power of two up to {BLOCK_SIDE}"
    return x.numel() > 0 and kernel_is_available("fp8 quantization", x, why=why)


def launch_absolute_maximum(x: Tensor) -> Tensor:
    """max |x| of the parts of x that each program reads: [programs], fp32. x: dense, in any order."""
    flat = x if x.is_contiguous() else x.t().contiguous()  # no copy of a transposed view
    programs = min(PROGRAMS * num_processors(x.device), ceil_div(x.numel(), TILE))
    largest = x.new_empty(programs, dtype=torch.float32)
    largest_kernel[(programs,)](flat, largest, x.numel(), BLOCK=TILE, num_warps=8)
    return largest


def launch_quantize(
    x: Tensor,
    kind: str,
    dtype: torch.dtype,
    side: int = BLOCK_SIDE,
    largest: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As quantize_reference."""
    m, n = x.shape
    per_row = kind in ("row", "group")
    is_transposed = x.stride(1) != 1  # such a view is read in narrow tiles

    # a tile computes its scales, unless they need elements of other tiles
    row_is_split = kind == "row" and (is_transposed or n > MAX_ROW)
    if largest is None and (kind == "tensor" or row_is_split):
        largest = absolute_maximum(x, kind, side)
    assert largest is None or kind in ("tensor", "row"), "a block's largest element is found beside its cast"

    # the tiles
    if kind in ("group", "block"):
        columns = side
    elif is_transposed:
        columns = BLOCK_SIDE
    else:
        columns = min(power_of_2(n), TILE if largest is not None else MAX_ROW)
    rows = side if kind == "block" else max(1, TILE // columns)
    grid = ceil_div(m, rows), ceil_div(n, columns)

    if largest is not None:
        inverse = inverse_scale(largest, dtype)
        scale = 1 / inverse
    else:
        scale = x.new_empty(m if per_row else grid[0], grid[1], dtype=torch.float32)
        inverse = scale  # not read
    q = torch.empty(m, n, dtype=dtype, device=x.device)
    cast_kernel[grid](
        x, q, scale, inverse, m, n, x.stride(0), x.stride(1), grid[1],
        PER_ROW=per_row,
        GIVEN=largest is not None,
        FLOOR=MIN_ABSOLUTE_MAXIMUM,
        LARGEST=MAX_VALUE[dtype],
        ROWS=rows,
        COLUMNS=columns,
        num_warps=16 if columns > 8192 else 8,
    )
    return q, scale
