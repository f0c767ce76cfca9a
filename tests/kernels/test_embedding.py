"""The gradient of an embedding: rows of equal ids are summed in fp32, in the order of their tokens, and added
to what is there.
"""

import pytest
import torch
from training import bound

from kernels import embedding as kernel
from kernels.embedding import add_rows, embedding

IDS = {
    "some twice": [3, 0, 3, 5, 0, 3, 6],
    "all equal": [2] * 7,
    "all different": [6, 1, 0, 5, 2, 4, 3],
    "one": [4],
    "first and last": [0, 6, 0, 6, 6],
}
V = 7


def expected(into, ids, dy):
    """The sum in fp64."""
    return into.double().index_add(0, ids, dy.double())


@pytest.mark.slow(every=20)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [1, 5, 64, 1500])  # the last is more than a program's columns
@pytest.mark.parametrize("name", IDS)
def test_triton_sums_rows_of_equal_ids(interpreted, name, d, dtype):
    ids = torch.tensor(IDS[name], device=interpreted)
    dy = torch.randn(len(ids), d, device=interpreted).to(dtype)
    into = torch.randn(V, d, device=interpreted)
    want = expected(into, ids, dy)
    got = kernel.launch_add_rows(into.clone(), ids, dy)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
    assert torch.equal(add_rows(into.clone(), ids, dy, into.shape), got)
    untouched = [row for row in range(V) if row not in IDS[name]]
    assert torch.equal(got[untouched], into[untouched])


def test_triton_runs_longer_than_a_tile(interpreted, monkeypatch):
    monkeypatch.setattr(kernel, "MAX_ROWS", 4)
    ids = torch.tensor([1] * 9 + [2] * 4 + [3] * 5, device=interpreted)[torch.randperm(18)]
    dy = torch.randn(18, 6, device=interpreted)
    into = torch.zeros(V, 6, device=interpreted)
    got = kernel.launch_add_rows(into.clone(), ids, dy)
    torch.testing.assert_close(got.double(), expected(into, ids, dy), rtol=1e-6, atol=1e-6)


def test_a_weight_without_a_buffer_has_a_gradient_of_its_dtype(interpreted):
    """A plain weight gets its gradient in its own dtype, rounded once."""
    ids = torch.tensor(IDS["some twice"], device=interpreted)
    weight = torch.randn(V, 12, device=interpreted).bfloat16().requires_grad_()
    y = embedding(ids[None], weight)
    dy = torch.randn_like(y)
    y.backward(dy)
    want = expected(torch.zeros(V, 12), ids, dy[0])
    assert torch.equal(weight.grad, want.bfloat16())


def test_without_tokens_nothing_is_added(interpreted):
    into = torch.ones(V, 3, device=interpreted)
    none = torch.zeros(0, dtype=torch.long, device=interpreted)
    assert torch.equal(add_rows(into.clone(), none, torch.zeros(0, 3, device=interpreted), into.shape), into)


@pytest.mark.gpu("embedding.add_rows_kernel")
def test_at_training_sizes(training):
    """Frequent ids have many rows to add."""
    shape = training.batch, training.seq
    frequent = torch.randint(3, shape, device=training.device)
    spread = torch.randint(training.vocab, shape, device=training.device)
    ids = torch.where(torch.rand(shape, device=training.device) < 0.5, frequent, spread)
    training.check_function(
        lambda weight: embedding(ids, weight),
        lambda weight: torch.nn.functional.embedding(ids, weight),
        {"weight": training.randn(training.vocab, training.hidden)},
        (training.randn(*shape, training.hidden),),
        {"y": 0.0, "dweight": bound(0, training.tokens)},
        weights=("weight",),
    )
