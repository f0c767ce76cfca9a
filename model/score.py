"""Score given tokens with a model whose layers are split across pipeline stages."""
from collections.abc import Mapping

import torch
from torch import Tensor

from model.transformer import PipelineStage
from parallel.pipeline.executor import Pipeline


def score_positions(tokens: Tensor, context: int) -> Tensor:
    """Return positions 0, 1, ... [b, s] for tokens [b, s]. Padding beyond the context repeats the last
    position."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    return positions.clamp(max=context - 1).expand_as(tokens)


@torch.no_grad()
def pipeline_scores(
    pipeline: Pipeline,
    stages: Mapping[int, PipelineStage],
    tokens: Tensor,
    targets: Tensor,
) -> Tensor | None:
    """Score the n counted targets: tokens, targets [b, s] of whole sequences -> [2, n]
    (OutputHead.token_scores).

    Returns None on ranks without the last stage. Collective: every rank calls it with tokens of the same
    shape. Ranks with the same dp and cp index pass the same tokens; ranks of a cp group may pass different
    ones. Runs one pass through all stages: a rank is done once it has sent its last hidden states, and may
    start the next pass.
    """
    x = tokens
    for number in range(pipeline.schedule.n_stages):
        x = pipeline.receive_hidden(x, tokens, number)
        stage = stages.get(number)
        if stage is None:
            continue
        x = stage.hidden_states(x, score_positions(tokens, stage.cfg.model.context))
        if stage.head is not None:
            return stage.head(x, targets=targets)
    return None
