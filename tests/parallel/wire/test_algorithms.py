"""Sums by sends: the same sum as the collective's, the bytes that the formulas say, in whatever nodes the
ranks are.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch

import config
from config.reading.suggestions import check_rules
from config.reading.tiny import tiny_config
from parallel.wire.algorithms import ranks_by_node, start_scatter_sum, start_sum

SIZE = 64 * 24


def numbers(rank, dtype):
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(rank)).to(dtype)


def sums(world, kind, node, dtype):
    """(the sum, bytes and calls that this rank sent), in a group of all ranks; and ZeRO's share of it, where
    the kind has one.
    """
    ledger = Counter()
    group = world.group_of_rank("dp_cp", [list(range(world.size))], ledger)
    whole = start_sum(numbers(world.rank, dtype), group, kind, node).wait()
    sent = ledger["dp_cp", "send", "bytes"], ledger["dp_cp", "send", "calls"]
    share = (
        start_scatter_sum(numbers(world.rank, dtype), group, kind).wait()
        if kind in ("ring", "collective")
        else None
    )
    return whole, sent, share, ledger["dp_cp", "send", "bytes"] - sent[0]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "kind,node",
    [
        ("collective", None),
        ("ring", None),
        ("server", None),
        ("hierarchy", 2),
        ("hierarchy", None),
        ("hierarchy", 1),
    ],
)
def test_the_same_sum_and_its_bytes(ranks, world, kind, node):
    found = ranks(world).run(sums, kind, node, torch.float64)
    true, n, N = sum(numbers(r, torch.float64) for r in range(world)), SIZE * 8, world
    k = min(node or N, N)
    want = {
        "collective": [0] * N,
        "ring": [2 * (N - 1) * n // N] * N,
        "server": [(N - 1) * n] + [n] * (N - 1),
        "hierarchy": [2 * (k - 1) * n // k + 2 * (N // k - 1) * n // N] * N,
    }[kind]
    for rank, (whole, sent, share, scattered) in enumerate(found):
        assert torch.allclose(whole, true, rtol=1e-12, atol=1e-12)
        assert sent[0] == want[rank], (rank, sent)
        if share is not None:
            assert torch.allclose(share, true.chunk(N)[rank], rtol=1e-12, atol=1e-12)
            assert scattered == ((N - 1) * n // N if kind == "ring" else 0)
        assert torch.equal(whole, found[0][0]), "every rank has the same bits"


@pytest.mark.parametrize(
    "kind,node", [("collective", None), ("ring", None), ("server", None), ("hierarchy", 2)]
)
def test_the_same_bits_twice(ranks, kind, node):
    first, second = (ranks(4).run(sums, kind, node, torch.float32) for _ in "ab")
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, second))


def test_nodes():
    assert ranks_by_node((0, 2, 4, 6), 4) == [[0, 1], [2, 3]]  # tp 2 on nodes of 4
    assert ranks_by_node((1, 3), 2) == [[0], [1]] and ranks_by_node((4, 5, 6, 7), None) == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    "parallel,world,key",
    [
        (dict(reduce="server", zero=1), 4, "parallel.reduce"),
        (dict(reduce="hierarchy", zero=3), 4, "parallel.reduce"),
        (dict(reduce="hierarchy", node=3), 4, "parallel.node"),
        (dict(node=0), 1, "parallel.node"),
        (dict(bucket_mb=0.0), 1, "parallel.bucket_mb"),
    ],
)
def test_refused(parallel, world, key):
    cfg = tiny_config("llama3-tiny")
    with pytest.raises(config.ConfigError, match=f"^{key}: "):
        check_rules(replace(cfg, parallel=replace(cfg.parallel, **parallel)), world)


def test_validate_agrees_with_the_nodes():
    """Whatever it lets pass cuts every data-parallel group into equal nodes."""
    from parallel.topology.dims import ParallelDims

    cfg = tiny_config("llama3-tiny")
    passed = 0
    for world, tp, pp, node in (
        (w, t, p, n)
        for w in (2, 4, 8)
        for t in (1, 2, 4)
        for p in (1, 2)
        for n in range(1, 9)
        if w % (t * p) == 0
    ):
        try:
            check_rules(
                replace(cfg, parallel=replace(cfg.parallel, tp=tp, pp=pp, node=node, reduce="hierarchy")),
                world,
            )
        except config.ConfigError:
            continue
        passed += 1
        for group in ParallelDims(world, tp=tp, pp=pp).groups("dp_replicate", "dp_shard", "cp"):
            assert len({len(n) for n in ranks_by_node(group, node)}) == 1, (world, tp, pp, node)
    assert passed > 20
