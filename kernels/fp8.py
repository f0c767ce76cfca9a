"""Quantization to 8-bit floats with scales (arXiv 2209.05433), one scale a tensor, a row, or a block (DeepSeek-V3, arXiv 2412.19437).

    inverse = LARGEST / max |x|      q = round to nearest even of x * inverse      x ~ q * scale, scale = 1 / inverse

in fp32, each operation rounded once: for finite inputs the torch definition and the Triton kernel give the same bits, and no
product hides an element that is not finite: it is NaN in q, or its scale is infinite. fp64 is quantized with scales in fp64 (on
the grid of the same 8 bits): what scripts.verify proves. A transposed view is read as it lies, and its q comes out contiguous:
that is how the operands of a weight gradient are made, whose rows run along the tokens.
"""
import torch
from torch import Tensor

from kernels.grad import wide
from kernels.triton_ import ceil_div, fits, power_of_2, processors, tl, triton

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
FLOOR = 2.0**-100  # of max |x|: zeros keep a finite inverse, and no weight or gradient is that small
SIDE = 128  # of a block
KINDS = ("tensor", "row", "group", "block")  # a scale: for all; a row; `side` columns of a row; a square of that side
TILE = 4096  # elements a program casts at a time
LONGEST = 1 << 15  # columns that one program keeps in registers
PROGRAMS = 4  # a multiprocessor, for the largest element of a tensor


def quantize(x: Tensor, kind: str, dtype: torch.dtype = E4M3, side: int = SIDE, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [m, n] -> q [m, n] in dtype, scale in fp32 (fp64): [1, 1] (tensor), [m, 1] (row), [m, n/side] (group: a row's `side`
    columns) or [m/side, n/side] (block), rounded up. group suits activations, block weights. largest: max |x| of each scale
    where it is known, in the shape of the scales: that of a larger tensor of which x is a part."""
    return (launch if triton_fits(x, kind, side) else reference)(x, kind, dtype, side, largest)


def dequantize(q: Tensor, scale: Tensor, kind: str, dtype: torch.dtype = torch.float32, side: int = SIDE) -> Tensor:
    """The way back: [m, n] in dtype."""
    return (q.to(scale.dtype) * spread(scale, q.shape, kind, side)).to(dtype)


def sides(kind: str, shape: torch.Size, side: int) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    return {"tensor": (shape[0], shape[1]), "row": (1, shape[1]), "group": (1, side), "block": (side, side)}[kind]


def spread(scale: Tensor, shape: torch.Size, kind: str, side: int = SIDE) -> Tensor:
    """A value a block -> a value an element."""
    for dim, size in enumerate(sides(kind, shape, side)):
        scale = scale.repeat_interleave(size, dim) if size > 1 and scale.shape[dim] > 1 else scale
        scale = scale.narrow(dim, 0, shape[dim]) if scale.shape[dim] > 1 else scale
    return scale.expand(shape)


def largest_of(x: Tensor, kind: str, side: int = SIDE) -> Tensor:
    """max |x| of each scale, fp32 or fp64."""
    if kind == "tensor" and triton_fits(x, kind, side):
        return launch_largest(x).amax().view(1, 1)
    if kind in ("tensor", "row"):  # no copy of x
        return torch.linalg.vector_norm(x, float("inf"), None if kind == "tensor" else 1, keepdim=True, dtype=wide(x.dtype))
    rows, columns = sides(kind, x.shape, side)
    padded = torch.nn.functional.pad(x.abs(), (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    return padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).amax((1, 3)).to(wide(x.dtype))


def reference(x: Tensor, kind: str, dtype: torch.dtype, side: int = SIDE, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The definition, bit for bit."""
    inverse = inverse_of(largest_of(x, kind, side) if largest is None else largest, dtype)
    q = (x.to(wide(x.dtype)) * spread(inverse, x.shape, kind, side)).clamp_(-LARGEST[dtype], LARGEST[dtype])
    return q.to(dtype).contiguous(), 1 / inverse


def inverse_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.full_like(largest, LARGEST[dtype]) / largest.clamp(min=FLOOR)  # a number over a tensor would round twice


# ---- Triton ------------------------------------------------------------------------------------------------------------------

@triton.jit
def cast_kernel(X, Q, SCALE, INVERSE, m, n, x_row, x_column, blocks, PER_ROW: tl.constexpr, GIVEN: tl.constexpr, FLOOR: tl.constexpr,
                LARGEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One tile: its rows have a scale each (PER_ROW), or all of it has one; GIVEN: INVERSE holds that of each row, or of the tensor.
    x_row, x_column: strides of X; Q is contiguous."""
    rows, columns = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    at = rows[:, None] * n + columns[None, :]
    x = tl.load(X + rows[:, None] * x_row + columns[None, :] * x_column, inside, 0.0).to(tl.float32)
    if GIVEN:
        inverse = tl.load(INVERSE + rows, rows < m, 1.0)[:, None] if PER_ROW else tl.load(INVERSE)
    elif PER_ROW:
        inverse = tl.div_rn(LARGEST, tl.maximum(tl.max(tl.abs(x), 1), FLOOR))
        tl.store(SCALE + rows * blocks + tl.program_id(1), tl.div_rn(1.0, inverse), rows < m)
        inverse = inverse[:, None]
    else:
        inverse = tl.div_rn(LARGEST, tl.maximum(tl.max(tl.max(tl.abs(x), 1), 0), FLOOR))
        tl.store(SCALE + tl.program_id(0) * blocks + tl.program_id(1), tl.div_rn(1.0, inverse))
    q = tl.clamp(x * inverse, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(Q + at, q.to(Q.dtype.element_ty), inside)


@triton.jit
def largest_kernel(X, LARGEST, n, BLOCK: tl.constexpr):
    largest = tl.zeros((BLOCK,), tl.float32)
    for first in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.abs(tl.load(X + at, at < n, 0.0).to(tl.float32)))
    tl.store(LARGEST + tl.program_id(0), tl.max(largest, 0))


def triton_fits(x: Tensor, kind: str, side: int) -> bool:
    why = None
    if x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) < (8, 9):
        why = "fp8 is in chips from sm_89 on"
    elif x.numel() >= 2**31:
        why = f"a tensor of {tuple(x.shape)} is too large"
    elif kind in ("group", "block") and (side & side - 1 or side > SIDE):
        why = f"blocks of {side} are no power of two up to {SIDE}"
    return x.numel() > 0 and fits("fp8 quantization", x, why=why)


def launch_largest(x: Tensor) -> Tensor:
    """Parts of max |x|, one a program. x: dense, in any order."""
    x = x if x.is_contiguous() else x.t()
    x = x if x.is_contiguous() else x.contiguous()
    programs = min(PROGRAMS * processors(x.device), ceil_div(x.numel(), TILE))
    largest = x.new_empty(programs, dtype=torch.float32)
    largest_kernel[(programs,)](x, largest, x.numel(), BLOCK=TILE, num_warps=8)
    return largest


def launch(x: Tensor, kind: str, dtype: torch.dtype, side: int = SIDE, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    (m, n), per_row = x.shape, kind in ("row", "group")
    q, narrow = torch.empty(m, n, dtype=dtype, device=x.device), x.stride(1) != 1  # narrow: a transposed view, read in tiles
    if largest is None and (kind == "tensor" or kind == "row" and (narrow or n > LONGEST)):
        largest = largest_of(x, kind, side)
    assert largest is None or kind in ("tensor", "row"), "a block's largest element is found beside its cast"
    columns = side if kind in ("group", "block") else SIDE if narrow else min(power_of_2(n), TILE if largest is not None else LONGEST)
    rows = side if kind == "block" else max(1, TILE // columns)
    grid = ceil_div(m, rows), ceil_div(n, columns)
    if largest is not None:
        inverse = inverse_of(largest, dtype)
        scale = 1 / inverse
    else:
        scale = inverse = x.new_empty(m if per_row else grid[0], grid[1], dtype=torch.float32)
    cast_kernel[grid](x, q, scale, inverse, m, n, x.stride(0), x.stride(1), grid[1], PER_ROW=per_row, GIVEN=largest is not None, FLOOR=FLOOR,
                      LARGEST=LARGEST[dtype], ROWS=rows, COLUMNS=columns, num_warps=16 if columns > 8192 else 8)
    return q, scale
