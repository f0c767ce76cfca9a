"""Rows to experts and back: each the other's transpose, sums in fp32, places without a row."""
import pytest
import torch

from kernels.permute import permute, sum_rows, unpermute

T, K, D = 7, 3, 5


def maps(dropped):
    """Every (token, choice) in a random order; some of them dropped."""
    pairs = torch.randperm(T * K)
    pairs = pairs[4:] if dropped else pairs
    slots = torch.full((T * K,), -1)
    slots[pairs] = torch.arange(len(pairs))
    return pairs // K, slots.view(T, K), not dropped


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_definition(dropped, dtype):
    source, slots, whole = maps(dropped)
    x, rows = torch.randn(T, D).to(dtype), torch.randn(len(source), D).to(dtype)
    assert torch.equal(permute(x, source, slots, whole), torch.stack([x[i] for i in source]))
    want = torch.zeros(T, D, dtype=torch.float64).index_add_(0, source, rows.double())
    assert torch.allclose(unpermute(rows, source, slots, whole), want.to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


@pytest.mark.parametrize("dropped", [False, True])
def test_gradcheck(dropped):
    source, slots, whole = maps(dropped)
    x, rows = (torch.randn(n, D, dtype=torch.float64, requires_grad=True) for n in (T, len(source)))
    assert torch.autograd.gradcheck(lambda x: permute(x, source, slots, whole), x)
    assert torch.autograd.gradcheck(lambda r: unpermute(r, source, slots, whole), rows)


def test_no_rows_at_all():
    slots = torch.full((T, K), -1)
    none = torch.empty(0, dtype=torch.long)
    x = torch.randn(T, D, requires_grad=True)
    y = unpermute(permute(x, none, slots, False), none, slots, False)
    assert torch.equal(y, torch.zeros(T, D))
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.zeros(T, D))


def test_sums_are_made_in_fp32():
    rows = torch.tensor([[256.0], [1.0], [1.0]]).bfloat16()
    assert sum_rows(rows, torch.tensor([[0, 1, 2]]), True).item() == 258  # one by one in bf16 it would stay 256
