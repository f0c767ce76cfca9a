"""Lion (arXiv 2302.06675, algorithm 2): the sign of an interpolated momentum. One moment; rates a tenth to a third of AdamW's."""
from torch import Tensor

from optim.base import Optimizer


class Lion(Optimizer):
    MOMENTS = ("lion_m",)

    def change(self, grad: Tensor, w: Tensor, m: Tensor, *, lr: float, decay: float) -> tuple[Tensor, Tensor]:
        direction = m.lerp(grad, 1 - self.cfg.beta1).sign_()
        return w * (1 - lr * decay) - lr * direction, m.lerp(grad, 1 - self.cfg.beta2)
