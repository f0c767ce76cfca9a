"""A profiler trace of some steps: `--profile.steps 10:12` writes one Chrome trace a rank into the run folder.

Open it in Perfetto or chrome://tracing: whether exchanges run beside the GEMMs is seen there. Steps outside of the range run
without it.
"""
import contextlib
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, supported_activities

from config import span


class Trace:
    """`with trace.around(step):` around each step; the file is written after the last of `steps` (FIRST:LAST, both included)."""

    def __init__(self, steps: str | None, folder: Path, rank: int) -> None:
        self.steps, self.path, self.running = span(steps), folder / f"trace-rank{rank}.json", None

    @contextlib.contextmanager
    def around(self, step: int):
        if step in self.steps and self.running is None:
            self.running = profile(activities=[a for a in (ProfilerActivity.CPU, ProfilerActivity.CUDA) if a in supported_activities()])
            self.running.__enter__()
        yield
        if self.running is not None and step >= self.steps[-1]:
            self.close()

    def close(self) -> None:
        """Write what was recorded; a run that ends inside the range has its trace too."""
        if self.running is not None:
            self.running.__exit__(None, None, None)
            self.running.export_chrome_trace(str(self.path))
            self.running = None
