"""SGD with momentum (Polyak 1964), as torch.optim.SGD has it: weight decay is part of the gradient."""
from torch import Tensor

from optim.base import Optimizer


class SGD(Optimizer):
    MOMENTS = ("momentum",)

    def change(self, grad: Tensor, w: Tensor, m: Tensor, *, lr: float, decay: float) -> tuple[Tensor, Tensor]:
        m = m * self.cfg.momentum + grad + decay * w
        return w - lr * m, m
