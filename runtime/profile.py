"""Record some steps, one file per rank in the run folder; other steps run without a recorder.

- `--profile.steps 10:12` writes a Chrome trace, trace-rankN.json. Open it in Perfetto or chrome://tracing to
  see whether communication overlaps with the GEMMs.
- `--profile.memory 10:12` writes every allocation of the GPU with its Python stack, memory-rankN.pickle, also
  if memory runs out in these steps. Open it at pytorch.org/memory_viz.
"""
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from parallel.extras import StepExtra
from parallel.microbatch import Microbatch

MAX_ALLOCATIONS = 1_000_000  # events in a memory snapshot; the oldest are dropped


class RecordedSteps(StepExtra):
    """Record the steps of a range, without their data loading. Subclasses define start and write."""

    def __init__(self, steps: range, path: Path) -> None:
        self.steps = steps
        self.path = path
        self.is_recording = False

    def before_gradients(self, run: Any, step: int, batches: list[Microbatch]) -> None:
        if step in self.steps and not self.is_recording:
            self.start()
            self.is_recording = True

    def after_step(self, run: Any, step: int) -> None:
        """Write the file after the last of the steps."""
        if step >= self.steps[-1]:
            self.close()

    def close(self) -> None:
        """Write what was recorded, also if the run ends during these steps."""
        if self.is_recording:
            self.is_recording = False
            self.write()

    def start(self) -> None:
        raise NotImplementedError

    def write(self) -> None:
        """Stop, and write what was recorded."""
        raise NotImplementedError


class ProfilerTrace(RecordedSteps):
    """A Chrome trace of the steps."""
    profiler: profile

    def start(self) -> None:
        supported = supported_activities()
        wanted = (ProfilerActivity.CPU, ProfilerActivity.CUDA)
        self.profiler = profile(activities=[activity for activity in wanted if activity in supported])
        self.profiler.__enter__()

    def write(self) -> None:
        self.profiler.__exit__(None, None, None)
        self.profiler.export_chrome_trace(str(self.path))
        del self.profiler


class MemorySnapshot(RecordedSteps):
    """The allocations of the steps on this rank's GPU, and what was allocated before them."""

    def start(self) -> None:
        torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS, stacks="python")

    def write(self) -> None:
        torch.cuda.memory._dump_snapshot(str(self.path))
        torch.cuda.memory._record_memory_history(enabled=None)
