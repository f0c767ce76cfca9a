"""Dynamic loss scaling for fp16 (arXiv 1710.03740, section 3.2), without a host sync.

The loss is multiplied by `scale` before its backward, so that small gradients stay above fp16's smallest numbers; norm and
update divide by it. A step that overflows is skipped (runtime/guard.py judges) and halves it; `window` good steps in a row
double it, up to LARGEST_SCALE. Powers of two: scaling changes no bit of what neither over- nor underflows. Other dtypes: always 1.
"""
import torch
from torch import Tensor

from config import LARGEST_SCALE


class Scaler:
    """scale: a device scalar; good: steps since it changed. first, window: train.loss_scale and train.loss_scale_window."""

    def __init__(self, dtype: torch.dtype, device: torch.device, first: float = 2.0**16, window: int = 1000) -> None:
        self.dynamic, self.window = dtype == torch.float16, window
        wide = torch.promote_types(dtype, torch.float32)  # scale / tokens is as exact as the gradients are
        self.scale = torch.tensor(first if self.dynamic else 1.0, dtype=wide, device=device)
        self.good = torch.zeros((), device=device)

    @torch.no_grad()
    def update(self, ok: Tensor) -> None:
        if not self.dynamic:
            return
        self.good = torch.where(ok, self.good + 1, 0.0)
        grown = torch.where(self.good >= self.window, (self.scale * 2).clamp(max=LARGEST_SCALE), self.scale)
        self.scale = torch.where(ok, grown, (self.scale / 2).clamp(min=1.0))
        self.good = torch.where(self.good >= self.window, 0.0, self.good)

    def state(self) -> list[float]:
        """For a checkpoint's meta.json: what `load` takes. Reads the device."""
        return [float(self.scale), float(self.good)]

    def load(self, state: list[float] | None) -> None:
        """Of a run that had none, the first scale stays."""
        if self.dynamic and state:
            self.scale.fill_(state[0])
            self.good.fill_(state[1])
