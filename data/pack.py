"""Pack windows of tokens into a Microbatch.

Without data.doc_mask a sequence is one stream, as in Megatron-LM: attention crosses document boundaries, and
the end-of-document token predicts the first token of the next document.

With data.doc_mask the documents of a sequence are independent: positions restart, attention stops at the
boundary (Microbatch.documents), and the target that would cross it is IGNORE_INDEX.

If a data set has a loss mask (loss_mask.py), targets that do not count are IGNORE_INDEX too.
"""
import numpy as np
import torch

from kernels.attention_mask import DocumentCounts
from parallel.microbatch import IGNORE_INDEX, Microbatch


def pack_windows(
    windows: list[np.ndarray],
    starts: list[np.ndarray] | None,
    counted: list[np.ndarray | None] | None = None,
) -> Microbatch:
    """Pack b windows of s + 1 tokens. `starts` holds the indices (1..s) at which a document begins in each
    window, or None without data.doc_mask. `counted` holds a bool [s + 1] for each window, which says whether
    the loss counts each token as a target, or None if all count."""
    token_ids = torch.from_numpy(np.stack(windows).astype(np.int64))  # [b, s + 1]
    b, s = token_ids.shape[0], token_ids.shape[1] - 1

    # clone, not contiguous(): for b = 1 both slices are contiguous views of the same memory, and writing
    # IGNORE_INDEX into the targets would change the tokens
    tokens = token_ids[:, :-1].clone()  # [b, s]
    targets = token_ids[:, 1:].clone()  # [b, s]
    for row, row_counted in zip(targets, counted or ()):
        if row_counted is not None:
            row[torch.from_numpy(~row_counted[1:])] = IGNORE_INDEX
    index = torch.arange(s).expand(b, s)
    if starts is None:
        return Microbatch(tokens, targets, index.contiguous())

    begins = torch.zeros(b, s + 1, dtype=torch.bool)  # is this the first token of a document?
    for row, row_starts in zip(begins, starts):
        row[torch.from_numpy(row_starts)] = True
    targets[begins[:, 1:]] = IGNORE_INDEX

    begins = begins[:, :-1]  # [b, s]
    document_start = torch.where(begins, index, 0).cummax(1).values  # of the document containing each token
    documents = begins.cumsum(1, dtype=torch.int32)
    positions = index - document_start
    counts = DocumentCounts(number=int((positions == 0).sum()), longest=int(positions.max()) + 1)
    return Microbatch(tokens, targets, positions, documents, document_counts=counts)
