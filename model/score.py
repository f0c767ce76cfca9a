"""Scores of given tokens by a model whose layers are divided over a pipeline."""
from collections.abc import Mapping

import torch
from torch import Tensor

from model.transformer import PipelineStage
from parallel.pipeline.executor import Pipeline


def score_positions(tokens: Tensor, context: int) -> Tensor:
    """[b, s] -> [b, s]: 0, 1, ... for the tokens of a text. Padding beyond the context has the last one."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    return positions.clamp(max=context - 1).expand_as(tokens)


@torch.no_grad()
def pipeline_scores(
    pipeline: Pipeline,
    stages: Mapping[int, PipelineStage],
    tokens: Tensor,
    targets: Tensor,
) -> Tensor | None:
    """tokens, targets [b, s] of whole sequences -> [2, n] of the n counted targets (OutputHead.token_scores).

    None on ranks without the last stage. Every rank calls it, with tokens of the same shape; those of the
    same dp and cp index with the same tokens. The ranks of a cp group may have different ones. One pass
    through all stages: a rank is done when it has sent on its last hidden states, and may begin the next one.
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
