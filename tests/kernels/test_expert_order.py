"""The order of experts, beside a stable sort."""

import pytest
import torch

from kernels import expert_order
from kernels.expert_order import order_by_expert


def get_numbers(order):
    """All that order_by_expert returns."""
    rows, choices, counts = order
    found = {"tokens": rows.source, "slots": rows.slots, "choices": choices.source}
    return found | {"places": choices.slots, "counts": counts}


def definition(index, experts):
    """A stable sort of the choices."""
    choices = index.flatten().sort(stable=True).indices
    slots = choices.argsort().view(index.shape)
    counts = torch.bincount(index.flatten(), minlength=experts)
    found = {"tokens": choices // index.shape[1], "slots": slots, "choices": choices}
    return found | {"places": slots.view(-1, 1), "counts": counts}


@pytest.mark.slow(every=12)
@pytest.mark.parametrize("way", ["torch", "triton"])
@pytest.mark.parametrize(
    "t, k, experts", [(1, 1, 1), (7, 2, 3), (50, 4, 8), (33, 8, 48), (40, 3, 130), (0, 2, 4)]
)
@pytest.mark.parametrize("kind", ["any", "one", "last"])
def test_the_order_is_that_of_a_stable_sort(request, monkeypatch, way, t, k, experts, kind):
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

    found = get_numbers(order)
    for name, want in definition(index, experts).items():
        assert torch.equal(found[name].cpu(), want) and found[name].dtype == torch.int64, name


@pytest.mark.gpu("expert_order.count_kernel", "expert_order.place_kernel")
def test_at_training_sizes(training):
    """Some experts are chosen more often."""
    appeal = torch.linspace(0, 0.5, training.experts, device=training.device)
    numbers = torch.rand(training.tokens, training.experts, device=training.device) + appeal
    index = numbers.argsort(-1)[:, : training.top_k].contiguous()
    training.check(
        lambda: get_numbers(order_by_expert(index, training.experts)),
        lambda: definition(index, training.experts),
        dict.fromkeys(("tokens", "slots", "choices", "places", "counts"), 0.0),
    )


def test_a_chunk_as_large_as_on_a_gpu(interpreted):
    index = torch.randint(0, 64, (400, 8), device=interpreted)
    order = order_by_expert(index, 64)
    assert torch.equal(order.choices.source, index.flatten().argsort(stable=True))
    assert torch.equal(order.rows_per_expert, torch.bincount(index.flatten(), minlength=64))
