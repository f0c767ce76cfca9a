"""Sampling text with a key/value cache: one forward over the prompt, then one token a step."""
from typing import Iterator

import torch
from torch import Tensor

from model.attention import Cache
from model.transformer import Stage


@torch.no_grad()
def generate(stage: Stage, prompt: list[int], max_new: int, *, temperature: float = 0.8, top_k: int | None = None,
             top_p: float | None = None, eod: int | None = None, seed: int = 0) -> Iterator[int]:
    """Yields new token ids. temperature 0: greedy. Stops at `eod` and at the end of the learned positions."""
    device = stage.embed.weight.device
    stream = torch.Generator(device).manual_seed(seed)
    cache, feed = Cache(), torch.tensor([prompt], device=device)
    limit = stage.cfg.model.context if stage.embed.positions is not None else None
    for _ in range(max_new):
        if limit and cache.length + feed.shape[1] > limit:
            return
        positions = torch.arange(cache.length, cache.length + feed.shape[1], device=device)[None]
        logits = stage.logits(feed, positions, cache, last=True)[0, -1]
        token = choose(logits, temperature, top_k, top_p, stream)
        if token == eod:
            return
        yield token
        feed = torch.tensor([[token]], device=device)


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
