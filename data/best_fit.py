"""Best-fit packing: place documents whole into sequences, and cut only those longer than a sequence.

Source: arXiv 2404.10830. A document of more than seq_len + 1 tokens is cut into pieces of that size, each
starting with the last token of the previous piece, so every token of a document but the first is predicted
exactly once per epoch. Pieces are placed by descending size into the fullest sequence with enough room (best
fit decreasing). Free slots at the end of a sequence are padding, which the loss skips. Nothing is predicted
across pieces.

If a later phase changes the sequence length, it repacks the unread rest of the epoch, so no token is lost or
predicted twice. Its next epochs pack all documents.

The sequences depend only on document lengths and on what earlier phases have read, so every rank and every
resume builds the same ones. Their order in an epoch is a keyed permutation (sampler.py). Memory: 24 bytes per
piece. Time: sorting the pieces, plus one step for each piece size and each amount of free room it fits into.
"""
import bisect
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from data.sampler import derive_seed, permute


class DocumentIndex(Protocol):
    """Document boundaries of a token stream (indexed.py)."""

    def document_starts(self, first: int, stop: int) -> np.ndarray: ...


@dataclass(frozen=True)
class Packing:
    """Sequences of seq_len + 1 slots, filled with pieces of documents by pack_ranges.

    firsts, stops int64 [pieces]: token range of each piece, in the order of the sequences.
    bounds int64 [sequences + 1]: first piece of each sequence.
    """
    seq_len: int
    firsts: np.ndarray
    stops: np.ndarray
    bounds: np.ndarray

    @property
    def count(self) -> int:
        """Number of sequences."""
        return len(self.bounds) - 1

    @property
    def utilization(self) -> float:
        """Fraction of the slots that hold tokens."""
        return float((self.stops - self.firsts).sum()) / max(1, self.count * (self.seq_len + 1))

    def pieces(self, sequence: int) -> list[tuple[int, int]]:
        """Return the token range [first, stop) of each piece of a sequence, in order."""
        which = slice(int(self.bounds[sequence]), int(self.bounds[sequence + 1]))
        return list(zip(self.firsts[which].tolist(), self.stops[which].tolist()))

    def get_ranges(self, sequences: np.ndarray) -> np.ndarray:  # int64 [n] -> int64 [ranges, 2]
        """Return the tokens of these sequences as ascending ranges [first, stop), adjacent pieces merged."""
        is_chosen = np.zeros(self.count, bool)
        is_chosen[sequences] = True
        is_chosen = np.repeat(is_chosen, np.diff(self.bounds))
        firsts, stops = self.firsts[is_chosen], self.stops[is_chosen]
        order = np.argsort(firsts)
        firsts, stops = firsts[order], stops[order]
        # pieces of one document share a token, pieces of two do not
        is_continuation = firsts[1:] < stops[:-1]
        return np.stack([firsts[np.r_[True, ~is_continuation]], stops[np.r_[~is_continuation, True]]], 1)


@dataclass(frozen=True)
class PackedSampler:
    """Samples of one length from one source: the rest of an epoch, then whole epochs.

    `rest` packs the unread part of epoch number `epoch`, and `whole` every later epoch. `seed` is the
    source's.
    """
    rest: Packing
    whole: Packing
    epoch: int
    seed: int

    @property
    def count(self) -> int:
        """Number of samples in a whole epoch."""
        return self.whole.count

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # int64 [n] -> 2 x int64 [n]
        """Map sample numbers (0 is the first of `rest`) to ids and the first token of each sequence."""
        samples = np.asarray(samples, np.int64)
        ids = np.empty_like(samples)
        first_tokens = np.empty_like(samples)
        later = 1 + (samples - self.rest.count) // self.count  # epochs after the one of `rest`
        later[samples < self.rest.count] = 0
        for epoch in np.unique(later).tolist():
            in_epoch = later == epoch
            packing, before = self._epoch(epoch)
            sequences = self._order(epoch, samples[in_epoch] - before)
            ids[in_epoch] = before + sequences
            first_tokens[in_epoch] = packing.firsts[packing.bounds[sequences]]
        return ids, first_tokens

    def pieces(self, sample_id: int) -> list[tuple[int, int]]:
        """Return the token range [first, stop) of each piece of a sample, in order."""
        if sample_id < self.rest.count:
            return self.rest.pieces(sample_id)
        return self.whole.pieces((sample_id - self.rest.count) % self.count)

    def unread(self, samples: int) -> tuple[int, np.ndarray | None]:
        """Return the epoch reached after `samples` samples, and its unread token ranges [n, 2] (None if all
        of it is unread)."""
        later = 0 if samples < self.rest.count else 1 + (samples - self.rest.count) // self.count
        packing, before = self._epoch(later)
        if later and samples == before:
            return self.epoch + later, None
        sequences = self._order(later, np.arange(samples - before, packing.count))
        return self.epoch + later, packing.get_ranges(sequences)

    def _epoch(self, later: int) -> tuple[Packing, int]:
        """Return the packing that is `later` epochs after `rest`, and how many samples precede it."""
        if later == 0:
            return self.rest, 0
        return self.whole, self.rest.count + (later - 1) * self.count

    def _order(self, later: int, places: np.ndarray) -> np.ndarray:  # int64 [n] -> int64 [n]
        """Map positions in the order of an epoch to sequence numbers."""
        return permute(places, self._epoch(later)[0].count, derive_seed(self.seed, self.epoch + later))


# ---- packing -----------------------------------------------------------------------------------------------

def document_ranges(index: DocumentIndex, first: int, last: int) -> np.ndarray:  # int64 [documents, 2]
    """Split the tokens [first, last) into documents, as ranges [begin, end)."""
    starts = index.document_starts(first, last) if last > first else ()
    bounds = np.concatenate([[first], starts, [last]]).astype(np.int64)
    return np.stack([bounds[:-1], bounds[1:]], 1)


def pack_ranges(ranges: np.ndarray, seq_len: int) -> Packing:
    """Pack token ranges, int64 [n, 2], each within one document."""
    pieces = cut_ranges(ranges, seq_len)
    sequence_of = best_fit_decreasing(pieces[:, 1] - pieces[:, 0], seq_len + 1)

    # pieces in the order of their sequences, and within a sequence in data order
    order = np.lexsort((pieces[:, 0], sequence_of))
    count = int(sequence_of.max()) + 1 if len(pieces) else 0
    bounds = np.concatenate([[0], np.cumsum(np.bincount(sequence_of, minlength=count))])
    return Packing(seq_len, pieces[order, 0], pieces[order, 1], bounds)


def cut_ranges(ranges: np.ndarray, seq_len: int) -> np.ndarray:  # int64 [n, 2] -> int64 [pieces, 2]
    """Cut the ranges into pieces [first, stop), in order. A range of one token predicts nothing and is
    dropped.
    """
    predicted = np.maximum(ranges[:, 1] - ranges[:, 0] - 1, 0)  # predicted tokens in each range
    counts = -(-predicted // seq_len)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # index within its range
    firsts = np.repeat(ranges[:, 0], counts) + number * seq_len
    stops = np.minimum(firsts + seq_len + 1, np.repeat(ranges[:, 1], counts))
    return np.stack([firsts, stops], 1)


def best_fit_decreasing(sizes: np.ndarray, capacity: int) -> np.ndarray:  # int64 [n] -> int64 [n]
    """Return the bin of each size. Place sizes in descending order, equal sizes in their given order, each
    into the fullest bin with enough room, or else into a new bin.

    While the same size still fits, the fullest bin with room stays the fullest. So equal sizes are placed
    together: as many as fill one bin, in all bins with equal room at once.
    """
    bins = np.empty(len(sizes), np.int64)
    count = 0
    by_room: dict[int, np.ndarray] = {}  # {free slots: bins with that many}
    rooms: list[int] = []  # keys of by_room, ascending

    def add(room: int, new: np.ndarray) -> None:
        if room == 0 or len(new) == 0:
            return
        if room not in by_room:
            bisect.insort(rooms, room)
            by_room[room] = new
        else:
            by_room[room] = np.concatenate([by_room[room], new])

    order = np.argsort(-sizes, kind="stable")
    for items in np.split(order, np.flatnonzero(np.diff(sizes[order])) + 1):
        while len(items):
            size = int(sizes[items[0]])
            place = bisect.bisect_left(rooms, size)
            if place < len(rooms):
                room = rooms.pop(place)
                chosen = by_room.pop(room)
            else:
                room = capacity
                chosen = np.arange(count, count - (-len(items) // (capacity // size)))  # rounded up
                count += len(chosen)

            # `fit` items per bin; the last bin may get fewer
            fit = room // size
            needed = -(-len(items) // fit)
            used, kept = chosen[:needed], chosen[needed:]
            filled = np.repeat(used, fit)[:len(items)]
            bins[items[:len(filled)]] = filled
            in_last = len(filled) - fit * (len(used) - 1)
            items = items[len(filled):]

            add(room, kept)
            add(room - fit * size, used[:-1])
            add(room - in_last * size, used[-1:])
    return bins
