"""Choose the checkpoint to resume from: the newest good one in memory or on disk, repaired if possible.

Also detects what the previous launch left undone.
"""
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoint import remote, state
from checkpoint.disk import store
from config import Config, ConfigError, is_due
from config.reading import get_phases, saved_config
from data.remote import RemoteError
from durable import mirror
from durable.restarts import MEMORY_RECORD
from optim.lr import learning_rates
from parallel.wire import comm
from parallel.wire.world import World
from runtime import failure, lines, setup
from runtime.run import TrainingRun

if TYPE_CHECKING:  # imported only by runs with in-memory checkpoints
    from durable.memory import MemoryCheckpoints


def open_memory(
    cfg: Config, env: setup.LaunchEnv, world: World, folder: Path
) -> "MemoryCheckpoints | None":
    """Open the in-memory checkpoints, or return None if this run neither makes nor has any.

    Without checkpoint.memory_every they are opened if an earlier launch had it, since they may be newer than
    those on disk. Collective. Raises ConfigError.
    """
    everyone = world.all_ranks()
    if cfg.checkpoint.memory_every is None:
        record = folder / MEMORY_RECORD
        has_some = state.run_on_first_rank(
            lambda: os.path.lexists(record), everyone, cfg.checkpoint.timeout_s
        )
        if not has_some:
            return None
    from durable.memory import MemoryCheckpoints

    return MemoryCheckpoints(cfg, folder, env.host, everyone)


def choose_start(
    cfg: Config,
    world: World,
    root: Path,
    in_memory: "MemoryCheckpoints | None",
    bad: dict[Path, str],
) -> state.StartingPoint:
    """Return the newest checkpoint, in memory or on disk, that is not known to be damaged. Collective.

    bad: {checkpoint: reason} for those that a rank found damaged. Raises ConfigError or IntegrityError.
    """
    everyone = world.all_ranks()
    if in_memory is None:
        return state.newest_start(cfg, root, everyone, bad)

    # prefer an in-memory checkpoint that is newer than all on disk
    start, _ = in_memory.newest_start(cfg, bad=bad)
    if start is not None:
        return start

    # otherwise the newest good one on disk
    on_disk, trouble = None, None
    try:
        on_disk = state.newest_start(cfg, root, everyone, bad)
    except store.IntegrityError as error:  # raised on all ranks if there are checkpoints but none is good
        trouble = error

    # otherwise one in memory that is newer than that; all newer ones on disk are damaged
    start, notes = in_memory.newest_start(cfg, after=-1 if on_disk is None else on_disk.step, bad=bad)
    if start is not None:
        of_disk = [str(trouble)] if on_disk is None else on_disk.notes
        return replace(start, notes=[*of_disk, *start.notes])
    if on_disk is None:
        assert trouble is not None
        raise trouble
    return replace(on_disk, notes=[*notes, *on_disk.notes])


def repair_from_store(cfg: Config, path: Path, root: Path) -> tuple[bool, str]:
    """Repair a damaged checkpoint from the remote store that has a copy of it.

    Returns (whether it was repaired, a log line), with an empty line if there is no store. root: the run's
    checkpoint folder.
    """
    try:
        source = mirror.copied_from(cfg, path, root)
        return (False, "") if source is None else (True, remote.repair(source, path))
    except (store.IntegrityError, store.StorageError, RemoteError) as error:
        return False, f"warning: {path} cannot be repaired from its store: {failure.one_line(error)}"


def drop_rows(folder: Path) -> None:
    """Remove the metrics of an earlier run that left no checkpoint in this folder. Raises StorageError."""
    for name in (lines.NAME, lines.INSIDE):
        with store.storage_errors(folder / name, 0):
            lines.truncate_after(folder / name, -1)


def is_evaluation_missing(
    cfg: Config, step: int, folder: Path | None, everyone: comm.Group, is_end: bool = False
) -> bool:
    """Return whether an evaluation was due after this step and is not in the folder. Collective.

    It is missing if the run was stopped before it, or if another run made the step (`folder` is None).
    is_end: whether the run ends with this step.
    """
    was_due = is_end or is_due(cfg.eval.every, step)
    if step == 0 or not was_due:
        return False
    return folder is None or state.run_on_first_rank(lambda: step not in evaluated_steps(folder), everyone)


def evaluated_steps(folder: Path) -> set[int]:
    """Return the steps that have a validation in metrics.jsonl."""
    _, validations = lines.read_metrics(folder)
    return {row["step"] for row in validations}


def rate_notes(run: TrainingRun, start: state.StartingPoint) -> list[str]:
    """Return a log line that compares the learning rates if a resume changes them, otherwise []."""
    if start.resumed is None:
        return []
    meta, step = start.resumed.meta, start.step
    try:
        before, horizon = get_phases(saved_config(meta["config"])), state.horizon_in(meta)
    except ConfigError:  # written by another version with different keys
        return []
    if horizon is None:
        return []
    old = learning_rates(before, horizon)(step)
    if math.isclose(old, run.learning_rate(step), rel_tol=1e-9):
        return []
    after = run.learning_rate(min(step + 1, run.steps))
    return [f"the learning rate jumps from {old:.2e} to {after:.2e}: these settings use a different schedule"]
