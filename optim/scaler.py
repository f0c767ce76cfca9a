"""Dynamic loss scaling for fp16 (arXiv 1710.03740, section 3.2), without a host sync.

The loss is multiplied by `scale` before the backward pass, so that small gradients stay above the smallest
fp16 numbers. The gradient norm and the update divide by it. A step that overflows is skipped (see
optim/guard.py) and halves the scale; `window` good steps in a row double it, up to MAX_LOSS_SCALE. The
scale is a power of two, so numbers that neither overflow nor underflow keep every bit. In other dtypes the
scale is always 1.
"""
import torch
from torch import Tensor

from config import MAX_LOSS_SCALE


class LossScaler:
    """Loss scale of a run. `scale` is a device scalar; `good_steps` counts good steps since it last changed.
    dynamic: whether a step adapts the scale.

    `first` and `window` are the keys train.loss_scale and train.loss_scale_window.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        first: float = 2.0**16,
        window: int = 1000,
    ) -> None:
        self.dynamic = dtype == torch.float16
        self.window = window
        scale_dtype = torch.promote_types(dtype, torch.float32)  # scale / tokens as exact as gradients
        self.scale = torch.tensor(first if self.dynamic else 1.0, dtype=scale_dtype, device=device)
        self.good_steps = torch.zeros((), device=device)

    @torch.no_grad()
    def adapt(self, is_good: Tensor, has_targets: Tensor) -> None:
        """Adapt the scale after a step. A step without targets changes nothing.

        `is_good` and `has_targets` are bool scalars; `is_good` is False if the step overflowed.
        """
        good_steps = torch.where(is_good, self.good_steps + 1, 0.0)
        window_is_full = good_steps >= self.window
        good_steps = torch.where(window_is_full, 0.0, good_steps)
        doubled = (self.scale * 2).clamp(max=MAX_LOSS_SCALE)
        halved = (self.scale / 2).clamp(min=1.0)
        grown = torch.where(window_is_full, doubled, self.scale)
        scale = torch.where(is_good, grown, halved)
        self.scale = torch.where(has_targets, scale, self.scale)
        self.good_steps = torch.where(has_targets, good_steps, self.good_steps)

    def state(self) -> list[float]:
        """Return the state that `load` takes, for a checkpoint's meta.json. Synchronizes with the device."""
        return [float(self.scale), float(self.good_steps)]

    def load(self, state: list[float] | None) -> None:
        """Restore `state`. If the saved run had no loss scaling, keep the initial scale."""
        if self.dynamic and state:
            scale, good_steps = state
            self.scale.fill_(scale)
            self.good_steps.fill_(good_steps)
