"""Stochastic rounding: right on average, exact where bf16 is, never from a number to inf or NaN, the same
bits in torch and Triton.
"""

import pytest
import torch

from kernels.rounding import ElementIndex, place_bits, round_to_bf16, salt, stochastic_round
from kernels.triton_ import tl, triton

N, CPU = 200_000, torch.device("cpu")


def get_bits(stream: int, n: int = N) -> torch.Tensor:
    return ElementIndex(stream, 0, n, n).bits(0, n, CPU)


def many(x: float) -> torch.Tensor:
    """x rounded N times, as N elements of one tensor."""
    return stochastic_round(torch.full((N,), x), get_bits(salt(1, 2, "w"))).double()


def neighbours(x: float) -> tuple[float, float]:
    """The bf16 numbers next to x > 0, below and above."""
    raw = torch.tensor(x).view(torch.int32) & -0x10000
    return tuple(float(r.view(torch.float32)) for r in (raw, raw + 0x10000))


@pytest.mark.slow(every=6)
@pytest.mark.parametrize("x", [1.001, 0.3, 255.9, 1.9999, 1e-30, 3.1e-41, 1.7e38, 2 - 2**-20, 1 + 2**-14])
@pytest.mark.parametrize("sign", [1, -1])
def test_unbiased_and_only_to_the_neighbours(x, sign):
    x = float(torch.tensor(x))
    below, above = neighbours(x)
    got = many(sign * x) * sign
    assert set(got.unique().tolist()) <= {below, above}
    up = (x - below) / (above - below)
    assert abs(float((got == above).double().mean()) - up) < 5 * (up * (1 - up) / N) ** 0.5 + 1 / N
    assert x < 1.9 or above != 2.0 or (got == 2.0).any()  # carried into the next exponent


def test_what_bf16_holds_stays():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for key in "ab":
        got = stochastic_round(every.float(), get_bits(salt(1, 2, key), len(every)))
        assert torch.equal(got.nan_to_num(), every.nan_to_num())
        assert torch.equal(got.isnan(), every.isnan()) and torch.equal(got.isinf(), every.isinf())
    # NaNs whose low bits alone are set, and all of them
    odd = torch.tensor([0x7F800001, 0x7FFFFFFF, -1]).to(torch.int32).view(torch.float32)
    assert stochastic_round(odd, torch.full((3,), 0xFFFF)).isnan().all()


def test_bits_differ_between_streams_and_neighbours():
    bits = get_bits(salt(1, 2, "w"))
    others = [get_bits(stream) for stream in (salt(2, 2, "w"), salt(1, 3, "w"), salt(1, 2, "v"))]
    streams = (bits, bits.roll(1), *others)
    fields = [(b >> 16 * i & 0xFFFF).double() - 32767.5 for b in streams for i in range(3)]
    correlation = torch.corrcoef(torch.stack(fields))
    assert (correlation - torch.eye(len(fields), dtype=torch.float64)).abs().max() < 5 / N**0.5
    for f in fields:
        chi_square = ((torch.histc(f, 64) - N / 64) ** 2 / (N / 64)).sum()
        assert chi_square < 63 + 5 * 126**0.5  # of 63 degrees of freedom


def test_a_piece_has_the_bits_of_its_tensor():
    rows, columns = 7, 12
    whole = ElementIndex(5, 0, columns, columns).bits(0, rows * columns, CPU).view(rows, columns)
    own = whole[2:5, 3:7].flatten()
    first = 2 * columns + 3
    assert torch.equal(ElementIndex(5, first, 4, columns).bits(0, 12, CPU), own)
    assert torch.equal(ElementIndex(5, first, 4, columns).bits(5, 4, CPU), own[5:9])
    assert torch.equal(ElementIndex(5, first, 4, columns, skip=5).bits(1, 3, CPU), own[6:9])


@triton.jit
def rounding_kernel(
    X, OUT, BITS, n, salt, base, width, stride, skip, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = place_bits(at, salt, base, width, stride, skip, ROWS)
    tl.store(BITS + at, bits.to(tl.int64, bitcast=True), at < n)
    tl.store(OUT + at, round_to_bf16(tl.load(X + at, at < n), bits), at < n)


@pytest.mark.slow(every=2)
@pytest.mark.parametrize(
    "place",
    [
        ElementIndex(salt(1, 1, "w"), 0, 1, 1),
        ElementIndex(salt(1, 2, "w"), 12345, 7, 40, 3),
        ElementIndex(-1, 1 << 33, 100, 100),
        ElementIndex(1, 1, 1, 2),
    ],
    ids=str,
)
def test_triton_rounds_to_the_same_bits(interpreted, place):
    n = 300
    x = torch.randn(n, device=interpreted) * 10.0 ** torch.randint(-38, 38, (n,), device=interpreted)
    x[:5] = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0])
    out = torch.empty(n, dtype=torch.bfloat16, device=interpreted)
    bits = torch.empty(n, dtype=torch.int64, device=interpreted)
    p = place
    numbers = (p.salt, p.base, p.width, p.stride, p.skip)
    rounding_kernel[(5,)](x, out, bits, n, *numbers, ROWS=p.width != p.stride, BLOCK=64)
    want = place.bits(0, n, interpreted)
    assert torch.equal(bits, want)
    assert torch.equal(out.nan_to_num(7.0), stochastic_round(x, want).nan_to_num(7.0))
    assert torch.equal(out.isnan(), x.isnan())
