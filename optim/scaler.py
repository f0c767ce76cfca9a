"""Dynamic loss scaling for fp16 (arXiv 1710.03740, section 3.2), without a host sync.

The loss is multiplied by `scale` before the backward, so that small gradients stay above the smallest numbers
of fp16. The gradient norm and the update divide by it. A step that overflows is skipped (runtime/guard.py
decides that), and halves the scale. `window` good steps in a row double it, up to MAX_LOSS_SCALE. The scale
is a power of two, so it changes no bit of a number that neither overflows nor underflows. In other dtypes it
is always 1.
"""
import torch
from torch import Tensor

from config import MAX_LOSS_SCALE


class LossScaler:
    """scale: a scalar on the device. good_steps: good steps since the scale changed.

    first, window: the keys train.loss_scale and train.loss_scale_window.
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
        scale_dtype = torch.promote_types(dtype, torch.float32)  # scale / tokens is as exact as the gradients
        self.scale = torch.tensor(first if self.dynamic else 1.0, dtype=scale_dtype, device=device)
        self.good_steps = torch.zeros((), device=device)

    @torch.no_grad()
    def adapt(self, is_good: Tensor, has_targets: Tensor) -> None:
        """Adapts the scale after a step. A step without targets changes nothing.

        is_good: a bool scalar, False if the step overflowed. has_targets: a bool scalar.
        """
        if not self.dynamic:
            return
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
        """What `load` takes, for a checkpoint's meta.json. Reads the device."""
        return [float(self.scale), float(self.good_steps)]

    def load(self, state: list[float] | None) -> None:
        """Restores `state`. If the saved run had no loss scaling, the first scale stays."""
        if self.dynamic and state:
            scale, good_steps = state
            self.scale.fill_(scale)
            self.good_steps.fill_(good_steps)
