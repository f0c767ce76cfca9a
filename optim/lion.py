"""Lion (arXiv 2302.06675, algorithm 2): the update is the sign of an interpolated momentum.

It has one moment. Its learning rates are three to ten times smaller than AdamW's.
"""
from torch import Tensor

from optim.base import Optimizer


class Lion(Optimizer):
    MOMENTS = ("lion_m",)

    def update_elements(
        self,
        grad: Tensor,
        weight: Tensor,
        *moments: Tensor,
        lr: float,
        weight_decay: float,
        step: int,
    ) -> tuple[Tensor, ...]:
        (momentum,) = moments
        direction = momentum.lerp(grad, 1 - self.cfg.beta1).sign_()
        new_weight = weight * (1 - lr * weight_decay) - lr * direction
        new_momentum = momentum.lerp(grad, 1 - self.cfg.beta2)
        return new_weight, new_momentum
