"""Every activation against torch's own operations, differentiated by autograd."""

import pytest
import torch
import torch.nn.functional as F
from definitions import check

from kernels.activations import ACTIVATIONS, get_activation


def halves(x):
    return x.chunk(2, -1)


def geglu(x):
    gate, up = halves(x)
    return F.gelu(gate, approximate="tanh") * up


def clamped_swiglu(x):
    """As gpt-oss has it."""
    gate, up = halves(x)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def limited_swiglu(x):
    """As Step 3.7 has it."""
    gate, up = halves(x)
    return F.silu(gate).clamp(max=7.0) * up.clamp(-7.0, 7.0)


def xielu(x, alpha_p=torch.zeros(1).double(), alpha_n=torch.zeros(1).double()):
    """arXiv 2411.13010"""
    above, below = F.softplus(alpha_p), 0.5 + F.softplus(alpha_n)
    return torch.where(x > 0, above * x * x, below * (torch.expm1(x.clamp(max=-1e-6)) - x)) + 0.5 * x


DEFINITIONS = {
    "swiglu": lambda x: F.silu(halves(x)[0]) * halves(x)[1],
    "geglu": geglu,
    "clamped_swiglu": clamped_swiglu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_erf": lambda x: x * torch.special.ndtr(x),
    "relu2": lambda x: F.relu(x) ** 2,
    "limited swiglu": limited_swiglu,
    "xielu": xielu,
}
EVERY = {**ACTIVATIONS, "limited swiglu": get_activation("swiglu", 7.0)}


def test_every_activation_has_a_definition():
    """No other proof sees a wrong backward: all layouts and one process have the same one."""
    missing = set(ACTIVATIONS) - set(DEFINITIONS)
    assert not missing, f"give DEFINITIONS a row for {missing}: the activation in torch's own operations"


@pytest.mark.parametrize(
    "name, weighted",
    [(name, weighted) for name in EVERY for weighted in (False, True)
     if not weighted or EVERY[name].weighted],
)
@pytest.mark.parametrize(
    "dtype, bound", [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 8e-3)]
)
def test_an_activation_is_its_definition(name, weighted, dtype, bound):
    activation, definition = EVERY[name], DEFINITIONS[name]
    wide = torch.promote_types(dtype, torch.float32)
    x = (5 * torch.randn(9, 14)).to(dtype).requires_grad_()
    if weighted:
        leaves = [x, torch.rand(9).to(wide).requires_grad_()]
        (y,) = check(activation.weighted, lambda x, w: definition(x) * w[:, None], leaves, bound)
    else:
        numbers = [torch.randn(1, dtype=wide, requires_grad=True) for _ in activation.learned]
        (y,) = check(activation.function, definition, [x, *numbers], bound)
    assert y.shape[-1] == (7 if activation.is_gated else 14)


@pytest.mark.parametrize("name", EVERY)
def test_gradients_far_from_zero(name):
    x = torch.tensor([[200.0, -200.0, 7.0, 1.0, 200.0, -7.0]], dtype=torch.float64, requires_grad=True)
    numbers = [torch.zeros(1, dtype=torch.float64) for _ in EVERY[name].learned]
    got, want = EVERY[name].function(x, *numbers), DEFINITIONS[name](x, *numbers)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        torch.autograd.grad(got.sum(), x)[0], torch.autograd.grad(want.sum(), x)[0])
