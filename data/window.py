"""A sample as read by the loader: seq_len + 1 token slots, document starts, and which targets count.

    read_stream    consecutive tokens of the stream, as located by sampler.py
    read_pieces    concatenated pieces of documents and padding, as placed by best_fit.py
"""
from typing import NamedTuple

import numpy as np

from data.loss_mask import LossMask
from data.start_tokens import Index

NO_STARTS = np.empty(0, np.int64)


class Window(NamedTuple):
    """The slots of one sample."""
    tokens: np.ndarray  # [seq_len + 1]
    starts: np.ndarray  # int64: slots from 1 on that begin a document or the padding
    counted: np.ndarray | None  # bool [seq_len + 1]: targets that the loss counts; None if all count
    filled: int  # slots before the padding


class WithoutTokens(NamedTuple):
    """A data set whose tokens are not read; all are 0."""
    index: Index

    @property
    def loss_mask(self) -> LossMask | None:
        return self.index.loss_mask

    def read(self, first: int, stop: int) -> np.ndarray:  # ids [stop - first]
        return np.zeros(stop - first, np.int64)

    def counted(self, first: int, stop: int) -> np.ndarray | None:  # bool [stop - first]
        return self.index.counted(first, stop)

    def document_starts(self, first: int, stop: int) -> np.ndarray:  # int64, rising
        return self.index.document_starts(first, stop)


class Part(NamedTuple):
    """Part of one document in a window."""
    tokens: np.ndarray  # [n]
    counted: np.ndarray  # bool [n]: does the loss count the token as a target?


def read_stream(index: Index | WithoutTokens, first: int, slots: int, wants_starts: bool) -> Window:
    """Read the tokens [first, first + slots). `wants_starts` looks up document starts."""
    stop = first + slots
    starts = index.document_starts(first, stop) - first if wants_starts else NO_STARTS
    return Window(index.read(first, stop), starts, counted_targets(index, first, stop), slots)


def counted_targets(
    index: Index | WithoutTokens, first: int, stop: int
) -> np.ndarray | None:  # bool [stop - first]
    """Return whether the loss counts each of the tokens [first, stop), or None if all count. If they begin
    inside a conversation, its first answer there does not count, since at least part of the question is cut
    off."""
    counted = index.counted(first, stop)
    if counted is None or index.loss_mask is None:
        return counted
    if first == 0 or len(index.document_starts(first - 1, first + 1)):
        return counted
    later = index.document_starts(first, stop)
    rest = counted[:later[0] - first] if len(later) else counted  # of the conversation
    answers = np.flatnonzero(rest)
    if len(answers):
        ends = np.flatnonzero(~rest[answers[0]:])
        rest[:answers[0] + ends[0] if len(ends) else len(rest)] = False
    return counted


def read_pieces(
    index: Index | WithoutTokens, pieces: list[tuple[int, int]], slots: int, pad_id: int
) -> Window:
    """Read the pieces [first, stop), then padding. The first token of a piece and padding do not count."""
    parts: list[Part] = []
    for first, stop in pieces:
        counted = counted_targets(index, first, stop)
        if counted is None:
            counted = np.ones(stop - first, bool)
        counted[0] = False
        parts.append(Part(index.read(first, stop), counted))
    return fill_slots(parts, slots, pad_id)


def fill_slots(parts: list[Part], slots: int, pad_id: int) -> Window:
    """Concatenate the parts, then pad; padding does not count."""
    tokens = np.full(slots, pad_id, np.int64)
    counted = np.zeros(slots, bool)
    starts: list[int] = []
    slot = 0
    for part in parts:
        starts.append(slot)
        end = slot + len(part.tokens)
        tokens[slot:end] = part.tokens
        counted[slot:end] = part.counted
        slot = end
    if slot < slots:
        starts.append(slot)
    return Window(tokens, np.array(starts[1:], np.int64), counted, slot)
