"""What outlives a phase: the log, the saver, the requests to stop, and the extras of the loop."""
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from build import extras_of_loop
from checkpoint import state
from checkpoint.disk import store
from checkpoint.disk.saver import CheckpointSaver
from checkpoint.disk_saves import DiskSaves, Uploads
from checkpoint.made_by import keep_provenance
from checkpoint.run_folder import RunFolder, describe_template, keep_tokenizer
from config import Config
from data.describe import describe_passes, describe_targets, describe_valid
from data.loader import BatchLoader
from optim.guard import NonFiniteGuard
from parallel.extras import Extra, FaultHook, no_fault
from parallel.wire.world import World
from plan.count import parameters
from runtime import lines, setup
from runtime.closing import trained_flops_per_token
from runtime.goodput import GoodputClock
from runtime.metrics import MetricsLogger
from runtime.run import TrainingRun
from runtime.stop import StopRequest

if TYPE_CHECKING:  # a run that asks for none of them loads none of them
    from checkpoint.disk.lease import Lease
    from data.task_files import ScoredTask
    from data.task_scores import EncodedTasks
    from durable.memory import MemoryCheckpoints
    from durable.uploader import CheckpointUploader


class PreparedRun(NamedTuple):
    """A run that is built and loaded, before its first step.

    start: where it resumes. notes: lines of the header. in_memory, uploads: None where there are none.
    eval_pending: whether the step before has no validation yet, which was due.
    """
    run: TrainingRun
    valid_data: BatchLoader
    start: state.StartingPoint
    notes: list[str]
    tasks: "list[ScoredTask]"
    in_memory: "MemoryCheckpoints | None"
    uploads: "CheckpointUploader | None"
    eval_pending: bool

    @property
    def is_finished(self) -> bool:
        return self.start.step == self.run.steps and not self.eval_pending


# Skipped steps in a row that end a run. In fp16 the loss scale must first come down: a halving a step.
SKIPPED_STEPS = 5
SKIPPED_STEPS_FP16 = 20


@dataclass(frozen=True)
class Services:
    """The services that outlive a phase. cfg: of the whole run. extras: those of the loop."""
    cfg: Config
    env: setup.LaunchEnv
    world: World
    folder: Path
    log: MetricsLogger
    goodput: GoodputClock
    saving: DiskSaves
    guard: NonFiniteGuard
    stop: StopRequest
    observe: FaultHook
    extras: Sequence[Extra]


def open_services(
    begun: PreparedRun,
    env: setup.LaunchEnv,
    world: World,
    folder: Path,
    *,
    goodput: GoodputClock,
    observe: FaultHook,
    lease: "Lease | None",
) -> Services:
    """Opens the log, the saver and what stands beside the loop. Collective under checkpoint.async_save."""
    run, cfg = begun.run, begun.run.cfg
    is_first_rank = env.rank == 0
    if is_first_rank:  # nothing is refused any more
        keep_tokenizer(cfg, run.data, folder / "tokenizer")
    stop = StopRequest(folder, cfg.train.max_minutes, watches_file=is_first_rank)
    saver_group = world.separate_group("saver") if cfg.checkpoint.async_save else None
    uploads = begun.uploads or Uploads()
    saver = CheckpointSaver(cfg.checkpoint.async_save, saver_group, committed=uploads.request)
    with store.storage_errors(folder / lines.NAME, 0):
        log = MetricsLogger(
            folder,
            run.phases.whole,
            env,
            steps=run.steps,
            flops_per_token=trained_flops_per_token(run),
            start_step=begun.start.step,
            goodput=goodput,
        )
    guard = NonFiniteGuard(SKIPPED_STEPS_FP16 if run.scaler.dynamic else SKIPPED_STEPS)
    run_folder = RunFolder(folder, log, is_first_rank)
    saving = DiskSaves(
        cfg.checkpoint,
        run_folder,
        saver,
        log=log,
        goodput=goodput,
        guard=guard,
        uploads=uploads,
        observe=observe,
    )
    extras = extras_of_loop(
        run,
        env,
        saving,
        lease=lease,
        uploads=begun.uploads,
        in_memory=begun.in_memory,
        observe=None if observe is no_fault else observe,
    )
    return Services(
        cfg=run.phases.whole,
        env=env,
        world=world,
        folder=folder,
        log=log,
        goodput=goodput,
        saving=saving,
        guard=guard,
        stop=stop,
        observe=observe,
        extras=extras,
    )


def log_header(
    services: Services, begun: PreparedRun, tasks: "dict[int, EncodedTasks]", about_layout: Sequence[str]
) -> None:
    """Prints what is about to run. tasks: of each model.context. about_layout: lines about the layout."""
    run, is_first_rank = begun.run, services.env.rank == 0
    notes = [*begun.notes, *keep_provenance(run, services.env, services.folder)]
    if tasks:
        notes = [*notes, f"{'tasks':<9}{tasks[run.cfg.model.context].describe()}"]
    first = {
        "valid": describe_valid(run.data, begun.valid_data) if services.cfg.data.valid is not None else None,
    }
    if is_first_rank:
        first |= {
            "template": describe_template(services.cfg, run.data),
            "epochs": describe_passes(run.data, run.phase_end),
            "targets": describe_targets(run.data, run.phase_end, begun.valid_data, run.cfg.eval.batches),
        }
    shown = [f"{name:<9}{text}" for name, text in first.items() if text]
    counts = parameters(services.cfg.model)
    sizes = counts["total"], counts["total"] - counts["embedding"]
    services.log.header(sizes, run.data.describe(), [*about_layout, *shown, *notes], run.provenance)
