"""The helpers of kernels/tiles.py give what plain torch gives."""

import pytest
import torch

from kernels.tiles import (
    block_range,
    inside_matrix,
    load_fp32,
    program_tile,
    tile_offsets,
    write_tile,
)
from kernels.triton_ import ceil_div, tl, triton


@triton.jit
def copy_kernel(X, Y, num_rows, num_columns, stride, M: tl.constexpr, N: tl.constexpr):
    rows = block_range(tl.program_id(0), M)
    columns = block_range(tl.program_id(1), N)
    inside = inside_matrix(rows, columns, num_rows, num_columns)
    x = load_fp32(X + tile_offsets(rows, columns, stride), inside)
    tl.store(Y + tile_offsets(rows, columns, num_columns), x * 2, inside)


@pytest.mark.slow(every=3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(8, 16), (7, 13), (1, 1)])
def test_tiles_cover_a_matrix_and_nothing_else(interpreted, shape, dtype):
    m, n = shape
    x = torch.randn(m, n + 3, device=interpreted).to(dtype)[:, :n]  # rows with a gap between them
    y = torch.full((m + 1, n), 7.0, dtype=dtype, device=interpreted)
    copy_kernel[(ceil_div(m, 4), ceil_div(n, 8))](x, y, m, n, x.stride(0), M=4, N=8)
    assert torch.equal(y[:m], x * 2)
    assert (y[m] == 7.0).all()


@triton.jit
def load_kernel(X, Y, n, BLOCK: tl.constexpr):
    index = block_range(tl.program_id(0), BLOCK)
    x = load_fp32(X + index, index < n, other=5.0)
    tl.store(Y + index, x)


def test_a_load_fills_what_is_masked(interpreted):
    x = torch.randn(11, device=interpreted).bfloat16()
    y = torch.zeros(16, device=interpreted)
    load_kernel[(4,)](x, y, len(x), BLOCK=4)
    assert torch.equal(y[:11], x.float())
    assert (y[11:] == 5.0).all()


@triton.jit
def write_kernel(INTO, PART, m, n, ADD: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    row = tl.program_id(0) * M
    column = tl.program_id(1) * N
    rows = row + tl.arange(0, M)
    columns = column + tl.arange(0, N)
    part = load_fp32(PART + tile_offsets(rows, columns, n), inside_matrix(rows, columns, m, n))
    write_tile(INTO, part, row, column, m, n, ADD=ADD)


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("add", [True, False])
def test_a_tile_is_written_or_added(interpreted, dtype, add):
    m, n = 10, 21
    into = torch.randn(m, n, device=interpreted).to(dtype)
    part = torch.randn(m, n, device=interpreted)
    expected = (into.float() + part if add else part).to(dtype)
    if not add:
        into.fill_(float("nan"))
    write_kernel[(ceil_div(m, 4), ceil_div(n, 8))](into, part, m, n, ADD=add, M=4, N=8)
    assert torch.equal(into, expected)


@triton.jit
def position_kernel(POSITIONS, m, n, M: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr):
    row, column = program_tile(m, n, M=M, N=N, GROUP=GROUP)
    tl.store(POSITIONS + tl.program_id(0) * 2, row)
    tl.store(POSITIONS + tl.program_id(0) * 2 + 1, column)


@pytest.mark.slow(every=5)
@pytest.mark.parametrize("m, n", [(64, 96), (61, 33), (16, 200), (200, 16), (1, 1)])
@pytest.mark.parametrize("group", [1, 2, 8])
def test_each_tile_has_one_program(interpreted, m, n, group):
    tiles_down, tiles_across = ceil_div(m, 16), ceil_div(n, 32)
    positions = torch.full((tiles_down * tiles_across, 2), -1, dtype=torch.int32, device=interpreted)
    position_kernel[(len(positions),)](positions, m, n, M=16, N=32, GROUP=group)
    found = [tuple(position) for position in positions.tolist()]
    every = {(down * 16, across * 32) for down in range(tiles_down) for across in range(tiles_across)}
    assert len(set(found)) == len(found) and set(found) == every
    first_band = found[: min(group, tiles_down) * tiles_across]
    assert {row for row, _ in first_band} == {down * 16 for down in range(min(group, tiles_down))}
