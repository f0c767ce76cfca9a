"""Map sample k of a split to a window of tokens: arithmetic on (seed, k), without a table.

A sample is seq_len + 1 consecutive tokens of the split's stream. Neighboring windows share one token, so an
epoch predicts every token but the first exactly once.

If the phases of a run use several sequence lengths (train.phases), spans are shuffled instead. A span
holds one or more windows of every length. A phase takes the next unread spans and shuffles their windows.

Each epoch visits its windows in the order of a keyed permutation: a Feistel network (Luby and Rackoff 1988)
with cycle walking (Black and Rogaway 2002). Tokens that do not fill a window are left over; each epoch shifts
all windows by a keyed part of them. This needs no memory, and microseconds per step, for any number of
windows up to 2**62.
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
        """Number of samples per epoch."""
        return (self.last - self.first - 1) // self.seq_len

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # int64 [n] -> 2 x int64 [n]
        """Map sample numbers to ids (epoch * count + window number) and the first token of each window."""
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


@dataclass(frozen=True)
class SpanSampler:
    """Samples of seq_len tokens within consecutive spans, in the span order of another sampler.

    `spans` samples whole spans: its seq_len is the span's. `first` and `last` count spans over all epochs; if
    `last` is None, the samples cover all spans from `first` on.
    """
    spans: WindowSampler
    seq_len: int
    first: int = 0
    last: int | None = None

    @property
    def in_span(self) -> int:
        """Number of samples per span."""
        return self.spans.seq_len // self.seq_len

    @property
    def count(self) -> int:
        """Number of samples per epoch."""
        return self.spans.count * self.in_span

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # int64 [n] -> 2 x int64 [n]
        """Map sample numbers (0 is in the first span) to ids and the first token of each window.

        The windows of an epoch's spans are shuffled together, so neighboring samples come from different
        spans.
        """
        places = self.first * self.in_span + np.asarray(samples, np.int64)  # windows, counted over all epochs
        if self.in_span > 1:
            places = self._shuffled(places)
        span_ids, first_tokens = self.spans.locate(places // self.in_span)
        parts = places % self.in_span
        return span_ids * self.in_span + parts, first_tokens + parts * self.seq_len

    def _shuffled(self, places: np.ndarray) -> np.ndarray:  # int64 [n] -> int64 [n]
        """Permute the windows [first span .. last span) within each epoch."""
        shuffled = np.empty_like(places)
        epochs = places // self.count
        for epoch in np.unique(epochs).tolist():
            in_epoch = epochs == epoch
            begin = max(epoch * self.count, self.first * self.in_span)
            end = (epoch + 1) * self.count
            if self.last is not None:
                end = min(end, self.last * self.in_span)
            if (places[in_epoch] >= end).any():
                raise ValueError(f"samples beyond span {self.last}, the last of these spans")
            seed = derive_seed(self.spans.seed, epoch, begin, 2)
            shuffled[in_epoch] = begin + permute(places[in_epoch] - begin, end - begin, seed)
        return shuffled


def derive_seed(*parts: int) -> int:
    """Derive a 64-bit seed from integers, the same in every version of Python and numpy."""
    state = 0
    for part in parts:
        mixed = mix_bits(np.array([(state ^ part) % 2**64], np.uint64))
        state = int(mixed[0])
    return state


def mix_bits(x: np.ndarray) -> np.ndarray:  # uint64 [n] -> uint64 [n]
    """Finalize as in splitmix64 (Steele, Lea, Flood 2014): every input bit affects every output bit."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(indices: np.ndarray, size: int, seed: int) -> np.ndarray:  # int64 [n] -> int64 [n]
    """Apply the permutation of range(size) selected by `seed` to each index."""
    num_bits = (size - 1).bit_length()
    half_bits = np.uint64(max(1, -(-num_bits // 2)))  # in each half of the network: domain below 4 size
    half_mask = (np.uint64(1) << half_bits) - np.uint64(1)
    round_keys = mix_bits(np.uint64(seed % 2**64) ^ np.arange(ROUNDS, dtype=np.uint64))

    x = np.asarray(indices).astype(np.uint64)
    outside = np.ones(len(x), bool)
    while outside.any():  # cycle walking: encrypt values not below size again; keeps it a permutation
        left = x[outside] >> half_bits
        right = x[outside] & half_mask
        for round_key in round_keys:
            left, right = right, left ^ (mix_bits(right ^ round_key) & half_mask)
        x[outside] = (left << half_bits) | right
        outside[outside] = x[outside] >= size
    return x.astype(np.int64)
