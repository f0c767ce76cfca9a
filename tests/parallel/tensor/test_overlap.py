"""Async tensor parallelism: products of parts that travel give what the products of the whole give, and a
part is multiplied before the last one is there.
"""

from collections import Counter

import pytest
import torch

from config import ConfigError
from config.reading import resolve
from config.reading.schedules import plan_pipeline
from kernels.linear import linear_out_of_region
from parallel.tensor import overlap
from parallel.tensor.regions import TensorParallelRegion
from parallel.wire import comm
from parallel.wire.comm import Group

INPUTS, OUTPUTS, LENGTH = 6, 4, 3  # LENGTH: tokens of a rank


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def tp_group(world) -> Group:
    return world.group_of_rank("tp", [list(range(world.size))], Counter())


def part(x: torch.Tensor, rank: int, size: int, dim: int = 1) -> torch.Tensor:
    return x.chunk(size, dim)[rank]


# ---- the two products --------------------------------------------------------------------------------------


def gathered_product(world, batch: int, with_bias: bool) -> tuple[torch.Tensor, torch.Tensor]:
    group = tp_group(world)
    x = part(numbers(1, batch, world.size * LENGTH, INPUTS), world.rank, world.size)
    bias = numbers(3, OUTPUTS) if with_bias else None
    return overlap.gather_and_multiply(x, numbers(2, OUTPUTS, INPUTS), bias, group)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_product_of_gathered_parts(ranks, size, batch, with_bias):
    x = numbers(1, batch, size * LENGTH, INPUTS)
    expected = torch.einsum("bsn,mn->bsm", x, numbers(2, OUTPUTS, INPUTS))
    if with_bias:
        expected = expected + numbers(3, OUTPUTS)
    for gathered, y in ranks(size).run(gathered_product, batch, with_bias):
        assert torch.equal(gathered, x)
        assert torch.allclose(y, expected, rtol=1e-12, atol=1e-12)


def scattered_product(world, batch: int, dtype: torch.dtype) -> torch.Tensor:
    size = world.size
    x = part(numbers(1, batch, size * LENGTH, size * INPUTS, dtype=dtype), world.rank, size, dim=2)
    weight = part(numbers(2, OUTPUTS, size * INPUTS, dtype=dtype), world.rank, size)
    return overlap.multiply_and_scatter(x, weight, tp_group(world))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_product_whose_sum_is_scattered(ranks, size, batch):
    x = numbers(1, batch, size * LENGTH, size * INPUTS)
    expected = torch.einsum("bsn,mn->bsm", x, numbers(2, OUTPUTS, size * INPUTS))
    for rank, y in enumerate(ranks(size).run(scattered_product, batch, torch.float64)):
        assert torch.allclose(y, part(expected, rank, size), rtol=1e-12, atol=1e-12)


def test_its_sum_in_bf16_is_rounded_once(ranks):
    """Each rank's product is rounded, as for a reduce-scatter; their sum is in fp32."""
    size = 4
    x = numbers(1, 1, size * LENGTH, size * INPUTS, dtype=torch.bfloat16)
    weight = numbers(2, OUTPUTS, size * INPUTS, dtype=torch.bfloat16)
    partials = [
        torch.nn.functional.linear(part(x, rank, size, dim=2), part(weight, rank, size))
        for rank in range(size)
    ]
    expected = torch.stack(partials).float().sum(0).bfloat16()
    for rank, y in enumerate(ranks(size).run(scattered_product, 1, torch.bfloat16)):
        assert torch.equal(y, part(expected, rank, size))


def row_layer(world, batch: int) -> tuple[torch.Tensor, ...]:
    """(y, gradients of x and of the weight) of this rank's part of a row layer in an async region."""
    size = world.size
    region = TensorParallelRegion(tp_group(world), sequence=True, is_async=True)
    x = part(numbers(1, batch, size * LENGTH, size * INPUTS), world.rank, size, dim=2).requires_grad_()
    weight = part(numbers(2, OUTPUTS, size * INPUTS), world.rank, size).clone().requires_grad_()
    y = linear_out_of_region(x, weight, region)
    y.backward(part(numbers(5, batch, size * LENGTH, OUTPUTS), world.rank, size))
    return y.detach(), x.grad, weight.grad


@pytest.mark.parametrize("batch", [1, 2])
def test_the_gradients_of_a_row_layer(ranks, batch):
    size = 3
    x = numbers(1, batch, size * LENGTH, size * INPUTS).requires_grad_()
    weight = numbers(2, OUTPUTS, size * INPUTS).requires_grad_()
    y = torch.einsum("bsn,mn->bsm", x, weight)
    y.backward(numbers(5, batch, size * LENGTH, OUTPUTS))
    for rank, (out, dx, dweight) in enumerate(ranks(size).run(row_layer, batch)):
        assert torch.allclose(out, part(y, rank, size), rtol=1e-12, atol=1e-12)
        assert torch.allclose(dx, part(x.grad, rank, size, dim=2), rtol=1e-12, atol=1e-12)
        assert torch.allclose(dweight, part(weight.grad, rank, size), rtol=1e-12, atol=1e-12)


# ---- what overlaps -----------------------------------------------------------------------------------------


def order_of_events(world) -> tuple[list[str], list[str]]:
    """What each of the two does, in order: it starts transfers, waits for one, or multiplies."""
    events: list[str] = []
    start_transfers = comm.start_transfers
    multiply = overlap.product
    wait_all = overlap.wait_all

    def note(name: str, function):
        def noted(*args, **kwargs):
            events.append(name)
            return function(*args, **kwargs)
        return noted

    comm.start_transfers = note("start", start_transfers)
    overlap.product = note("multiply", multiply)
    overlap.wait_all = note("wait", wait_all)
    try:
        gathered_product(world, 1, False)
        of_gather = list(events)
        events.clear()
        scattered_product(world, 1, torch.float64)
    finally:
        comm.start_transfers = start_transfers
        overlap.product = multiply
        overlap.wait_all = wait_all
    return of_gather, events


def test_parts_are_multiplied_while_others_travel(ranks):
    of_gather, of_scatter = ranks(3).run(order_of_events)[0]
    assert of_gather == ["start", "start", "multiply", "wait", "multiply", "wait", "multiply"]
    assert of_scatter == ["multiply", "start", "multiply", "start", "multiply", "wait"]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_every_round_pairs_up(size):
    groups = [Group("tp", tuple(range(size)), index) for index in range(size)]
    plans = [list(overlap.rounds(group)) for group in groups]
    for round_of_ranks in zip(*plans):
        for rank, (target, _) in enumerate(round_of_ranks):
            assert round_of_ranks[target][1] == rank
    for rank, plan in enumerate(plans):
        everyone_else = set(range(size)) - {rank}
        assert {target for target, _ in plan} == everyone_else
        assert {source for _, source in plan} == everyone_else


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys, message", [
    ("--parallel.tp 2 --parallel.async_tp true", "set parallel.sp true"),
    ("--parallel.tp 2 --parallel.sp true --parallel.async_tp true --train.dtype fp8", "set train.dtype bf16"),
])
def test_what_it_cannot_do_is_refused(keys, message):
    cfg = resolve("llama3-tiny", None, keys.split())
    with pytest.raises(ConfigError, match=message):
        plan_pipeline(cfg, 2)
