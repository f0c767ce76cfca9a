"""Tiles of matrices, for Triton kernels: indexing, loads and stores.

A tile is given by its rows [M] and its columns [N]: vectors of indices, which may be outside of the matrix.
Loads return fp32 for any dtype. `tl.store` casts to the dtype of its pointers.
"""
from kernels.triton_ import tl, triton


@triton.jit
def block_range(block, BLOCK: tl.constexpr):
    """Return the indices of block number `block`, with BLOCK indices per block: [BLOCK]."""
    return block * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def inside_matrix(rows, columns, num_rows, num_columns):
    """Return which elements of a tile are inside a matrix [num_rows, num_columns]: bool [M, N]."""
    return (rows < num_rows)[:, None] & (columns < num_columns)[None, :]


@triton.jit
def tile_offsets(rows, columns, stride):
    """Return the offsets of a tile's elements in a matrix whose rows are `stride` apart: int64 [M, N]."""
    return rows.to(tl.int64)[:, None] * stride + columns[None, :]


@triton.jit
def load_fp32(pointers, mask, other=0.0):
    """Load in fp32, with `other` outside of the mask (None: undefined values)."""
    return tl.load(pointers, mask, other).to(tl.float32)


@triton.jit
def write_tile(INTO, part, row, column, num_rows, num_columns, ADD: tl.constexpr):
    """Write (ADD: accumulate) part [M, N], with first element (row, column), to INTO [num_rows,
    num_columns]."""
    rows = row + tl.arange(0, part.shape[0])
    columns = column + tl.arange(0, part.shape[1])
    pointers = INTO + tile_offsets(rows, columns, num_columns)
    inside = inside_matrix(rows, columns, num_rows, num_columns)
    if ADD:
        part += load_fp32(pointers, inside, other=None)
    tl.store(pointers, part, inside)


@triton.jit
def program_tile(
    num_rows, num_columns,
    M: tl.constexpr,
    N: tl.constexpr,
    GROUP: tl.constexpr,
) -> "tuple[tl.tensor, tl.tensor]":
    """Return the first row and column of this program's tile [M, N] of a matrix [num_rows, num_columns].

    The tiles of concurrent programs form a square, GROUP tiles high, to share data in cache.
    """
    tiles_down = tl.cdiv(num_rows, M)
    tiles_across = tl.cdiv(num_columns, N)
    band = tl.program_id(0) // (GROUP * tiles_across)  # GROUP rows of tiles; the last band may be shorter
    height = tl.minimum(tiles_down - band * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * tiles_across)
    row = (band * GROUP + within % height) * M
    column = within // height * N
    return row, column
