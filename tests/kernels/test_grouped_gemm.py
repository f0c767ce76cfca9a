"""Grouped GEMM: the loop of GEMMs against einsum, and Triton's one launch against the loop."""
import pytest
import torch

from kernels import grouped_gemm as kernel
from kernels.grouped_gemm import grouped_linear

COUNTS = {"uneven": (5, 0, 17, 16, 1), "all to one": (0, 0, 39), "even": (16, 16), "none at the ends": (0, 7, 0)}


def case(counts, o, n, dtype):
    x = torch.randn(sum(counts), n).to(dtype).requires_grad_()
    weight = torch.randn(len(counts) * o, n).to(dtype).requires_grad_()
    return x, weight, torch.randn(sum(counts), o).to(dtype)


def definition(x, weight, counts):
    owner = torch.repeat_interleave(torch.arange(len(counts), device=x.device), torch.tensor(counts, device=x.device))
    return torch.einsum("mn,mon->mo", x, weight.view(len(counts), -1, x.shape[1])[owner])


@pytest.mark.parametrize("name", COUNTS)
def test_the_loop(name):
    x, weight, dy = case(COUNTS[name], 6, 10, torch.float64)
    got, want = grouped_linear(x, weight, COUNTS[name]), definition(x, weight, COUNTS[name])
    torch.testing.assert_close(got, want)
    for a, b in zip(*(torch.autograd.grad(y, (x, weight), dy) for y in (got, want))):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("o, n", [(40, 24), (16, 72)])
@pytest.mark.parametrize("on_device", [False, True])
def test_triton(interpreted, monkeypatch, given, name, dtype, o, n, on_device):
    if interpreted.type == "cpu":
        for table in ("TILE", "WGRAD"):
            monkeypatch.setattr(kernel, table, {"M": 16, "N": 32, "K": 16})
    counts = torch.tensor(COUNTS[name], device=interpreted) if on_device else COUNTS[name]
    x, weight, dy = (t.detach().to(interpreted) for t in case(COUNTS[name], o, n, dtype))
    leaves, exact = (x.requires_grad_(), given(weight, 1.0)), (x.detach().double().requires_grad_(), weight.double().requires_grad_())
    got, want = grouped_linear(leaves[0], leaves[1], counts), definition(*exact, COUNTS[name])
    assert got.grad_fn.triton
    got.backward(dy)
    want.backward(dy.double())
    rounding = {torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    assert (got - want).norm() <= rounding * want.norm()
    assert (leaves[0].grad - exact[0].grad).norm() <= rounding * exact[0].grad.norm()
    assert (leaves[1].main_grad - 1 - exact[1].grad).norm() <= 1e-6 * exact[1].grad.norm()  # fp32 throughout
    for i, count in enumerate(COUNTS[name]):
        assert count or (leaves[1].main_grad.view(len(COUNTS[name]), o, n)[i] == 1).all()


def test_triton_returns_a_plain_tensors_gradient(interpreted, monkeypatch):
    if interpreted.type == "cpu":
        for table in ("TILE", "WGRAD"):
            monkeypatch.setattr(kernel, table, {"M": 16, "N": 16, "K": 16})
    x, weight, dy = (t.detach().to(interpreted).requires_grad_() for t in case((3, 0, 4), 8, 16, torch.bfloat16))
    got = torch.autograd.grad(grouped_linear(x, weight, (3, 0, 4)), weight, dy)[0]
    want = torch.autograd.grad(definition(x.double(), weight.double(), (3, 0, 4)), weight, dy.double())[0]
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


def test_rows_that_the_copy_engine_cannot_read_take_the_loop(interpreted, capfd):
    x, weight, _ = (t.to(interpreted) for t in case((3, 4), 8, 7, torch.bfloat16))
    torch.testing.assert_close(grouped_linear(x, weight, (3, 4)), definition(x, weight, (3, 4)), rtol=0.02, atol=0.02)
    assert "not aligned to 16 bytes" in capfd.readouterr().err
