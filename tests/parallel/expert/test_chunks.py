"""Chunks of rows, on links and experts that take time: what has left before which experts compute, forward
and backward, and how long a layer takes.

The clock is not that of the wall: an exchange of rows occupies the link for its share of LINK, after those
that were started before it, and a chunk of experts computes for its share of EXPERTS (twice that backward).
"""
import functools
import random
from dataclasses import dataclass, field, replace

import pytest
import torch

from build import build_run
from config.reading.tiny import tiny_config
from kernels import grad
from parallel.expert.dispatch import rows_of_chunks
from parallel.topology.dims import ParallelDims
from parallel.topology.mesh import Mesh
from parallel.wire import comm

CPU = torch.device("cpu")
LINK = 12.0  # of all rows of a layer, one way
FORWARD = 12.0  # of all experts of a layer
BACKWARD = 2 * FORWARD


@dataclass
class SlowJob:
    """One rank's clock, and what it did in order. hidden: width of a row; others take no time."""
    hidden: int
    num_chunks: int
    now: float = 0.0
    link_is_free_at: float = 0.0
    done: list[str] = field(default_factory=list)
    arrives_at: dict[int, float] = field(default_factory=dict)

    def start(self, inner, x, *args, **how):
        work = inner(x, *args, **how)
        if x.ndim == 2 and x.shape[1] == self.hidden:
            self.link_is_free_at = max(self.link_is_free_at, self.now) + LINK / self.num_chunks
            self.arrives_at[id(work)] = self.link_is_free_at
            self.done.append("start")
        return work

    def wait(self, inner, work):
        if id(work) in self.arrives_at:
            self.now = max(self.now, self.arrives_at.pop(id(work)))
            self.done.append("wait")
        return inner(work)

    def compute(self, inner, rows, *args):
        """The experts: their backward is over when the gradient of their input is there."""
        x = rows.x.view_as(rows.x)
        x.register_hook(lambda _: self.take(BACKWARD))
        self.take(FORWARD)
        return inner(rows._replace(x=x), *args)

    def take(self, seconds: float) -> None:
        self.now += seconds / self.num_chunks
        self.done.append("experts")

    def elapsed(self) -> tuple[list[str], float]:
        """What was done, and how long it took, from the last call on."""
        done, now = self.done, self.now
        self.done, self.now, self.link_is_free_at = [], 0.0, 0.0
        return done, now


def timed(world, name, chunks):
    """What a layer of a mixture does and how long it takes, forward and backward; its gradient of x."""
    cfg = tiny_config(name, world.size)
    cfg = replace(cfg, parallel=replace(cfg.parallel, ep=world.size, ep_chunks=chunks))
    mesh = Mesh.bind(ParallelDims(world.size, ep=world.size), world)
    run = build_run(cfg, mesh, torch.device("cpu"), None, 1)
    moe = next(block.mlp for block in run.stages[0].blocks if hasattr(block.mlp, "router"))
    clock = SlowJob(cfg.model.hidden, chunks)
    g = torch.Generator().manual_seed(world.rank)
    x = torch.randn(2, 6, cfg.model.hidden, generator=g, dtype=torch.float64, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe.experts, "forward", functools.partial(clock.compute, moe.experts.forward))
        patch.setattr(comm, "start_all_to_all", functools.partial(clock.start, comm.start_all_to_all))
        inner = comm.PendingExchange.wait
        patch.setattr(comm.PendingExchange, "wait", lambda work: clock.wait(inner, work))
        y, _ = moe(x, None)
        forward = clock.elapsed()
        (y * y).sum().backward()
        backward = clock.elapsed()
    weights = [slot.param.main_grad.clone() for b in run.buckets for slot in b.slots]
    return forward, backward, [y.detach(), x.grad, *weights]


def order(chunks: int) -> list[str]:
    """All chunks leave, then each waits for the one that it computes, and goes back."""
    return ["start"] * chunks + ["wait", "experts", "start"] * chunks + ["wait"] * chunks


def seconds(chunks: int, products: float) -> float:
    """By hand, where the link is at least as busy as a chunk of experts, or the experts are the slower ones:
    the longer of what the link and the experts need, with the ends that nothing hides."""
    return max(2 * LINK, LINK / chunks + products + LINK / chunks) if chunks > 1 else 2 * LINK + products


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_other_chunks_are_under_way_while_experts_compute(ranks, chunks):
    """The dispatch of chunk i + 1 has started before the experts of chunk i compute, and its combine is
    awaited after all of them; in the backward the same, from the last chunk to the first."""
    for (forward, took), (backward, took_back), _ in ranks(2).run(timed, "mixtral-tiny", chunks):
        assert forward == backward == order(chunks)
        assert took == pytest.approx(seconds(chunks, FORWARD))
        assert took_back == pytest.approx(seconds(chunks, BACKWARD))


def with_weight_gradients(world, name, chunks, recompute):
    """What the backward of a mixture does, in order, and how many weight gradients still wait."""
    cfg = tiny_config(name, world.size)
    cfg = replace(cfg, parallel=replace(cfg.parallel, ep=world.size, ep_chunks=chunks, recompute=recompute))
    run = build_run(cfg, Mesh.bind(ParallelDims(world.size, ep=world.size), world), CPU, None, 1)
    block = next(block for block in run.stages[0].blocks if hasattr(block.mlp, "router"))
    experts = block.mlp.experts
    job = SlowJob(cfg.model.hidden, chunks)
    g = torch.Generator().manual_seed(world.rank)
    x = torch.randn(2, 6, cfg.model.hidden, generator=g, dtype=torch.float64, requires_grad=True)

    def write(inner, weight, compute):
        if weight is experts.gate_up or weight is experts.down:
            job.done.append("weight")
        inner(weight, compute)

    y, _ = block.mlp(x, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "start_all_to_all", functools.partial(job.start, comm.start_all_to_all))
        inner = comm.PendingExchange.wait
        patch.setattr(comm.PendingExchange, "wait", lambda work: job.wait(inner, work))
        patch.setattr(grad, "write_grad", functools.partial(write, grad.write_grad))
        y.sum().backward()
    return job.done, len(experts.late_grads.waiting), experts.late_grads.deferring


@pytest.mark.parametrize("name", ["mixtral-tiny", "qwen2-moe-tiny"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_gradients_of_rows_are_on_their_way_before_those_of_weights(ranks, name, chunks):
    """The last exchange of the backward travels during the two weight gradients of its chunk."""
    of_chunk = ["wait", "start", "weight", "weight"]
    expected = ["start"] * chunks + of_chunk * chunks + ["wait"] * chunks
    for done, waiting, deferring in ranks(2).run(with_weight_gradients, name, chunks, "none"):
        assert done == expected
        assert waiting == 0 and not deferring


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("name", ["mixtral-tiny", "qwen2-moe-tiny"])
@pytest.mark.parametrize("chunks", [2, 4, 5])
def test_the_numbers_are_those_of_one_chunk(ranks, name, chunks):
    """Bit for bit where each expert is in one chunk; else its weights' gradient is a sum of two."""
    whole = ranks(2).run(timed, name, 1)
    divided = ranks(2).run(timed, name, chunks)
    num_local = tiny_config(name, 2).model.mlp.experts // 2
    for (*_, expected), (*_, got) in zip(whole, divided):
        for a, b in zip(expected, got):
            if num_local % chunks == 0:
                assert torch.equal(a, b)
            else:
                assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("num_local, num_chunks", [(1, 1), (1, 3), (2, 2), (3, 2), (8, 3), (4, 8), (5, 4)])
def test_rows_are_divided_evenly_over_chunks(num_local, num_chunks):
    """Row by row: row j of n of expert e stands at e + j / n of the rank's experts, and the chunks are equal
    parts of these."""
    draw = random.Random(num_local)
    counts = torch.tensor([[draw.choice((0, 1, 5, 12)) for _ in range(num_local)] for _ in range(3)])
    found = rows_of_chunks(counts, num_chunks)
    expected = torch.zeros_like(found)
    for rank in range(3):
        for expert in range(num_local):
            n = int(counts[rank, expert])
            for row in range(n):
                # the chunk in which the row ends: a boundary that lies within it takes it to the next one
                end = (expert * n + row + 1) / n  # in experts
                boundaries = [b * num_local / num_chunks + 1e-9 for b in range(num_chunks + 1)]
                boundary = next(b for b, place in enumerate(boundaries) if place >= end)
                expected[boundary - 1, rank, expert] += 1
    assert torch.equal(found, expected) and torch.equal(found.sum(0), counts)
