"""Fused head and cross entropy against F.cross_entropy on the whole logits."""
import pytest
import torch
import torch.nn.functional as F

from kernels.cross_entropy import IGNORE, linear_cross_entropy


def case(t=11, d=6, v=13, dtype=torch.float64):
    hidden = torch.randn(t, d, dtype=dtype, requires_grad=True)
    weight = torch.randn(v, d, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(0, v - 3, (t,))


def definition(hidden, weight, targets, scale, vocab):
    return F.cross_entropy((hidden @ weight.t())[:, :vocab].to(torch.promote_types(hidden.dtype, torch.float32)), targets,
                           ignore_index=IGNORE, reduction="sum") * scale


@pytest.mark.parametrize("chunk", [None, 1, 4, 11, 64])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
def test_loss_and_gradients(chunk, ignored):
    hidden, weight, y = case()
    y[{"none": slice(0), "some": slice(2, 5), "all": slice(None)}[ignored]] = IGNORE
    got = linear_cross_entropy(hidden, weight, y, 0.3, 10, chunk=chunk)  # rows 10, 11, 12 are padding
    want = definition(hidden, weight, y, 0.3, 10)
    torch.testing.assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got, (hidden, weight)), torch.autograd.grad(want, (hidden, weight))):
        torch.testing.assert_close(a, b)


def test_gradcheck():
    hidden, weight, y = case(5, 3, 7)
    y[1] = IGNORE
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, y, 0.5, 6, chunk=2), (hidden, weight))


def test_scale_may_live_on_the_device():
    hidden, weight, y = case()
    a, b = linear_cross_entropy(hidden, weight, y, torch.tensor(0.25), 13), linear_cross_entropy(hidden, weight, y, 0.25, 13)
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("size", [1.0, 300.0])  # 300: logits of thousands, whose exponentials overflow
def test_rounding(dtype, bound, size):
    hidden, weight, y = case(40, 32, 130)
    hidden, weight = ((x.detach() * size**0.5).to(dtype).requires_grad_() for x in (hidden, weight))
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    got, want = linear_cross_entropy(hidden, weight, y, 1 / 40, 128, chunk=16), definition(*exact, y, 1 / 40, 128)
    assert got.dtype == torch.float32
    assert abs(got - want) <= bound * want
    for a, b in zip(torch.autograd.grad(got, (hidden, weight)), torch.autograd.grad(want, exact)):
        assert (a.double() - b).norm() <= (bound if size == 1 else 20 * bound) * b.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradient_is_added_to_the_buffer_once(given, dtype):
    hidden, weight, y = case(dtype=dtype)
    plain = torch.autograd.grad(linear_cross_entropy(hidden, weight, y, 0.3, 10, chunk=4), weight)[0]
    kept = given(weight, 1.0)
    linear_cross_entropy(hidden, kept, y, 0.3, 10, chunk=4).backward()
    assert kept.grad is None
    torch.testing.assert_close(kept.main_grad - 1, plain.to(kept.main_grad.dtype), rtol=0.02 if dtype == torch.bfloat16 else 1e-9,
                               atol=0.02 if dtype == torch.bfloat16 else 1e-12)


def test_no_gradient_without_grad_mode(given):
    hidden, weight, y = case()
    kept = given(weight)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, kept, y, 1.0, 13)
    assert not loss.requires_grad and not kept.main_grad.any()


def test_vocabulary_in_two_parts():
    """Two ranks' halves, merged as a tensor-parallel head merges them, against the whole."""
    hidden, weight, y = case(11, 6, 14)
    y[3] = IGNORE
    want = linear_cross_entropy(hidden, weight, y, 0.3, 12)
    dh, dw = torch.autograd.grad(want, (hidden, weight))
    logits = (hidden @ weight.t()).detach()
    logits[:, 12:] = -torch.inf
    everywhere = torch.logsumexp(logits, 1), logits.gather(1, y.clamp(0)[:, None])[:, 0].where(y != IGNORE, 0.0)
    parts = []
    for start in (0, 7):
        at = iter(range(0, 11, 4))

        def merge(lse, picked, at=at):
            first = next(at)
            return everywhere[0][first:first + len(lse)], everywhere[1][first:first + len(lse)]

        half = weight[start:start + 7]
        got = linear_cross_entropy(hidden, half, y, 0.3, 12, start=start, merge=merge, chunk=4)
        torch.testing.assert_close(got, want)
        parts.append(torch.autograd.grad(got, (hidden, half)))
    torch.testing.assert_close(parts[0][0] + parts[1][0], dh)
    torch.testing.assert_close(torch.cat((parts[0][1], parts[1][1])), dw)
