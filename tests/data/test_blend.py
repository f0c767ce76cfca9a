"""data/blend.py: every sample once, shares kept, any place computed alone."""

import random
from collections import Counter

import numpy as np
import pytest

from config import ConfigError
from data.blend import Blend, parse_blend


def random_blends(count):
    rng = random.Random(0)
    for _ in range(count):
        weights = [(1, 2, 3, 7, 1000, rng.randrange(1, 10**6)) for _ in range(rng.randrange(1, 7))]
        yield Blend(tuple(map(rng.choice, weights))), rng


def test_each_sample_comes_once_in_order_and_shares_are_kept():
    for mix, _ in random_blends(100):
        total, sets = sum(mix.weights), len(mix.weights)
        d, j = mix.pick(0, 700)
        for k, w in enumerate(mix.weights):
            mine = j[d == k]
            assert mine.tolist() == list(range(len(mine)))  # 0, 1, 2, ...: each once
            given = np.cumsum(d == k)
            want = np.arange(1, 701) * w / total
            assert np.abs(given - want).max() <= 0.5 + sets * w / total / 2 + 1e-9


def test_any_stretch_is_the_same_computed_alone():
    for mix, rng in random_blends(60):
        d, j = mix.pick(0, 600)
        for _ in range(10):
            a, n = rng.randrange(500), rng.randrange(1, 100)
            some = mix.pick(a, n)
            assert some[0].tolist() == d[a : a + n].tolist() and some[1].tolist() == j[a : a + n].tolist()


def test_a_trillion_samples_in_nothing_is_lost_or_twice():
    """Where floats would be tied."""
    mix, at = Blend((700_001, 300_007, 1)), 10**12
    seen = Counter()
    for i in range(20):
        d, j = mix.pick(at + 50 * i, 50)
        seen.update(zip(d.tolist(), j.tolist()))
    assert len(seen) == 1000 and max(seen.values()) == 1
    for k in range(3):
        mine = sorted(j for d, j in seen if d == k)
        assert mine == list(range(mine[0], mine[0] + len(mine))) if mine else True


def test_two_sets_stay_within_one():
    d, _ = parse_blend("0.7 a 0.3 b")[0].pick(0, 10_000)
    assert np.abs(np.cumsum(d == 0) - 0.7 * np.arange(1, 10_001)).max() <= 1


def test_weights_and_paths_are_parsed():
    assert parse_blend("0.7 a 0.3 b") == (Blend((7, 3)), ["a", "b"])
    assert parse_blend("1 a 2e-1 'b c'") == (Blend((5, 1)), ["a", "b c"])
    assert parse_blend("a") == (Blend((1,)), ["a"])


@pytest.mark.parametrize("text,told", [
    ("", "empty"),
    ("0.7 a 0.3", "alternate"),
    ("0.7 a b 0.3", "alternate"),
    ("0 a 1 b", "above 0"),
    ("-1 a 1 b", "above 0"),
    ("nan a 1 b", "weights must be finite, and nan is not"),
    ("-Inf a 1 b", "weights must be finite, and -Inf is not"),
    ("0.5 'a", "quot"),
])
def test_a_blend_that_cannot_be_parsed_is_refused(text, told):
    with pytest.raises(ConfigError, match=told):
        parse_blend(text)
