"""Estimate how much of a run's data counts in its loss, from a bounded number of its sequences.

The order of sequences is shuffled, so a run's first sequences are spread over its data. Only the loss mask
and the document starts are read, and tokens only in files without an index.
"""
from dataclasses import dataclass

import numpy as np

from data.start_tokens import Index
from data.window import counted_targets

SAMPLED_SEQUENCES = 512  # maximum checked at startup


@dataclass(frozen=True)
class TargetCounts:
    """Counted targets in `looked_at` out of `sequences` sequences.

    places: targets if all of them counted. targets: those that count. empty: sequences without any. cut:
    targets in conversations that begin before their sequence, or None if there are no conversations.
    """
    looked_at: int
    sequences: int
    places: int
    targets: int
    empty: int
    cut: int | None

    def describe(self) -> str:
        """Return one line for the run's header."""
        parts = [
            f"{100 * self.targets / self.places:.1f} % of targets count",
            f"{100 * self.empty / self.looked_at:.1f} % of sequences have none that does",
        ]
        if self.cut:
            share = f"{100 * self.cut / self.targets:.1f} %"
            parts.append(f"{share} of what counts is in conversations that begin before their sequence")
        is_sample = self.looked_at < self.sequences
        sample = f" ({self.looked_at:,} of {self.sequences:,} sequences looked at)" if is_sample else ""
        return ", ".join(parts) + sample


def number_of_targets(counted: np.ndarray | None, starts: np.ndarray | None, seq_len: int) -> int:
    """Return how many targets of a sequence count, as data/pack.py marks them.

    `counted` is bool [seq_len + 1], or None for all. `starts` are the slots from 1 on that begin a document,
    whose first token then does not count; None without data.doc_mask.
    """
    is_target = np.ones(seq_len + 1, bool) if counted is None else counted.copy()
    is_target[0] = False
    if starts is not None:
        is_target[starts] = False
    return int(is_target.sum())


def cut_targets(index: Index, first: int, stop: int) -> int:
    """Return the counted targets among the tokens (first, stop) whose document begins before `first`."""
    if index.document_start(index.document_at(first)) == first:
        return 0
    starts = index.document_starts(first, stop)
    counted = counted_targets(index, first, int(starts[0]) if len(starts) else stop)
    return 0 if counted is None else int(counted[1:].sum())
