"""Biases of experts against an addition for each row, differentiated by autograd."""
import pytest
import torch

from kernels.expert_bias import add_expert_bias, members_of
from kernels.permute import RowOrder

COUNTS = [3, 0, 5, 1]
ROWS, EXPERTS, WIDTH, TOKENS = sum(COUNTS), len(COUNTS), 6, 5
EXPERT = torch.tensor([0, 0, 0, 2, 2, 2, 2, 2, 3])
DTYPES = [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]


def order() -> RowOrder:
    """Rows of 5 tokens, sorted by expert; the last token has one, the fourth none."""
    source = torch.tensor([0, 1, 2, 0, 1, 2, 4, 5, 1])
    slots = torch.full((6, 3), -1)
    taken = [0] * 6
    for row, token in enumerate(source.tolist()):
        slots[token, taken[token]] = row
        taken[token] += 1
    return RowOrder(source, slots, every_slot_filled=False)


@pytest.mark.parametrize("counts", [COUNTS, torch.tensor(COUNTS)], ids=["host", "device"])
@pytest.mark.parametrize("weighted, ordered", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("dtype, bound", DTYPES)
def test_against_one_addition_a_row(given, counts, weighted, ordered, dtype, bound):
    height, first = (6, 2) if ordered else (ROWS, 0)
    x = torch.randn(height, first + WIDTH).to(dtype)
    bias = torch.randn(EXPERTS * WIDTH).to(dtype)
    weight = torch.rand(ROWS).to(torch.promote_types(dtype, torch.float32))
    dy = torch.randn(height, first + WIDTH).to(dtype)
    kept = given(bias, 1.0)
    of_rows = order() if ordered else None

    # by hand, in fp64
    exact = [t.double().clone().requires_grad_() for t in (x, bias, weight)]
    factors = exact[2] if weighted else torch.ones(ROWS, dtype=torch.float64)
    rows = exact[1].view(EXPERTS, WIDTH)[EXPERT] * factors[:, None]
    added = torch.zeros(height, WIDTH, dtype=torch.float64)
    added = added.index_add(0, of_rows.source if of_rows else torch.arange(ROWS), rows)
    want = torch.cat((exact[0][:, :first], exact[0][:, first:] + added), 1)
    want_grads = torch.autograd.grad(want, exact[:2] + exact[2:] * weighted, dy.double())

    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    for _ in range(2):
        members = members_of(counts, ROWS, x, leaves[1] if weighted else None, of_rows)
        got = add_expert_bias(leaves[0] * 1, kept, members, first)
        got.backward(dy)
    assert got.dtype == dtype and kept.grad is None
    grads = [leaves[0].grad / 2, (kept.main_grad - 1) / 2] + [leaves[1].grad] * weighted
    if weighted:
        grads[2] = grads[2] / 2
    for a, b in zip((got, *grads), (want, *want_grads), strict=True):
        assert (a.double() - b).norm() <= bound * b.norm()


def test_the_first_gradient_of_a_step_overwrites_and_an_expert_without_rows_has_zeros(given):
    bias = given(torch.randn(EXPERTS * WIDTH), float("nan"), is_written=False)
    add_expert_bias(torch.randn(ROWS, WIDTH), bias, members_of(COUNTS, ROWS, bias)).sum().backward()
    want = torch.tensor(COUNTS, dtype=torch.float32).repeat_interleave(WIDTH)
    assert torch.equal(bias.main_grad, want)


def test_without_rows_no_bias_has_a_gradient(given):
    bias = given(torch.randn(EXPERTS * WIDTH), 0.0)
    got = add_expert_bias(torch.randn(0, WIDTH), bias, members_of([0] * EXPERTS, 0, bias))
    got.sum().backward()
    assert got.shape == (0, WIDTH) and not bias.main_grad.any()
