"""DiskSaves: save a run to disk and report each save."""
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from checkpoint import replicas, state
from checkpoint.disk import store
from checkpoint.disk.saver import CheckpointSaver
from checkpoint.run_folder import RunFolder
from config import CheckpointConfig
from optim.guard import NonFiniteGuard
from parallel.extras import FaultHook
from parallel.wire.comm import Group
from runtime import failure
from runtime.goodput import GoodputClock
from runtime.metrics import MetricsLogger
from runtime.run import TrainingRun


class Uploads:
    """What happens to a committed checkpoint beyond the run folder: nothing, without checkpoint.mirror
    (durable/uploader.py)."""

    def request(self) -> None:
        """Upload what is committed now. Returns immediately."""

    def has_failed(self) -> bool:
        """Return whether too many uploads in a row failed, so that the run must end."""
        return False

    def check(self) -> None:
        """Raise RemoteError if has_failed()."""


class DiskSaves:
    """Save a run to disk, in the background under checkpoint.async_save.

    observe: called at each of store.FAULT_POINTS.
    """

    def __init__(
        self,
        cfg: CheckpointConfig,
        run_folder: RunFolder,
        saver: CheckpointSaver,
        *,
        log: MetricsLogger,
        goodput: GoodputClock,
        guard: NonFiniteGuard,
        uploads: Uploads,
        observe: FaultHook,
    ) -> None:
        self.cfg = cfg
        self.run_folder = run_folder
        self.root = run_folder.folder / "checkpoints"
        self.saver = saver
        self.log = log
        self.goodput = goodput
        self.guard = guard
        self.uploads = uploads
        self.observe = observe

    def prepare(self, run: TrainingRun, step: int) -> None:
        """Flush the log and call before_save. Raises instead of saving a run that must be aborted."""
        self.guard.count_skipped(self.log.flush())
        run.extras.before_save(run, step)

    def save(self, run: TrainingRun, step: int, *, is_final: bool) -> None:
        """Save a checkpoint, and wait for it if it is the final one.

        Raises ReplicaMismatch before anything is written if replicas diverge, and StorageError if the final
        save fails or if more than checkpoint.failed_saves saves fail in a row.
        """
        self.prepare(run, step)
        with self.goodput.spending("saving"):
            run.data.check_unchanged()
            self.run_folder.restore(run, step)
            started = time.perf_counter()
            replicas.compare_replicas(run)
            with self.tolerate_failure():  # the previous save, in the background
                self.saver.wait()
            with self.tolerate_failure(is_final):
                self.write(run, step, is_final=is_final, started=started)
        self.goodput.saved(step)

    def write(self, run: TrainingRun, step: int, *, is_final: bool, started: float) -> None:
        def fault_point(point: str) -> object:
            return self.observe(point, step)  # the step being saved; training may be ahead of it

        state.save_run(run, self.saver, self.root, step, fault_point=fault_point)
        if self.saver.in_background and not is_final:
            return
        path = self.saver.wait_saved()
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        linked_bytes = sum(self.saver.linked)
        self.log.log_save(path, num_bytes, time.perf_counter() - started, linked_bytes)

    def list_saved(self) -> list[tuple[int, Path]]:
        """Return [(step, folder)] of the checkpoints on disk, newest first."""
        return store.committed_checkpoints(self.root)

    def has_failed(self) -> bool:
        """Return whether a background save, or too many uploads in a row, failed on this rank."""
        return self.saver.has_failed() or self.uploads.has_failed()

    def raise_failure(self, everyone: Group) -> None:
        """Raise on every rank any failure that is not tolerated. Collective."""
        with self.tolerate_failure():
            self.saver.wait()
        state.run_on_first_rank(self.uploads.check, everyone)

    @contextlib.contextmanager
    def tolerate_failure(self, is_final: bool = False) -> Iterator[None]:
        """Turn a StorageError of a save into a warning, on all ranks; the next save tries again.

        Re-raises it if the save is the final one or if more than checkpoint.failed_saves failed in a row.
        """
        try:
            yield
        except store.StorageError as error:
            failed, excused = self.saver.num_failed, self.cfg.failed_saves
            if is_final or failed > excused:
                raise
            self.log.log_line(
                f"warning: a checkpoint was not saved ({failed} of {excused} consecutive failures "
                f"allowed, checkpoint.failed_saves): {failure.one_line(error)}"
            )
