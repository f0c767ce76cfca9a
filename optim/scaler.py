"""Dynamic loss scaling for fp16 (arXiv 1710.03740, section 3.2), without a host sync.

The loss is multiplied by `scale` before its backward, so that small gradients stay above fp16's smallest numbers; norm and
update divide by it. A step that overflows is skipped (runtime/guard.py judges) and halves it; GROWTH good steps in a row
double it. Powers of two: scaling changes no bit of what neither over- nor underflows. Other dtypes: always 1.
"""
import torch
from torch import Tensor

FIRST, GROWTH, LARGEST = 2.0**16, 1000, 2.0**24


class Scaler:
    """scale: a device scalar; good: steps since it changed."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dynamic = dtype == torch.float16
        wide = torch.promote_types(dtype, torch.float32)  # scale / tokens is as exact as the gradients are
        self.scale = torch.tensor(FIRST if self.dynamic else 1.0, dtype=wide, device=device)
        self.good = torch.zeros((), device=device)

    @torch.no_grad()
    def update(self, ok: Tensor) -> None:
        if not self.dynamic:
            return
        self.good = torch.where(ok, self.good + 1, 0.0)
        grown = torch.where(self.good >= GROWTH, (self.scale * 2).clamp(max=LARGEST), self.scale)
        self.scale = torch.where(ok, grown, (self.scale / 2).clamp(min=1.0))
        self.good = torch.where(self.good >= GROWTH, 0.0, self.good)

    def state(self) -> list[float]:
        """For a checkpoint's meta.json: what `load` takes. Reads the device."""
        return [float(self.scale), float(self.good)]

    def load(self, state: list[float] | None) -> None:
        """Of a run that had none, the first scale stays."""
        if self.dynamic and state:
            self.scale.fill_(state[0])
            self.good.fill_(state[1])
