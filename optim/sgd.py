"""SGD with momentum (Polyak 1964), as in torch.optim.SGD: weight decay is added to the gradient."""
from torch import Tensor

from optim.base import Optimizer


class SGD(Optimizer):
    MOMENTS = ("momentum",)

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
        new_momentum = momentum * self.cfg.momentum + grad + weight_decay * weight
        return weight - lr * new_momentum, new_momentum
