"""Sampling text: one forward over the prompt, then one token a step from a key/value cache."""
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from model.attention import Cache

Logits = Callable[[Tensor, Tensor, Cache | None, int], Tensor]  # parallel/pipeline.py: Pipeline.logits


@torch.no_grad()
def generate(logits_of: Logits, prompt: list[int], max_new: int, *, temperature: float = 0.8, top_k: int | None = None,
             top_p: float | None = None, eod: int | None = None, seed: int = 0, limit: int | None = None, multiple: int = 1,
             device: torch.device = torch.device("cpu")) -> Iterator[int]:
    """Yields new token ids; every rank yields the same. temperature 0: greedy. Stops at `eod`, and at `limit` tokens where
    the positions are learned. multiple: sequence parallelism cuts the sequence, so it is padded to a multiple of this and
    run anew for each token (what comes after a token does not touch it); 1: the cache is used.
    """
    stream = torch.Generator().manual_seed(seed)
    ids, cache, done = list(prompt), Cache() if multiple == 1 else None, 0
    for _ in range(max_new):
        if limit is not None and len(ids) > limit:
            return
        feed = ids[done:] + [0] * (-len(ids[done:]) % multiple)
        positions = torch.arange(done, done + len(feed), device=device)[None]
        logits = logits_of(torch.tensor([feed], device=device), positions, cache, len(ids) - done - 1).cpu()
        token = choose(logits, temperature, top_k, top_p, stream)
        if token == eod:
            return
        yield token
        done = len(ids) if cache is not None else 0
        ids.append(token)


def choose(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, stream: torch.Generator) -> int:
    """One token from logits [v]: top_k keeps the k likeliest, top_p the smallest set with that much probability."""
    if temperature == 0:
        return int(logits.argmax())
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[0]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    probs = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, order = probs.sort(descending=True)
        ordered[ordered.cumsum(0) - ordered >= top_p] = 0.0  # the token that crosses the bound stays
        probs = torch.zeros_like(probs).scatter_(0, order, ordered)
    return int(torch.multinomial(probs, 1, generator=stream))
