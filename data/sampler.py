"""Which window of tokens is sample k of a split: arithmetic on (seed, k), without a table.

A sample is seq_len + 1 consecutive tokens of the split's stream. Neighbouring windows share one token, so
that an epoch predicts every token but the first exactly once.

Each epoch visits its windows in the order of a keyed permutation: a Feistel network (Luby and Rackoff 1988)
with cycle walking (Black and Rogaway 2002). The tokens that do not fill a window are left over; each epoch
shifts all windows by a keyed share of them. This costs no memory, and microseconds in each step, for any
number of windows up to 2**62.
"""
from dataclasses import dataclass

import numpy as np

ROUNDS = 6  # of the Feistel network


@dataclass(frozen=True)
class WindowSampler:
    """The samples of the tokens [first, last) of one stream."""
    first: int
    last: int
    seq_len: int
    seed: int

    @property
    def count(self) -> int:
        """Number of samples of an epoch."""
        return (self.last - self.first - 1) // self.seq_len

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # int64 [n] -> 2 x int64 [n]
        """Sample numbers -> ids (epoch * count + number of the window) and the first token of each window."""
        samples = np.asarray(samples, np.int64)
        left_over = self.last - self.first - 1 - self.count * self.seq_len
        ids = np.empty_like(samples)
        first_tokens = np.empty_like(samples)

        epochs = samples // self.count
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            permutation_seed = derive_seed(self.seed, int(epoch))
            windows = permute(samples[in_epoch] % self.count, self.count, permutation_seed)
            shift = derive_seed(self.seed, int(epoch), 1) % (left_over + 1)
            ids[in_epoch] = epoch * self.count + windows
            first_tokens[in_epoch] = self.first + shift + windows * self.seq_len
        return ids, first_tokens


def derive_seed(*parts: int) -> int:
    """A 64-bit seed from whole numbers; the same in every version of Python and numpy."""
    state = 0
    for part in parts:
        mixed = mix_bits(np.array([(state ^ part) % 2**64], np.uint64))
        state = int(mixed[0])
    return state


def mix_bits(x: np.ndarray) -> np.ndarray:  # uint64 [n] -> uint64 [n]
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): every input bit changes every output bit."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(indices: np.ndarray, size: int, seed: int) -> np.ndarray:  # int64 [n] -> int64 [n]
    """Where the permutation of range(size) that `seed` selects sends each index."""
    num_bits = (size - 1).bit_length()
    half_bits = np.uint64(max(1, -(-num_bits // 2)))  # of each half of the network: domain below 4 size
    half_mask = (np.uint64(1) << half_bits) - np.uint64(1)
    round_keys = mix_bits(np.uint64(seed % 2**64) ^ np.arange(ROUNDS, dtype=np.uint64))

    x = np.asarray(indices).astype(np.uint64)
    outside = np.ones(len(x), bool)
    while outside.any():  # cycle walking: encrypt again what is not below size; that keeps it a permutation
        left = x[outside] >> half_bits
        right = x[outside] & half_mask
        for round_key in round_keys:
            left, right = right, left ^ (mix_bits(right ^ round_key) & half_mask)
        x[outside] = (left << half_bits) | right
        outside[outside] = x[outside] >= size
    return x.astype(np.int64)
