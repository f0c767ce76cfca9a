"""RMSNorm and LayerNorm against torch's, alone and with the residual add."""

import math

import pytest
import torch
import torch.nn.functional as F
from training import bound

from kernels.norm import add_norm, layer_norm, rms_norm

EPS = 1e-5
FUNCTIONS = {  # of x; and of x, its residual
    "rms": (rms_norm, lambda x, r, w, eps: add_norm(x, r, w, None, eps)),
    "layer": (layer_norm, add_norm),
}


def case(dtype=torch.float64, shape=(2, 5, 7)):
    x, r = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in "xr")
    w, b = (torch.randn(shape[-1], dtype=dtype, requires_grad=True) for _ in "wb")
    return x, r, w, b


def definition(x, w, b=None, eps=EPS):
    return F.rms_norm(x, w.shape, w, eps) if b is None else F.layer_norm(x, w.shape, w, b, eps)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_gradcheck(kind):
    x, r, w, b = case()
    one, two = FUNCTIONS[kind]
    extra = (w,) if kind == "rms" else (w, b)
    assert torch.autograd.gradcheck(lambda x, *p: one(x, *p, EPS), (x, *extra))
    assert torch.autograd.gradcheck(lambda x, r, *p: two(x, r, *p, EPS), (x, r, *extra))


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(
    "dtype, bound", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)]
)
def test_against_torch(kind, dtype, bound):
    x, r, w, b = (t.detach().to(dtype).requires_grad_() for t in case(shape=(3, 4, 65)))
    b = None if kind == "rms" else b
    exact = [None if t is None else t.detach().double().requires_grad_() for t in (x, r, w, b)]
    y, total = add_norm(x, r, w, b, EPS)
    want_total = exact[0] + exact[1]
    want = definition(want_total, exact[2], exact[3])
    dy, dt = torch.randn(3, 4, 65).to(dtype), torch.randn(3, 4, 65).to(dtype)
    leaves = [t for t in (x, r, w, b) if t is not None]
    got = (y, total, *torch.autograd.grad((y, total), leaves, (dy, dt)))
    should = (
        want,
        want_total,
        *torch.autograd.grad(
            (want, want_total), [t for t in exact if t is not None], (dy.double(), dt.double())
        ),
    )
    for a, c in zip(got, should):
        assert (a.double() - c).norm() <= bound * c.norm()


def test_a_part_that_nobody_uses():
    x, r, w, _ = case()
    y, total = add_norm(x, r, w, None, EPS)
    assert torch.equal(torch.autograd.grad(total.sum(), x, retain_graph=True)[0], torch.ones_like(x))
    assert torch.autograd.grad(y.sum(), r)[0].shape == r.shape


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("way", ["definition", "triton"])
def test_without_a_residual_x_comes_back_and_its_gradient_is_added(request, kind, way):
    """(norm(x), x): both gradients of x in one pass."""
    device = request.getfixturevalue("interpreted") if way == "triton" else torch.device("cpu")
    dtype = torch.float32 if way == "triton" else torch.float64
    x, _, w, b = (t.detach().to(device, dtype).requires_grad_() for t in case(shape=(3, 4, 65)))
    y, same = add_norm(x, None, w, None if kind == "rms" else b, EPS)
    assert torch.equal(same, x) and same.data_ptr() == x.data_ptr()
    assert y.grad_fn is same.grad_fn and y.grad_fn.triton == (way == "triton")
    want = definition(x, w, None if kind == "rms" else b)
    dy, dx = torch.randn_like(x), torch.randn_like(x)
    leaves = (x, w) if kind == "rms" else (x, w, b)
    got = torch.autograd.grad((y, same), leaves, (dy, dx))
    for a, c in zip(got, torch.autograd.grad((want, x * 1), leaves, (dy, dx))):
        torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-5)


def test_weight_gradients_go_to_the_buffers(given):
    x, _, w, b = case(torch.bfloat16)
    plain = torch.autograd.grad(layer_norm(x, w, b, EPS).sum(), (w, b))
    w2, b2 = given(w, 1.0), given(b, 2.0)
    for _ in range(2):
        layer_norm(x, w2, b2, EPS).sum().backward()
    assert w2.grad is None and b2.grad is None
    torch.testing.assert_close(w2.main_grad, 1 + 2 * plain[0].float(), rtol=0.02, atol=0.02)
    torch.testing.assert_close(b2.main_grad, 2 + 2 * plain[1].float(), rtol=0.02, atol=0.02)


def gradients(kind, leaves, dy, dt):
    """y, x + residual, and all gradients."""
    x, r, w, b = leaves
    y, total = add_norm(x, r, w, None if kind == "rms" else b, EPS)
    given = [t for t in leaves if t.requires_grad] if kind == "layer" else [x, r, w]
    return y, total, *torch.autograd.grad((y, total), given, (dy, dt))


@pytest.mark.slow(every=3)
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(
    "dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 0.003)]
)
@pytest.mark.parametrize("shape", [(2, 37, 48), (70, 129), (3, 4096), (1, 1, 1)])
def test_triton(interpreted, kind, dtype, bound, shape):
    leaves = [t.detach().to(interpreted, dtype).requires_grad_() for t in case(shape=shape)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    dy, dt = (torch.randn(shape, device=interpreted).to(dtype) for _ in "yt")
    got = gradients(kind, leaves, dy, dt)
    assert got[0].grad_fn.triton
    for a, c in zip(got, gradients(kind, exact, dy.double(), dt.double())):
        assert a.dtype == dtype and (a.double() - c).norm() <= bound * c.norm().clamp_min(0.1)


def test_triton_without_residual_on_strided_rows(interpreted):
    """The heads of q inside a merged qkv: no uniform row stride, so a copy is made, never a wrong read."""
    qkv, w = torch.randn(2, 3, 6, 16, device=interpreted), torch.randn(16, device=interpreted)
    q = qkv[:, :, 1:3].requires_grad_()
    got, want = rms_norm(q, w, EPS), F.rms_norm(q, (16,), w, EPS)
    torch.testing.assert_close(got, want)
    dy = torch.randn(2, 2, 3, 16, device=interpreted).transpose(1, 2)
    torch.testing.assert_close(*(torch.autograd.grad(y, q, dy)[0] for y in (got, want)))


def test_what_triton_has_no_kernel_for_is_said_once(interpreted, capfd):
    x, w = (
        torch.randn(2, 4, dtype=torch.float64, device=interpreted),
        torch.ones(4, dtype=torch.float64, device=interpreted),
    )
    for _ in range(2):
        torch.testing.assert_close(rms_norm(x, w, EPS), F.rms_norm(x, (4,), w, EPS))
    said = capfd.readouterr().err.splitlines()
    assert said == ["norm: no kernel for float64; the slower torch reference runs instead"]


@pytest.mark.slow(every=2)
@pytest.mark.gpu("norm.forward_kernel", "norm.backward_kernel")
@pytest.mark.parametrize("kind, where", [
    *((kind, where) for kind in ("rms", "layer") for where in ("alone", "after a residual")),
    ("rms", "heads"),
])
def test_at_training_sizes(training, kind, where):
    """A residual's sum is rounded once before the statistics. eps is large enough to matter in bf16."""
    eps = 0.1
    shape = training.tokens, training.hidden
    if where == "heads":
        shape = training.batch, training.seq, training.heads, training.head_dim
    rows = math.prod(shape[:-1])
    parameters = {"w": 1 + 0.1 * training.randn(shape[-1])}
    if kind == "layer":
        parameters["b"] = 0.1 * training.randn(shape[-1])

    one, two = FUNCTIONS[kind]
    tensors, dys = {"x": training.randn(*shape)}, [training.randn(*shape)]
    ours, exact = lambda x, *p: one(x, *p, eps), lambda x, *p: definition(x, *p, eps=eps)
    once = int(where == "after a residual")
    bounds = {"y": bound(1 + once), "dx": bound(1 + once), "dw": bound(once, rows), "db": bound(0, rows)}
    if once:
        tensors["r"] = training.randn(*shape)
        dys.append(training.randn(*shape))
        ours = lambda x, r, *p: two(x, r, *p, eps)
        exact = lambda x, r, *p: (definition(x + r, *p, eps=eps), x + r)
        bounds |= {"y1": bound(1), "dr": bound(2)}
    if kind == "rms":
        del bounds["db"]
    training.check_function(
        ours, exact, tensors | parameters, tuple(dys), bounds, weights=tuple(parameters)
    )
