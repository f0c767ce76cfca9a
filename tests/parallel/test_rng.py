"""Dropout's bits against a hash of whole numbers written here (rates and means:
tests/test_definitions.py).
"""

import pytest
import torch

from parallel.rng import DropoutRng

SEED, STEP, SITE, RATE, ONES = 1234, 7, 3, 0.3, (1 << 64) - 1


def mixed(x: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
    generators")."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & ONES
    x = (x ^ x >> 27) * 0x94D049BB133111EB & ONES
    return x ^ x >> 31


def expected(step: int, site: int, row: int, column: int, channel: int) -> int:
    """53 bits of one element: its coordinates are hashed one after the other."""
    key = step * 0xD1B54A32D192ED03 + SEED * 0x9E3779B97F4A7C15 + site & ONES
    return mixed(mixed(mixed(mixed(key) + row & ONES) + column & ONES) + channel & ONES) >> 11


def noise(step=STEP) -> DropoutRng:
    return DropoutRng(SEED, step, torch.tensor([0, 5, 9]), torch.tensor([2, 0, 11, 300]))


@pytest.mark.parametrize("step", [STEP, torch.tensor(STEP)], ids=["int", "tensor"])
def test_bits_are_a_hash_of_the_coordinates(step):
    n, rows, columns, width = noise(step), (0, 5, 9), (2, 0, 11, 300), 5
    want = [[[expected(STEP, SITE, r, c, k) for k in range(width)] for c in columns] for r in rows]
    assert n.bits(SITE, width).tolist() == want
    kept = [[[k >= int(RATE * 2**53) for k in c] for c in r] for r in want]
    assert n.keep_mask(SITE, width, RATE).tolist() == kept
    far = torch.tensor([[[0.75 + k / 2**54 for k in c] for c in r] for r in want], dtype=torch.float64)
    torch.testing.assert_close(n.uniform(SITE, width, 0.25, torch.float64), far, rtol=0, atol=1e-15)
