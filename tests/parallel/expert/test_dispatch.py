"""Dispatch and combine: each row meets its expert and comes home, wherever experts are and however many there
are of each.
"""

import functools
from collections import Counter
from dataclasses import replace

import pytest
import torch

from build import build_run
from config.reading.tiny import tiny_config
from parallel.expert.dispatch import Combine, Dispatch, count_choices, plan_dispatch
from parallel.topology.dims import ParallelDims
from parallel.topology.mesh import Mesh
from parallel.wire import comm

E, K, D, ROOM = 4, 2, 3, 6


def routed(rank, kind):
    """index [t, K] and probs of this rank: another number of tokens on each."""
    g = torch.Generator().manual_seed(rank)
    t = {"empty": 0 if rank else 6}.get(kind, 3 + rank)
    index = (
        torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(t)])
        if t
        else torch.empty(0, K, dtype=torch.long)
    )
    if kind == "one":  # all to the first two experts: the others get nothing
        index = torch.arange(K).expand(t, K).clone()
    if kind in ("dropped", "padded"):
        index[torch.rand(t, K, generator=g) < 0.4] = -1
    return (
        index,
        torch.rand(t, K, generator=g, dtype=torch.float64),
        torch.randn(t, D, generator=g, dtype=torch.float64),
    )


def experts(given, counts, first, part, parts):
    """Expert e multiplies by e + 1; the j-th part of it gives a share of that."""
    x, order, weight = given
    source = torch.arange(len(x)) if order is None else order.source
    out = [
        r * (first + i + 1) * (part + 1) / sum(range(1, parts + 1))
        for i, r in enumerate(x[source].split(counts))
    ]
    return torch.zeros_like(x).index_add(0, source, torch.cat(out) * weight[:, None])


def trip(world, kind, etp, chunks):
    """This rank's outputs and gradients, with what they must be, and what the ledger counted."""
    ledger = Counter()
    group = world.group_of_rank("ep_etp", [list(range(world.size))], ledger)
    index, probs, x = routed(world.rank, kind)
    probs.requires_grad_(), x.requires_grad_()
    p = plan_dispatch(
        index,
        E,
        group,
        etp,
        may_drop=kind in ("dropped", "padded"),
        capacity=ROOM if kind == "padded" else None,
        num_chunks=chunks,
    )
    here = E * etp // world.size
    back, first = Combine(p), group.index // etp * here
    for chunk, rows in zip(p.chunks, Dispatch(x, probs, p).chunks()):
        back.send(experts(rows, chunk.rows_per_expert, first, group.index % etp, etp))
    y = back.tokens()
    kept = index >= 0
    want = x * (probs * (index + 1) * kept).sum(1, keepdim=True)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    made, true = (torch.autograd.grad(t, (x, probs), dy) for t in (y, want))
    sent = (E * ROOM if kind == "padded" else int(kept.sum())) * etp
    return (
        [(y.detach(), want.detach()), *zip(made, true)],
        ledger["ep_etp", "all_to_all", "calls"],
        ledger["ep_etp", "all_to_all", "bytes"],
        sent,
        [chunk.rows_per_expert for chunk in p.chunks],
    )


@pytest.mark.slow(every=5, core=["2-1-1-padded"])
@pytest.mark.parametrize("kind", ["even", "one", "empty", "dropped", "padded"])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("size, etp", [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_there_and_back(ranks, size, etp, chunks, kind):
    chunks = chunks if size > 1 else 1
    found = ranks(size).run(trip, kind, etp, chunks)
    for pairs, calls, bytes_, sent, counts in found:
        for got, want in pairs:
            assert got.shape == want.shape and torch.allclose(got, want, atol=1e-12)
        # tokens there and back, forward and backward; probabilities there, their gradients back; counts
        assert bytes_ == (size > 1) * (4 * sent * D * 8 + 2 * sent * 8 + (kind != "padded") * E * etp * 8)
        assert calls == (size > 1) * (4 * chunks + 2 + (kind != "padded"))
        of_expert = [sum(of_chunks) for of_chunks in zip(*counts)]
        assert kind != "padded" or of_expert == [ROOM * size] * len(of_expert)  # whatever was routed
        # whole experts, one chunk after the other; a boundary is within one where it has to be
        here = len(of_expert)
        for i, of_chunk in enumerate(counts):
            some = [e for e in range(here) if i * here / chunks < e + 1 and e < (i + 1) * here / chunks]
            assert all(n == 0 for e, n in enumerate(of_chunk) if e not in some)
            if here % chunks == 0:
                assert [of_chunk[e] for e in some] == [of_expert[e] for e in some]
    assert sum(sum(map(sum, counts)) for *_, counts in found) == sum(sent for *_, sent, _ in found)


def overlapped(world, name):
    """What a mixture layer over two ranks does, in order: exchanges started and waited for, halves of the
    shared experts done; there, and back.
    """
    cfg = tiny_config(name, world.size)
    cfg = replace(cfg, parallel=replace(cfg.parallel, ep=world.size))
    run = build_run(
        cfg, Mesh.bind(ParallelDims(world.size, ep=world.size), world), torch.device("cpu"), None, 1
    )
    moe = next(b.mlp for b in run.stages[0].blocks if hasattr(b.mlp, "router"))
    shared = moe.shared_experts
    done, (active, down) = [], (shared.hidden_activation, shared.down.forward)
    start, wait = comm.start_all_to_all, comm.PendingExchange.wait

    def watched(what, function, x):
        x = x.view_as(x)
        x.register_hook(lambda _: done.append(what))  # its gradient: this half's backward is over
        done.append(what)
        return function(x)

    shared.hidden_activation, shared.down.forward = (
        functools.partial(watched, *pair) for pair in (("active", active), ("down", down))
    )
    x = torch.randn(
        2,
        6,
        cfg.model.hidden,
        generator=torch.Generator().manual_seed(world.rank),
        dtype=torch.float64,
        requires_grad=True,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            comm, "start_all_to_all", lambda *args, **how: done.append("start") or start(*args, **how)
        )
        patch.setattr(comm.PendingExchange, "wait", lambda work: done.append("wait") or wait(work))
        y, _ = moe(x, None)
        forward = done[:]
        done.clear()
        y.sum().backward()
    return forward, done


@pytest.mark.parametrize("name", ["deepseek-v3-tiny", "qwen2-moe-tiny"])
def test_shared_experts_lie_under_both_exchanges(ranks, name):
    for forward, backward in ranks(2).run(overlapped, name):
        assert forward == [
            "start",
            "start",
            "active",
            "wait",
            "wait",
            "start",
            "down",
            "wait",
        ]  # tokens and probabilities; outputs
        assert backward == ["start", "down", "wait", "start", "start", "active", "wait", "wait"]


@pytest.mark.parametrize("choices", [[], [2], [-1, -1], [0, 3, 3, -1, 2, 3, 0]])
def test_choices_are_counted(choices):
    chosen = torch.tensor(choices, dtype=torch.int64)
    counts = count_choices(chosen, 4)
    assert torch.equal(counts, torch.bincount(chosen + 1, minlength=5))
