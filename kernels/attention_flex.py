"""Attention by torch's flex_attention (arXiv 2412.05496), over the intervals of an AttentionMask.

It takes every mask that the other libraries do not: documents that the host cannot count, or that are short,
and any combination of windows, documents and chunks; and soft caps and sinks, where flash-attn is missing.
torch compiles it at the first call of each kind, for about half a minute.
"""
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from kernels.attention_libraries import FLEX_MIN_HEAD_DIM
from kernels.attention_mask import AttentionMask, make_attention_mask
from kernels.attention_scores import ScoreForm

BLOCK = 128  # queries, and keys, of a block: flex_attention's default


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, form: ScoreForm, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """q [b, s_q, h, d], k [b, s_k, g, d], v [b, s_k, g, e] -> out [b, s_q, h, e], and on request the
    logsumexp of the scores [b, s_q, h], with gradients.

    mask: None is plain causal over equal lengths.
    """
    results = run_flex(q, k, v, mask, form, AuxRequest(lse=True) if with_lse else None)
    if not with_lse:
        return results.transpose(1, 2), None
    out, aux = results
    return out.transpose(1, 2), aux.lse.transpose(1, 2)


def largest_scores_by_query(q: Tensor, k: Tensor, mask: AttentionMask, form: ScoreForm) -> Tensor:
    """q [b, s_q, h, d], k [b, s_k, g, d] -> the largest score of the keys that each query sees [b, h, s_q].

    NaN if a score is NaN. No gradients. As values, flex_attention gets the first columns of the keys: it
    needs some, and their product is not used.
    """
    given = None if mask.is_causal else mask
    _, aux = run_flex(q, k, k[..., :FLEX_MIN_HEAD_DIM], given, form, AuxRequest(lse=True, max_scores=True))
    return torch.where(aux.lse.isnan(), aux.lse, aux.max_scores)  # the kernel's maximum ignores NaN


def run_flex(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, form: ScoreForm, aux: AuxRequest | None
) -> Any:
    """Call flex_attention: out [b, h, s_q, e], or (out, AuxOutput) if `aux` asks for more."""
    function = compiled() if q.is_cuda else flex_attention
    return function(
        *(x.transpose(1, 2) for x in (q, k, v)),
        score_mod=None if form.softcap is None else soft_capped(form.softcap),
        block_mask=causal_blocks(q.shape[1], q.device) if mask is None else block_mask(mask),
        scale=1 / form.divisor(q.shape[-1]),
        enable_gqa=q.shape[2] != k.shape[2],
        return_aux=aux,
    )


@functools.cache
def compiled() -> Callable[..., Tensor | tuple[Tensor, object]]:
    """Return the fused kernels: without torch.compile, flex_attention holds all scores."""
    return torch.compile(flex_attention, dynamic=False)


@functools.cache
def soft_capped(softcap: float) -> Callable[..., Tensor]:
    """Return the score modification of a soft cap. One object for each cap: torch compiles each once."""
    def capped(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


# ---- blocks ------------------------------------------------------------------------------------------------

@functools.lru_cache(maxsize=4)
def causal_blocks(s: int, device: torch.device) -> BlockMask:
    """Return the blocks of causal attention of s tokens over themselves."""
    return make_block_mask(make_attention_mask(0, s, 0, s, None, None, device))


@functools.lru_cache(maxsize=4)
def block_mask(mask: AttentionMask) -> BlockMask:
    """Return the blocks of a mask. All layers of a pass share a mask, and so its blocks."""
    return make_block_mask(mask)


def make_block_mask(mask: AttentionMask) -> BlockMask:
    """Make the blocks from the intervals of keys that queries see: no [s_q, s_k] mask, and no host sync.

    Intervals only move forward, so the keys that the queries of a block see form one interval, from the first
    key of its first query to the position of its last query.
    """
    first_key, device = mask.first_key, mask.device
    if first_key is None:
        first_key = torch.full((1, mask.s_q), mask.key_start, dtype=torch.int32, device=device)

    # positions of the first and the last query and key of each block
    queries = torch.arange(0, mask.s_q, BLOCK, device=device)
    last_queries = (queries + BLOCK - 1).clamp_max(mask.s_q - 1)
    keys = mask.key_start + torch.arange(0, mask.s_k, BLOCK, device=device)
    last_keys = (keys + BLOCK - 1).clamp_max(mask.key_start + mask.s_k - 1)

    # a block of keys is seen by some query of a block, or by all  [b or 1, 1, blocks of queries, of keys]
    first_seen = first_key[:, None, queries, None]
    last_seen = (mask.query_start + last_queries)[:, None]
    is_seen = (last_keys >= first_seen) & (keys <= last_seen)
    seen_by_all = (keys >= first_key[:, None, last_queries, None]) & (
        last_keys <= (mask.query_start + queries)[:, None])
    is_whole = (queries + BLOCK <= mask.s_q)[:, None] & (keys + BLOCK <= mask.key_start + mask.s_k)
    is_full = is_seen & seen_by_all & is_whole

    shares_rows = len(first_key) == 1

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        first = first_key[0, query] if shares_rows else first_key[b, query]
        key = key + mask.key_start
        return (key >= first) & (key <= query + mask.query_start)

    return BlockMask.from_kv_blocks(
        *in_order(is_seen & ~is_full),
        *in_order(is_full),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(mask.s_q, mask.s_k),
    )


def in_order(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of chosen blocks in each row, and all indices of the row with the chosen ones first.

    chosen bool [b, 1, n, m] -> int32 [b, 1, n], int32 [b, 1, n, m].
    """
    counts = chosen.sum(-1, dtype=torch.int32)
    order = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return counts, order.to(torch.int32)
