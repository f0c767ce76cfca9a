"""A sample as the loader reads it: seq_len + 1 slots of tokens, where documents begin in them, what counts.

    read_stream    consecutive tokens of the stream, as sampler.py locates them
    read_pieces    pieces of documents one after the other and padding, as best_fit.py places them
"""
from typing import NamedTuple

import numpy as np

from data.start_tokens import Index
from data.targets import WithoutTokens

NO_STARTS = np.empty(0, np.int64)


class Window(NamedTuple):
    """The slots of one sample."""
    tokens: np.ndarray  # [seq_len + 1]
    starts: np.ndarray  # int64: slots from 1 on that begin a document, or the padding
    counted: np.ndarray | None  # bool [seq_len + 1]: does the loss count the token as a target? None: all
    filled: int  # slots before the padding


class Part(NamedTuple):
    """What a window holds of one document."""
    tokens: np.ndarray  # [n]
    counted: np.ndarray  # bool [n]: does the loss count the token as a target?


def read_stream(index: Index | WithoutTokens, first: int, slots: int, wants_starts: bool) -> Window:
    """The tokens [first, first + slots). Without wants_starts, no starts are looked up."""
    stop = first + slots
    starts = index.document_starts(first, stop) - first if wants_starts else NO_STARTS
    return Window(index.read(first, stop), starts, index.counted(first, stop), slots)


def read_pieces(
    index: Index | WithoutTokens, pieces: list[tuple[int, int]], slots: int, pad_id: int
) -> Window:
    """The tokens of the pieces [first, stop), then padding. Neither the first token of a piece nor padding
    counts."""
    parts: list[Part] = []
    for first, stop in pieces:
        counted = index.counted(first, stop)
        if counted is None:
            counted = np.ones(stop - first, bool)
        counted[0] = False
        parts.append(Part(index.read(first, stop), counted))
    return fill_slots(parts, slots, pad_id)


def fill_slots(parts: list[Part], slots: int, pad_id: int) -> Window:
    """The parts one after the other, then padding, which does not count."""
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
