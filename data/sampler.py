"""Which window of tokens is the k-th sample: arithmetic on (seed, k), no table.

A sample is seq_len + 1 consecutive tokens of a split's stream; neighbours share one token, so that every token but the
first is predicted once an epoch. Epoch e visits the n windows in the order of a keyed permutation (a Feistel network,
walked until it lands below n: Luby and Rackoff 1988; Black and Rogaway 2002), and shifts where they start by a keyed
part of what is left over at the end. Costs no memory and microseconds a step, for any n up to 2**62.
"""
from dataclasses import dataclass

import numpy as np

ROUNDS = 6


@dataclass(frozen=True)
class Windows:
    """The samples of one stream [first, last) of tokens."""
    first: int
    last: int
    seq_len: int
    seed: int

    @property
    def count(self) -> int:
        """Samples an epoch."""
        return (self.last - self.first - 1) // self.seq_len

    def window(self, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # int64 [m] -> 2 x int64 [m]
        """Sample numbers -> (id, epoch * count + window; first token). seq_len + 1 tokens from there are the sample."""
        k = np.asarray(k, np.int64)
        slack = self.last - self.first - 1 - self.count * self.seq_len
        ids, at = np.empty_like(k), np.empty_like(k)
        for epoch in np.unique(k // self.count):
            here = k // self.count == epoch
            w = permute(k[here] % self.count, self.count, key(self.seed, int(epoch)))
            shift = key(self.seed, int(epoch), 1) % (slack + 1)
            ids[here], at[here] = epoch * self.count + w, self.first + shift + w * self.seq_len
        return ids, at


def key(*parts: int) -> int:
    """A 64-bit key of whole numbers; stable over versions of Python and numpy."""
    h = 0
    for part in parts:
        h = int(mix(np.array([(h ^ part) % 2**64], np.uint64))[0])
    return h


def mix(x: np.ndarray) -> np.ndarray:  # uint64 [m]
    """splitmix64's finaliser (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(i: np.ndarray, n: int, seed: int) -> np.ndarray:  # int64 [m] -> int64 [m]
    """A permutation of range(n) at the places i, keyed by seed."""
    half = np.uint64(max(1, -(-(n - 1).bit_length() // 2)))  # bits in each half of the network; its domain is below 4n
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = mix(np.uint64(seed % 2**64) ^ np.arange(ROUNDS, dtype=np.uint64))
    x = np.asarray(i).astype(np.uint64)
    walk = np.ones(len(x), bool)
    while walk.any():  # leaving the domain and walking on until inside again keeps it a permutation of range(n)
        left, right = x[walk] >> half, x[walk] & mask
        for k in keys:
            left, right = right, left ^ (mix(right ^ k) & mask)
        x[walk] = left << half | right
        walk[walk] = x[walk] >= n
    return x.astype(np.int64)
