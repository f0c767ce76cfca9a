"""RMSNorm and LayerNorm against torch's, alone and with the residual add."""
import pytest
import torch
import torch.nn.functional as F

from kernels.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm

EPS = 1e-5


def case(dtype=torch.float64, shape=(2, 5, 7)):
    x, r = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in "xr")
    w, b = (torch.randn(shape[-1], dtype=dtype, requires_grad=True) for _ in "wb")
    return x, r, w, b


def definition(x, w, b):
    return F.rms_norm(x, w.shape, w, EPS) if b is None else F.layer_norm(x, w.shape, w, b, EPS)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_gradcheck(kind):
    x, r, w, b = case()
    one, two = (rms_norm, add_rms_norm) if kind == "rms" else (layer_norm, add_layer_norm)
    extra = (w,) if kind == "rms" else (w, b)
    assert torch.autograd.gradcheck(lambda x, *p: one(x, *p, EPS), (x, *extra))
    assert torch.autograd.gradcheck(lambda x, r, *p: two(x, r, *p, EPS), (x, r, *extra))


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_against_torch(kind, dtype, bound):
    x, r, w, b = (t.detach().to(dtype).requires_grad_() for t in case(shape=(3, 4, 65)))
    b = None if kind == "rms" else b
    exact = [None if t is None else t.detach().double().requires_grad_() for t in (x, r, w, b)]
    y, total = add_rms_norm(x, r, w, EPS) if b is None else add_layer_norm(x, r, w, b, EPS)
    want_total = exact[0] + exact[1]
    want = definition(want_total, exact[2], exact[3])
    dy, dt = torch.randn(3, 4, 65).to(dtype), torch.randn(3, 4, 65).to(dtype)
    leaves = [t for t in (x, r, w, b) if t is not None]
    got = (y, total, *torch.autograd.grad((y, total), leaves, (dy, dt)))
    should = (want, want_total, *torch.autograd.grad((want, want_total), [t for t in exact if t is not None],
                                                     (dy.double(), dt.double())))
    for a, c in zip(got, should):
        assert (a.double() - c).norm() <= bound * c.norm()


def test_a_part_that_nobody_uses():
    x, r, w, _ = case()
    y, total = add_rms_norm(x, r, w, EPS)
    assert torch.equal(torch.autograd.grad(total.sum(), x, retain_graph=True)[0], torch.ones_like(x))
    assert torch.autograd.grad(y.sum(), r)[0].shape == r.shape


def test_weight_gradients_go_to_the_buffers(given):
    x, _, w, b = case(torch.bfloat16)
    plain = torch.autograd.grad(layer_norm(x, w, b, EPS).sum(), (w, b))
    w2, b2 = given(w, 1.0), given(b, 2.0)
    for _ in range(2):
        layer_norm(x, w2, b2, EPS).sum().backward()
    assert w2.grad is None and b2.grad is None
    torch.testing.assert_close(w2.main_grad, 1 + 2 * plain[0].float(), rtol=0.02, atol=0.02)
    torch.testing.assert_close(b2.main_grad, 2 + 2 * plain[1].float(), rtol=0.02, atol=0.02)
