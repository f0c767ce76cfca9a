"""In-memory saves on this and other nodes, between the saves to disk (checkpoint.memory_every)."""
from typing import Any

from checkpoint import replicas, state
from checkpoint.disk import store
from checkpoint.disk_saves import DiskSaves
from config import is_due
from durable.memory import MemoryCheckpoints
from parallel.extras import Extra
from runtime import failure


class MemorySaves(Extra):
    """Save to memory every `every` steps; with None, a run only resumes from memory and never saves to it."""

    def __init__(self, in_memory: MemoryCheckpoints, every: int | None, saving: DiskSaves) -> None:
        self.in_memory = in_memory
        self.every = every
        self.saving = saving

    def after_save(self, run: Any, step: int, saved: bool) -> bool:
        """Save the step to memory if a save is due and the step was not saved to disk.

        Raises ReplicaMismatch before anything is written, as a disk save does.
        """
        if saved or not is_due(self.every, step) or not run.extras.may_save(run, step):
            return saved
        self.saving.prepare(run, step)
        with self.saving.goodput.spending("saving"):
            run.data.check_unchanged()
            replicas.compare_replicas(run)
            is_kept = self.keep(run, step)
        if is_kept:
            self.saving.goodput.saved(step)
        return True  # the replicas were compared even if the save failed

    def keep(self, run: Any, step: int) -> bool:
        """Save the step to memory and return whether it is there. A StorageError is only a warning: an older
        state is on disk."""
        saving = self.saving

        def fault_point(point: str) -> object:
            return saving.observe(point, step)

        try:
            pieces, meta = state.get_rank_boxes(run), state.describe_run(run, step)
            in_progress = saving.saver.step_in_progress()
            self.in_memory.save(step, pieces, meta, saving_step=in_progress, fault_point=fault_point)
        except store.StorageError as error:  # raised on all ranks
            saving.log.log_line(f"warning: step {step:,} is not kept in memory: {failure.one_line(error)}")
            return False
        return True

    def at_end(self, run: Any) -> None:
        """Free the memory once the run is saved on disk. Collective."""
        self.in_memory.clear()
