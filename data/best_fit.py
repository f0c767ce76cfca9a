"""Best-fit packing: documents are placed whole into sequences, and cut only if they are longer than one.

Source: arXiv 2404.10830. A document of more than seq_len + 1 tokens is cut into pieces of that size, each of
which begins with the last token of the piece before: every token but the first of a document is predicted
exactly once in an epoch. Pieces are placed by descending size into the fullest sequence that has room (best
fit decreasing). What stays free at the end of a sequence is padding, which the loss does not count. Between
two pieces nothing is predicted.

A later phase of the run with sequences of another length packs again what the epoch has left unread, so that
no token is lost and none is predicted twice; its next epochs pack all documents.

The sequences follow from the documents' lengths and from what phases have read, so that every rank, and every
resume, makes the same ones. Their order in an epoch is a keyed permutation (sampler.py). Memory: 24 bytes for
each piece. Time: that of sorting the pieces, and a step for each size of piece and each room it finds.
"""
import bisect
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from data.sampler import derive_seed, permute


class DocumentIndex(Protocol):
    """The documents of a stream of tokens (indexed.py)."""

    def document_starts(self, first: int, stop: int) -> np.ndarray: ...


@dataclass(frozen=True)
class Packing:
    """Sequences of seq_len + 1 slots, filled with pieces of documents. pack_ranges makes it.

    firsts, stops int64 [pieces]: the tokens of each piece, in the order of the sequences.
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
        """Share of the slots that hold tokens."""
        return float((self.stops - self.firsts).sum()) / max(1, self.count * (self.seq_len + 1))

    def pieces(self, sequence: int) -> list[tuple[int, int]]:
        """The tokens [first, stop) of each piece of a sequence, in order."""
        which = slice(int(self.bounds[sequence]), int(self.bounds[sequence + 1]))
        return list(zip(self.firsts[which].tolist(), self.stops[which].tolist()))

    def ranges_of(self, sequences: np.ndarray) -> np.ndarray:  # int64 [n] -> int64 [ranges, 2]
        """The tokens of these sequences as rising ranges [first, stop), neighbouring pieces joined."""
        is_chosen = np.zeros(self.count, bool)
        is_chosen[sequences] = True
        is_chosen = np.repeat(is_chosen, np.diff(self.bounds))
        firsts, stops = self.firsts[is_chosen], self.stops[is_chosen]
        order = np.argsort(firsts)
        firsts, stops = firsts[order], stops[order]
        goes_on = firsts[1:] < stops[:-1]  # pieces of one document share a token, those of two have none
        return np.stack([firsts[np.r_[True, ~goes_on]], stops[np.r_[~goes_on, True]]], 1)


@dataclass(frozen=True)
class PackedSampler:
    """The samples of one length of one source: what is left of an epoch, then whole epochs.

    rest: of epoch number `epoch`; whole: of every later one. seed: of the source's order.
    """
    rest: Packing
    whole: Packing
    epoch: int
    seed: int

    @property
    def count(self) -> int:
        """Number of samples of a whole epoch."""
        return self.whole.count

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # int64 [n] -> 2 x int64 [n]
        """Sample numbers, from 0 at the first of `rest` -> ids and the first token of each sequence."""
        samples = np.asarray(samples, np.int64)
        ids = np.empty_like(samples)
        first_tokens = np.empty_like(samples)
        later = 1 + (samples - self.rest.count) // self.count  # epochs after that of `rest`
        later[samples < self.rest.count] = 0
        for epoch in np.unique(later).tolist():
            in_epoch = later == epoch
            packing, before = self._epoch(epoch)
            sequences = self._order(epoch, samples[in_epoch] - before)
            ids[in_epoch] = before + sequences
            first_tokens[in_epoch] = packing.firsts[packing.bounds[sequences]]
        return ids, first_tokens

    def pieces(self, sample_id: int) -> list[tuple[int, int]]:
        """The tokens [first, stop) of each piece of a sample, in order."""
        if sample_id < self.rest.count:
            return self.rest.pieces(sample_id)
        return self.whole.pieces((sample_id - self.rest.count) % self.count)

    def unread(self, samples: int) -> tuple[int, np.ndarray | None]:
        """The number of the epoch after `samples` samples, and the ranges [n, 2] of its tokens that are not
        read, or None for all of it."""
        later = 0 if samples < self.rest.count else 1 + (samples - self.rest.count) // self.count
        packing, before = self._epoch(later)
        if later and samples == before:
            return self.epoch + later, None
        sequences = self._order(later, np.arange(samples - before, packing.count))
        return self.epoch + later, packing.ranges_of(sequences)

    def _epoch(self, later: int) -> tuple[Packing, int]:
        """The sequences of the epoch that comes so much later than that of `rest`, and the number of samples
        before it."""
        if later == 0:
            return self.rest, 0
        return self.whole, self.rest.count + (later - 1) * self.count

    def _order(self, later: int, places: np.ndarray) -> np.ndarray:  # int64 [n] -> int64 [n]
        """Places in the order of an epoch -> numbers of sequences."""
        return permute(places, self._epoch(later)[0].count, derive_seed(self.seed, self.epoch + later))


# ---- packing -----------------------------------------------------------------------------------------------

def document_ranges(index: DocumentIndex, first: int, last: int) -> np.ndarray:  # int64 [documents, 2]
    """The documents in the tokens [first, last) as ranges [begin, end)."""
    starts = index.document_starts(first, last) if last > first else ()
    bounds = np.concatenate([[first], starts, [last]]).astype(np.int64)
    return np.stack([bounds[:-1], bounds[1:]], 1)


def pack_ranges(ranges: np.ndarray, seq_len: int) -> Packing:
    """Packs ranges of tokens, int64 [n, 2], each of one document."""
    pieces = cut_ranges(ranges, seq_len)
    sequence_of = best_fit_decreasing(pieces[:, 1] - pieces[:, 0], seq_len + 1)

    # pieces in the order of their sequences, and within one in the order of the data
    order = np.lexsort((pieces[:, 0], sequence_of))
    count = int(sequence_of.max()) + 1 if len(pieces) else 0
    bounds = np.concatenate([[0], np.cumsum(np.bincount(sequence_of, minlength=count))])
    return Packing(seq_len, pieces[order, 0], pieces[order, 1], bounds)


def cut_ranges(ranges: np.ndarray, seq_len: int) -> np.ndarray:  # int64 [n, 2] -> int64 [pieces, 2]
    """The pieces [first, stop) of the ranges, in order; a range of one token predicts nothing and has
    none."""
    predicted = np.maximum(ranges[:, 1] - ranges[:, 0] - 1, 0)  # tokens, in each range
    counts = -(-predicted // seq_len)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # in its range
    firsts = np.repeat(ranges[:, 0], counts) + number * seq_len
    stops = np.minimum(firsts + seq_len + 1, np.repeat(ranges[:, 1], counts))
    return np.stack([firsts, stops], 1)


def best_fit_decreasing(sizes: np.ndarray, capacity: int) -> np.ndarray:  # int64 [n] -> int64 [n]
    """The bin of each size. The largest size goes first, equal sizes in their order; each goes into the
    fullest bin that has room for it, or into a new one.

    A bin that was the fullest with room stays so as long as the same size fits again. So equal sizes are
    placed together: those that fill one bin, and the same for all bins that are equally full.
    """
    bins = np.empty(len(sizes), np.int64)
    count = 0
    by_room: dict[int, np.ndarray] = {}  # {free slots: the bins that have so many}
    rooms: list[int] = []  # the keys of by_room, rising

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

            # `fit` items for each bin; the last of the bins that are needed may get fewer
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
