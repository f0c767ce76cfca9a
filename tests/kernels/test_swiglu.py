"""SwiGLU and GELU in Triton against torch's own operations, differentiated by autograd. (Without Triton:
test_activations.py.)
"""

import pytest
import torch
import torch.nn.functional as F
from definitions import check
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


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(
    "dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 6e-3), (torch.float16, 8e-4)]
)
@pytest.mark.parametrize("shape", [(2, 3, 74), (1, 2 * 2048 + 6), (0, 4)])
def test_triton_is_the_definition(interpreted, name, dtype, bound, shape):
    x = (3 * torch.randn(shape, device=interpreted)).to(dtype).requires_grad_()
    check(*PAIRS[name], [x], bound)


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
        ("torch", torch.bfloat16, 6e-3),
        ("triton", torch.float32, 1e-6),
        ("triton", torch.bfloat16, 6e-3),
        ("triton", torch.float16, 8e-4),
    ],
)
@pytest.mark.parametrize("m, f", [(5, 37), (3, 100), (0, 8)])
def test_a_weighted_swiglu_is_the_definition(request, monkeypatch, way, dtype, bound, m, f):
    monkeypatch.setattr(kernel, "BLOCK", 64)  # of 100 channels the last ones are a cut block
    device = request.getfixturevalue("interpreted") if way == "triton" else "cpu"
    x = (3 * torch.randn(m, 2 * f, device=device)).to(dtype).requires_grad_()
    weight = torch.rand(m, device=device).requires_grad_()  # a router's, in fp32
    check(weighted_swiglu, weighted_definition, [x, weight], bound)


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
