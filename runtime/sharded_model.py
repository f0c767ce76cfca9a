"""A model on the ranks of a mesh, for evaluation and generation: in training, or loaded from a checkpoint."""
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from config import Config
from model.context import GenerationCache
from model.generate import pipeline_logits
from model.score import pipeline_scores
from model.transformer import PipelineStage
from parallel.pipeline.executor import Pipeline
from parallel.topology.mesh import Mesh

if TYPE_CHECKING:
    from data.task_scores import Score, TextRow


@dataclass(frozen=True)
class ShardedModel:
    """stages: {stage number: stage} on this rank."""
    cfg: Config
    mesh: Mesh
    device: torch.device
    stages: dict[int, PipelineStage]
    pipeline: Pipeline

    def logits(
        self, tokens: Tensor, positions: Tensor, cache: GenerationCache | None, position: int | None
    ) -> Tensor:
        """Return logits [vocab] at `position` of tokens [1, s]; [b, s, vocab] if it is None. Collective."""
        return pipeline_logits(
            self.pipeline,
            self.stages,
            tokens,
            positions,
            cache=cache,
            position=position,
        )

    def score(self, rows: "Sequence[TextRow]") -> "list[Score]":
        """Score texts, split over dp and cp; every rank returns all scores. Collective."""
        from data.task_scores import score_rows

        def forward(tokens: Tensor, targets: Tensor) -> Tensor | None:
            return pipeline_scores(self.pipeline, self.stages, tokens, targets)

        train = self.cfg.train
        return score_rows(
            rows,
            forward,
            batch_tokens=train.micro_batch * train.seq_len,
            device=self.device,
            multiple=self.pipeline.hidden_shape.sequence_shards,
            replicas=self.mesh.dp_cp,
            stages=self.mesh.pp,
        )
