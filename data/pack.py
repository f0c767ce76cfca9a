"""Windows of tokens -> a Batch.

Without data.doc_mask a sample is one stream: attention sees across documents and the end-of-document token predicts the
first token of the next one, as in Megatron. With it every document in a sample stands alone: positions restart, `docs`
lets attention stop at the boundary, and the target that would cross it is -100: nothing in a document tells how the
next one begins.
"""
import numpy as np
import torch

from data.batch import Batch

IGNORE = -100


def pack(windows: list[np.ndarray], starts: list[np.ndarray] | None) -> Batch:
    """b windows of s + 1 tokens, and the places (1..s) in each where a document begins; none: no doc_mask."""
    ids = torch.from_numpy(np.stack(windows).astype(np.int64))  # [b, s + 1]
    b, s = ids.shape[0], ids.shape[1] - 1
    # copies, not contiguous(): of a single row that would be the same memory for both, and -100 would be
    # written into the tokens
    tokens, targets = ids[:, :-1].clone(), ids[:, 1:].clone()  # [b, s]
    place = torch.arange(s).expand(b, s)
    if starts is None:
        return Batch(tokens, targets, place.contiguous())
    begins = torch.zeros(b, s + 1, dtype=torch.bool)
    for row, at in zip(begins, starts):
        row[torch.from_numpy(at)] = True
    targets[begins[:, 1:]] = IGNORE
    begins = begins[:, :-1]
    positions = place - torch.where(begins, place, 0).cummax(1).values
    return Batch(tokens, targets, positions, begins.cumsum(1, dtype=torch.int32))
