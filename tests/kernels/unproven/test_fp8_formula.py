"""Results that their fp8 readers compute: the same 8 bits and scales as from a result in memory."""

import functools

import pytest
import torch
from test_fp8 import check_bits

from kernels import fp8, norm, swiglu
from kernels.fp8 import E4M3, E5M2
from kernels.fp8_linear import CASTS as PLAIN_CASTS
from kernels.fp8_linear import RECIPES, Fp8Scaling, scaled_linear
from kernels.linear import recompute_output
from kernels.unproven import fp8_norm, fp8_swiglu
from kernels.unproven.fp8_formula import (
    CASTS,
    find_origin_maxima,
    quantize_origin,
    quantize_origin_pair,
    quantize_transposed_origin,
)
from kernels.unproven.fp8_origin import Origin, Reader, find_origin

KINDS = ("tensor", "row", "group", "mx")
SHAPES = [(150, 96), (64, 128), (1, 32), (131, 160)]  # tails of strips, tiles and programs
SIDE = 32


def draw(*shape, device, dtype=torch.bfloat16):
    """Rows and columns of very different size; the largest element is in the last row and column."""
    rows, columns = (torch.logspace(*size) for size in ((-2, 1, shape[0]), (-1, 1, shape[1])))
    x = torch.randn(*shape, device=device) * rows[:, None].to(device) * columns.to(device)
    x[-1, -1] = 60.0
    return x.to(dtype)


@pytest.fixture
def small_tiles(interpreted, monkeypatch):
    """Several rows a tile and several tiles a program. Its value: the device."""
    if interpreted.type == "cpu":
        monkeypatch.setattr(norm, "TILE", 512)
    return interpreted


def norm_result(m, n, device, dtype, layer: bool, kind: str):
    """(the origin of an unwritten y, y)."""
    x, residual = (draw(m, n, device=device, dtype=dtype) for _ in range(2))
    weight, bias = ((torch.randn(n) + shift).to(device, dtype) for shift in (1, 3))
    args = x, residual, weight, bias if layer else None, 1e-5
    y, total, *statistics = fp8_norm.launch_deferred(*args, kind)
    assert y.isnan().all()
    want, want_total, *want_statistics = norm.launch_forward(*args)
    assert torch.equal(total, want_total)
    for one, other in zip(statistics, want_statistics):
        assert (one is None and other is None) or torch.equal(one, other)
    return find_origin(y), want


def rms_result(m, n, device, dtype, kind):
    return norm_result(m, n, device, dtype, False, kind)


def layer_result(m, n, device, dtype, kind):
    return norm_result(m, n, device, dtype, True, kind)


def swiglu_result(m, n, device, dtype, kind):
    gate_up = draw(m, 2 * n, device=device, dtype=dtype)
    return find_origin(fp8_swiglu.swiglu(gate_up, reader=Reader(kind, SIDE))), swiglu.launch_swiglu(gate_up)


def swiglu_gradient(m, n, device, dtype, kind):
    gate_up = draw(m, 2 * n, device=device, dtype=dtype).requires_grad_()
    dy = draw(m, n, device=device, dtype=dtype)
    y = fp8_swiglu.swiglu(gate_up, reader=Reader(kind, SIDE))
    (grad,) = torch.autograd.grad(y, gate_up, dy)
    assert grad.isnan().all()
    return find_origin(grad), swiglu.launch_swiglu_backward(dy, gate_up.detach())


RESULTS = (rms_result, layer_result, swiglu_result, swiglu_gradient)


def check_both_directions(origin, y, kind, bits):
    """Maxima, 8 bits and scales of an unwritten result, together and one by one, are those of y in memory."""
    maxima = find_origin_maxima(origin, kind, both=True)
    want_maxima = fp8.find_maxima(y, kind, both=True)
    if kind == "tensor":
        assert maxima.rows.amax() == y.abs().amax()
    if kind == "row":
        assert torch.equal(maxima.rows, want_maxima.rows)
        assert torch.equal(maxima.columns, want_maxima.columns)

    ahead, back = (fp8.quantize_reference(x, kind, bits, SIDE) for x in (y, y.t()))
    pair = quantize_origin_pair(origin, kind, bits, SIDE, maxima)
    check_bits(pair.ahead[:2], ahead)
    check_bits(pair.back[:2], back)
    check_bits(quantize_origin(origin, kind, bits, SIDE, maxima.rows)[:2], ahead)
    check_bits(quantize_transposed_origin(origin, kind, bits, SIDE, maxima.columns)[:2], back)


@pytest.mark.slow(
    core=[
        "torch.float16-torch.float8_e5m2-(1, 32)-swiglu_gradient-tensor",
        "torch.float16-torch.float8_e5m2-(1, 32)-rms_result-tensor",
    ],
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("result", RESULTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype, bits", [(torch.bfloat16, E4M3), (torch.float16, E5M2)], ids=str)
def test_the_bits_of_a_result_in_memory(small_tiles, kind, result, shape, dtype, bits):
    origin, y = result(*shape, small_tiles, dtype, kind)
    assert not origin.is_written and y.isfinite().all()
    check_both_directions(origin, y, kind, bits)


def check_at_training_sizes(training, make, kind):
    """The same 8 bits and scales of both directions. make() -> (the origin of an unwritten result, it)."""
    written = []

    def ours():
        torch.manual_seed(0)
        origin, y = make()
        written[:] = [y]
        pair = quantize_origin_pair(origin, kind, E4M3, fp8.BLOCK_SIDE,
                                    find_origin_maxima(origin, kind, both=True))
        return results(pair.ahead, pair.back)

    def definition():
        (y,) = written
        return results(*(fp8.quantize_reference(x, kind, E4M3) for x in (y, y.t())))

    def results(ahead, back):
        return {
            "q": ahead[0].view(torch.uint8),
            "scale": ahead[1],
            "q back": back[0].view(torch.uint8),
            "scale back": back[1],
        }

    training.check(ours, definition, dict.fromkeys(("q", "scale", "q back", "scale back"), 0.0))


@pytest.mark.slow(every=2)
@pytest.mark.gpu("unproven.fp8_formula.formula_cast_kernel")
@pytest.mark.parametrize("kind", ("tensor", "row"))
@pytest.mark.parametrize("result, width", [
    pytest.param(
        rms_result, "hidden",
        marks=pytest.mark.gpu("norm.forward_kernel", "unproven.fp8_norm.deferred_kernel"),
    ),
    pytest.param(
        swiglu_result, "ffn",
        marks=pytest.mark.gpu("unproven.fp8_formula.formula_maxima_kernel", "swiglu.swiglu_kernel"),
    ),
    pytest.param(
        swiglu_gradient, "ffn",
        marks=pytest.mark.gpu("unproven.fp8_formula.formula_maxima_kernel", "swiglu.swiglu_backward_kernel"),
    ),
])  # fmt: skip
def test_at_training_sizes(training, kind, result, width):
    shape = training.tokens, getattr(training, width)
    make = lambda: result(*shape, training.device, torch.bfloat16, kind)
    check_at_training_sizes(training, make, kind)


@pytest.mark.slow
@pytest.mark.parametrize("result", RESULTS, ids=lambda f: f.__name__)
def test_more_strips_than_a_cast_reads_parts(small_tiles, monkeypatch, result):
    monkeypatch.setattr(fp8, "MAX_PARTS", 2)
    origin, y = result(150, 96, small_tiles, torch.bfloat16, "tensor")
    pair = quantize_origin_pair(origin, "tensor", E4M3, SIDE, find_origin_maxima(origin, "tensor", both=True))
    check_bits(pair.back[:2], fp8.quantize_reference(y.t(), "tensor", E4M3))


# ---- a block's MLP: norm, projection, activation, projection ----------------------------------------------


def mlp(x, residual, weights, recipe, casts, *, recomputes: bool, layer: bool):
    """What model/block.py computes -> results, and the gradients of all that has one."""
    scaling = Fp8Scaling(recipe, SIDE, casts=casts)
    leaves = [x.detach().requires_grad_() for x in (x, residual, *weights)]
    x, residual, first, norm_weight, norm_bias, gate_up, down = leaves
    add_norm, activation = norm.add_norm, swiglu.swiglu
    if casts.matrix is find_origin:  # as model/unproven.py sets them
        reader = Reader(scaling.activation_kind, SIDE)
        add_norm = functools.partial(fp8_norm.add_norm, reader=reader)
        activation = functools.partial(fp8_swiglu.swiglu, reader=reader)

    def normalize(total, residual=None):
        return add_norm(total, residual, norm_weight, norm_bias if layer else None, 1e-5)

    x = scaled_linear(x, first, None, None, scaling)
    h, total = normalize(x, residual)
    if recomputes:
        h = recompute_output(h, lambda total: normalize(total)[0], total)
    made = scaled_linear(h, gate_up, None, None, scaling)
    activated = activation(made)
    if recomputes:
        activated = recompute_output(activated, activation, made)
    y = scaled_linear(activated, down, None, None, scaling)
    out = y + total
    grads = torch.autograd.grad(out, leaves, draw(*out.shape, device=out.device), allow_unused=not layer)
    return out.detach(), h.detach(), *grads


@pytest.mark.slow(core=["37-32-160-rowwise-False-False"])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("t, d, f", [(96, 64, 96), (37, 32, 160)])
def test_an_mlp_trains_with_the_same_bits(small_tiles, recipe, recomputes, layer, t, d, f):
    """Beside the path through memory, which reads every tensor for its maxima."""
    sizes = ((t, d), (t, d), (d, d), (1, d), (1, d), (2 * f, d), (d, f))
    x, residual, *weights = (draw(*size, device=small_tiles) for size in sizes)
    weights[1], weights[2] = weights[1][0], weights[2][0]
    reads = []  # of tensors in memory

    def counting(casts):
        def find_maxima(x, kind, *, both):
            maxima = casts.find_maxima(x, kind, both=both)
            if maxima.rows is not None and not (isinstance(x, Origin) and not x.is_written):
                reads.append(tuple(x.shape))
            return maxima

        return casts._replace(find_maxima=find_maxima)

    torch.manual_seed(1)
    want = mlp(x, residual, weights, recipe, counting(PLAIN_CASTS), recomputes=recomputes, layer=layer)
    without = len(reads)
    reads.clear()
    torch.manual_seed(1)
    got = mlp(x, residual, weights, recipe, counting(CASTS), recomputes=recomputes, layer=layer)
    # what is left: the first product's x and dy, and the last one's dy
    assert without - len(reads) == (3 if recipe in ("tensorwise", "rowwise") else 0), (without, reads)
    assert got[1].isnan().all() and not want[1].isnan().any()
    for index, (one, other) in enumerate(zip(got, want)):
        if index != 1 and other is not None:
            assert one.isfinite().all() and torch.equal(one, other), index
