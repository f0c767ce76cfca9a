"""Muon (Keller Jordan 2024; at scale: arXiv 2502.16982): a matrix is updated by its orthogonalized momentum.

This holds for hidden matrices. Embeddings, the head, routers, norms and biases are updated by AdamW. The
update of a matrix is scaled by 0.2 sqrt(max(m, n)), so that both can use one learning rate (2502.16982,
section 2.2). muP requires an update whose spectral norm is the same at every width (arXiv 2310.17813), and
this scale grows as the square root of the width: so under muP the learning rate of hidden matrices falls as
the square root of the width (mup_power in config/optimizers.py). Of a matrix with one side that stays, the
spectral norm that muP requires is that of the scale where it widens, and falls 1 / width behind it where it
narrows: the rates that AdamW has, too (ParameterSpec.with_mup).

Orthogonalization needs whole matrices, whatever shards them: optim/muon_exchange.py brings each to one rank
of the pipeline stage, and the results back.
"""
import torch
from torch import Tensor

from config import OptimConfig
from kernels.newton_schulz import newton_schulz
from optim.adamw import AdamW
from optim.base import Optimizer, State, copy_where, zeros_like_master
from optim.muon_exchange import (
    BoxValues,
    exchange_boxes,
    extract_box,
    extract_boxes,
    plan_matrix_exchange,
)
from parallel.sharding.boxes import Box
from parallel.sharding.bucket import Bucket
from parallel.sharding.views import boxes_of, update_ranges
from parallel.topology.mesh import Mesh
from parallel.wire import comm

SCALE = 0.2  # times sqrt(max(m, n)): about the RMS of AdamW's updates


class Muon(Optimizer):
    """Muon for the buckets of hidden matrices; it holds an AdamW, which updates all others.

    adamw: the optimizer of the other buckets, with their moments. momentum: {index of a bucket of hidden
    matrices: its flat momentum, in the dtype of its master}.
    """

    def __init__(self, cfg: OptimConfig, buckets: list[Bucket], mesh: Mesh) -> None:
        super().__init__(cfg, buckets, mesh)

        # the state: of AdamW, and the momentum of the hidden matrices
        others = [bucket for bucket in buckets if not bucket.is_hidden]
        self.adamw = AdamW(cfg, others, mesh)
        self.hidden_buckets = [index for index, bucket in enumerate(buckets) if bucket.is_hidden]
        self.momentum: dict[int, Tensor] = {}
        for index in self.hidden_buckets:
            self.momentum[index] = zeros_like_master(buckets[index])

        # which rank orthogonalizes which matrix
        self.group = mesh.pipeline_stage
        held = self.hidden_boxes(each_once=False)
        counted = self.hidden_boxes(each_once=True)
        of_ranks = comm.all_gather_objects((held, counted), self.group)
        held_by_rank = [boxes for boxes, _ in of_ranks]
        counted_by_rank = [boxes for _, boxes in of_ranks]
        self.plan = plan_matrix_exchange(held_by_rank, counted_by_rank, self.group.index)

    def hidden_boxes(self, each_once: bool) -> list[Box]:
        """The boxes of hidden matrices that this rank holds. each_once: see boxes_of."""
        boxes: list[Box] = []
        for index in self.hidden_buckets:
            bucket = self.buckets[index]
            boxes += [box for box, _ in boxes_of(bucket, bucket.weights.master, each_once)]
        return boxes

    def state(self) -> State:
        """What a checkpoint stores beside the master weights."""
        state: dict[str, list[Tensor | None]] = {
            "muon_m": [self.momentum.get(index) for index in range(len(self.buckets))],
        }
        for name, flats in self.adamw.state().items():
            remaining = iter(flats)  # those of the buckets that are not hidden, in order
            state[name] = [None if bucket.is_hidden else next(remaining) for bucket in self.buckets]
        return state

    @torch.no_grad()
    def step(self, step: int, lr: float, grad_scale: Tensor, is_good: Tensor) -> None:
        """Update number `step` (from 1), with the gradients multiplied by `grad_scale`.

        is_good: a bool scalar. Where it is False the step is skipped, and nothing changes.
        """
        # is_good is the same on every rank, so no rank waits for another in the exchange
        if is_good.device.type == "cpu" and not is_good:
            return
        # all but the hidden matrices
        self.adamw.step(step, lr, grad_scale, is_good)

        # the hidden matrices
        updates = self.update_momentum(grad_scale, is_good)
        views: list[BoxValues] = []
        for index in self.hidden_buckets:
            views += boxes_of(self.buckets[index], updates[index])
        self.orthogonalize(views)
        for index in self.hidden_buckets:
            self.update_weights(self.buckets[index], updates[index], lr, is_good)

    def update_momentum(self, grad_scale: Tensor, is_good: Tensor) -> dict[int, Tensor]:
        """Updates the momentum. Returns {bucket index: update, not orthogonalized yet}."""
        updates: dict[int, Tensor] = {}
        decay = self.cfg.momentum
        for index in self.hidden_buckets:
            grad = self.buckets[index].grads.local * grad_scale
            momentum = self.momentum[index]
            copy_where([momentum], (momentum * decay + grad,), is_good)
            updates[index] = grad + decay * momentum  # Nesterov's look-ahead
        return updates

    def update_weights(self, bucket: Bucket, update: Tensor, lr: float, is_good: Tensor) -> None:
        """update: flat, over the owned share of the bucket."""
        for run, _, lr_factor, _ in update_ranges(bucket):
            weight = bucket.weights.master[run]
            decayed = weight * (1 - lr * self.cfg.weight_decay)
            new_weight = decayed - lr * lr_factor * update[run]
            copy_where([weight], (new_weight,), is_good)
        bucket.weights.copy_master_to_local()

    def orthogonalize(self, views: list[BoxValues]) -> None:
        """Replaces parts of matrices by the parts of the orthogonalized matrices, in place.

        views: [(box, its values)], all that this rank holds of the stage's hidden matrices.
        """
        plan = self.plan
        like = self.buckets[0].weights.master

        # the owner assembles its matrices
        outgoing = [extract_boxes(views, boxes) for boxes in plan.send_to]
        received = exchange_boxes(outgoing, plan.receive_from, self.group, like)
        received += zip(plan.kept_here, extract_boxes(views, plan.kept_here))
        matrices = {key: like.new_empty(shape) for key, shape in plan.shapes.items()}
        for box, values in received:
            whole = Box.whole(box.key, box.shape)
            matrices[box.key][box.slices_in(whole)] = values

        for matrix in matrices.values():
            scale = SCALE * max(matrix.shape)**0.5
            matrix.copy_(newton_schulz(matrix) * scale)

        # the results go to all ranks that hold a part
        results: list[BoxValues] = []
        for key, matrix in matrices.items():
            results.append((Box.whole(key, matrix.shape), matrix))
        outgoing = [extract_boxes(results, boxes) for boxes in plan.return_to]
        received = exchange_boxes(outgoing, plan.return_from, self.group, like)
        received += zip(plan.kept_here, extract_boxes(results, plan.kept_here))
        for box, values in received:
            extract_box(views, box).copy_(values)
