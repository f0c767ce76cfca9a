"""Dispatch and combine: each row meets its expert and comes home, wherever experts are and however many there are of each."""
from collections import Counter

import pytest
import torch

from parallel.expert import Dispatch, combine, plan

E, K, D, ROOM = 4, 2, 3, 6


def routed(rank, kind):
    """index [t, K] and probs of this rank: another number of tokens on each."""
    g = torch.Generator().manual_seed(rank)
    t = {"empty": 0 if rank else 6}.get(kind, 3 + rank)
    index = torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(t)]) if t else torch.empty(0, K, dtype=torch.long)
    if kind == "one":  # all to the first two experts: the others get nothing
        index = torch.arange(K).expand(t, K).clone()
    if kind in ("dropped", "padded"):
        index[torch.rand(t, K, generator=g) < 0.4] = -1
    return index, torch.rand(t, K, generator=g, dtype=torch.float64), torch.randn(t, D, generator=g, dtype=torch.float64)


def experts(rows, weight, counts, first, part, parts):
    """Expert e multiplies by e + 1; the j-th part of it gives a share of that."""
    out = [r * (first + i + 1) * (part + 1) / sum(range(1, parts + 1)) for i, r in enumerate(rows.split(counts))]
    return torch.cat(out) * weight[:, None]


def trip(world, kind, etp):
    """This rank's outputs and gradients, with what they must be, and what the ledger counted."""
    ledger = Counter()
    group = world.groups("experts", [list(range(world.size))], ledger)
    index, probs, x = routed(world.rank, kind)
    probs.requires_grad_(), x.requires_grad_()
    p = plan(index, E, group, etp, dropped=kind in ("dropped", "padded"), room=ROOM if kind == "padded" else None)
    way = Dispatch(x, probs, p)
    rows, weight = way.rows()
    here = E * etp // world.size
    y = combine(experts(rows, weight, p.counts, group.index // etp * here, group.index % etp, etp), p)
    kept = index >= 0
    want = x * (probs * (index + 1) * kept).sum(1, keepdim=True)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    made, true = (torch.autograd.grad(t, (x, probs), dy) for t in (y, want))
    sent = (E * ROOM if kind == "padded" else int(kept.sum())) * etp
    return [(y.detach(), want.detach()), *zip(made, true)], ledger["experts", "all_to_all", "bytes"], sent, p.counts


@pytest.mark.parametrize("kind", ["even", "one", "empty", "dropped", "padded"])
@pytest.mark.parametrize("size, etp", [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_there_and_back(ranks, size, etp, kind):
    found = ranks(size).run(trip, kind, etp)
    for pairs, bytes_, sent, counts in found:
        for got, want in pairs:
            assert got.shape == want.shape and torch.allclose(got, want, atol=1e-12)
        # tokens there and back, forward and backward; probabilities there, and their gradients back; a table of counts
        assert bytes_ == (size > 1) * (4 * sent * D * 8 + 2 * sent * 8 + (kind != "padded") * E * etp * 8)
        assert kind != "padded" or counts == [ROOM * size] * len(counts)  # whatever was routed
    assert sum(sum(counts) for *_, counts in found) == sum(sent for _, _, sent, _ in found)
