"""parallel.ep_bound: the same number of rows to each rank, whatever is routed, and the counts on the device.
What is over the bound is counted, and its step computed again: a run is the same as without.
"""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from random_tokens import begin

from build import build_run
from config.reading.tiny import tiny_config
from model import bounded_rows
from model.bounded_rows import BoundedRows
from model.sharding import parallel_dims
from parallel.expert.bounded import plan_bounded_dispatch
from parallel.expert.dispatch import Combine, Dispatch
from parallel.topology.mesh import Mesh
from parallel.wire import comm
from train import train_step

E, K, D, T = 8, 2, 3, 12


def routed(rank, kind):
    """index [T, K], probs and x of this rank."""
    g = torch.Generator().manual_seed(rank)
    index = torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(T)])
    if kind == "one":  # all to the first two experts
        index = torch.arange(K).expand(T, K).clone()
    probs = torch.rand(T, K, generator=g, dtype=torch.float64)
    return index, probs, torch.randn(T, D, generator=g, dtype=torch.float64)


def experts(given, counts, first, part, parts):
    """Expert e multiplies by e + 1; the j-th part of it gives a share of that."""
    x, order, weight = given
    source = torch.arange(len(x)) if order is None else order.source
    factors = torch.arange(first, first + len(counts), dtype=torch.float64) + 1
    factors = factors.repeat_interleave(counts) * (part + 1) / sum(range(1, parts + 1))
    return torch.zeros_like(x).index_add(0, source, x[source] * (factors * weight)[:, None])


def kept_by_hand(index, units, room):
    """Which choices [T, K] are sent: of those for the experts of a unit, the first by expert."""
    kept = torch.zeros_like(index, dtype=torch.bool)
    for unit in range(units):
        of_unit = [
            (int(index[t, k]), t, k) for t in range(T) for k in range(K) if index[t, k] * units // E == unit
        ]
        for _, t, k in sorted(of_unit)[:room]:
            kept[t, k] = True
    return kept


def trip(world, kind, etp, chunks, bound):
    ledger = Counter()
    group = world.group_of_rank("ep_etp", [list(range(world.size))], ledger)
    index, probs, x = routed(world.rank, kind)
    probs.requires_grad_(), x.requires_grad_()
    plan = plan_bounded_dispatch(index, E, group, etp, bound=bound, num_chunks=chunks)
    here = E * etp // world.size
    back, first = Combine(plan), group.index // etp * here
    for chunk, rows in zip(plan.chunks, Dispatch(x, probs, plan).chunks()):
        back.send(experts(rows, chunk.rows_per_expert, first, group.index % etp, etp))
    y = back.tokens()

    units = world.size // etp * chunks
    room = min(math.ceil(bound * T * K / units), T * min(K, E // units))
    kept = kept_by_hand(index, units, room)
    want = x * (probs * (index + 1) * kept).sum(1, keepdim=True)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    made, true = (torch.autograd.grad(t, (x, probs), dy) for t in (y, want))
    sent = units * etp * room
    nbytes = 4 * sent * D * 8 + 2 * sent * 8 + E * etp * 8
    counted = ledger["ep_etp", "all_to_all", "bytes"], ledger["ep_etp", "all_to_all", "calls"]
    rows = [int(chunk.rows_per_expert.sum()) for chunk in plan.chunks]
    return (
        [(y.detach(), want.detach()), *zip(made, true)],
        (counted, (nbytes, 4 * chunks + 3)),
        (int(plan.num_over), int((~kept).sum())),
        (rows, [room * world.size] * chunks),
    )


@pytest.mark.slow(every=3)
@pytest.mark.parametrize("kind", ["even", "one"])
@pytest.mark.parametrize("bound", [1.0, 1.25, 8.0])
@pytest.mark.parametrize("size, etp, chunks", [
    (2, 1, 1), (2, 1, 4), (2, 2, 1), (2, 2, 2), (4, 1, 2), (4, 2, 1), (4, 2, 2), (4, 4, 8),
])
def test_there_and_back(ranks, size, etp, chunks, bound, kind):
    """Rows within the bound meet their experts and come home, those over it are counted; by hand."""
    found = ranks(size).run(trip, kind, etp, chunks, bound)
    for pairs, *others in found:
        for got, want in pairs:
            assert torch.allclose(got, want, atol=1e-12)
        for got, want in others:
            assert got == want
    if kind == "one" and chunks == 1 and size > etp:
        assert all((over > 0) == (bound < size // etp) for *_, (over, _), _ in found)


# ---- a run -------------------------------------------------------------------------------------------------


LAYOUTS = {
    "ep2": (2, dict(ep=2)),
    "ep2 chunks": (2, dict(ep=2, ep_chunks=2, recompute="full")),
    "ep2 etp2": (4, dict(ep=2, etp=2, tp=2, sp=True, zero=1)),
    "pp2 ep2": (4, dict(pp=2, ep=2, zero=1, schedule="zb-v")),
    "zero3": (2, dict(ep=2, zero=3)),
    "powersgd": (4, dict(ep=2, compress="powersgd", powersgd_rank=2)),
}
STEPS = 3


def laid(parallel, bound):
    cfg = tiny_config("mixtral-tiny", 4)
    return replace(cfg, parallel=replace(cfg.parallel, **parallel, ep_bound=bound))


def trained(world, cfg):
    """A rank's losses, norms, routers and weights; how often a step was computed again, and the log."""
    run, data = begin(world, cfg, STEPS)
    values, lines = [], []
    for step in range(1, STEPS + 1):
        loss, norm, *_ = train_step(run, step, data.microbatches(step - 1))
        values += [loss, norm, run.routers.stats.clone()]
        lines += run.extras.pop_lines()
    for bucket in run.buckets:
        bucket.weights.wait_unshard()
    values += [bucket.weights.master.clone() for bucket in run.buckets]
    again = [extra.num_repeated for extra in run.extras if isinstance(extra, BoundedRows)]
    return values, again, lines


def without_restore(world, cfg):
    """Planted: PowerSGD's error is not that of before the step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded_rows, "restore_compression", lambda *_: None)
        return trained(world, cfg)


def without_look(world, cfg):
    """Planted: whether rows are over the bound is not looked at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundedRows, "all_rows_fit", lambda self: True)
        return trained(world, cfg)


def are_alike(found, expected) -> bool:
    pairs = [pair for one, other in zip(found, expected) for pair in zip(one[0], other[0], strict=True)]
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in pairs)


@pytest.mark.slow(core=["ep2", "powersgd"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_run_is_what_it_is_without_a_bound(ranks, layout):
    """With a bound that some step exceeds on some rank, and with one that none does."""
    size, parallel = LAYOUTS[layout]
    exact = ranks(size).run(trained, laid(parallel, None))
    tight = ranks(size).run(trained, laid(parallel, 1.0))
    wide = ranks(size).run(trained, laid(parallel, 8.0))
    assert are_alike(tight, exact) and are_alike(wide, exact)
    for (_, repeated, lines), (_, never, silent) in zip(tight, wide):
        assert repeated == tight[0][1] and 1 <= repeated[0] <= STEPS and never == [0]
        assert "parallel.ep_bound 1 allows, and was computed again" in lines[0] and not silent


def test_rows_that_nobody_looks_for_are_seen(ranks):
    size, parallel = LAYOUTS["ep2"]
    exact = ranks(size).run(trained, laid(parallel, None))
    assert not are_alike(ranks(size).run(without_look, laid(parallel, 1.0)), exact)


@pytest.mark.slow
def test_an_error_of_powersgd_that_is_not_restored_is_seen(ranks):
    size, parallel = LAYOUTS["powersgd"]
    exact = ranks(size).run(trained, laid(parallel, None))
    assert not are_alike(ranks(size).run(without_restore, laid(parallel, 1.0)), exact)


def sizes_of_exchanges(world, bound):
    """Rows of each all-to-all of a mixture's forward outside of training."""
    cfg = laid(dict(ep=2), bound)
    run = build_run(cfg, Mesh.bind(parallel_dims(cfg, 2), world), torch.device("cpu"), None, 1)
    moe = run.stages[0].blocks[0].mlp
    sizes = []
    x = torch.randn(1, 6, cfg.model.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    real = comm.start_all_to_all
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(comm, "start_all_to_all", lambda t, *a, **o: sizes.append(len(t)) or real(t, *a, **o))
        moe(x, None)
    return sizes


def test_an_evaluation_sends_what_is_routed(ranks):
    """Nobody would compute it again."""
    assert ranks(2).run(sizes_of_exchanges, 1.0) == ranks(2).run(sizes_of_exchanges, None)
