"""data/sampler.py: permutations that are permutations, windows that cover a split once an epoch."""

import random

import numpy as np
import pytest

from data.sampler import SpanSampler, WindowSampler, derive_seed, permute


def test_permute_is_a_permutation_of_any_range():
    for n in [*range(1, 70), 127, 128, 129, 1000, 4095, 4097]:
        for seed in (0, 7):
            assert sorted(permute(np.arange(n), n, seed)) == list(range(n))


def test_permute_gives_any_place_alone():
    whole = permute(np.arange(1000), 1000, 5)
    some = np.array([999, 0, 17])
    assert permute(some, 1000, 5).tolist() == whole[some].tolist()


def test_permute_shuffles():
    """Fixed points, runs and the correlation with the identity are those of a random order; keys give other
    orders.
    """
    n = 10_000
    orders = [permute(np.arange(n), n, derive_seed(3, e)) for e in range(4)]
    for order in orders:
        assert (order == np.arange(n)).sum() < 10
        assert (np.diff(order) == 1).sum() < 10
        assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 0.05
    assert all((a == b).sum() < 10 for i, a in enumerate(orders) for b in orders[:i])
    few = [tuple(permute(np.arange(4), 4, derive_seed(s))) for s in range(2000)]
    assert len(set(few)) == 24 and max(map(few.count, set(few))) < 170  # 83 of each are expected


def test_permute_has_no_two_alike_in_a_huge_range():
    n = 10**15 + 37
    out = permute(np.arange(10_000), n, 1)
    assert len(set(out.tolist())) == 10_000 and 0 <= out.min() and out.max() < n


def test_windows_cover_the_stream_once_an_epoch():
    rng = random.Random(0)
    for _ in range(200):
        first, seq = rng.randrange(1000), rng.randrange(1, 20)
        w = WindowSampler(first, first + seq + 1 + rng.randrange(300), seq, rng.randrange(2**64))
        for epoch in range(3):
            ids, at = w.locate(np.arange(w.count) + epoch * w.count)
            assert sorted(ids) == list(range(epoch * w.count, (epoch + 1) * w.count))
            assert at.min() >= w.first and at.max() + seq + 1 <= w.last
            assert np.diff(np.sort(at)).tolist() == [seq] * (w.count - 1)  # neighbours share one token


def test_windows_change_with_epoch_and_seed():
    w = WindowSampler(0, 10_150, 100, 1)
    a, b = w.locate(np.arange(101))[1], w.locate(np.arange(101, 202))[1]
    assert w.count == 101 and a.tolist() != b.tolist()
    assert (
        len({int(w.locate(np.arange(e * 101, e * 101 + 101))[1].min()) for e in range(20)}) > 10
    )  # the shift
    assert WindowSampler(0, 10_150, 100, 2).locate(np.arange(101))[1].tolist() != a.tolist()


def test_the_windows_of_spans_cover_them_once_and_no_epoch_goes_before_another():
    """From any span to any other of three epochs, in windows of one length or several to a span."""
    rng = random.Random(1)
    for _ in range(100):
        in_span, seq = rng.choice([1, 2, 5]), rng.randrange(1, 9)
        first, length = rng.randrange(1000), in_span * seq
        last = first + length + 1 + rng.randrange(20 * length)
        spans = WindowSampler(first, last, length, rng.randrange(99))
        begin, end = sorted(rng.sample(range(3 * spans.count + 1), 2))
        windows = SpanSampler(spans, seq, begin, end)
        assert (windows.in_span, windows.count) == (in_span, in_span * spans.count)

        span_ids, span_tokens = spans.locate(np.arange(begin, end))
        want = [(number * in_span + part, int(token) + part * seq)
                for number, token in zip(span_ids.tolist(), span_tokens.tolist()) for part in range(in_span)]
        ids, tokens = windows.locate(np.arange((end - begin) * in_span))
        assert sorted(zip(ids.tolist(), tokens.tolist())) == sorted(want)
        assert (np.diff(ids // windows.count) >= 0).all()
        if in_span > 1:
            with pytest.raises(ValueError, match=f"beyond span {end}"):
                windows.locate(np.array([(end - begin) * in_span]))


def test_the_windows_of_a_span_are_apart():
    spans = WindowSampler(0, 4001, 40, 1)
    ids, _ = SpanSampler(spans, 10).locate(np.arange(400))
    assert (np.diff(ids // 4) == 0).sum() < 20  # 3 are expected
    alone, _ = SpanSampler(spans, 40).locate(np.arange(100))
    assert alone.tolist() == spans.locate(np.arange(100))[0].tolist()


def test_order_is_frozen():
    """Resuming with a newer version of the code must read the same samples: these numbers may never
    change.
    """
    assert permute(np.arange(10), 10, 1).tolist() == [3, 5, 1, 0, 2, 7, 6, 9, 8, 4]
    halves = SpanSampler(WindowSampler(0, 13, 4, 1), 2, 1)
    assert halves.locate(np.arange(8))[1].tolist() == [0, 8, 2, 10, 4, 0, 8, 2]
    assert derive_seed(1, 2, 3) == 15020427595393229491
    assert derive_seed(-1) == derive_seed(2**64 - 1) and derive_seed(2**64 + 5) == derive_seed(
        5
    )  # any whole number is a seed
