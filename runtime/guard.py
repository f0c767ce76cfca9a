"""Decides on the device whether a step is finite; the host counts the skipped steps later.

Guarantees
- `all_finite` never waits for the device.
- A step that is not finite is skipped as a whole (the optimizer leaves weights and states as they are), and
  by every rank alike, because loss and gradient norm are already reduced over the whole world.
- After `limit` bad steps in a row the run ends with exit code 77; its last good checkpoint stays as it is.
- A step without targets is skipped too (train.train_step). It is not a bad step, and ends no row of them.
"""
from collections.abc import Iterable

import torch
from torch import Tensor


class NonFiniteLoss(RuntimeError):
    """Loss or gradient norm were not finite for too many steps in a row (exit code 77)."""

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
