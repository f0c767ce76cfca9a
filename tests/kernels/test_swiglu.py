"""SwiGLU and GELU against torch's own operations, differentiated by autograd."""

import pytest
import torch
import torch.nn.functional as F
from training import bound

from kernels import swiglu as kernel
from kernels.swiglu import gelu, swiglu, weighted_swiglu

DEFINITIONS = {
    "swiglu": lambda x: F.silu(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :],
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
}


def weighted_definition(x, weight):
    return DEFINITIONS["swiglu"](x) * weight[:, None]


PAIRS = {"swiglu": (swiglu, DEFINITIONS["swiglu"]), "gelu": (gelu, DEFINITIONS["gelu"])}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(
    "dtype, bound", [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 6e-3)]
)
def test_against_torch(name, dtype, bound):
    ours, definition = PAIRS[name]
    x = (3 * torch.randn(3, 5, 14)).to(dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    got, want = ours(x), definition(exact)
    dy = torch.randn(want.shape).to(dtype)
    for a, b in (
        (got, want),
        (torch.autograd.grad(got, x, dy)[0], torch.autograd.grad(want, exact, dy.double())[0]),
    ):
        assert a.dtype == dtype and (a.double() - b).norm() <= bound * b.norm()


@pytest.mark.parametrize("name", PAIRS)
def test_gradcheck(name):
    assert torch.autograd.gradcheck(
        PAIRS[name][0], torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    )


def test_far_from_zero():
    x = torch.tensor([[200.0, -200.0, 1.0, 1.0]], requires_grad=True)
    y = swiglu(x)
    assert y.tolist() == [[200.0, 0.0]]
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [[1.0, 0.0, 200.0, 0.0]]


def test_weighted():
    """Times a number a row, whose gradient is the row's product."""
    x, w = (
        torch.randn(4, 6, dtype=torch.float64, requires_grad=True),
        torch.randn(4, dtype=torch.float64, requires_grad=True),
    )
    assert torch.allclose(weighted_swiglu(x, w), swiglu(x) * w[:, None])
    assert torch.autograd.gradcheck(weighted_swiglu, (x, w))
    low = weighted_swiglu(x.detach().bfloat16().requires_grad_(), w.detach().float().requires_grad_())
    dx, dw = torch.autograd.grad(low.sum(), low.grad_fn.saved_tensors)
    assert low.dtype == dx.dtype == torch.bfloat16 and dw.dtype == torch.float32


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(
    "dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 6e-3), (torch.float16, 8e-4)]
)
@pytest.mark.parametrize("shape", [(2, 3, 74), (1, 2 * 2048 + 6), (0, 4)])
def test_triton(interpreted, name, dtype, bound, shape):
    ours, definition = PAIRS[name]
    x = (3 * torch.randn(shape, device=interpreted)).to(dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    got, want = ours(x), definition(exact)
    dy = torch.randn(want.shape, device=interpreted).to(dtype)
    for a, b in (
        (got, want),
        (torch.autograd.grad(got, x, dy)[0], torch.autograd.grad(want, exact, dy.double())[0]),
    ):
        assert a.dtype == dtype and a.shape == b.shape and (a.double() - b).norm() <= bound * b.norm()


@pytest.mark.parametrize("name", PAIRS)
def test_triton_on_strided_input_and_far_from_zero(interpreted, name):
    x = (
        torch.tensor([[200.0, -200.0, 1.0, 0.0], [-90.0, 90.0, 1.0, 1.0]], device=interpreted)
        .repeat(3, 2)[::2, ::2]
        .requires_grad_()
    )
    got, want = (f(x) for f in PAIRS[name])
    dy = torch.ones(1, device=interpreted).expand_as(want)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, dy)[0] for y in (got, want)))


@pytest.mark.parametrize(
    "way, dtype, bound",
    [
        ("torch", torch.float64, 1e-12),
        ("torch", torch.bfloat16, 6e-3),
        ("triton", torch.float32, 1e-6),
        ("triton", torch.bfloat16, 6e-3),
        ("triton", torch.float16, 8e-4),
    ],
)
@pytest.mark.parametrize("m, f", [(5, 37), (3, 100), (0, 8)])
def test_weighted_either_way(request, monkeypatch, way, dtype, bound, m, f):
    monkeypatch.setattr(kernel, "BLOCK", 64)  # of 100 channels the last ones are a cut block
    device = request.getfixturevalue("interpreted") if way == "triton" else "cpu"
    x = (3 * torch.randn(m, 2 * f, device=device)).to(dtype).requires_grad_()
    weight = (
        torch.rand(m, device=device).to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    )  # a router's, in fp32
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    got, want = weighted_swiglu(x, weight), weighted_definition(*exact)
    dy = torch.randn(want.shape, device=device).to(dtype)
    for a, b in zip(
        (got, *torch.autograd.grad(got, (x, weight), dy)),
        (want, *torch.autograd.grad(want, exact, dy.double())),
    ):
        assert a.shape == b.shape and (a.double() - b).norm() <= bound * b.norm()


KERNELS = {
    "swiglu": ("swiglu.swiglu_kernel", "swiglu.swiglu_backward_kernel"),
    "weighted": ("swiglu.swiglu_kernel", "swiglu.weighted_backward_kernel"),
    "gelu": ("swiglu.gelu_kernel", "swiglu.gelu_backward_kernel"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.gpu(*kernels)) for name, kernels in KERNELS.items()]
)
def test_at_training_sizes(training, name):
    ours, exact = (PAIRS | {"weighted": (weighted_swiglu, weighted_definition)})[name]
    width = training.ffn * (1 if name == "gelu" else 2)
    tensors = {"x": training.randn(training.tokens, width)}
    bounds = {"y": bound(1), "dx": bound(1)}
    if name == "weighted":
        tensors["weight"] = torch.rand(training.tokens, device=training.device)
        bounds["dweight"] = bound(0, training.ffn)
    dy = training.randn(training.tokens, training.ffn)
    training.check_function(ours, exact, tensors, (dy,), bounds)
