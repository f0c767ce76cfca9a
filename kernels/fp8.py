"""FP8 quantization with scales (arXiv 2209.05433): one scale per tensor, row or block.

Blocks are those of DeepSeek-V3 (arXiv 2412.19437), or those of MXFP8, whose scales are powers of two
(microscale).

    inverse = LARGEST / max |x|
    q       = x * inverse, rounded to nearest even
    scale   = 1 / inverse, so that x is about q * scale

This is computed in fp32, and each operation rounds once: so for finite inputs the torch reference and the
Triton kernel agree bit for bit. A non-finite element is never hidden: it is NaN in q, or its scale is
infinite. fp64 is quantized to the same 8 bits with scales in fp64, for the proofs of scripts.verify.

A GEMM reads its operands along the contracted dim, so a matrix used in two GEMMs is needed in both
orientations: x for y and for dW, dy for dx and dW, W for y and dx. quantize_pair reads it once and writes it
and its transpose, each with separate scales.
"""
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.grad import accumulation_dtype
from kernels.tiles import block_range, inside_matrix, load_fp32, tile_offsets
from kernels.triton_ import ceil_div, kernel_is_available, num_processors, power_of_2, tl, triton

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MAX_VALUE = {E4M3: 448.0, E5M2: 57344.0}
# lower bound of max |x|: keeps the inverse of zeros finite, and no weight or gradient is that small
MIN_ABSOLUTE_MAXIMUM = 2.0**-100
BLOCK_SIDE = 128  # elements of a group; rows and columns of a block
MX_SIDE = 32  # elements that share a scale of MXFP8 (OCP Microscaling Formats v1.0, table 1)
# the largest exponent of a scale of MXFP8; the smallest is its negative (5.4.1)
MX_EXPONENT = 127
# what shares a scale: the tensor, a row, `side` columns of a row, a square of `side` rows and columns;
# mx: `side` columns of a row, and the scale is a power of two
SCALE_KINDS = ("tensor", "row", "group", "block", "mx")
SHARED_KINDS = ("tensor", "row")  # scales that span any number of columns, and so the ranks that shard them
GROUP_KINDS = ("group", "mx")  # scales that change along a row, every `side` columns
TILE = 4096  # elements that a program casts at a time if it writes no transpose
PAIR = 64, BLOCK_SIDE  # rows and columns that a program casts if it writes a transpose
MAX_ROW = 1 << 15  # columns that one program keeps in registers
PROGRAMS = 4  # programs per multiprocessor, for the maximum of a tensor
MAX_PARTS = 1024  # partial maxima that a cast reduces itself
STRIP = 64  # rows whose maxima one program finds, BLOCK_SIDE columns at a time


class Maxima(NamedTuple):
    """max |x| for each scale of a matrix [m, n] and of its transpose; with None, the cast computes it.

    For kind row, rows is [m, 1] and columns [n, 1]. For kind tensor both are the same: any number of values,
    whose maximum counts.
    """
    rows: Tensor | None = None
    columns: Tensor | None = None


Quantized = tuple[Tensor, Tensor]  # q and its scales, as returned by quantize


def quantize(
    x: Tensor,
    kind: str,
    dtype: torch.dtype = E4M3,
    side: int = BLOCK_SIDE,
    largest: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x [m, n] -> q [m, n] in dtype, and its scales in fp32 (fp64 for fp64).

    kind is one of SCALE_KINDS; group suits activations, block weights. The scales are [1, 1] (tensor), [m, 1]
    (row), [m, n/side] (group, mx) or [m/side, n/side] (block), with sizes rounded up. Scales of groups may be
    stored column-major, as a GEMM reads them.
    largest, if known, is max |x| for each scale, as in Maxima: x may be a part of a larger tensor that shares
    the scales. A transposed view is read without a copy, and its q is contiguous.
    """
    cast = launch_quantize if triton_fits(x, kind, side) else quantize_reference
    return cast(x, kind, dtype, side, largest)


def quantize_pair(
    x: Tensor,
    kind: str,
    dtype: torch.dtype = E4M3,
    side: int = BLOCK_SIDE,
    maxima: Maxima = Maxima(),
) -> tuple[Quantized, Quantized]:
    """Return quantize(x) and quantize(x.t()), from one read of x [m, n].

    x may also be several matrices [e, m, n]. They are quantized stacked, [e m, n] and [e n, m], and for kind
    tensor there is one scale per matrix, [e, 1]. maxima of a tensor are [e, parts] then.
    """
    stacked = x if x.dim() == 3 else x[None]
    if not triton_fits(x, kind, side):
        return quantize_pair_reference(stacked, kind, dtype, side, maxima)
    rows_are_dense = stacked.stride(2) == 1
    return launch_quantize_pair(
        stacked if rows_are_dense else stacked.contiguous(), kind, dtype, side, maxima
    )


def find_maxima(x: Tensor, kind: str, *, both: bool) -> Maxima:
    """Return the maxima of a matrix [m, n] from one read; none for groups and blocks (see their casts).

    With both, also return those of the columns, for the transpose.
    """
    if kind == "tensor":
        largest = absolute_maximum_in_parts(x)
        return Maxima(largest, largest)
    if kind != "row":
        return Maxima()
    if triton_fits(x, kind, BLOCK_SIDE) and x.stride(1) == 1:
        return launch_maxima(x[None])
    columns = absolute_maximum(x.t(), kind) if both else None
    return Maxima(absolute_maximum(x, kind), columns)


def dequantize(
    q: Tensor,
    scale: Tensor,
    kind: str,
    dtype: torch.dtype = torch.float32,
    side: int = BLOCK_SIDE,
) -> Tensor:
    """Invert quantize: [m, n] in dtype."""
    expanded = expand_scale(scale, q.shape, kind, side)
    return (q.to(scale.dtype) * expanded).to(dtype)


def block_shape(kind: str, shape: torch.Size, side: int) -> tuple[int, int]:
    """Return the number of rows and columns that share a scale."""
    shapes = {
        "tensor": (shape[0], shape[1]),
        "matrix": (side, shape[1]),  # several stacked matrices, `side` rows each
        "row": (1, shape[1]),
        "group": (1, side),
        "mx": (1, side),
        "block": (side, side),
    }
    return shapes[kind]


def expand_scale(scale: Tensor, shape: torch.Size, kind: str, side: int = BLOCK_SIDE) -> Tensor:
    """Expand scales from one per block to one per element [m, n]."""
    for dim, size in enumerate(block_shape(kind, shape, side)):
        if scale.shape[dim] == 1:
            continue  # broadcast below
        if size > 1:
            scale = scale.repeat_interleave(size, dim)
        scale = scale.narrow(dim, 0, shape[dim])
    return scale.expand(shape)


def absolute_maximum(x: Tensor, kind: str, side: int = BLOCK_SIDE) -> Tensor:
    """Return max |x| for each scale, in the shape of the scales, in fp32 or fp64."""
    dtype = accumulation_dtype(x.dtype)
    if kind in SHARED_KINDS:
        dim = None if kind == "tensor" else 1
        return torch.linalg.vector_norm(x, float("inf"), dim, keepdim=True, dtype=dtype)  # does not copy x

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
    """Reference for quantize, bit for bit."""
    if largest is None:
        largest = absolute_maximum(x, kind, side)
    elif kind == "tensor":
        largest = largest.amax().view(1, 1)
    inverse, scale = microscale(largest, dtype) if kind == "mx" else exact_scale(largest, dtype)
    inverses = expand_scale(inverse, x.shape, kind, side)  # [m, n]
    scaled = x.to(accumulation_dtype(x.dtype)) * inverses
    q = scaled.clamp_(-MAX_VALUE[dtype], MAX_VALUE[dtype])
    return q.to(dtype).contiguous(), scale


def quantize_pair_reference(
    x: Tensor,
    kind: str,
    dtype: torch.dtype,
    side: int = BLOCK_SIDE,
    maxima: Maxima = Maxima(),
) -> tuple[Quantized, Quantized]:
    """Reference for quantize_pair, for x [e, m, n]."""
    def stacked(matrices: Tensor, largest: Tensor | None) -> Quantized:
        count, rows, _ = matrices.shape
        below = matrices.reshape(count * rows, -1)
        if kind != "tensor":
            return quantize_reference(below, kind, dtype, side, largest)
        if largest is not None:
            largest = largest.view(count, -1).amax(1, keepdim=True)
        return quantize_reference(below, "matrix", dtype, rows, largest)

    return stacked(x, maxima.rows), stacked(x.transpose(1, 2), maxima.columns)


def exact_scale(largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (the factor that maps `largest` to the largest number of dtype, its inverse: the scale), both in
    the shape of `largest`."""
    # full_like, because a Python number divided by a tensor rounds twice
    inverse = torch.full_like(largest, MAX_VALUE[dtype]) / largest.clamp(min=MIN_ABSOLUTE_MAXIMUM)
    return inverse, 1 / inverse


def microscale(largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (factor, scale) as exact_scale does, for the scales of MXFP8: powers of two.

        scale = 2 ** ceil(log2(largest / MAX_VALUE)), with exponents in -127 .. 127

    Rounding the exponent up saturates no element (arXiv 2506.08027). The exponent of the specification's
    own rule, floor(log2 largest) - 8 (OCP Microscaling Formats v1.0, 6.3), maps largest to 256 .. 511, and
    what exceeds 448 saturates.
    The ends are those of the instruction that converts to E8M0, and of torchao's rule RCEIL: with the
    smallest scale, all elements become 0, and their factor is 1. The scale of an infinite `largest` is the
    largest one, and the infinite element saturates; that of NaN is NaN.
    """
    limit = torch.full_like(largest, MAX_VALUE[dtype])
    quotient = largest / limit
    mantissa, exponent = torch.frexp(quotient)  # mantissa * 2^exponent, with 0.5 <= mantissa < 1
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    exponent = torch.where(quotient == 0, -MX_EXPONENT, exponent).clamp(-MX_EXPONENT, MX_EXPONENT)
    exponent = torch.where(quotient.isinf(), MX_EXPONENT, exponent)
    factor = torch.where(exponent == -MX_EXPONENT, 1.0, power_of_two(-exponent))
    is_nan = quotient.isnan()
    return (
        torch.where(is_nan, quotient, factor.to(largest.dtype)),
        torch.where(is_nan, quotient, power_of_two(exponent).to(largest.dtype)),
    )


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent in fp32, for integers in -127 .. 127."""
    biased = (exponent + 127).to(torch.int32)
    normal = (biased << 23).view(torch.float32)
    return torch.where(biased == 0, torch.full_like(normal, 2.0**-127), normal)


# ---- Triton ----------------------------------------------------------------------------------------------

@triton.jit
def scale_and_cast(
    x, largest,
    KIND: tl.constexpr,
    FLOOR: tl.constexpr,
    LARGEST: tl.constexpr,
    DTYPE: tl.constexpr,
) -> "tuple[tl.tensor, tl.tensor]":
    """Return x in 8 bits and its scales, from the maxima: one number, or a shape that broadcasts to x's.

    FLOOR is the lower bound of the maxima. LARGEST is the largest number of DTYPE.
    """
    if KIND == "mx":
        inverse, scale = power_of_two_scale(tl.div_rn(largest, LARGEST))
    else:
        inverse = tl.div_rn(LARGEST, tl.maximum(largest, FLOOR))
        scale = tl.div_rn(1.0, inverse)
    q = tl.clamp(x * inverse, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return q.to(DTYPE), scale


@triton.jit
def power_of_two_scale(quotient) -> "tuple[tl.tensor, tl.tensor]":
    """Return the factor and the scale of `microscale`, from largest / LARGEST."""
    bits = quotient.to(tl.int32, bitcast=True)
    rest = bits & 0x7FFFFF
    exponent = bits >> 23  # biased by 127, as that of E8M0; 0: a subnormal, rest * 2^-149
    rounded_up = exponent + (rest > 0).to(tl.int32)
    biased = tl.where(exponent == 0, (rest > 0x400000).to(tl.int32), tl.minimum(rounded_up, 254))

    smallest = tl.full(bits.shape, 0x400000, tl.int32)  # 2^-127
    scale = tl.where(biased == 0, smallest, biased << 23).to(tl.float32, bitcast=True)
    inverse = tl.where(biased == 254, smallest, (254 - biased) << 23).to(tl.float32, bitcast=True)
    inverse = tl.where(biased == 0, 1.0, inverse)
    is_nan = quotient != quotient
    return tl.where(is_nan, quotient, inverse), tl.where(is_nan, quotient, scale)


@triton.jit
def cast_tile(
    x, Q, SCALE, MAXIMA, Q_BACK, SCALE_BACK, MAXIMA_BACK,
    rows, columns, m, n, column_end, matrix, parts, down, across, tiles_down, tiles_across,
    KIND: tl.constexpr,
    GIVEN: tl.constexpr,
    AHEAD: tl.constexpr,
    BACK: tl.constexpr,
    FLOOR: tl.constexpr,
    LARGEST: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Cast one tile x [ROWS, COLUMNS] of one matrix [m, n] into Q (AHEAD) and its transpose Q_BACK [n, m]
    (BACK).

    rows and columns are those of the tile; columns from column_end on do not belong to it. It is number
    `down` of tiles_down, and `across` of tiles_across. The matrices are stacked in Q, Q_BACK and the scales.
    KIND tensor and (GIVEN) row read the maxima from MAXIMA and MAXIMA_BACK: [parts] per matrix, or [m] and
    [n]. Otherwise the tile computes its own: one per row and column (row, group, mx), or one for all
    (block). SCALE has one number per matrix (tensor), [m] (row), [tiles down, tiles across] (block), and for
    group and mx [tiles across, rows of all matrices]; SCALE_BACK is the same for the transpose.
    """
    first_row = matrix * m  # in Q; the first column in Q_BACK
    first_column = matrix * n
    DTYPE: tl.constexpr = Q.dtype.element_ty

    # a single scale: the same numbers in both orientations
    if KIND == "tensor" or KIND == "block":
        if KIND == "tensor":
            part = tl.arange(0, PARTS)
            largest = tl.max(tl.load(MAXIMA + matrix * parts + part, part < parts, 0.0), 0)
            place = matrix
            place_back = matrix
            is_first = (down == 0) & (across == 0)
        else:
            largest = tl.max(tl.max(tl.abs(x), 1), 0)
            place = (matrix * tiles_down + down) * tiles_across + across
            place_back = (matrix * tiles_across + across) * tiles_down + down
            is_first = True
        ahead, scale = scale_and_cast(x, largest, KIND=KIND, FLOOR=FLOOR, LARGEST=LARGEST, DTYPE=DTYPE)
        back = ahead
        if AHEAD:
            tl.store(SCALE + place, scale, is_first)
        if BACK:
            tl.store(SCALE_BACK + place_back, scale, is_first)

    # one scale per row for Q, and one per column for its transpose
    else:
        BY_TILE: tl.constexpr = KIND == "group" or KIND == "mx"
        matrices = tl.num_programs(2)
        if AHEAD:
            if GIVEN:
                largest = tl.load(MAXIMA + first_row + rows, rows < m, 0.0)
            else:
                largest = tl.max(tl.abs(x), 1)
            ahead, scale = scale_and_cast(
                x, largest[:, None], KIND=KIND, FLOOR=FLOOR, LARGEST=LARGEST, DTYPE=DTYPE
            )
            is_stored = (rows < m) & ((across == 0) | BY_TILE)
            scale_pointers = SCALE + across * m * matrices + first_row + rows
            tl.store(scale_pointers[:, None], scale, is_stored[:, None])
        if BACK:
            if GIVEN:
                largest_back = tl.load(MAXIMA_BACK + first_column + columns, columns < column_end, 0.0)
            else:
                largest_back = tl.max(tl.abs(x), 0)
            back, scale_back = scale_and_cast(
                x, largest_back[None, :], KIND=KIND, FLOOR=FLOOR, LARGEST=LARGEST, DTYPE=DTYPE
            )
            is_stored_back = (columns < column_end) & ((down == 0) | BY_TILE)
            scale_back_pointers = SCALE_BACK + down * n * matrices + first_column + columns
            tl.store(scale_back_pointers[None, :], scale_back, is_stored_back[None, :])

    # elements
    if AHEAD:
        q_pointers = Q + tile_offsets(first_row + rows, columns, n)
        tl.store(q_pointers, ahead, inside_matrix(rows, columns, m, column_end))
    if BACK:
        back_pointers = Q_BACK + tile_offsets(first_column + columns, rows, m)
        tl.store(back_pointers, tl.trans(back), inside_matrix(columns, rows, column_end, m))


@triton.jit
def cast_kernel(
    X, Q, SCALE, MAXIMA, Q_BACK, SCALE_BACK, MAXIMA_BACK, m, n, parts, x_matrix, x_row, x_column,
    KIND: tl.constexpr,
    GIVEN: tl.constexpr,
    AHEAD: tl.constexpr,
    BACK: tl.constexpr,
    FLOOR: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Run cast_tile on one tile [ROWS, COLUMNS] of one matrix X [m, n], read once.

    Programs: tiles down, tiles across, matrices. x_matrix, x_row and x_column are strides of X.
    """
    down = tl.program_id(0)
    across = tl.program_id(1)
    matrix = tl.program_id(2).to(tl.int64)
    rows = block_range(down.to(tl.int64), ROWS)
    columns = block_range(across, COLUMNS)
    pointers = X + matrix * x_matrix + rows[:, None] * x_row + columns[None, :] * x_column
    x = load_fp32(pointers, inside_matrix(rows, columns, m, n))  # [ROWS, COLUMNS]
    cast_tile(
        x, Q, SCALE, MAXIMA, Q_BACK, SCALE_BACK, MAXIMA_BACK,
        rows, columns, m, n, n, matrix, parts, down, across, tl.num_programs(0), tl.num_programs(1),
        KIND=KIND,
        GIVEN=GIVEN,
        AHEAD=AHEAD,
        BACK=BACK,
        FLOOR=FLOOR,
        LARGEST=LARGEST,
        PARTS=PARTS,
    )


@triton.jit
def largest_kernel(X, LARGEST, n, BLOCK: tl.constexpr):
    """Compute LARGEST [programs] = max |x| of the blocks of X [n] that each program reads."""
    largest = tl.zeros((BLOCK,), tl.float32)
    stride = tl.num_programs(0) * BLOCK
    for first in range(tl.program_id(0) * BLOCK, n, stride):
        offsets = first + tl.arange(0, BLOCK)
        x = load_fp32(X + offsets, offsets < n)
        largest = tl.maximum(largest, tl.abs(x))
    tl.store(LARGEST + tl.program_id(0), tl.max(largest, 0))


@triton.jit
def maxima_kernel(
    X, OF_ROWS, OF_COLUMNS, m, n, x_matrix, x_row,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute max |x| of each row of one matrix X [m, n], OF_ROWS [m], and of each column in one strip of
    ROWS rows, OF_COLUMNS [strips, n]. Programs: strips, matrices."""
    strip = tl.program_id(0).to(tl.int64)
    matrix = tl.program_id(1).to(tl.int64)
    rows = block_range(strip, ROWS)
    first_of_columns = (matrix * tl.num_programs(0) + strip) * n
    largest = tl.zeros((ROWS,), tl.float32)
    for first in range(0, n, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        inside = inside_matrix(rows, columns, m, n)
        x = tl.abs(load_fp32(X + matrix * x_matrix + tile_offsets(rows, columns, x_row), inside))
        largest = tl.maximum(largest, tl.max(x, 1))
        tl.store(OF_COLUMNS + first_of_columns + columns, tl.max(x, 0), columns < n)
    tl.store(OF_ROWS + matrix * m + rows, largest, rows < m)


def triton_fits(x: Tensor, kind: str, side: int) -> bool:
    """Whether the kernels can quantize x."""
    why = None
    if x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) < (8, 9):
        why = "fp8 needs sm_89 or newer"
    elif x.numel() >= 2**31:
        why = f"a tensor of {tuple(x.shape)} is too large"
    elif kind not in SHARED_KINDS and (side & side - 1 or side > BLOCK_SIDE):
        why = f"blocks of {side} are not a power of two up to {BLOCK_SIDE}"
    return x.numel() > 0 and kernel_is_available("fp8 quantization", x, why=why)


def absolute_maximum_in_parts(x: Tensor) -> Tensor:
    """Return max |x| of the parts of x that each program reads; without kernels that of x, [1, 1].

    x is dense, in any order.
    """
    if not triton_fits(x, "tensor", BLOCK_SIDE):
        return absolute_maximum(x, "tensor")
    flat = x if x.is_contiguous() else x.t().contiguous()  # no copy for a transposed view
    programs = min(PROGRAMS * num_processors(x.device), ceil_div(x.numel(), TILE))
    largest = x.new_empty(programs, dtype=torch.float32)
    largest_kernel[(programs,)](flat, largest, x.numel(), BLOCK=TILE, num_warps=8)
    return largest


def launch_maxima(x: Tensor) -> Maxima:
    """Return the maxima of rows and columns of x [e, m, n], whose rows are dense: [e m, 1] and [e n, 1]."""
    count, m, n = x.shape
    strips = ceil_div(m, STRIP)
    rows = x.new_empty(count * m, 1, dtype=torch.float32)
    columns = x.new_empty(count, strips, n, dtype=torch.float32)
    maxima_kernel[(strips, count)](
        x, rows, columns, m, n, x.stride(0), x.stride(1), ROWS=STRIP, COLUMNS=BLOCK_SIDE, num_warps=8
    )
    return Maxima(rows, columns.amax(1).view(count * n, 1))


def launch_quantize(
    x: Tensor,
    kind: str,
    dtype: torch.dtype,
    side: int = BLOCK_SIDE,
    largest: Tensor | None = None,
) -> Quantized:
    """Run quantize_reference as kernels."""
    m, n = x.shape
    assert largest is None or kind in SHARED_KINDS, "a block's largest element is found beside its cast"
    if x.stride(1) != 1 and x.stride(0) == 1:  # a transposed view
        base = x.t()
        if largest is None:
            largest = find_maxima(base, kind, both=True).columns
        _, quantized = launch_cast(base[None], kind, dtype, side, Maxima(columns=largest), ahead=False)
        return quantized

    # a tile computes its scales, unless they depend on elements of other tiles
    if largest is None and (kind == "tensor" or (kind == "row" and n > MAX_ROW)):
        largest = find_maxima(x, kind, both=False).rows
    quantized, _ = launch_cast(x[None], kind, dtype, side, Maxima(rows=largest), back=False)
    return quantized


def launch_quantize_pair(
    x: Tensor, kind: str, dtype: torch.dtype, side: int = BLOCK_SIDE, maxima: Maxima = Maxima()
) -> tuple[Quantized, Quantized]:
    """Run quantize_pair_reference as kernels."""
    if maxima.rows is None:
        maxima = find_matrix_maxima(x, kind)
    return launch_cast(x, kind, dtype, side, maxima)


def find_matrix_maxima(x: Tensor, kind: str) -> Maxima:
    """find_maxima of x [e, m, n]. For kind tensor [e, parts]; of rows and columns [e m, 1] and [e n, 1]."""
    if kind == "row":
        return launch_maxima(x)
    if kind == "tensor" and len(x) > 1:
        largest = torch.linalg.vector_norm(x, float("inf"), (1, 2), dtype=torch.float32)  # does not copy x
        return Maxima(largest[:, None], largest[:, None])
    return find_maxima(x[0], kind, both=True)


def launch_cast(
    x: Tensor,
    kind: str,
    dtype: torch.dtype,
    side: int,
    maxima: Maxima,
    *,
    ahead: bool = True,
    back: bool = True,
) -> tuple[Quantized, Quantized]:
    """Cast x [e, m, n] (ahead) and its transposes (back) to 8 bits; results not requested are empty."""
    count, m, n = x.shape
    given = maxima.rows if ahead else maxima.columns

    # with transposes, tiles are tall enough to write these in runs of 64 bytes or more
    if kind not in SHARED_KINDS:
        rows, columns = side, side
        if kind in GROUP_KINDS and not back:
            rows = max(1, TILE // side)
    elif back:
        rows, columns = PAIR
    else:
        columns = min(power_of_2(n), TILE if given is not None else MAX_ROW)
        rows = max(1, TILE // columns)
    grid = ceil_div(m, rows), ceil_div(n, columns), count

    quantized, transposed, maxima, parts = before_cast(
        x, (count, m, n), kind, dtype, side, maxima, ahead=ahead, back=back
    )
    cast_kernel[grid](
        x, *quantized, or_else(maxima.rows, x), *transposed, or_else(maxima.columns, x), m, n, parts,
        x.stride(0), x.stride(1), x.stride(2),
        KIND=kind,
        GIVEN=given is not None,
        AHEAD=ahead,
        BACK=back,
        FLOOR=MIN_ABSOLUTE_MAXIMUM,
        LARGEST=MAX_VALUE[dtype],
        ROWS=rows,
        COLUMNS=columns,
        PARTS=power_of_2(parts),
        num_warps=cast_warps(rows, columns),
    )
    return as_stored(quantized, kind), as_stored(transposed, kind)


def before_cast(
    x: Tensor,
    shape: tuple[int, int, int],
    kind: str,
    dtype: torch.dtype,
    side: int,
    maxima: Maxima,
    *,
    ahead: bool,
    back: bool,
) -> tuple[Quantized, Quantized, Maxima, int]:
    """Return the outputs of a cast of matrices [e, m, n], ahead and back, on the device of x; the maxima that
    it reads; and in how many parts those of a tensor are."""
    count, m, n = shape
    parts = 1
    if kind == "tensor":
        given = maxima.rows if ahead else maxima.columns
        assert given is not None, "the largest element of a tensor is found before its cast"
        given = in_few_parts(given, count)
        parts = given.shape[1]
        maxima = Maxima(given, given)
    quantized = empty_result(x, (count, m, n), kind, dtype, side, is_written=ahead)
    transposed = empty_result(x, (count, n, m), kind, dtype, side, is_written=back)
    return quantized, transposed, maxima, parts


def in_few_parts(largest: Tensor, matrices: int) -> Tensor:
    """Reduce max |x| of each matrix in any number of parts to [matrices, parts], few enough for a cast."""
    parts = largest.view(matrices, -1)
    return parts.amax(1, keepdim=True) if parts.shape[1] > MAX_PARTS else parts


def as_stored(quantized: Quantized, kind: str) -> Quantized:
    """Return the result of a cast in the shape that quantize returns: scales of groups are column-major."""
    q, scale = quantized
    return q, scale.t() if kind in GROUP_KINDS else scale


def cast_warps(rows: int, columns: int) -> int:
    """Return enough warps for the elements of a tile to fit the threads' registers, and few enough for each
    thread to load 16 bytes."""
    if rows * columns > 8192:
        return 16
    return 8 if rows * columns > 1024 else 4


def empty_result(
    x: Tensor, shape: tuple[int, int, int], kind: str, dtype: torch.dtype, side: int, is_written: bool
) -> Quantized:
    """Allocate the outputs of a cast of matrices [e, m, n], on the device of x; empty if not written."""
    count, m, n = shape
    if not is_written:
        return x.new_empty(0, dtype=dtype), x.new_empty((0, 0), dtype=torch.float32)
    shapes = {
        "tensor": (count, 1),
        "row": (count * m, 1),
        "group": (ceil_div(n, side), count * m),
        "mx": (ceil_div(n, side), count * m),
        "block": (count * ceil_div(m, side), ceil_div(n, side)),
    }
    q = x.new_empty(count * m, n, dtype=dtype)
    return q, x.new_empty(shapes[kind], dtype=torch.float32)


def or_else(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return `tensor`, or a placeholder for an argument that the kernel does not read."""
    return other if tensor is None else tensor
