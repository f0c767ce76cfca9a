"""Text sampling: one forward pass over the prompt, then one token per step with a key/value cache."""
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor

from config import vocab_size
from model.context import GenerationCache
from model.transformer import PipelineStage
from parallel.pipeline.executor import Pipeline
from parallel.wire import comm

# (tokens [1, s], positions [1, s], cache, position) -> logits [vocab] of the token at that position
LogitsOf = Callable[[Tensor, Tensor, GenerationCache | None, int], Tensor]


@torch.no_grad()
def generate(
    logits_of: LogitsOf,
    prompt: list[int],
    max_new: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    stops: Collection[int] = (),
    seed: int = 0,
    limit: int | None = None,
    vocab: int | None = None,
    multiple: int = 1,
    switches: Collection[int] = (),
    device: torch.device = torch.device("cpu"),
) -> Iterator[int]:
    """Yield new token ids, the same on every rank.

    Temperature 0 takes the likeliest token. Stops before an id in `stops`, and once the model has read
    `limit` tokens (learned positions end there). Ids from `vocab` on are never sampled, for models whose
    table is longer than their tokenizer. Sequence parallelism shards the sequence, so it is padded to a
    multiple of `multiple` and recomputed for each token (a token does not depend on later ones); with
    multiple 1 the cache is used. `switches` are lengths beyond which all tokens are rotated differently, so
    the text is read again (config.rope_switches).
    """
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    cache = GenerationCache() if multiple == 1 else None
    num_cached = 0
    for _ in range(max_new):
        if limit is not None and len(ids) > limit:
            return
        if cache is not None and any(num_cached <= length < len(ids) for length in switches):
            cache, num_cached = GenerationCache(), 0
        new_ids = ids[num_cached:]
        padding = [0] * (-len(new_ids) % multiple)
        tokens = torch.tensor([new_ids + padding], device=device)
        end = num_cached + tokens.shape[1]
        positions = torch.arange(num_cached, end, device=device)[None]
        if limit is not None:
            positions = positions.clamp(max=limit - 1)  # only padding exceeds it
        logits = logits_of(tokens, positions, cache, len(new_ids) - 1)[:vocab].cpu()

        token = sample_token(
            logits,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            generator=generator,
        )
        if token in stops:
            return
        yield token
        if cache is not None:
            num_cached = len(ids)
        ids.append(token)


def sample_token(
    logits: Tensor,
    *,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator,
) -> int:
    """Sample one token from logits [vocab]: among the `top_k` likeliest, and in the smallest set with
    probability `top_p`."""
    if temperature == 0:
        return int(logits.argmax())
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[0]:
        smallest = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    probs = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, order = probs.sort(descending=True)
        mass_before = ordered.cumsum(0) - ordered
        ordered[mass_before >= top_p] = 0.0  # keep the token that crosses the bound
        probs = torch.zeros_like(probs).scatter_(0, order, ordered)
    return int(torch.multinomial(probs, 1, generator=generator))


@torch.no_grad()
def pipeline_logits(pipeline: Pipeline, stages: Mapping[int, PipelineStage], tokens: Tensor,
                    positions: Tensor, cache: GenerationCache | None, position: int | None) -> Tensor:
    """Return the logits [vocab] at `position` of tokens [1, s], on every rank, in one pass through all
    stages.

    `cache` holds keys and values of earlier tokens, if any are kept. With position None, returns the logits
    [b, s, vocab] of all tokens [b, s].
    """
    x = tokens
    last = pipeline.schedule.n_stages - 1
    for number in range(pipeline.schedule.n_stages):
        x = pipeline.receive_hidden(x, tokens, number)
        stage = stages.get(number)
        if stage is None:
            continue
        x = stage.hidden_states(x, positions, cache=cache)
        if stage.head is not None:
            x = stage.head(x, position=position)
    if cache is not None:
        cache.length += tokens.shape[1]

    if last not in stages:
        dtype = torch.promote_types(pipeline.hidden_shape.dtype, torch.float32)
        vocab = vocab_size(next(iter(stages.values())).cfg.model)
        shape = (vocab,) if position is not None else (*tokens.shape, vocab)
        x = torch.empty(shape, dtype=dtype, device=tokens.device)
    source = pipeline.schedule.rank_of_stage[last]
    return comm.broadcast(x.contiguous(), pipeline.mesh.pp, source)
