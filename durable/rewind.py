"""Rewind to the last good checkpoint after consecutive spikes (optim.spike_rewind; see optim/spikes.py)."""
from collections.abc import Iterable
from typing import Any

from checkpoint import state
from checkpoint.disk import store
from checkpoint.disk_saves import DiskSaves
from config import OptimConfig
from config.exit_codes import NON_FINITE
from durable.memory import MemoryCheckpoints
from optim.spikes import SpikeState
from parallel.extras import Extra
from parallel.sharding.bucket import wait_param_gathers
from runtime import failure, lines
from runtime.metrics import PendingStep


class PersistentSpikes(RuntimeError):
    """Loss or gradient norm keeps spiking (exit code 77)."""

    exit_code = NON_FINITE


class SpikeRewinds:
    """Decide when to rewind a run (optim.spike_rewind), and when to abort it."""

    def __init__(self, cfg: OptimConfig) -> None:
        self.cfg = cfg
        self.num_rewinds = 0  # since a step beyond `furthest` was applied
        self.furthest = 0  # the last spike that caused a rewind

    def find(self, spikes: SpikeState, steps: Iterable[tuple[int, bool]]) -> int | None:
        """Count `steps`, each (step, whether it was a spike).

        Returns the first spike of the streak if it is long enough to rewind before it, otherwise None.
        Raises PersistentSpikes after too many rewinds, or, without spike_rewind, once the streak is as long
        as the window.
        """
        if self.cfg.spike_sigma is None:
            return None
        for step, is_spike in steps:
            spikes.count(step, is_spike)
            if not is_spike and step > self.furthest:
                self.num_rewinds = 0
        number = len(spikes.in_a_row)
        limit = self.cfg.spike_rewind
        if limit is None and number >= self.cfg.spike_window:
            raise PersistentSpikes(
                f"loss or gradient norm far above their recent range for {number} steps in a row, as many as "
                "optim.spike_window; the weights are those before them. Lower optim.lr, raise "
                "optim.spike_sigma, or set optim.spike_rewind"
            )
        if limit is None or number < limit:
            return None
        if self.num_rewinds >= self.cfg.spike_rewinds:
            first, last = spikes.in_a_row[0], spikes.in_a_row[-1]
            raise PersistentSpikes(
                f"spikes at steps {first:,} to {last:,} again, after the run went back {self.num_rewinds} "
                "times (optim.spike_rewinds) and skipped different data each time; inspect the data, or "
                "lower optim.lr"
            )
        self.num_rewinds += 1
        self.furthest = max(self.furthest, spikes.in_a_row[-1])
        return spikes.in_a_row[0]


class Rewinds(Extra):
    """Count the spikes that the log has read, and rewind the run after too many in a row.

    in_memory: the in-memory checkpoints, if any; a rewind discards the later ones.
    """

    def __init__(self, cfg: OptimConfig, saving: DiskSaves, in_memory: MemoryCheckpoints | None) -> None:
        self.cfg = cfg
        self.saving = saving
        self.log = saving.log
        self.in_memory = in_memory
        self.rewinds = SpikeRewinds(cfg)
        self.read: list[tuple[int, bool]] = []  # steps that the log has read, but not yet counted
        self.log.observers.append(self.add_step)

    def add_step(self, row: dict[str, Any], pending: PendingStep) -> None:
        """Keep (step, whether it was a spike) of a finite step, and report a spike on the console."""
        is_spike = bool(row["spike"])
        if is_spike or not row["skipped"]:
            self.read.append((row["step"], is_spike))
        if is_spike:
            numbers = f"loss {row['loss']:.4g}, gradient norm {row['grad_norm']:.4g}"
            self.log.log_line(f"spike at step {row['step']:,}: {numbers}; the step was not applied")

    def find(self, run: Any) -> int | None:
        """Count the steps that were read since the last call. See SpikeRewinds.find."""
        steps, self.read = self.read, []
        return self.rewinds.find(run.spikes, steps)

    def on_resume(self, run: Any, step: int) -> None:
        self.rewinds = SpikeRewinds(self.cfg)

    def after_step(self, run: Any, step: int) -> int | None:
        first_spike = self.find(run)
        return None if first_spike is None else self.go_back(run)

    def may_save(self, run: Any, step: int) -> bool:
        """Skip saves during a streak of spikes, since the run may be rewound before it."""
        return self.cfg.spike_rewind is None or not run.spikes.in_a_row

    def before_save(self, run: Any, step: int) -> None:
        self.find(run)  # under spike_rewind all were counted

    def go_back(self, run: Any) -> int:
        """Rewind to the newest good checkpoint before the streak of spikes, and skip their data. Collective.

        Returns the step of that checkpoint. Raises PersistentSpikes if there is none, or StorageError.
        """
        everyone, timeout_s = run.mesh.world, run.cfg.checkpoint.timeout_s
        with self.saving.tolerate_failure():
            self.saving.saver.wait()
        wait_param_gathers(run.buckets)
        spikes, left_out = run.spikes.in_a_row, run.spikes.data_steps_to_skip()
        shown = ", ".join(f"{step:,}" for step in spikes)
        self.log.log_line(f"{len(spikes)} spikes in a row, steps {shown}: rewinding")
        step = self.load_before(run, spikes)

        # discard everything after that step
        folder = self.saving.root
        run.spikes.skip_data_steps(left_out)
        if self.in_memory is not None:
            self.in_memory.drop_after(step)
        state.run_on_first_rank(lambda: store.drop_after(folder, step), everyone, timeout_s)
        with store.storage_errors(folder.parent / lines.NAME, 0):
            self.log.rewind(step)
        self.read = []
        self.saving.goodput.rewound(step)
        self.log.log_line(
            f"rewound to the checkpoint of step {step:,}; data steps skipped from now on, counted from "
            f"0: {', '.join(f'{number:,}' for number in left_out)}"
        )
        return step

    def load_before(self, run: Any, spikes: list[int]) -> int:
        """Load the newest good checkpoint before these steps, and return its step. Raises
        PersistentSpikes."""
        folder = self.saving.root

        def list_steps() -> list[int]:
            return [step for step, _ in store.committed_checkpoints(folder) if step < spikes[0]]

        for step in state.run_on_first_rank(list_steps, run.mesh.world, run.cfg.checkpoint.timeout_s):
            try:
                state.resume_after(run, folder, step)
            except store.IntegrityError as error:
                self.log.log_line(f"warning: {failure.one_line(error)}")
                continue
            return step
        raise PersistentSpikes(
            f"{len(spikes)} spikes in a row from step {spikes[0]:,} on (optim.spike_rewind), "
            "but no good checkpoint precedes them; lower checkpoint.every, or raise "
            "checkpoint.keep"
        )
