"""The tool that proves the kernels, proved first: Triton's interpreter (tests/interpreter.py) gives what
torch gives, bit for bit.
"""

import pytest
import torch

from kernels.triton_ import tl, triton

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled here, not interpreted"
)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@triton.jit
def arithmetic(A, B, SUM, PRODUCT, QUOTIENT, LARGER, PICKED, LESS, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(A + at), tl.load(B + at)
    tl.store(SUM + at, a + b)
    tl.store(PRODUCT + at, a * b)
    tl.store(QUOTIENT + at, (a.to(tl.float32) / b.to(tl.float32)).to(A.dtype.element_ty))
    tl.store(LARGER + at, tl.maximum(a, b))
    tl.store(PICKED + at, tl.where(a > b, -a, b))
    tl.store(LESS + at, a < b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_arithmetic_is_that_of_torch(dtype):
    a, b = torch.randn(64).to(dtype), torch.randn(64).to(dtype)
    out = [torch.empty_like(a) for _ in range(5)] + [torch.empty(64, dtype=torch.bool)]
    arithmetic[(1,)](a, b, *out, 64)
    for got, want in zip(out, (a + b, a * b, a / b, torch.maximum(a, b), torch.where(a > b, -a, b), a < b)):
        assert torch.equal(got, want)


@triton.jit
def product(A, B, C, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a, b = tl.load(A + m[:, None] * K + k[None, :]), tl.load(B + n[None, :] * K + k[:, None])
    tl.store(
        C + m[:, None] * N + n[None, :],
        tl.dot(a, b, tl.full((M, N), 1.0, tl.float32), input_precision="ieee"),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_summed_in_fp32(dtype):
    a, b, c = torch.randn(16, 32).to(dtype), torch.randn(8, 32).to(dtype), torch.empty(16, 8)
    product[(1,)](a, b, c, 16, 8, 32)
    torch.testing.assert_close(c, a.float() @ b.float().t() + 1)


@triton.jit
def running_sum(X, Y, n, first, step):
    total = 0.0
    for i in range(first, n, step):
        total += tl.load(X + i).to(tl.float32)
    tl.store(Y, total.to(Y.dtype.element_ty))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_loop_with_run_time_bounds(dtype):
    x, y = torch.randn(50).to(dtype), torch.empty(1, dtype=dtype)
    running_sum[(1,)](x, y, 41, 2, 3)
    torch.testing.assert_close(y, x[2:41:3].float().sum()[None].to(dtype))


@triton.jit
def cast(X, Y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(Y + at, tl.load(X + at).to(Y.dtype.element_ty))


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_casts_round_to_nearest_even(dtype):
    """All that lies near two neighbouring values and their middle, subnormals included."""
    numbers, bits, step = (2**7, torch.uint8, 1) if dtype.itemsize == 1 else (2**15, torch.int16, 97)
    grid = torch.arange(numbers).to(bits).view(dtype).float()
    grid = grid[grid.isfinite()][::step]
    middle = (grid[1:].double() + grid[:-1].double()) / 2
    x = torch.cat([middle.float(), torch.nextafter(middle.float(), torch.tensor(0.0)), grid])
    x = torch.cat((x, -x))
    x = torch.nn.functional.pad(x, (0, (1 << (len(x) - 1).bit_length()) - len(x)))
    y, back = torch.empty_like(x, dtype=dtype), torch.empty_like(x)
    cast[(1,)](x, y, len(x))
    assert torch.equal(y.float(), x.to(dtype).float())
    cast[(1,)](y, back, len(x))
    assert torch.equal(back, y.float())


@triton.jit
def reductions(X, Y, N: tl.constexpr):
    x = tl.load(X + tl.arange(0, N))
    tl.store(Y, tl.max(x, 0).to(tl.float32))
    tl.store(Y + 1, tl.sum(x, 0).to(tl.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions_are_those_of_torch(dtype):
    x, y = -torch.rand(8).to(dtype), torch.empty(2)
    if dtype == torch.bfloat16:
        with pytest.raises(Exception, match="adds its bits"):
            reductions[(1,)](x, y, 8)
    else:
        reductions[(1,)](x, y, 8)
        assert torch.allclose(y[1], x.float().sum(), rtol=1e-3)
    assert y[0] == x.max()
