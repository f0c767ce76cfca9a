"""LAMB (arXiv 1904.00962, algorithm 2) and LARS (arXiv 1708.03888): steps in proportion to a tensor's norm.

The norms are over whole stored tensors, however they are sharded. Every rank sums the squares of the elements
that it counts, and one all-reduce of two numbers per tensor completes the sums. Norm weights and biases,
which are not decayed, have no trust ratio either.
"""
import torch
from torch import Tensor

from config import OptimConfig
from optim.base import Optimizer, copy_where, decoupled_rates
from parallel.sharding.bucket import Bucket
from parallel.sharding.views import get_boxes
from parallel.topology.mesh import Mesh
from parallel.wire import comm

LARS_TRUST = 0.001  # LARS: eta in the paper


class TrustRatioOptimizer(Optimizer):
    """Base of LAMB and LARS: the trust ratio |weight| / |direction| of each stored tensor.

    `tensor_index` maps the key of each tensor with a trust ratio to its row in the vector of ratios.
    """

    def __init__(self, cfg: OptimConfig, buckets: list[Bucket], mesh: Mesh) -> None:
        super().__init__(cfg, buckets, mesh)
        local_keys: set[str] = set()
        for bucket in self.buckets:
            for slot in bucket.slots:
                spec = slot.param.spec
                if spec.has_decay:
                    local_keys.update(box.key for box in spec.boxes)
        keys_of_ranks = comm.all_gather_objects(local_keys, mesh.world)
        all_keys = sorted(local_keys.union(*keys_of_ranks))
        self.tensor_index = {key: index for index, key in enumerate(all_keys)}

    def direction(self, index: int, step: int, grad_scale: Tensor) -> Tensor:
        """Return the direction of the owned elements of bucket `index`, decay included, before the ratio."""
        raise NotImplementedError

    def trust_ratios(self, step: int, grad_scale: Tensor) -> Tensor:
        """Return |weight| / |direction| of each tensor, [tensors]; 1 where either norm is zero."""
        num_tensors = len(self.tensor_index)
        squares = self.empty.new_zeros(num_tensors, 2)
        for index, bucket in enumerate(self.buckets):
            direction = self.direction(index, step, grad_scale)
            self.add_squares(squares[:, 0], bucket, bucket.weights.master)
            self.add_squares(squares[:, 1], bucket, direction)
        norms = comm.all_reduce_sum(squares, self.mesh.world).sqrt()
        weight_norm, direction_norm = norms.unbind(1)
        both_positive = (weight_norm > 0) & (direction_norm > 0)
        return torch.where(both_positive, weight_norm / direction_norm, 1.0)

    def add_squares(self, squares: Tensor, bucket: Bucket, flat: Tensor) -> None:
        """Add the squares of flat [owned elements] to squares [tensors]; each element counts on one rank."""
        for box, values in get_boxes(bucket, flat, each_once=True):
            row = self.tensor_index.get(box.key)
            if row is not None:
                squares[row] += values.square().sum()

    def scaled_direction(
        self,
        index: int,
        step: int,
        grad_scale: Tensor,
        *,
        ratios: Tensor,
        trust: float = 1.0,
    ) -> Tensor:
        """Return the direction of bucket `index`, times trust * ratio in tensors that have a ratio, and times
        the learning-rate factor of each range."""
        direction = self.direction(index, step, grad_scale)
        for box, values in get_boxes(self.buckets[index], direction):
            row = self.tensor_index.get(box.key)
            if row is not None:
                values.mul_(trust * ratios[row])
        for part in self.buckets[index].update_ranges:
            if part.group_lr_factor != 1:
                direction[part.elements] *= part.group_lr_factor
        return direction

    def weight_decay_term(self, index: int) -> Tensor:
        """Return weight_decay * master for bucket `index`, 0 for elements without weight decay."""
        bucket = self.buckets[index]
        term = torch.zeros_like(bucket.weights.master)
        for part in bucket.update_ranges:
            rates = decoupled_rates(self.cfg, 1.0, part)
            if rates.weight_decay:
                term[part.elements] = rates.weight_decay * bucket.weights.master[part.elements]
        return term


class LAMB(TrustRatioOptimizer):
    MOMENTS = ("adam_m", "adam_v")

    def update(self, step: int, lr: float, grad_scale: Tensor, is_good: Tensor) -> None:
        for index, bucket in enumerate(self.buckets):
            exp_avg, exp_avg_sq = self.get_moments(index)
            grad = bucket.grads.local * grad_scale
            new_exp_avg = exp_avg.lerp(grad, 1 - self.cfg.beta1)
            new_exp_avg_sq = exp_avg_sq.lerp(grad.square(), 1 - self.cfg.beta2)
            copy_where([exp_avg, exp_avg_sq], (new_exp_avg, new_exp_avg_sq), is_good)

        ratios = self.trust_ratios(step, grad_scale)
        for index, bucket in enumerate(self.buckets):
            direction = self.scaled_direction(index, step, grad_scale, ratios=ratios)
            master = bucket.weights.master
            new_master = master - lr * direction
            copy_where([master], (new_master,), is_good)
            self.buckets[index].weights.copy_master_to_local()

    def direction(self, index: int, step: int, grad_scale: Tensor) -> Tensor:
        """Compute the direction from the moments, which already include this step's gradients."""
        exp_avg, exp_avg_sq = self.get_moments(index)
        bias_correction1 = 1 - self.cfg.beta1**step
        bias_correction2 = 1 - self.cfg.beta2**step
        root = (exp_avg_sq / bias_correction2).sqrt_().add_(self.cfg.eps)
        return exp_avg / bias_correction1 / root + self.weight_decay_term(index)

    def get_moments(self, index: int) -> tuple[Tensor, Tensor]:
        return self.moments["adam_m"][index], self.moments["adam_v"][index]


class LARS(TrustRatioOptimizer):
    MOMENTS = ("momentum",)

    def update(self, step: int, lr: float, grad_scale: Tensor, is_good: Tensor) -> None:
        ratios = self.trust_ratios(step, grad_scale)
        for index, bucket in enumerate(self.buckets):
            momentum = self.moments["momentum"][index]
            direction = self.scaled_direction(
                index, step, grad_scale, ratios=ratios, trust=LARS_TRUST)
            new_momentum = momentum * self.cfg.momentum + lr * direction
            master = bucket.weights.master
            new_master = master - new_momentum
            copy_where([momentum, master], (new_momentum, new_master), is_good)
            self.buckets[index].weights.copy_master_to_local()

    def direction(self, index: int, step: int, grad_scale: Tensor) -> Tensor:
        return self.buckets[index].grads.local * grad_scale + self.weight_decay_term(index)
