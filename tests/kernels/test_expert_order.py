"""The order of experts, beside a stable sort."""

import pytest
import torch

from kernels import expert_order
from kernels.expert_order import order_by_expert


@pytest.mark.parametrize("way", ["torch", "triton"])
@pytest.mark.parametrize(
    "t, k, experts", [(1, 1, 1), (7, 2, 3), (50, 4, 8), (33, 8, 48), (40, 3, 130), (0, 2, 4)]
)
@pytest.mark.parametrize("kind", ["any", "one", "last"])
def test_beside_a_stable_sort(request, monkeypatch, way, t, k, experts, kind):
    """Chunks of 64 choices in blocks of 16 and 32: some full, one not, an expert in many of them."""
    device = torch.device("cpu")
    if way == "triton":
        device = request.getfixturevalue("interpreted")
        monkeypatch.setattr(expert_order, "CHUNK", 64)
        monkeypatch.setattr(expert_order, "TILE", 256)
    index = torch.randint({"any": 0, "one": 0, "last": experts - 1}[kind], experts, (t, k))
    if kind == "one":
        index[:] = experts // 2
    order = order_by_expert(index.to(device), experts)

    chosen = index.flatten().tolist()
    choices = sorted(range(t * k), key=lambda choice: chosen[choice])  # stable
    places = [choices.index(choice) for choice in range(t * k)]
    assert order.choices.source.tolist() == choices
    assert order.rows.source.tolist() == [choice // k for choice in choices]
    assert order.rows.slots.flatten().tolist() == order.choices.slots.flatten().tolist() == places
    assert order.rows.slots.shape == (t, k) and order.choices.slots.shape == (t * k, 1)
    assert order.rows_per_expert.tolist() == [chosen.count(expert) for expert in range(experts)]
    for numbers in (*order.rows[:2], *order.choices[:2], order.rows_per_expert):
        assert numbers.dtype == torch.int64


def test_a_chunk_as_large_as_on_a_gpu(interpreted):
    index = torch.randint(0, 64, (400, 8), device=interpreted)
    order = order_by_expert(index, 64)
    assert torch.equal(order.choices.source, index.flatten().argsort(stable=True))
    assert torch.equal(order.rows_per_expert, torch.bincount(index.flatten(), minlength=64))
