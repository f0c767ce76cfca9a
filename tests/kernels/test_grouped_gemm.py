"""Grouped GEMM against a GEMM an expert: uneven and empty experts, gradients in the buffers, now or later."""
import pytest
import torch

from kernels.grouped_gemm import grouped_dgrad, grouped_forward, grouped_linear, grouped_wgrad
from parallel.pipeline import Later

COUNTS = [[3, 0, 5, 1], [0, 0, 9, 0], [9, 0, 0, 0], [0, 0, 0, 0], [2, 2, 2, 3]]
N, O = 6, 10


def exact(x, w, counts):
    return torch.cat([rows @ part.t() for rows, part in zip(x.split(counts), w.view(len(counts), -1, x.shape[1]))])


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_against_one_gemm_an_expert(given, counts, dtype, bound):
    x, w, dy = (torch.randn(*s).to(dtype) for s in ((sum(counts), N), (len(counts) * O, N), (sum(counts), O)))
    kept, x1 = given(w, 1.0), x.clone().requires_grad_()
    x2, w2 = (t.double().requires_grad_() for t in (x, w))
    want = exact(x2, w2, counts)
    dx, dw = torch.autograd.grad(want, (x2, w2), dy.double())
    for _ in range(2):
        got = grouped_linear(x1, kept, counts)
        got.backward(dy)
    assert got.shape == want.shape and got.dtype == dtype and kept.grad is None
    for a, b in ((got, want), (x1.grad / 2, dx), ((kept.main_grad - 1) / 2, dw)):
        assert (a.double() - b).norm() <= bound * b.norm() + 1e-300
    for i, n in enumerate(counts):
        assert n or (kept.main_grad.view(len(counts), O, N)[i] == 1).all()  # an empty expert's gradient is what it was


def test_the_three_products_alone():
    counts, (x, w, dy) = [2, 0, 3], (torch.randn(5, N), torch.randn(3, O, N), torch.randn(5, O))
    assert torch.allclose(grouped_forward(x, w, counts), exact(x, w.view(-1, N), counts))
    assert torch.allclose(grouped_dgrad(dy, w, counts), torch.cat([dy[:2] @ w[0], dy[2:] @ w[2]]))
    into = torch.ones(3, O, N, dtype=torch.float64)
    grouped_wgrad(into, dy.double(), x.double(), counts)
    assert torch.allclose(into, 1 + torch.stack([dy[:2].t() @ x[:2], torch.zeros(O, N), dy[2:].t() @ x[2:]]).double(), atol=1e-5)


def test_gradcheck():
    x, w = torch.randn(5, 3, dtype=torch.float64, requires_grad=True), torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: grouped_linear(x, w, [4, 0, 0, 1]), (x, w))


def test_weight_gradient_put_off(given):
    """Inside an I nothing reaches the buffer; its W brings the same bits."""
    x, w, dy, counts = torch.randn(5, N), torch.randn(2 * O, N), torch.randn(5, O), [1, 4]
    now, put = given(w), given(w)
    put.later = Later()
    put.later.open, put.later.at = True, 3
    for weight in (now, put):
        grouped_linear(x.clone().requires_grad_(), weight, counts).backward(dy)
    assert now.main_grad.any() and not put.main_grad.any()
    put.later.run(3)
    assert torch.equal(now.main_grad, put.main_grad)
