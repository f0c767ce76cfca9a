"""Runs a schedule: one interpreter for every list of ops. Accumulating gradients is the list of a one-stage pipeline."""
from torch import Tensor

from parallel.schedule import Op


class Later:
    """The weight gradients that an I left behind, by microbatch, until their W (kernels/grad.py puts them here)."""

    def __init__(self) -> None:
        self.open: bool = False  # inside an I
        self.at: int = 0
        self.jobs: dict[int, list] = {}

    def put(self, compute, into: Tensor) -> None:
        self.jobs.setdefault(self.at, []).append((compute, into))

    def run(self, mb: int) -> None:
        for compute, into in self.jobs.pop(mb, []):
            compute(into)


class Pipeline:
    """stage(batch, scale) -> the scaled loss of one microbatch; later: its deferred weight gradients."""

    def __init__(self, stage, later: Later) -> None:
        self.stage, self.later = stage, later

    def run(self, ops: list[Op], batches: list, scale) -> Tensor:
        """Run this rank's ops over the step's microbatches; returns the summed loss (times scale), without a host sync."""
        losses: dict[int, Tensor] = {}
        total = 0.0
        for op in ops:
            if op.kind == "F":
                losses[op.mb] = self.stage(batches[op.mb], scale)
                total = total + losses[op.mb].detach()
            elif op.kind in "BI":
                self.later.open, self.later.at = op.kind == "I", op.mb
                losses.pop(op.mb).backward()
                self.later.open = False
            else:
                self.later.run(op.mb)
        return total
