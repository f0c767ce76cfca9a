"""A weight in 8 bits: quantized once while its owner says that it stays, and never used after that; and what
a layer launches.
"""

from collections import Counter

import pytest
import torch

from kernels import fp8, fp8_linear, triton_
from kernels.fp8_linear import RECIPES, Fp8Scaling, scaled_linear
from kernels.fp8_weight import QuantizedWeight

SIDE = 32


def trained(x, weight, dy, recipe):
    """-> y, dx."""
    x = x.detach().requires_grad_()
    y = scaled_linear(x, weight, None, None, Fp8Scaling(recipe, SIDE))
    (dx,) = torch.autograd.grad(y, x, dy)
    return y.detach(), dx


def drawn(dtype=torch.bfloat16):
    return (torch.randn(size).to(dtype) for size in ((64, 96), (128, 96), (64, 128)))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_kept_weight_is_quantized_once(monkeypatch, recipe):
    calls = Counter()
    for name in ("quantize_operand_pair", "find_maxima"):
        function = getattr(fp8_linear, name)

        def counted(x, *args, function=function, name=name, **kwargs):
            calls[name] += x.shape == (128, 96)  # the weight's
            return function(x, *args, **kwargs)

        monkeypatch.setattr(fp8_linear, name, counted)
    x, weight, dy = drawn()
    want = trained(x, weight, dy, recipe)
    assert calls == {"quantize_operand_pair": 2, "find_maxima": 2}  # nobody keeps it: forward and backward

    calls.clear()
    weight.quantized = QuantizedWeight()
    for _ in range(3):
        for got, expected in zip(trained(x, weight, dy, recipe), want):
            assert torch.equal(got, expected)
    assert calls == {"quantize_operand_pair": 1, "find_maxima": 1}

    weight.quantized.free()  # what the scales are computed from stays
    assert torch.equal(trained(x, weight, dy, recipe)[0], want[0])
    assert calls == {"quantize_operand_pair": 2, "find_maxima": 1}


@pytest.mark.parametrize("recipe", RECIPES)
def test_after_drop_the_new_values_are_used(recipe):
    x, weight, dy = drawn()
    weight.quantized = QuantizedWeight()
    old = trained(x, weight, dy, recipe)
    weight.mul_(-3)
    assert torch.equal(trained(x, weight, dy, recipe)[0], old[0])  # the owner has not said so
    weight.quantized.drop()
    fresh = trained(x, weight.clone(), dy, recipe)
    for got, want, before in zip(trained(x, weight, dy, recipe), fresh, old):
        assert torch.equal(got, want) and not torch.equal(got, before)


# what a layer of one linear launches to quantize: in a forward and backward whose weight is kept
LAUNCHES = {
    "tensorwise": {"largest_kernel": 2, "cast_kernel": 2},  # x, dy
    "rowwise": {"maxima_kernel": 2, "cast_kernel": 2},
    "blockwise": {"cast_kernel": 2},
    "mxfp8": {"cast_kernel": 2},
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_launches(interpreted, monkeypatch, given, recipe):
    """Each of x and dy: one pass that finds what its scales need, if they are not its tiles' own, and one
    that writes it in both directions. A weight the same, once.
    """
    launched = count_launches(monkeypatch)
    x, weight, dy = (t.to(interpreted) for t in drawn())
    weight = given(weight)
    weight.quantized = QuantizedWeight()
    trained(x, weight, dy, recipe)
    launched.clear()
    trained(x, weight, dy, recipe)
    assert launched == LAUNCHES[recipe]
    weight.quantized.drop()
    launched.clear()
    trained(x, weight, dy, recipe)
    assert launched == {name: 3 * count // 2 for name, count in LAUNCHES[recipe].items()}


def count_launches(monkeypatch) -> Counter:
    """{kernel of kernels/fp8.py: how often it is launched from now on}."""
    launched = Counter()

    class Counting:
        def __init__(self, name):
            self.name, self.kernel = name, getattr(fp8, name)

        def __getitem__(self, grid):
            launched[self.name] += 1
            return self.kernel[grid]

    for name in ("largest_kernel", "maxima_kernel", "cast_kernel"):
        monkeypatch.setattr(fp8, name, Counting(name))
    return launched


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tokens, features, outputs", [(48, 96, 80), (80, 32, 208)])
def test_a_layer_through_the_kernels_is_the_definition(
    interpreted, monkeypatch, given, recipe, tokens, features, outputs
):
    """x, W and dy in sizes that fill no tile; blocks of 16, which only the definition multiplies."""
    sizes = (tokens, features), (outputs, features), (tokens, outputs)
    x, weight, dy = (torch.randn(size).bfloat16().to(interpreted) for size in sizes)

    def results():
        leaf = x.clone().requires_grad_()
        kept = given(weight, 1.0)
        y = scaled_linear(leaf, kept, None, None, Fp8Scaling(recipe, 16))
        y.backward(dy)
        return y.detach(), leaf.grad, kept.main_grad

    with monkeypatch.context() as without_kernels:
        without_kernels.setattr(triton_, "DEVICES", ())
        want = results()
    for ours, definition in zip(results(), want):
        torch.testing.assert_close(ours, definition, rtol=4e-3, atol=1e-2)
