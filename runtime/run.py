"""TrainingRun: everything a training step needs, for one phase. build.py builds it from a config."""
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from config import Tree
from config.reading import Phase, Phases
from data.loader import BatchLoader
from model.router_states import RouterStates
from optim.base import Optimizer
from optim.scaler import LossScaler
from optim.spikes import SpikeState
from parallel.extras import Extra, Extras
from parallel.pipeline.schedule import Op
from parallel.sharding.bucket import Bucket
from runtime.sharded_model import ShardedModel

if TYPE_CHECKING:  # optional features, imported only if the config enables them
    from model.inside import LayerStatistics
    from optim.ema import WeightEMA
    from optim.noise import GradientNoiseScale
    from parallel.pipeline.graphs import RecordedPipeline


@dataclass(frozen=True)
class TrainingRun(ShardedModel):
    """The state of one phase of a run on this rank, beyond its model.

    `phases` lists all phases of the run; `phase` is the current one and `cfg` its config.
    """
    phases: Phases
    phase: Phase
    steps: int  # total steps of the run
    loader: BatchLoader | None  # the train split, or None if the caller supplies the microbatches
    buckets: list[Bucket]  # parameters, gradients and masters on this rank; frozen ones come last
    optim: Optimizer
    learning_rate: Callable[[int], float]  # of a step (from 1), before per-parameter factors
    schedules: dict[int, list[Op]]  # {microbatches per step: this rank's ops}
    routers: RouterStates  # MoE router state other than weights: biases, load statistics
    scaler: LossScaler  # fp16 loss scaling
    spikes: SpikeState  # spike detection (optim.spike_sigma) and the data steps to skip
    extras: Extras  # hooks of optional features
    noise_scale: "GradientNoiseScale | None" = None  # also in extras; read by the log (log.noise_scale)
    inside: "LayerStatistics | None" = None  # also in extras; read by the log (log.inside_every)
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
    def phase_end(self) -> int:
        """The last step of this phase."""
        return self.phases.last_step(self.phase, self.steps)

    @property
    def phases_ahead(self) -> tuple[Phase, ...]:
        """This phase and the later ones."""
        return self.phases.all[self.phase.number - 1:]

    def with_extras(self, *extras: Extra) -> "TrainingRun":
        """Return a copy of the run with these extras appended."""
        return replace(self, extras=Extras((*self.extras, *extras)))
