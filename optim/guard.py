"""Check on the device whether a step is finite; the host counts the skipped steps later.

Guarantees
- `all_finite` causes no host sync.
- A non-finite step is skipped as a whole (the optimizer leaves weights and states unchanged) and on every
  rank, because loss and gradient norm are already reduced over the whole world.
- After `limit` consecutive bad steps the run ends with exit code 77; its last good checkpoint is untouched.
- A step without targets is skipped too (train.train_step). It does not count as bad and does not reset the
  count of consecutive bad steps.
"""
from collections.abc import Iterable

import torch
from torch import Tensor

from config.exit_codes import NON_FINITE


class NonFiniteLoss(RuntimeError):
    """Loss or gradient norm was not finite for too many steps in a row (exit code 77)."""

    exit_code = NON_FINITE


def all_finite(loss: Tensor, norm: Tensor) -> Tensor:
    """Return a bool tensor [] on the device of `norm`, True if both are finite. No host sync."""
    # test each, not their sum: inf - inf is nan, and a sum of finite numbers can overflow
    loss_is_finite = torch.isfinite(loss.detach()).to(norm.device)
    return loss_is_finite & torch.isfinite(norm.detach())


class NonFiniteGuard:
    """Count bad steps. limit: number of consecutive bad steps that ends the run."""

    def __init__(self, limit: int = 5) -> None:
        self.limit = limit
        self.num_bad = 0  # consecutive bad steps, as far as the host knows

    def count_skipped(self, skipped: Iterable[int]) -> None:
        """Count the flags of the next steps in order; 1 means not finite.

        Raises NonFiniteLoss after `limit` consecutive ones.
        """
        for flag in skipped:
            self.num_bad = self.num_bad + 1 if flag else 0
            if self.num_bad >= self.limit:
                raise NonFiniteLoss(
                    f"loss or gradient norm not finite for {self.num_bad} steps in a row; the weights and "
                    f"the last checkpoint are untouched. Lower optim.lr, set optim.clip, or inspect the data")
