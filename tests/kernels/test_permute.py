"""Rows to experts and back: each the other's transpose, sums in fp32, places without a row."""

import pytest
import torch
from training import bound

from kernels.permute import permute, sum_rows, unpermute

T, K, D = 7, 3, 5  # tokens, choices of each, features


def test_without_rows_everything_is_0():
    slots = torch.full((T, K), -1)
    none = torch.empty(0, dtype=torch.long)
    x = torch.randn(T, D, requires_grad=True)
    y = unpermute(permute(x, none, slots, False), none, slots, False)
    assert torch.equal(y, torch.zeros(T, D))
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.zeros(T, D))


def test_sums_are_made_in_fp32():
    rows = torch.tensor([[256.0], [1.0], [1.0]]).bfloat16()
    assert sum_rows(rows, torch.tensor([[0, 1, 2]]), True).item() == 258  # one by one in bf16: 256


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


@pytest.mark.slow(every=14, core=["11-3-40-True-dtype0-1e-12-torch", "11-3-40-False-dtype2-0.004-torch"])
@pytest.mark.parametrize("way", ["torch", "triton"])
@pytest.mark.parametrize(
    "dtype, bound",
    [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)],
)
@pytest.mark.parametrize(
    "t, k, d, drop",
    [(11, 3, 40, False), (11, 3, 40, True), (5, 1, 2100, False), (300, 2, 1, True), (0, 2, 4, False)],
)
def test_rows_go_there_and_back_as_defined(request, way, dtype, bound, t, k, d, drop):
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


@pytest.mark.slow(every=2)
@pytest.mark.gpu("permute.sum_kernel")
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("way", [permute, unpermute])
def test_at_training_sizes(training, way, drop):
    """Forward and backward of one are the backward and forward of the other."""
    source, slots = routes(training.tokens, training.top_k, drop, training.device)
    tokens, rows = (training.randn(n, training.hidden) for n in (training.tokens, len(source)))
    gathers = way is permute
    training.check_function(
        lambda x: way(x, source, slots, not drop),
        lambda x: x[source] if gathers else definition(x, slots),
        {"x": tokens if gathers else rows},
        (rows if gathers else tokens,),
        {"y": 0.0 if gathers else bound(1), "dx": bound(1) if gathers else 0.0},
    )
