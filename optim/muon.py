"""Muon (Keller Jordan 2024; at scale: arXiv 2502.16982): update a matrix by its orthogonalized momentum.

Muon updates hidden matrices; AdamW updates embeddings, the head, routers, norms and biases. The update of a
matrix is scaled by 0.2 sqrt(max(m, n)), so that both can share one learning rate (2502.16982, section 2.2).
muP requires an update whose spectral norm is the same at every width (arXiv 2310.17813), and this scale grows
with the square root of the width, so under muP the learning rate of hidden matrices falls with the square
root of the width (mup_power in config/optimizers.py). If only one side of a matrix grows with the width, the
spectral norm that muP requires grows like this scale where the matrix widens, and is smaller by 1 / width
where it narrows. These are the same rates as AdamW's (ParameterSpec.with_mup).

Orthogonalization needs whole matrices, however they are sharded: optim/muon_exchange.py gathers each matrix
on one rank of the pipeline stage and sends back the results.
"""
from torch import Tensor

from config import OptimConfig
from kernels.newton_schulz import orthogonalize
from optim.adamw import AdamW
from optim.base import Optimizer, copy_where, decoupled_rates, zeros_like_master
from optim.muon_exchange import (
    BoxValues,
    gather_matrices,
    plan_matrix_exchange,
    return_matrices,
)
from parallel.sharding.boxes import Box
from parallel.sharding.bucket import Bucket
from parallel.sharding.views import Moments, get_boxes
from parallel.topology.mesh import Mesh
from parallel.wire import comm

SCALE = 0.2  # times sqrt(max(m, n)): about the RMS of AdamW's updates


class Muon(Optimizer):
    """Muon for the buckets of hidden matrices, with an inner AdamW for all others.

    `adamw` holds the moments of the other buckets. `momentum` maps the index of each hidden bucket to its
    flat momentum, in the dtype of its master.
    """
    MOMENTUM = "muon_m"  # its name in checkpoints

    def __init__(self, cfg: OptimConfig, buckets: list[Bucket], mesh: Mesh) -> None:
        super().__init__(cfg, buckets, mesh)

        # optimizer state: AdamW's, and the momentum of the hidden matrices
        others = [bucket for bucket in self.buckets if not bucket.is_hidden]
        self.adamw = AdamW(cfg, others, mesh)
        self.hidden_buckets = [index for index, bucket in enumerate(self.buckets) if bucket.is_hidden]
        self.momentum: dict[int, Tensor] = {}
        for index in self.hidden_buckets:
            self.momentum[index] = zeros_like_master(self.buckets[index])

        # assign matrices to ranks
        self.group = mesh.pipeline_stage
        held = self.hidden_boxes(each_once=False)
        counted = self.hidden_boxes(each_once=True)
        of_ranks = comm.all_gather_objects((held, counted), self.group)
        held_by_rank = [boxes for boxes, _ in of_ranks]
        counted_by_rank = [boxes for _, boxes in of_ranks]
        self.plan = plan_matrix_exchange(held_by_rank, counted_by_rank, self.group.index)

    def hidden_boxes(self, each_once: bool) -> list[Box]:
        """Return the boxes of hidden matrices on this rank; `each_once` is passed to get_boxes."""
        boxes: list[Box] = []
        for index in self.hidden_buckets:
            bucket = self.buckets[index]
            boxes += [box for box, _ in get_boxes(bucket, bucket.weights.master, each_once)]
        return boxes

    def state(self) -> Moments:
        """Return the state that a checkpoint stores in addition to the master weights."""
        state: dict[str, list[Tensor | None]] = {
            self.MOMENTUM: [self.momentum.get(index) for index in range(len(self.buckets))],
        }
        for name, flats in self.adamw.state().items():
            remaining = iter(flats)  # one for each bucket that is not hidden, in order
            state[name] = [None if bucket.is_hidden else next(remaining) for bucket in self.buckets]
        return state

    def update(self, step: int, lr: float, grad_scale: Tensor, is_good: Tensor) -> None:
        """Update everything but the hidden matrices with AdamW, then these.

        is_good is the same on every rank, so no rank waits for another in the all-to-all.
        """
        self.adamw.update(step, lr, grad_scale, is_good)

        # the hidden matrices
        updates = self.update_momentum(grad_scale, is_good)
        self.orthogonalize(self.hidden_views(updates), is_good)
        for index in self.hidden_buckets:
            self.update_weights(self.buckets[index], updates[index], lr, is_good)

    def hidden_views(self, flats: dict[int, Tensor]) -> list[BoxValues]:
        """Return [(box, its values)] of flats {index of a hidden bucket: flat tensor of its owned shard}."""
        views: list[BoxValues] = []
        for index in self.hidden_buckets:
            views += get_boxes(self.buckets[index], flats[index])
        return views

    def update_momentum(self, grad_scale: Tensor, is_good: Tensor) -> dict[int, Tensor]:
        """Update the momentum. Return {bucket index: update before orthogonalization}."""
        updates: dict[int, Tensor] = {}
        decay = self.cfg.momentum
        for index in self.hidden_buckets:
            grad = self.buckets[index].grads.local * grad_scale
            momentum = self.momentum[index]
            copy_where([momentum], (momentum * decay + grad,), is_good)
            updates[index] = grad + decay * momentum  # Nesterov's look-ahead
        return updates

    def update_weights(self, bucket: Bucket, update: Tensor, lr: float, is_good: Tensor) -> None:
        """Apply a flat update [owned shard] to the masters of the bucket."""
        for part in bucket.update_ranges:
            rates = decoupled_rates(self.cfg, lr, part)
            weight = bucket.weights.master[part.elements]
            decayed = weight * (1 - rates.lr * rates.weight_decay)
            new_weight = decayed - rates.lr * update[part.elements]
            copy_where([weight], (new_weight,), is_good)
        bucket.weights.copy_master_to_local()

    def orthogonalize(self, views: list[BoxValues], is_good: Tensor) -> None:
        """Replace parts of matrices by parts of the orthogonalized matrices, in place.

        `views` lists (box, its values) for all parts of the stage's hidden matrices on this rank. is_good:
        whether the step counts (scalar bool); unused here, but NorMuon and Dion have further moments to keep.
        """
        matrices = gather_matrices(views, self.plan, self.group, self.empty)
        for matrix in matrices.values():
            scale = SCALE * max(matrix.shape)**0.5
            matrix.copy_(orthogonalize(matrix, self.cfg.orthogonalize) * scale)
        return_matrices(matrices, views, self.plan, group=self.group, like=self.empty)
