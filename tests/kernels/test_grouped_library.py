"""Grouped products by torch's library: tried first, named if it fails, and used where rows lie in order."""

import pytest
import torch

from kernels import grouped_library
from kernels.grouped_gemm import grouped_linear
from kernels.permute import RowOrder

BF16 = torch.bfloat16
CPU = torch.device("cpu")


@pytest.fixture
def library(small_products, monkeypatch):
    """torch._grouped_mm, on the CPU too. Its value: the calls that it has had."""
    grouped_library.library_multiplies.cache_clear()
    monkeypatch.setattr(grouped_library, "DEVICES", ("cuda", "cpu"))
    real, calls = torch._grouped_mm, []
    monkeypatch.setattr(torch, "_grouped_mm", lambda *args, **how: calls.append(how) or real(*args, **how))
    yield calls
    grouped_library.library_multiplies.cache_clear()


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("counts", [(5, 0, 17, 16, 1), (0, 0, 39), (0, 7, 0)], ids=str)
@pytest.mark.parametrize("o, n", [(40, 24), (16, 72)])
def test_beside_a_product_an_expert(library, interpreted, given, counts, o, n):
    m = sum(counts)
    x = torch.randn(m, n, device=interpreted).to(BF16).requires_grad_()
    weight = torch.randn(len(counts) * o, n, device=interpreted).to(BF16)
    dy = torch.randn(m, o, device=interpreted).to(BF16)
    assert grouped_library.library_multiplies(x.device, BF16)
    library.clear()
    kept = given(weight)
    y = grouped_linear(x, kept, counts)
    y.backward(dy)
    assert len(library) == 2  # forward, and the gradient of the input

    exact, exact_weight = (z.detach().double().requires_grad_() for z in (x, weight))
    parts = zip(exact.split(counts), exact_weight.view(len(counts), o, n))
    want = torch.cat([rows @ expert.t() for rows, expert in parts])
    want.backward(dy.double())
    assert (y - want).norm() <= 4e-3 * want.norm()
    assert (x.grad - exact.grad).norm() <= 4e-3 * exact.grad.norm()
    assert (kept.main_grad - exact_weight.grad).norm() <= 1e-6 * exact_weight.grad.norm()  # not in 16 bits


def test_rows_of_tokens_are_not_its_own(library, interpreted):
    """It takes what lies in order: of a gathering product, the gradient; of a combining one, the forward."""
    order = RowOrder(torch.tensor([2, 0, 1, 0, 2, 1]), torch.tensor([[1, 3], [2, 5], [0, 4]]))
    order = order._replace(source=order.source.to(interpreted), slots=order.slots.to(interpreted))
    assert grouped_library.library_multiplies(interpreted, BF16)
    for rows, how in ((3, {"gather": order}), (6, {"combine": order})):
        x = torch.randn(rows, 16, device=interpreted).to(BF16).requires_grad_()
        weight = torch.randn(2 * 16, 16, device=interpreted).to(BF16)
        library.clear()
        grouped_linear(x, weight, (4, 2), **how).sum().backward()
        assert len(library) == 1


def broken(x, matrices, offs):
    """As some have been: the rows after an expert without rows are another's."""
    counts = offs.diff(prepend=offs.new_zeros(1))
    return torch.cat([rows @ matrices[-1] for rows in x.split(counts.tolist())])


def absent(x, matrices, offs):
    raise RuntimeError("grouped gemm is not supported\non this chip")


@pytest.mark.parametrize("function, line", [
    (broken, "a wrong result"),
    (absent, "grouped gemm is not supported"),
    (lambda x, matrices, offs: (x.float() @ matrices[0].float()), "a wrong result"),
])
def test_one_that_fails_the_trial_is_named_and_not_used(library, monkeypatch, capfd, function, line):
    monkeypatch.setattr(torch, "_grouped_mm", function)
    assert not grouped_library.library_multiplies(CPU, BF16)
    assert f"({line}); our own kernel runs instead" in capfd.readouterr().err


def test_other_chips_and_dtypes_are_not_tried(library, monkeypatch):
    assert not grouped_library.library_multiplies(CPU, torch.float16)
    monkeypatch.setattr(grouped_library, "chip_name", lambda _: 10)
    assert not grouped_library.library_multiplies(CPU, BF16)
    assert not library
