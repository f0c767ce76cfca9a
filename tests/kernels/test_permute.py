"""Rows to their experts and back: against indexing, with holes, each the other's gradient."""
import pytest
import torch

from kernels.permute import permute, unpermute


def routes(t, k, drop, device):
    """source [m] and slots [t, k]; drop: some tokens lose some of their rows."""
    keep = torch.rand(t, k) < (0.6 if drop else 2)
    token, place = keep.nonzero(as_tuple=True)
    order = torch.randperm(len(token))
    slots = torch.full((t, k), -1)
    slots[token[order], place[order]] = torch.arange(len(order))
    return token[order].to(device), slots.to(device)


def definition(rows, slots):
    padded = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))  # -1 is the last
    return padded.double()[slots].sum(1)


@pytest.mark.parametrize("way", ["torch", "triton"])
@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
@pytest.mark.parametrize("t, k, d, drop", [(11, 3, 40, False), (11, 3, 40, True), (5, 1, 2100, False), (300, 2, 1, True), (0, 2, 4, False)])
def test_there_and_back(request, way, dtype, bound, t, k, d, drop):
    if way == "triton" and dtype == torch.float64:
        dtype, bound = torch.float32, 1e-6
    device = request.getfixturevalue("interpreted") if way == "triton" else torch.device("cpu")
    source, slots = routes(t, k, drop, device)
    x = torch.randn(t, d, device=device).to(dtype).requires_grad_()
    rows = permute(x, source, slots, not drop)
    assert torch.equal(rows, x[source])
    dy = torch.randn(len(source), d, device=device).to(dtype)
    dx = torch.autograd.grad(rows, x, dy)[0]
    want = definition(dy, slots)
    assert (dx.double() - want).norm() <= bound * want.norm()
    y = dy.clone().requires_grad_()
    back = unpermute(y, source, slots, not drop)
    assert torch.equal(back, dx)
    dt = torch.randn(t, d, device=device).to(dtype)
    assert torch.equal(torch.autograd.grad(back, y, dt)[0], dt[source])
