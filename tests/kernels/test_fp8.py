"""Quantization to fp8: bounds, scales, and the kernel's bits beside the definition's."""

import numpy as np
import pytest
import torch
from training import bound

from kernels import fp8
from kernels.fp8 import E4M3, E5M2, MAX_VALUE, SCALE_KINDS, dequantize, find_maxima, quantize, quantize_pair

SCALES = {"tensor": (1, 1), "row": (150, 1), "group": (150, 3), "block": (2, 3), "mx": (150, 3)}


def draw(m=150, n=300, dtype=torch.float32):
    x = torch.randn(m, n) * torch.logspace(-6, 6, m)[:, None]  # rows of very different size
    x[3] = 0.0
    return x.to(dtype)


@pytest.mark.parametrize("kind", SCALE_KINDS)
@pytest.mark.parametrize("dtype, bits", [(E4M3, 3), (E5M2, 2)])
def test_error_is_half_a_unit_in_the_last_place(kind, dtype, bits):
    x = draw()
    q, scale = quantize(x, kind, dtype)
    assert q.shape == x.shape and q.dtype == dtype and scale.shape == SCALES[kind]
    error, unit = (dequantize(q, scale, kind) - x).abs(), fp8.expand_scale(scale, x.shape, kind)
    smallest = torch.finfo(dtype).smallest_normal * 2.0**-bits  # the step of subnormals
    assert (error <= 1.001 * torch.maximum(x.abs() * 2.0 ** -(bits + 1), smallest * unit)).all()
    largest, end = q.float().abs().max(), MAX_VALUE[dtype]  # mx: scaled by a power of two
    assert end / 2 < largest <= end and (kind == "mx" or largest == end)
    assert (q[3].float() == 0).all() and scale.isfinite().all()


def test_smaller_blocks_keep_small_rows():
    x = draw()
    small = x[:64]
    error = {
        kind: ((dequantize(*quantize(x, kind), kind) - x)[:64].norm() / small.norm()).item()
        for kind in SCALE_KINDS
    }
    assert error["row"] < 0.04 and error["group"] < 0.04 and error["mx"] < 0.04 and error["tensor"] > 0.9


@pytest.mark.slow(every=24)
@pytest.mark.parametrize("kind", SCALE_KINDS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_triton_gives_the_same_bits(interpreted, kind, dtype, source):
    x = draw(dtype=torch.float32).clamp(-6e4, 6e4).to(source).to(interpreted)
    for part in (x, x[:129, :127], x[:1], x[:, :1], x.t(), x[:129, :127].t()):
        (q, scale), (want, want_scale) = (
            quantize(part, kind, dtype),
            fp8.quantize_reference(part, kind, dtype),
        )
        assert (
            torch.equal(q.view(torch.uint8), want.view(torch.uint8))
            and torch.equal(scale, want_scale)
            and q.is_contiguous()
        )


def check_bits(got, want):
    (q, scale), (want_q, want_scale) = got, want
    assert q.dtype == want_q.dtype and q.is_contiguous() and q.shape == want_q.shape
    assert torch.equal(q.view(torch.uint8), want_q.view(torch.uint8))
    assert scale.shape == want_scale.shape and torch.equal(scale, want_scale)


@pytest.mark.slow(every=24)
@pytest.mark.parametrize("kind", SCALE_KINDS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(150, 300), (129, 127), (1, 300), (150, 1), (256, 128)])
def test_one_read_gives_the_bits_of_both_directions(interpreted, kind, dtype, source, shape):
    x = draw(256).clamp(-6e4, 6e4).to(source).to(interpreted)[: shape[0], : shape[1]].contiguous()
    wide = draw(256, 400).to(source).to(interpreted)[: shape[0], 8 : 8 + shape[1]]  # a gap between rows
    for part in (x, wide.clamp(-6e4, 6e4)):
        ahead, back = quantize_pair(part, kind, dtype)
        check_bits(ahead, fp8.quantize_reference(part, kind, dtype))
        check_bits(back, fp8.quantize_reference(part.t(), kind, dtype))


@pytest.mark.parametrize("kind", SCALE_KINDS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_several_matrices_are_apart(interpreted, kind, dtype):
    """Experts: each matrix has its own scales, and its transpose its own rows."""
    size = torch.logspace(-2, 2, 3)[:, None, None]
    x = (draw(3 * 64, 96).view(3, 64, 96) * size).bfloat16().to(interpreted)
    both = quantize_pair(x, kind, dtype, 32)
    for matrices, (q, scale) in zip((x, x.transpose(1, 2)), both):
        of_each = zip(matrices, q.chunk(3), scale.chunk(3))
        for matrix, q_of_one, scale_of_one in of_each:
            check_bits((q_of_one, scale_of_one), fp8.quantize_reference(matrix, kind, dtype, 32))


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("kind", ["tensor", "row"])
def test_a_larger_maximum_is_taken_where_it_is_given(interpreted, kind):
    """As from other ranks; of a tensor in more parts than a cast reads itself, too."""
    x = draw(dtype=torch.bfloat16).to(interpreted)
    maxima = find_maxima(x, kind, both=True)
    assert torch.equal(maxima.rows.amax(), x.abs().amax().float())
    more = fp8.Maxima(*(2 * largest for largest in maxima))
    ahead, back = quantize_pair(x, kind, E4M3, maxima=more)
    check_bits(ahead, fp8.quantize_reference(x, kind, E4M3, largest=more.rows))
    check_bits(back, fp8.quantize_reference(x.t(), kind, E4M3, largest=more.columns))
    check_bits(quantize(x.t(), kind, E4M3, largest=more.columns), back)
    assert not torch.equal(ahead[1], quantize(x, kind, E4M3)[1])
    if kind == "tensor":
        parts = torch.linspace(0, float(more.rows.amax()), 3 * fp8.MAX_PARTS, device=interpreted)
        check_bits(quantize(x, kind, E4M3, largest=parts), ahead)


@pytest.mark.slow(every=16)
@pytest.mark.parametrize("kind", SCALE_KINDS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("sick", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(interpreted, monkeypatch, kind, dtype, sick):
    """Whatever multiplies it, the product is NaN; in kind mx an infinite one may stay infinite. A GPU's
    maximum of NaN and a number is the number; the interpreter's is NaN.
    """
    saturates = kind == "mx" and abs(sick) == float("inf")
    from triton.runtime.interpreter import InterpreterBuilder

    for name, function in (("create_maxnumf", np.fmax), ("create_minnumf", np.fmin)):
        monkeypatch.setattr(
            InterpreterBuilder, name, lambda self, a, b, function=function: self.binary_op(a, b, function)
        )
    x = draw().to(interpreted)
    x[70, 130] = sick
    ahead, back = quantize_pair(x, kind, dtype)
    found = [dequantize(*make(x, kind, dtype), kind)[70, 130] for make in (quantize, fp8.quantize_reference)]
    found += [dequantize(*ahead, kind)[70, 130], dequantize(*back, kind)[130, 70]]
    assert all(float(one) == sick if saturates else one.isnan() for one in found)


@pytest.mark.slow(every=3)
@pytest.mark.gpu("fp8.cast_kernel")
@pytest.mark.parametrize("kind", [
    pytest.param("tensor", marks=pytest.mark.gpu("fp8.largest_kernel")),
    pytest.param("row", marks=pytest.mark.gpu("fp8.maxima_kernel")),
    "group",
    "block",
    "mx",
])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_at_training_sizes(training, kind, dtype):
    """A matrix and its transposed view, with the definition's bits."""
    x = training.randn(training.tokens, training.inner)
    views = {"x": x, "x^T": x.t()}

    def results(function):
        found = {}
        for name, view in views.items():
            q, scale = function(view, kind, dtype)
            found |= {f"bits of {name}": q.view(torch.uint8), f"scale of {name}": scale}
            found[name] = dequantize(q, scale, kind)
        return found

    bounds = {f"{what} of {name}": 0.0 for what in ("bits", "scale") for name in views}
    training.check(
        lambda: results(quantize),
        lambda: results(fp8.quantize_reference) | {name: view.float() for name, view in views.items()},
        bounds | dict.fromkeys(views, bound(1, dtype=dtype)),
    )
