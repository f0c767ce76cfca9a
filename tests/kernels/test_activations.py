"""Every activation against torch's own operations, differentiated by autograd."""
import pytest
import torch
import torch.nn.functional as F

from kernels.activations import ACTIVATIONS, activation_of


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
EVERY = {**ACTIVATIONS, "limited swiglu": activation_of("swiglu", 7.0)}


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
def test_against_torch(name, weighted, dtype, bound):
    x = (5 * torch.randn(9, 14)).to(dtype).requires_grad_()
    weight = torch.rand(9).to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    exact = x.detach().double().requires_grad_()
    exact_weight = weight.detach().double().requires_grad_()

    activation = EVERY[name]
    numbers = [torch.randn(1, dtype=weight.dtype, requires_grad=True) for _ in activation.learned]
    exact_numbers = [number.detach().double().requires_grad_() for number in numbers]
    if weighted:
        got, want = activation.weighted(x, weight), DEFINITIONS[name](exact) * exact_weight[:, None]
        leaves, exact_leaves = (x, weight), (exact, exact_weight)
    else:
        got, want = activation.function(x, *numbers), DEFINITIONS[name](exact, *exact_numbers)
        leaves, exact_leaves = (x, *numbers), (exact, *exact_numbers)
    dy = torch.randn(want.shape).to(dtype)
    grads = torch.autograd.grad(got, leaves, dy)
    exact_grads = torch.autograd.grad(want, exact_leaves, dy.double())

    assert got.shape[-1] == (7 if activation.is_gated else 14)
    assert got.dtype == dtype and all(a.dtype == leaf.dtype for a, leaf in zip(grads, leaves))
    for a, b in zip((got, *grads), (want, *exact_grads)):
        assert (a.double() - b).norm() <= bound * b.norm()


@pytest.mark.parametrize("name", EVERY)
def test_gradients_far_from_zero(name):
    x = torch.tensor([[200.0, -200.0, 7.0, 1.0, 200.0, -7.0]], dtype=torch.float64, requires_grad=True)
    numbers = [torch.zeros(1, dtype=torch.float64) for _ in EVERY[name].learned]
    got, want = EVERY[name].function(x, *numbers), DEFINITIONS[name](x, *numbers)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        torch.autograd.grad(got.sum(), x)[0], torch.autograd.grad(want.sum(), x)[0])
