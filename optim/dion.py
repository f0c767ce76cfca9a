"""Dion (arXiv 2504.05295, algorithm 1): update a matrix by an orthonormalized low-rank part of its momentum.

One power iteration a step. With the momentum M and the gradient G [m, n], and Q [n, r] of the step before:

    B = M + G        P = orthonormal columns of B Q [m, r]        R = B^T P [n, r]
    M = B - (1 - momentum) P R^T        Q = columns of R, divided by their norms        update = P Q^T

r is ceil(optim.rank_fraction min(m, n)). What P does not span stays in the momentum in full: error feedback.

The update is scaled as Muon's (optim/muon.py), by 0.2 sqrt(max(m, n)), not by the paper's sqrt(m / n): where
r = min(m, n) and Q has converged it is Muon's, orthogonal. So learning rates are Muon's, shared with AdamW,
and so are their powers under muP. The RMS of P Q^T is sqrt(r / min(m, n)) of Muon's.

A direction in which B is zero but for rounding (of an expert with fewer tokens than r, say) has no P. Its
update is zero, and its column of Q stays. The diagonal of the QR decomposition is made positive. So P Q^T is
the same under every layout, up to rounding.

Q^T is the first r rows of a moment [m, n], so that checkpoints, resharding and replicas take it like any
other. The state is as large as AdamW's, though only r of the m rows are read. The moment begins with normal
numbers that depend on the seed and the name, as weights do. All rows have them: a resumed run may have
another rank. The owner of a matrix gathers B and Q, and sends back the update, the momentum and Q: on the way
back twice Muon's elements, and r n more each way.
"""
from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from config import OptimConfig
from optim.base import copy_where, zeros_like_master
from optim.muon import SCALE, Muon
from optim.muon_exchange import BoxValues, gather_matrices, map_boxes, return_matrices
from parallel.sharding.boxes import Box
from parallel.sharding.bucket import Bucket
from parallel.sharding.spec import ParameterSpec, initialize
from parallel.sharding.views import Moments, get_boxes
from parallel.topology.mesh import Mesh

# A column of R below eps^(2/3) of the norm of B is rounding: eps times the condition of B Q.
NOISE = 2 / 3


class LowRank(NamedTuple):
    """Factors of B [m, n] at rank r: left is P [m, r], right is R [n, r], basis the next Q [n, r].

    A direction that was not found has zeros in P and R, and its previous column in Q.
    """
    left: Tensor
    right: Tensor
    basis: Tensor


class Dion(Muon):
    """Dion for the buckets of hidden matrices, with an inner AdamW for all others.

    `basis` maps the index of each hidden bucket to a flat moment, in the dtype of its master, whose first
    rows are the Q^T of each matrix. `basis_plan` exchanges these rows.
    """
    MOMENTUM = "dion_m"
    BASIS = "dion_q"

    def __init__(self, cfg: OptimConfig, buckets: list[Bucket], mesh: Mesh) -> None:
        super().__init__(cfg, buckets, mesh)
        self.basis = {index: self.draw_basis(self.buckets[index]) for index in self.hidden_buckets}
        self.first_rows = rows_of_basis(cfg.rank_fraction)
        self.basis_plan = map_boxes(self.plan, self.first_rows)

    def draw_basis(self, bucket: Bucket) -> Tensor:
        """Return the initial moment of a bucket, flat."""
        flat = zeros_like_master(bucket)
        for box, values in get_boxes(bucket, flat):
            named = replace(box, key=f"{box.key}@{self.BASIS}")
            initialize(ParameterSpec((named,), "hidden", std=1.0), values, bucket.seed)
        return flat

    def state(self) -> Moments:
        basis = [self.basis.get(index) for index in range(len(self.buckets))]
        return {**super().state(), self.BASIS: basis}

    def update_momentum(self, grad_scale: Tensor, is_good: Tensor) -> dict[int, Tensor]:
        """Return {bucket index: momentum plus gradient}. `orthogonalize` updates the momentum."""
        sums: dict[int, Tensor] = {}
        for index, momentum in self.momentum.items():
            sums[index] = momentum + self.buckets[index].grads.local * grad_scale
        return sums

    def orthogonalize(self, views: list[BoxValues], is_good: Tensor) -> None:
        """Replace parts of the sums of momentum and gradient by parts of the updates, in place. Update the
        momentum and Q.

        views, is_good: as in Muon.orthogonalize. A skipped step leaves momentum and Q as they were.
        """
        new_momentum = {index: torch.zeros_like(momentum) for index, momentum in self.momentum.items()}
        momentum_views = self.hidden_views(new_momentum)
        basis_views = self.basis_views()
        matrices = gather_matrices(views, self.plan, self.group, self.empty)
        bases = gather_matrices(basis_views, self.basis_plan, self.group, self.empty)

        momenta: dict[str, Tensor] = {}
        for key, matrix in matrices.items():  # [m, n]
            basis = bases[key]  # [r, n]
            found = low_rank(matrix, basis.T)
            momenta[key] = matrix - (1 - self.cfg.momentum) * (found.left @ found.right.T)
            matrix.copy_(found.left @ found.basis.T * (SCALE * max(matrix.shape)**0.5))
            basis.copy_(torch.where(is_good, found.basis.T, basis))

        return_matrices(matrices, views, self.plan, group=self.group, like=self.empty)
        return_matrices(momenta, momentum_views, self.plan, group=self.group, like=self.empty)
        return_matrices(bases, basis_views, self.basis_plan, group=self.group, like=self.empty)
        for index, momentum in self.momentum.items():
            copy_where([momentum], (new_momentum[index],), is_good)

    def basis_views(self) -> list[BoxValues]:
        """Return [(box, its values)] of the parts of all Q^T [r, n] on this rank."""
        views: list[BoxValues] = []
        for box, values in self.hidden_views(self.basis):
            part = self.first_rows(box)
            if part is not None:
                views.append((part, values[:part.size[0]]))
        return views


def rows_of_basis(rank_fraction: float) -> Callable[[Box], Box | None]:
    """Return a function of a box [m, n]: its part in the rows of Q^T [r, n], or None if it has none."""
    def first_rows(box: Box) -> Box | None:
        rank = ceil(rank_fraction * min(box.shape))
        rows = min(box.size[0], rank - box.start[0])
        if rows <= 0:
            return None
        return Box(box.key, (rank, box.shape[1]), box.start, (rows, box.size[1]))

    return first_rows


def low_rank(matrix: Tensor, basis: Tensor) -> LowRank:
    """matrix [m, n], Q of the previous step [n, r] -> its factors, by one power iteration."""
    left, triangle = torch.linalg.qr(matrix @ basis)
    left = left * torch.where(triangle.diagonal() < 0, -1.0, 1.0)  # else rounding could decide the sign
    right = matrix.T @ left
    lengths = right.norm(dim=0)
    is_found = lengths > torch.finfo(matrix.dtype).eps**NOISE * matrix.norm()
    return LowRank(
        left=torch.where(is_found, left, 0.0),
        right=torch.where(is_found, right, 0.0),
        basis=torch.where(is_found, right / lengths, basis),
    )
