"""The judge of a step: finite or not. The device judges, the host listens later.

Promises: `judge` never waits for the device; a step that is not finite is skipped as a whole (the optimizer multiplies
it by zero) and, because loss and norm are already sums over the whole world, skipped by every rank alike; when `limit`
steps in a row are bad the run ends with exit code 77 and its last good checkpoint stays as it is.
"""
from collections.abc import Iterable

import torch
from torch import Tensor


class NonFinite(RuntimeError):
    """Loss or gradient norm were not finite for too many steps in a row (exit code 77)."""

    exit_code = 77
    exit_code = 77


class Guard:
    def __init__(self, limit: int = 5):
        self.limit = limit
        self.bad = 0  # consecutive bad steps that the host has heard of

    def judge(self, loss: Tensor, norm: Tensor) -> Tensor:
        """A bool tensor [] on the device of `norm`: True when both scalars are finite. No host sync."""
        # isfinite of each, not of the sum: inf - inf and overflow of the sum would judge the wrong number
        return torch.isfinite(loss.detach()).to(norm.device) & torch.isfinite(norm.detach())

    def observe(self, skipped: Iterable[int]) -> None:
        """Hears the skipped flags (0 or 1) of the next steps in order. Raises NonFinite after `limit` ones in a row."""
        for flag in skipped:
            self.bad = self.bad + 1 if flag else 0
            if self.bad >= self.limit:
                raise NonFinite(f"loss or gradient norm not finite for {self.bad} steps in a row; the weights and the "
                                f"last checkpoint are untouched. Lower optim.lr, set optim.clip, or look at the data")
