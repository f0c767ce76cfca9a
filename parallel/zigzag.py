"""How context parallelism cuts a sequence: in 2n chunks, of which rank r holds chunks r and 2n - 1 - r.

A causal query at place i has i + 1 keys, so a plain cut would give the last rank most of the work. A rank with an early
chunk and its mirror image has the average (arXiv 2407.21783, section 3.3.2):

    n = 4     chunk  0 1 2 3 4 5 6 7
              rank   0 1 2 3 3 2 1 0

Every rank of a cp group reads the whole sequence from its own mapped file, so the cut is a selection and costs nothing on
the wire. Within a rank the order is the sequence's: places rise. A group of one holds both chunks in order: the identity.
"""
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.sight import Sight
from kernels.sight import sight as interval
from parallel.comm import Group


def chunks(index: int, n: int) -> tuple[int, int]:
    """The two chunks of rank `index` of n."""
    return index, 2 * n - 1 - index


def places(s: int, index: int, n: int, device: torch.device | None = None) -> Tensor:
    """int64 [s / n]: the place in a sequence of s tokens of each token of rank `index`. s: a multiple of 2n."""
    c = s // (2 * n)
    return torch.cat([torch.arange(c, device=device) + chunk * c for chunk in chunks(index, n)])


def cut(batch, group: Group):
    """A microbatch of whole sequences (data/batch.py) -> this rank's tokens of it. `docs` stays whole: who sees whom is
    decided between a rank's own tokens and everyone's. Applied once, before anything is counted."""
    if group.size == 1:
        return batch
    mine = places(batch.tokens.shape[1], group.index, group.size, batch.tokens.device)
    ahead, ahead_targets = (x if x is None else x[:, :, mine] for x in (batch.ahead, batch.ahead_targets))
    return replace(batch, tokens=batch.tokens[:, mine], targets=batch.targets[:, mine], positions=batch.positions[:, mine], places=mine,
                   ahead=ahead, ahead_targets=ahead_targets)


def join(parts: Tensor) -> Tensor:
    """[n, b, s/n, ...] of all ranks -> [b, s, ...] in the order of the sequence."""
    n, b = parts.shape[:2]
    early, late = parts.chunk(2, 2)  # [n, b, c, ...]
    return torch.cat((early, late.flip(0))).transpose(0, 1).reshape(b, -1, *parts.shape[3:])


def split(x: Tensor, n: int) -> Tensor:
    """The way back: [b, s, ...] -> [n, b, s/n, ...], the parts of all ranks."""
    early, late = x.unflatten(1, (2 * n, -1)).transpose(0, 1).chunk(2)  # [n, b, c, ...]
    return torch.cat((early, late.flip(0)), 2)


class Meeting(NamedTuple):
    """Queries of one chunk that see keys of another. query, key: which half of its rank's tokens the chunk is; and its
    number in the sequence."""
    query: int
    key: int
    query_chunk: int
    key_chunk: int


def meetings(index: int, source: int, n: int, c: int, window: int | None) -> list[Meeting]:
    """Where tokens of rank `index` see tokens of rank `source`, by chunks of c tokens; what is wholly in the future, or wholly
    behind the window, is left out. A chunk's meeting with itself comes first: after it, every query has seen a key."""
    met = [Meeting(i, j, a, b) for i, a in enumerate(chunks(index, n)) for j, b in enumerate(chunks(source, n))
           if b <= a and (window is None or (a - b - 1) * c + 1 < window)]
    return sorted(met, key=lambda m: m.query_chunk - m.key_chunk)


def sight(m: Meeting, c: int, window: int | None, docs: Tensor | None, device: torch.device) -> Tensor | Sight | None:
    """bool [b or 1, 1, c, c]: which queries of a meeting see which keys, by their places in the sequence; None: all see all.
    docs [b, s]: the document of each token of the whole sequence. On a GPU as a Sight, whose kernels skip blocks."""
    if device.type == "cuda":
        return interval(m.query_chunk * c, c, m.key_chunk * c, c, window, docs, device)
    see, apart = None, m.query_chunk - m.key_chunk  # in chunks
    place = torch.arange(c, device=device)
    far = apart * c + place[:, None] - place
    if apart == 0:
        see = (far >= 0)[None, None]
    if window is not None and (apart + 1) * c > window:
        near = (far < window)[None, None]
        see = near if see is None else see & near
    if docs is not None:
        of_query, of_key = (docs[:, chunk * c:(chunk + 1) * c] for chunk in (m.query_chunk, m.key_chunk))
        same = of_query[:, None, :, None] == of_key[:, None, None, :]
        see = same if see is None else see & same
    return see
