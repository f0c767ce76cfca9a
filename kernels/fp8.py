"""Quantization to 8-bit floats with scales (arXiv 2209.05433), one scale a tensor, a row, or a block (DeepSeek-V3, arXiv 2412.19437).

    inverse = LARGEST / max |x|      q = round to nearest even of x * inverse      x ~ q * scale, scale = 1 / inverse

in fp32, each operation rounded once: for finite inputs the torch definition and the Triton kernel give the same bits.
"""
import torch
from torch import Tensor

from kernels.triton_ import ceil_div, fits, power_of_2, processors, tl, triton

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
FLOOR = 2.0**-100  # of max |x|: zeros keep a finite inverse, and no weight or gradient is that small
BLOCKS = {"tensor": (None, None), "row": (1, None), "group": (1, 128), "block": (128, 128)}  # rows, columns of a scale; none: all
TILE = 4096  # elements a program casts at a time
LONGEST = 1 << 15  # columns that one program keeps in registers
PROGRAMS = 4  # a multiprocessor, for the largest element of a tensor


def quantize(x: Tensor, kind: str, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """x [m, n] -> q [m, n] in dtype, scale in fp32: [1, 1] (tensor), [m, 1] (row), [m, n/128] (group: a row's 128 columns) or
    [m/128, n/128] (block), rounded up. group suits activations, block weights."""
    return (launch if triton_fits(x, kind) else reference)(x, kind, dtype)


def dequantize(q: Tensor, scale: Tensor, kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """The way back: [m, n] in dtype."""
    return (q.float() * spread(scale, q.shape, kind)).to(dtype)


def spread(scale: Tensor, shape: torch.Size, kind: str) -> Tensor:
    """A value a block -> a value an element."""
    for dim, size in enumerate(BLOCKS[kind]):
        scale = scale.repeat_interleave(size or shape[dim], dim)
    return scale[:shape[0], :shape[1]]


def reference(x: Tensor, kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The definition, bit for bit."""
    (m, n), f = x.shape, x.float()
    rows, columns = (size or whole for size, whole in zip(BLOCKS[kind], x.shape))
    padded = torch.nn.functional.pad(f.abs(), (0, -n % columns, 0, -m % rows))
    largest = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).amax((1, 3))
    inverse = inverse_of(largest, dtype)
    q = (f * spread(inverse, x.shape, kind)).clamp(-LARGEST[dtype], LARGEST[dtype])
    return q.to(dtype), 1 / inverse


def inverse_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.full_like(largest, LARGEST[dtype]) / largest.clamp(min=FLOOR)  # a number over a tensor would round twice


# ---- Triton ------------------------------------------------------------------------------------------------------------------

@triton.jit
def cast_kernel(X, Q, SCALE, INVERSE, m, n, blocks, PER_ROW: tl.constexpr, GIVEN: tl.constexpr, FLOOR: tl.constexpr,
                LARGEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One tile: its rows have a scale each (PER_ROW), or all of it has one; GIVEN: INVERSE holds that of the whole tensor."""
    rows, columns = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    at = rows[:, None] * n + columns[None, :]
    x = tl.load(X + at, inside, 0.0).to(tl.float32)
    if GIVEN:
        inverse = tl.load(INVERSE)
    elif PER_ROW:
        inverse = tl.div_rn(LARGEST, tl.maximum(tl.max(tl.abs(x), 1), FLOOR))
        tl.store(SCALE + rows * blocks + tl.program_id(1), tl.div_rn(1.0, inverse), rows < m)
        inverse = inverse[:, None]
    else:
        inverse = tl.div_rn(LARGEST, tl.maximum(tl.max(tl.max(tl.abs(x), 1), 0), FLOOR))
        tl.store(SCALE + tl.program_id(0) * blocks + tl.program_id(1), tl.div_rn(1.0, inverse))
    q = tl.minimum(tl.maximum(x * inverse, -LARGEST), LARGEST)
    tl.store(Q + at, q.to(Q.dtype.element_ty), inside)


@triton.jit
def largest_kernel(X, LARGEST, n, BLOCK: tl.constexpr):
    largest = tl.zeros((BLOCK,), tl.float32)
    for first in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.abs(tl.load(X + at, at < n, 0.0).to(tl.float32)))
    tl.store(LARGEST + tl.program_id(0), tl.max(largest, 0))


def triton_fits(x: Tensor, kind: str) -> bool:
    why = None
    if x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) < (8, 9):
        why = "fp8 is in chips from sm_89 on"
    elif kind == "row" and x.shape[1] > LONGEST or x.numel() >= 2**31:
        why = f"a tensor of {tuple(x.shape)} is too large"
    return x.numel() > 0 and fits("fp8 quantization", x, why=why)


def launch(x: Tensor, kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, (m, n) = x.contiguous(), x.shape
    q, inverse, per_row = torch.empty_like(x, dtype=dtype), None, BLOCKS[kind][0] == 1
    columns = min(power_of_2(n), LONGEST) if kind in ("row", "tensor") else 128
    rows = 128 if kind == "block" else max(1, TILE // columns)
    grid = ceil_div(m, rows), ceil_div(n, columns)
    if kind == "tensor":
        programs = min(PROGRAMS * processors(x.device), ceil_div(x.numel(), TILE))
        largest = x.new_empty(programs, dtype=torch.float32)
        largest_kernel[(programs,)](x, largest, x.numel(), BLOCK=TILE, num_warps=8)
        inverse = inverse_of(largest.amax().view(1, 1), dtype)
        scale = 1 / inverse
    else:
        scale = x.new_empty(m if per_row else grid[0], grid[1], dtype=torch.float32)
    cast_kernel[grid](x, q, scale, scale if inverse is None else inverse, m, n, grid[1], PER_ROW=per_row, GIVEN=kind == "tensor",
                      FLOOR=FLOOR, LARGEST=LARGEST[dtype], ROWS=rows, COLUMNS=columns, num_warps=16 if columns > 8192 else 8)
    return q, scale
