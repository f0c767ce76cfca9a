"""How much of what a run reads counts in its loss, from a bounded number of its sequences.

The order of sequences is shuffled, so the first of a run are spread over its data. Read are the bits of the
loss mask and where documents begin; tokens only of files without an index.
"""
from dataclasses import dataclass

import numpy as np

from data.start_tokens import Index
from data.window import counted_targets

SAMPLED_SEQUENCES = 512  # that a start looks at, at most


@dataclass(frozen=True)
class TargetCounts:
    """The counted targets of `looked_at` out of `sequences` sequences.

    places: targets that they would have if all counted. targets: those that count. empty: sequences without
    any. cut: targets in conversations that begin before their sequence; None where there are no
    conversations.
    """
    looked_at: int
    sequences: int
    places: int
    targets: int
    empty: int
    cut: int | None

    def describe(self) -> str:
        """One line for the run's header."""
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
    """Return the targets of a sequence that count, as data/pack.py marks them.

    counted: bool [seq_len + 1], or None for all. starts: slots from 1 on that begin a document, whose first
    token does not count then; None without data.doc_mask.
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
