"""TrainingRun: everything a training step needs, for one phase. build.py builds it from a config."""
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

if TYPE_CHECKING:  # optional features, imported only if the config enables them
    from data.task_scores import Score, TextRow
    from optim.ema import WeightEMA
    from optim.noise import GradientNoiseScale
    from parallel.pipeline.graphs import RecordedPipeline


@dataclass(frozen=True)
class TrainingRun:
    """The state of one phase of a run on this rank.

    `phases` lists all phases of the run; `phase` is the current one and `cfg` its config.
    """
    cfg: Config
    phases: Phases
    phase: Phase
    mesh: Mesh
    device: torch.device
    loader: BatchLoader | None  # the train split, or None if the caller supplies the microbatches
    stages: dict[int, PipelineStage]  # {stage number: stage} on this rank
    buckets: list[Bucket]  # parameters, gradients and masters on this rank
    optim: Optimizer
    pipeline: Pipeline
    schedules: dict[int, list[Op]]  # {microbatches per step: this rank's ops}
    steps: int  # total steps of the run
    routers: RouterStates  # MoE router state other than weights: biases, load statistics
    scaler: LossScaler  # fp16 loss scaling
    spikes: SpikeState  # spike detection (optim.spike_sigma) and the data steps to skip
    extras: Extras  # hooks of optional features
    noise_scale: "GradientNoiseScale | None" = None  # also in extras; read by the log (log.noise_scale)
    ema: "WeightEMA | None" = None  # also in extras; read by checkpoints and evaluation (train.ema)
    recording: "RecordedPipeline | None" = None  # replaces the pipeline under train.cuda_graphs
    provenance: Tree = field(default_factory=dict)  # code, packages, weights and data, for checkpoints

    @property
    def data(self) -> BatchLoader:
        """The train split. Raises ValueError if the run was built without one."""
        if self.loader is None:
            raise ValueError("the run was built without data")
        return self.loader

    @property
    def last_step(self) -> int:
        """Last step of this phase."""
        return self.phases.last_step(self.phase, self.steps)

    def with_extras(self, *extras: Extra) -> "TrainingRun":
        """Return a copy of the run with these extras appended."""
        return replace(self, extras=Extras((*self.extras, *extras)))

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of step `step` (from 1), before per-parameter factors."""
        return learning_rate_of_run(schedules_of(self.phases, self.steps), step)

    def logits(
        self, tokens: Tensor, positions: Tensor, cache: GenerationCache | None, position: int
    ) -> Tensor:
        """Return the logits [vocab] at `position` of tokens [1, s], on every rank."""
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
