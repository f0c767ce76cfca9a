"""NorMuon (arXiv 2510.05491, algorithm 1): Muon with an adaptive learning rate for each row (neuron).

The rows of the orthogonalized momentum [m, n] of a matrix differ in norm. Each row is divided by the root of
the moving average of its mean square, and the result is scaled to an RMS of 0.2 (optim/muon.py: that of
AdamW's updates). The momentum is an average of gradients, without Nesterov's look-ahead. Under muP, learning
rates are Muon's, since updates have the same RMS at every width.

The second moment is one value for each row. Every element of the row keeps a copy of it, so that checkpoints
store it and replicas compare it like any other moment: the state is as large as AdamW's. The owner of a
matrix gathers one value for each row along with the matrix, and sends it back with the result.
"""
import torch
from torch import Tensor

from config import OptimConfig
from kernels.newton_schulz import orthogonalize
from optim.base import copy_where, zeros_like_master
from optim.muon import SCALE, Muon
from optim.muon_exchange import (
    BoxValues,
    gather_matrices,
    map_boxes,
    return_matrices,
    row_box,
)
from parallel.sharding.bucket import Bucket
from parallel.sharding.views import Moments
from parallel.topology.mesh import Mesh


class NorMuon(Muon):
    """NorMuon for the buckets of hidden matrices, with an inner AdamW for all others.

    `second_moment` maps the index of each hidden bucket to its flat second moment, in the dtype of its master
    and constant along each row. `row_plan` exchanges one value of each row.
    """
    MOMENTUM = "normuon_m"

    def __init__(self, cfg: OptimConfig, buckets: list[Bucket], mesh: Mesh) -> None:
        super().__init__(cfg, buckets, mesh)
        self.second_moment = {index: zeros_like_master(self.buckets[index]) for index in self.hidden_buckets}
        self.row_plan = map_boxes(self.plan, row_box)

    def state(self) -> Moments:
        second = [self.second_moment.get(index) for index in range(len(self.buckets))]
        return {**super().state(), "normuon_v": second}

    def update_momentum(self, grad_scale: Tensor, is_good: Tensor) -> dict[int, Tensor]:
        """Update the momentum. Return {bucket index: the momentum, which is to be orthogonalized}."""
        updates: dict[int, Tensor] = {}
        for index in self.hidden_buckets:
            grad = self.buckets[index].grads.local * grad_scale
            momentum = self.momentum[index]
            updates[index] = momentum.lerp(grad, 1 - self.cfg.momentum)
            copy_where([momentum], (updates[index],), is_good)
        return updates

    def orthogonalize(self, views: list[BoxValues], is_good: Tensor) -> None:
        """Replace parts of matrices by parts of their updates in place, and update the second moments.

        views, is_good: as in Muon.orthogonalize. A skipped step leaves the second moments as they were.
        """
        moments = self.hidden_views(self.second_moment)
        rows = [(row_box(box), values[:, :1]) for box, values in moments]
        matrices = gather_matrices(views, self.plan, self.group, self.empty)
        second_moments = gather_matrices(rows, self.row_plan, self.group, self.empty)

        for key, matrix in matrices.items():  # [m, n]
            second = second_moments[key]  # [m, 1]
            orthogonal = orthogonalize(matrix, self.cfg.orthogonalize)
            mean_square = orthogonal.square().mean(1, keepdim=True)
            new_second = second.lerp(mean_square, 1 - self.cfg.beta2)
            normalized = orthogonal / (new_second.sqrt() + self.cfg.eps)
            norm = normalized.norm().clamp(min=self.cfg.eps)  # without gradients: no division by zero
            matrix.copy_(normalized * (SCALE * matrix.numel()**0.5 / norm))
            second.copy_(torch.where(is_good, new_second, second))

        return_matrices(matrices, views, self.plan, group=self.group, like=self.empty)
        return_matrices(second_moments, rows, self.row_plan, group=self.group, like=self.empty)
        for _, values in moments:  # rows wrote the first column
            values[:, 1:] = values[:, :1]
