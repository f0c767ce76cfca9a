"""TrainingRun: all that a step of one phase works with. build.py makes it from a config."""
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from config import Config, Tree
from config.reading import Phase, Phases
from data.loader import BatchLoader
from model.context import GenerationCache
from model.generate import pipeline_logits
from model.router_states import RouterStates
from model.score import pipeline_scores
from model.transformer import PipelineStage
from optim.base import Optimizer
from optim.lr import learning_rate_of_run, schedules_of
from optim.scaler import LossScaler
from optim.spikes import SpikeState
from parallel.extras import Extra, Extras
from parallel.pipeline.executor import Pipeline
from parallel.pipeline.schedule import Op
from parallel.sharding.bucket import Bucket
from parallel.topology.mesh import Mesh

if TYPE_CHECKING:  # a run that asks for none of them loads none of them
    from data.task_scores import Score, TextRow
    from optim.ema import WeightEMA
    from optim.noise import GradientNoiseScale
    from runtime.graphs import RecordedPipeline


@dataclass(frozen=True)
class TrainingRun:
    """All that a step needs.

    phases: of the whole run. phase: the present one, and cfg is its config.
    """
    cfg: Config
    phases: Phases
    phase: Phase
    mesh: Mesh
    device: torch.device
    loader: BatchLoader | None  # the train split; None if the caller has its own microbatches
    stages: dict[int, PipelineStage]  # of this rank, by number
    buckets: list[Bucket]  # of this rank's parameters
    optim: Optimizer
    pipeline: Pipeline
    schedules: dict[int, list[Op]]  # {number of microbatches of a step: this rank's ops}
    steps: int  # the horizon
    routers: RouterStates  # what a mixture's routers keep beside their weights
    scaler: LossScaler  # of the loss, in fp16
    spikes: SpikeState  # which steps are not applied (optim.spike_sigma), and which data is left out
    extras: Extras  # what a step has beside the plain one
    noise_scale: "GradientNoiseScale | None" = None  # of these extras, for the log (log.noise_scale)
    ema: "WeightEMA | None" = None  # of these extras, for checkpoints and evaluations (train.ema)
    recording: "RecordedPipeline | None" = None  # runs in place of the pipeline (train.cuda_graphs)
    provenance: Tree = field(default_factory=dict)  # what makes the run, for its checkpoints

    @property
    def data(self) -> BatchLoader:
        """The train split. Raises ValueError if the run was built without."""
        if self.loader is None:
            raise ValueError("the run was built without data")
        return self.loader

    @property
    def last_step(self) -> int:
        """The last step of this phase."""
        return self.phases.last_step(self.phase, self.steps)

    def with_extras(self, *extras: Extra) -> "TrainingRun":
        """The run with these behind its own."""
        return replace(self, extras=Extras((*self.extras, *extras)))

    def learning_rate(self, step: int) -> float:
        """Of step number `step` (from 1), before the factors of single parameters."""
        return learning_rate_of_run(schedules_of(self.phases, self.steps), step)

    def logits(
        self, tokens: Tensor, positions: Tensor, cache: GenerationCache | None, position: int
    ) -> Tensor:
        """Logits [vocab] of the token at `position` of tokens [1, s], on every rank."""
        return pipeline_logits(
            self.pipeline,
            self.stages,
            tokens,
            positions,
            cache=cache,
            position=position,
        )

    def score(self, rows: "Sequence[TextRow]") -> "list[Score]":
        """The scores of texts, the same on every rank. Ranks of dp and cp divide them. Collective."""
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
