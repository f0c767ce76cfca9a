"""Profile some steps: `--profile.steps 10:12` writes one Chrome trace per rank to the run folder.

Open it in Perfetto or chrome://tracing to see whether communication overlaps with the GEMMs. Other steps run
without the profiler.
"""
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, supported_activities

from config import profiled_steps
from parallel.extras import StepExtra
from parallel.microbatch import Microbatch


class ProfilerTrace(StepExtra):
    """Profile the steps FIRST:LAST, both included, without their data loading."""

    def __init__(self, steps: str, folder: Path, rank: int) -> None:
        self.steps = profiled_steps(steps)
        self.path = folder / f"trace-rank{rank}.json"
        self.profiler: profile | None = None  # set while recording

    def before_gradients(self, run: Any, step: int, batches: list[Microbatch]) -> None:
        if step in self.steps and self.profiler is None:
            self.start()

    def after_step(self, run: Any, step: int) -> None:
        """Write the trace after the last of the steps."""
        if self.profiler is not None and step >= self.steps[-1]:
            self.close()

    def start(self) -> None:
        supported = supported_activities()
        wanted = (ProfilerActivity.CPU, ProfilerActivity.CUDA)
        self.profiler = profile(activities=[activity for activity in wanted if activity in supported])
        self.profiler.__enter__()

    def close(self) -> None:
        """Write what was recorded, also if the run ends during these steps."""
        if self.profiler is None:
            return
        self.profiler.__exit__(None, None, None)
        self.profiler.export_chrome_trace(str(self.path))
        self.profiler = None
