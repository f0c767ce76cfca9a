"""Chunks of tokens for stateful layers (kernels/delta_rule.py, kernels/state_space.py), and the documents
within them.

There are n chunks of C tokens; per-token tensors are [n, b, h, C, ...]. If s is not a multiple of C, zero
tokens are appended.
"""
import math

import torch
import torch.nn.functional as F
from torch import Tensor


def by_chunk(x: Tensor, chunk: int, dtype: torch.dtype) -> Tensor:
    """[b, s, h, ...] -> [n, b, h, chunk, ...]"""
    missing = -x.shape[1] % chunk
    if missing:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
    x = x.unflatten(1, (-1, chunk)).movedim(1, 0).transpose(2, 3)
    return x.to(dtype, memory_format=torch.contiguous_format)


def by_token(x: Tensor, s: int) -> Tensor:
    """Invert by_chunk for s tokens: [n, b, h, chunk, d] -> [b, s, h, d]."""
    return x.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :s]


def document_starts(documents: Tensor | None, document_before: Tensor | None) -> Tensor | None:
    """Whether a token is the first of its document: documents [b, s] -> bool [b, s]. None for one document.

    document_before [b] is that of the token before the first one; it defaults to that of the first.
    """
    if documents is None:
        return None
    before = documents[:, :1] if document_before is None else document_before[:, None]
    return documents != torch.cat((before, documents[:, :-1]), 1)


def documents_of_chunk(starts: Tensor, chunk: int) -> Tensor:
    """Return each token's document, numbered within its chunk: starts, bool [b, s] -> [n, b, 1, chunk].

    0 is the document that continues from before the chunk.
    """
    return by_chunk(starts[:, :, None], chunk, torch.int32).cumsum(-1)


def visible_pairs(g: Tensor, document: Tensor | None) -> Tensor:
    """Whether token i sees token j: g [n, b, h, C] -> bool [C, C], or with documents [n, b, 1, C, C]."""
    chunk = g.shape[-1]
    earlier = torch.ones(chunk, chunk, dtype=torch.bool, device=g.device).tril()
    if document is None:
        return earlier
    return earlier & (document[..., :, None] == document[..., None, :])


def head_decays(g: Tensor, document: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return decays between tokens [n, b, h, C, C], and from chunk start and to chunk end [n, b, h, C, 1].

    They are 0 if a token is not seen, or another document starts in between.

    g [n, b, h, C] is the logarithm of each token's decay, which acts before the token itself.
    """
    # in fp64, so that differences of large sums are exact enough; as a GEMM, which is deterministic on a GPU
    ones = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.float64, device=g.device)
    log_decay = g.double() @ ones.triu()
    between = (log_decay[..., :, None] - log_decay[..., None, :]).to(g.dtype)
    between = between.masked_fill(~visible_pairs(g, document), -math.inf).exp()
    inside = log_decay.to(g.dtype)[..., None].exp()
    outside = (log_decay[..., -1:] - log_decay).to(g.dtype)[..., None].exp()
    return between, *within_document(inside, outside, document)


def within_document(inside: Tensor, outside: Tensor, document: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mask decays from chunk start and to chunk end [n, b, h, C, d] if a document starts in between."""
    if document is None:
        return inside, outside
    document = document[..., None]
    inside = inside.masked_fill(document != 0, 0)
    outside = outside.masked_fill(document != document[..., -1:, :], 0)
    return inside, outside
