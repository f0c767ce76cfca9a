"""A profiler trace of some steps: `--profile.steps 10:12` writes one Chrome trace a rank into the run folder.

Open it in Perfetto or chrome://tracing; it shows whether exchanges overlap with the GEMMs. Other steps run
without the profiler.
"""
import contextlib
from collections.abc import Iterator
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, supported_activities

from config import profiled_steps


class ProfilerTrace:
    """`with trace.around(step):` around each step. steps: FIRST:LAST, both included, or None for no trace."""

    def __init__(self, steps: str | None, folder: Path, rank: int) -> None:
        self.steps = profiled_steps(steps)
        self.path = folder / f"trace-rank{rank}.json"
        self.profiler: profile | None = None  # while it records

    @contextlib.contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Records the step if it is among `steps`; writes the file after the last of them."""
        if step in self.steps and self.profiler is None:
            self.start()
        yield
        if self.profiler is not None and step >= self.steps[-1]:
            self.close()

    def start(self) -> None:
        supported = supported_activities()
        wanted = (ProfilerActivity.CPU, ProfilerActivity.CUDA)
        self.profiler = profile(activities=[activity for activity in wanted if activity in supported])
        self.profiler.__enter__()

    def close(self) -> None:
        """Writes what was recorded, also when the run ends among the steps."""
        if self.profiler is None:
            return
        self.profiler.__exit__(None, None, None)
        self.profiler.export_chrome_trace(str(self.path))
        self.profiler = None
