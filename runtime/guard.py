"""Decides on the device whether a step is finite; the host counts the skipped steps later.

Guarantees
- `all_finite` never waits for the device.
- A step that is not finite is skipped as a whole (the optimizer leaves weights and states as they are), and
  by every rank alike, because loss and gradient norm are already reduced over the whole world.
- After `limit` bad steps in a row the run ends with exit code 77; its last good checkpoint stays as it is.
- A step without targets is skipped too (train.train_step). It is not a bad step, and ends no row of them.
"""
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from config import OptimConfig


class NonFiniteLoss(RuntimeError):
    """Loss or gradient norm were not finite for too many steps in a row (exit code 77)."""

    exit_code = 77


class SpikesPersist(RuntimeError):
    """Loss or gradient norm stayed far above what was usual (exit code 77)."""

    exit_code = 77


def all_finite(loss: Tensor, norm: Tensor) -> Tensor:
    """Return a bool tensor [] on the device of `norm`: True when both are finite. No host sync."""
    # each by itself, not their sum: inf - inf is nan, and a sum of finite numbers can overflow
    loss_is_finite = torch.isfinite(loss.detach()).to(norm.device)
    return loss_is_finite & torch.isfinite(norm.detach())


class NonFiniteGuard:
    """Count the bad steps. limit: bad steps in a row that end the run."""

    def __init__(self, limit: int = 5) -> None:
        self.limit = limit
        self.num_bad = 0  # bad steps in a row, as far as the host knows

    def count_skipped(self, skipped: Iterable[int]) -> None:
        """Counts the flags (1: not finite) of the next steps, in order.

        Raises NonFiniteLoss after `limit` ones in a row.
        """
        for flag in skipped:
            self.num_bad = self.num_bad + 1 if flag else 0
            if self.num_bad >= self.limit:
                raise NonFiniteLoss(
                    f"loss or gradient norm not finite for {self.num_bad} steps in a row; the weights and "
                    f"the last checkpoint are untouched. Lower optim.lr, set optim.clip, or look at the data")


class SpikesInARow(Protocol):
    """optim.spikes.SpikeState"""

    @property
    def in_a_row(self) -> list[int]: ...
    def count(self, step: int, is_spike: bool) -> None: ...


class SpikeRewinds:
    """Decides when a run goes back (optim.spike_rewind), and when it ends."""

    def __init__(self, cfg: OptimConfig) -> None:
        self.cfg = cfg
        self.num_rewinds = 0  # since a step beyond `furthest` was applied
        self.furthest = 0  # the last spike before which the run went back

    def find(self, spikes: SpikesInARow, steps: Iterable[tuple[int, bool]]) -> int | None:
        """Counts (step, whether it was a spike). Returns the first of so many spikes in a row that the run
        must go back before it, or None if it goes on.

        Raises SpikesPersist when it has gone back too often, and when it never goes back and as many spikes
        came in a row as the window has steps.
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
            raise SpikesPersist(
                f"loss or gradient norm far above what was usual for {number} steps in a row, as many as "
                "optim.spike_window; the weights are those before them. Lower optim.lr, raise "
                "optim.spike_sigma, or set optim.spike_rewind"
            )
        if limit is None or number < limit:
            return None
        if self.num_rewinds >= self.cfg.spike_rewinds:
            first, last = spikes.in_a_row[0], spikes.in_a_row[-1]
            raise SpikesPersist(
                f"spikes at steps {first:,} to {last:,} again, after the run went back {self.num_rewinds} "
                "times (optim.spike_rewinds) and left out other data each time; look at the data, or lower "
                "optim.lr"
            )
        self.num_rewinds += 1
        self.furthest = max(self.furthest, spikes.in_a_row[-1])
        return spikes.in_a_row[0]
