"""A profiler trace of some steps: `--profile.steps 10:12` writes one Chrome trace a rank into the run folder.

Open it in Perfetto or chrome://tracing: whether exchanges run beside the GEMMs is seen there. The trace of CPU and, where
there is one, GPU activity comes from torch.profiler; steps outside of the range run without it.
"""
import contextlib
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, supported_activities

from config import ConfigError


def span(text: str | None) -> range:
    """The steps that "10:12" names, both ends included; "10" names one. Raises ConfigError."""
    if text is None:
        return range(0)
    first, _, last = text.partition(":")
    if not (first.isdigit() and (last or first).isdigit() and 0 < int(first) <= int(last or first)):
        raise ConfigError(f"profile.steps: {text!r} must be FIRST:LAST, steps from 1 on, e.g. 10:12")
    return range(int(first), int(last or first) + 1)


class Profiler:
    """begin(step) and end(step) around each step; the trace is written after the last step of the range, or by close()."""

    def __init__(self, text: str | None, folder: Path, rank: int) -> None:
        self.steps, self.path, self.running = span(text), folder / f"trace-rank{rank}.json", None

    def begin(self, step: int) -> None:
        if step in self.steps and self.running is None:
            self.running = profile(activities=[a for a in (ProfilerActivity.CPU, ProfilerActivity.CUDA) if a in supported_activities()])
            self.running.__enter__()

    def end(self, step: int) -> None:
        if self.running is not None and step == self.steps[-1]:
            self.close()

    def close(self) -> None:
        running, self.running = self.running, None
        if running is not None:
            running.__exit__(None, None, None)
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
            running.export_chrome_trace(str(self.path))
