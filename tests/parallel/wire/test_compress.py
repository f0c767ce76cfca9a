"""Lossy sums and gathers: how far off they may be, that no two ranks see different values, that nothing sick
vanishes. Planted bugs must be seen by the same checks.
"""

import math
from collections import Counter

import pytest
import torch

from parallel.sharding import powersgd
from parallel.sharding.boxes import Box
from parallel.sharding.slots import Slot
from parallel.sharding.spec import ParameterSpec, parameter
from parallel.wire import compress
from parallel.wire.algorithms import start_gather, start_scatter_sum, start_sum
from parallel.wire.world import World

KINDS = ("int8", "fp8")
BLOCK, SIZE = 64, 64 * 48
SLACK = 1 + 1e-5  # fp32 rounds the scale, the quotient and the product


def gradient(name: str, rank: int = 0, dtype=torch.float32) -> torch.Tensor:
    x = torch.randn(SIZE, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    if name == "outliers":
        x[rank::97] *= 1e6
    elif name == "zeros":
        x[: SIZE // 2] = 0
    elif name == "tiny":
        x *= 1e-40
    elif name == "huge":
        x *= 1e30
    elif name == "opposite":  # the ranks all but cancel
        x = torch.full_like(x, 3.0) * (1 if rank % 2 else -1) + x * 1e-3
    elif name == "equal":
        x = torch.ones_like(x)
    return x.to(dtype)


GRADIENTS = ("normal", "outliers", "zeros", "tiny", "huge", "opposite", "equal")


# ---- codes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_code_is_as_near_as_it_says(kind, name):
    for block in (64, 256):
        x = gradient(name).view(4, -1)
        message = compress.encode(x, kind, block)
        assert message.dtype == torch.uint8 and message.shape == (4, x.shape[1] * (block + 4) // block)
        back, limit = (
            compress.decode(message, kind, block, torch.float64),
            compress.error_bound(x.double(), kind, block),
        )
        assert ((back - x.double()).abs() <= limit * SLACK).all()
        assert not back[x == 0].any()
        top = x.double().abs().unflatten(1, (-1, block)).amax(2, keepdim=True)
        assert (
            limit.unflatten(1, (-1, block))
            <= top.clamp(min=compress.MIN_ABSOLUTE_MAXIMUM) / (254 if kind == "int8" else 16) * SLACK
        ).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sick", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so(kind, sick):
    x = gradient("normal").view(1, -1)
    x[0, 70] = sick
    back = compress.decode(compress.encode(x, kind, BLOCK), kind, BLOCK, torch.float32)
    assert back[0, 64:128].isnan().all() and back[0, :64].isfinite().all() and back[0, 128:].isfinite().all()
    with_overflow = compress.encode(torch.full((1, BLOCK), 1e300, dtype=torch.float64), kind, BLOCK)
    assert compress.decode(with_overflow, kind, BLOCK, torch.float64).isnan().all()


# ---- sums and gathers --------------------------------------------------------------------------------------


def neighbours_scale(message, kind, block, dtype):
    """Planted: the scale of the block before."""
    n = message.shape[1] // (block + 4) * block
    codes, scale = message[:, :n].view(compress.CODECS[kind]), message[:, n:].view(torch.float32).roll(1, 1)
    return (codes.to(dtype).unflatten(1, (-1, block)) * scale.to(dtype)[..., None]).flatten(1)


class KeepsItsOwn(compress.CompressedAllGather):
    """Planted: a rank keeps its own share as it was, the others see it quantized."""

    def __init__(self, x, group, out, codec, block):
        super().__init__(x, group, out, codec, block)
        self.own, self.at = x.clone(), group.index

    def wait(self):
        super().wait().view(self.num_rows, -1)[self.at] = self.own
        return self.out


def sums(world: World, kind: str, name: str, planted: str = ""):
    """(sum, share of it, what gather makes of that share, what is on the wire), and a gradient with one NaN,
    summed.
    """
    before = compress.decode, compress.CompressedAllGather
    if planted == "scale":
        compress.decode = neighbours_scale
    elif planted == "own":
        compress.CompressedAllGather = KeepsItsOwn
    try:
        ledger = Counter()
        group = world.group_of_rank("dp_cp", [list(range(world.size))], ledger)
        x = gradient(name, world.rank)
        whole = start_sum(x.clone(), group, kind, None, BLOCK).wait()
        sent = {
            verb: ledger["dp_cp", verb, "bytes"]
            for verb in ("all_to_all", "all_gather", "all_reduce", "send")
        }
        share = start_scatter_sum(x.clone(), group, kind, BLOCK).wait()
        gathered = start_gather(share, group, torch.empty_like(x), kind, BLOCK).wait()
        if world.rank == 1:
            x[700] = float("nan")
        return whole, share, gathered, sent, start_sum(x, group, kind, None, BLOCK).wait()
    finally:
        compress.decode, compress.CompressedAllGather = before


def wrong(found, kind: str, name: str) -> list[str]:
    """What is wrong with them."""
    N, xs = len(found), [gradient(name, r).view(1, -1) for r in range(len(found))]
    true = sum(x.double() for x in xs)
    limit = sum(compress.error_bound(x.double(), kind, BLOCK) for x in xs)
    added = sum(
        compress.decode(compress.encode(x, kind, BLOCK), kind, BLOCK, torch.float32) for x in xs
    )  # what is rounded again
    both = limit + compress.error_bound(added.double(), kind, BLOCK)
    fp32 = sum(x.double().abs() for x in xs) * N * 2.0**-23
    says = []
    for rank, (whole, share, gathered, sent, sick) in enumerate(found):
        part = slice(rank * SIZE // N, (rank + 1) * SIZE // N)
        says += [f"sum of rank {rank}"] * (not ((whole - true[0]).abs() <= both[0] * SLACK + fp32[0]).all())
        says += [f"share of rank {rank}"] * (
            not ((share - true[0, part]).abs() <= (limit[0] * SLACK + fp32[0])[part]).all()
        )
        says += [f"another sum on rank {rank}"] * (not torch.equal(whole, found[0][0]))
        says += [f"another gather on rank {rank}"] * (not torch.equal(gathered, found[0][2]))
        says += [f"NaN lost on rank {rank}"] * (not sick[700].isnan())
        wire = SIZE + SIZE // BLOCK * 4
        assert sent == {"all_to_all": wire, "all_gather": wire, "all_reduce": 0, "send": 0}
    return says


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GRADIENTS)
def test_sums_are_within_their_bound_and_the_same_everywhere(ranks, kind, name):
    for world in (2, 4):
        found = ranks(world).run(sums, kind, name)
        assert not wrong(found, kind, name)
        assert all(
            torch.equal(a, b) for a, b in zip(found[0][:3], ranks(world).run(sums, kind, name)[0][:3])
        ), "twice the same bits"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("planted, sees", [("scale", "sum of rank 0"), ("own", "another gather on rank 1")])
def test_planted_in_sums(ranks, kind, planted, sees):
    assert sees in wrong(ranks(2).run(sums, kind, "outliers", planted), kind, "outliers")


# ---- PowerSGD ----------------------------------------------------------------------------------------------

SHAPES = ((24, 10), (7, 64), (30,), (12, 12))


class ForgetsErrors(powersgd.PowerSGD):
    """Planted: what was not sent is lost."""

    def start_next_phase(self):
        super().start_next_phase()
        self.error.zero_()


def factored(world: World, rank: int, steps: int, planted: str = "", sick: int = 0):
    """Of each step, for all ranks together: (gradients, what was sent, errors before, errors after)."""
    group = world.group_of_rank("dp_cp", [list(range(world.size))], Counter())
    slots, at = [], 0
    for i, shape in enumerate(SHAPES):
        slots.append(
            Slot(
                parameter(
                    ParameterSpec((Box.whole(f"w{i}", shape),), "hidden" if len(shape) > 1 else "bias", 1.0)
                ),
                at,
                True,
            )
        )
        at += 64 * (-(-slots[-1].numel // 64))
    kind = ForgetsErrors if planted == "errors" else powersgd.PowerSGD
    power = kind(tuple(slots), at, group, rank=rank, seed=1, like=torch.zeros(at, dtype=torch.float64))
    out, stream = [], torch.Generator().manual_seed(world.rank)
    for step in range(1, steps + 1):
        grad = torch.zeros(at, dtype=torch.float64)
        for slot in slots:
            slot.view_in(grad).copy_(
                torch.randn(slot.param.spec.shape, generator=stream, dtype=torch.float64)
            )
        mine, before = grad.clone(), power.error.clone()
        if step == sick and world.rank == 1:
            grad[3] = float("inf")
        sent = power.start(grad).wait().clone()
        out.append((mine, sent, before, power.error.clone()))
        power.resolve_error_feedback(sent.isfinite().all())
    return out, [q.clone() for q in power.bases]


def total(found, step: int, which: int) -> torch.Tensor:
    return sum(steps[step][which] for steps, _ in found)


def identity(found, step: int) -> float:
    """How far sent + errors after is from gradients + errors before."""
    return float(
        (found[0][0][step][1] + total(found, step, 3) - total(found, step, 0) - total(found, step, 2))
        .abs()
        .max()
    )


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("rank", [1, 4, 64])
def test_what_is_not_sent_stays_behind(ranks, world, rank):
    found = ranks(world).run(factored, rank, 4)
    for step in range(4):
        assert identity(found, step) < 1e-12
        assert all(torch.equal(steps[step][1], found[0][0][step][1]) for steps, _ in found), (
            "every rank has the same sum"
        )
        error = total(found, step, 3).abs().max()
        assert error < 1e-12 if rank == 64 else error > 0.1
        left, asked = total(found, step, 3), total(found, step, 0) + total(found, step, 2)
        assert (
            left.norm() <= asked.norm() * SLACK
        )  # a projection: what is left is no longer than what there was
        assert torch.allclose(
            found[0][0][step][1][704:734], total(found, step, 0)[704:734], rtol=0, atol=1e-12
        )  # a vector travels whole
    assert all(torch.equal(a, b) for _, bases in found for a, b in zip(bases, found[0][1]))


def test_the_next_bases_are_those_of_the_right_factors(ranks):
    """One step of the power iteration by hand, from the first bases (arXiv 1905.13727, algorithm 1)."""
    found = ranks(2).run(factored, 4, 1)
    flat = total(found, 0, 0)
    at = matrices = 0
    for i, shape in enumerate(SHAPES):
        if len(shape) > 1:
            spec = ParameterSpec((Box.whole(f"w{i}", shape),), "hidden", 1.0)
            grad = flat[at : at + math.prod(shape)].view(powersgd.matrix_shape(spec))
            left = torch.linalg.qr(grad @ powersgd.draw_basis(spec, 4, seed=1)).Q
            expected = torch.linalg.qr(grad.mT @ left).Q
            assert torch.allclose(found[0][1][matrices], expected, rtol=0, atol=1e-10)
            matrices += 1
        at += 64 * (-(-math.prod(shape) // 64))
    assert matrices == len(found[0][1])


def test_planted_lost_errors(ranks):
    found = ranks(2).run(factored, 2, 2, "errors")
    assert identity(found, 0) > 0.1


def test_a_skipped_step_leaves_nothing_behind(ranks):
    found = ranks(2).run(factored, 2, 3, "", 2)
    assert (
        not found[0][0][1][1][:240].isfinite().any() and not found[1][0][1][1][:240].isfinite().any()
    )  # on every rank
    assert all(not steps[2][2].any() and steps[2][1].isfinite().all() for steps, _ in found)
    assert identity(found, 2) < 1e-12
