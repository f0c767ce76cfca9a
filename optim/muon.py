"""Muon (Keller Jordan 2024; at scale: arXiv 2502.16982): a matrix is updated by its orthogonalized momentum.

This holds for hidden matrices. Embeddings, the head, routers, norms and biases are updated by AdamW. The
update of a matrix is scaled by 0.2 sqrt(max(m, n)), so that both can use one learning rate (2502.16982,
section 2.2). muP requires an update whose spectral norm is the same at every width (arXiv 2310.17813), and
this scale grows as the square root of the width: so under muP the learning rate of hidden matrices falls as
the square root of the width (mup_power in config/optimizers.py).

Orthogonalization needs whole matrices, whatever shards them. The ranks of a pipeline stage divide the
matrices of the stage among themselves, balanced by FLOPs. One all-to-all sends the momentum of each matrix to
its owner, another sends the results to all ranks that hold a part of it. What the owner holds itself is not
sent: so a matrix of n elements costs at most n elements on the way to the owner, and n for each copy on the
way back.
"""
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from config import OptimConfig
from kernels.newton_schulz import newton_schulz
from optim.adamw import AdamW
from optim.base import Optimizer, State, copy_where, zeros_like_master
from parallel.sharding.boxes import Box
from parallel.sharding.bucket import Bucket
from parallel.sharding.views import boxes_of, update_ranges
from parallel.topology.mesh import Mesh
from parallel.wire import comm

Shapes = dict[str, tuple[int, ...]]  # {key: (m, n)} of matrices
BoxesByRank = list[list[Box]]  # for each rank of the group
BoxValues = tuple[Box, Tensor]  # a box, and the values of its elements
SCALE = 0.2  # times sqrt(max(m, n)): about the RMS of AdamW's updates


@dataclass(frozen=True)
class MatrixExchange:
    """What one rank sends and receives around the orthogonalization.

    Sender and receiver list their boxes in the same order.

    shapes: {key: (m, n)} of the matrices that this rank owns, which it orthogonalizes.
    kept_here: parts of these matrices that this rank holds itself.
    send_to, receive_from: for each rank of the group, the parts of the momentum on their way to the owners.
    return_to, return_from: for each rank of the group, the parts of the results on their way back.
    """
    shapes: Shapes
    kept_here: list[Box]
    send_to: BoxesByRank
    receive_from: BoxesByRank
    return_to: BoxesByRank
    return_from: BoxesByRank


def orthogonalization_cost(shape: tuple[int, ...]) -> int:
    """Proportional to the FLOPs of Newton-Schulz: m n min(m, n)."""
    return prod(shape) * min(shape)


def assign_owners(shapes: Shapes, ranks: int) -> dict[str, int]:
    """{key: rank} of the owners: the most expensive matrix first, each to the rank with the least load."""
    cost = {key: orthogonalization_cost(shape) for key, shape in shapes.items()}
    load = [0] * ranks
    owner: dict[str, int] = {}
    for key in sorted(shapes, key=lambda key: (-cost[key], key)):
        least_loaded = load.index(min(load))
        owner[key] = least_loaded
        load[least_loaded] += cost[key]
    return owner


def plan_matrix_exchange(owned: BoxesByRank, alone: BoxesByRank, me: int) -> MatrixExchange:
    """The exchange of rank `me`.

    owned: for each rank of the group, the boxes that it holds.
    alone: those of them that it counts, so that all ranks together have each element once.
    """
    shapes = {box.key: box.shape for boxes in owned for box in boxes}
    owner = assign_owners(shapes, len(owned))

    def boxes_to_owner(rank: int, to: int) -> list[Box]:
        """What `rank` sends to the owner `to`: boxes that it counts, less what the owner holds itself."""
        if rank == to:
            return []
        parts = [box for box in alone[rank] if owner[box.key] == to]
        for held in owned[to]:
            parts = subtract_box(parts, held)
        return parts

    def boxes_to_holder(rank: int, to: int) -> list[Box]:
        """What the owner `rank` returns: all boxes that `to` holds of its matrices."""
        if rank == to:
            return []
        return [box for box in owned[to] if owner[box.key] == rank]

    ranks = range(len(owned))
    return MatrixExchange(
        shapes={key: shape for key, shape in shapes.items() if owner[key] == me},
        kept_here=[box for box in owned[me] if owner[box.key] == me],
        send_to=[boxes_to_owner(me, rank) for rank in ranks],
        receive_from=[boxes_to_owner(rank, me) for rank in ranks],
        return_to=[boxes_to_holder(me, rank) for rank in ranks],
        return_from=[boxes_to_holder(rank, me) for rank in ranks],
    )


def subtract_box(parts: list[Box], held: Box) -> list[Box]:
    """What `held` does not cover of the parts, which may be of several tensors."""
    rest: list[Box] = []
    for part in parts:
        rest += part.difference(held) if part.key == held.key else [part]
    return rest


def exchange_boxes(
    parts: list[list[Tensor]], incoming: BoxesByRank, group: comm.Group, like: Tensor
) -> list[BoxValues]:
    """One all-to-all: parts[r] go to rank r, and the boxes incoming[r] come from rank r.

    Returns [(box, its values)] of all incoming boxes. like: gives the dtype and the device.
    """
    sent = [sum(part.numel() for part in to_rank) for to_rank in parts]
    received = [sum(box.volume for box in from_rank) for from_rank in incoming]
    flat_parts = [part.reshape(-1) for to_rank in parts for part in to_rank]
    flat = torch.cat(flat_parts) if sum(sent) else like.new_empty(0)

    flat = comm.start_all_to_all(flat, sent, received, group).wait()
    boxes = [box for from_rank in incoming for box in from_rank]
    if not boxes:
        return []
    volumes = [box.volume for box in boxes]
    values = [value.view(box.size) for box, value in zip(boxes, flat.split(volumes))]
    return list(zip(boxes, values))


class Muon(Optimizer):
    """Muon for the buckets of hidden matrices, AdamW for all others.

    momentum: {index of a bucket of hidden matrices: its flat momentum, in the dtype of its master}.
    """

    def __init__(self, cfg: OptimConfig, buckets: list[Bucket], mesh: Mesh) -> None:
        super().__init__(cfg, buckets, mesh)
        self.group = mesh.pipeline_stage
        self.hidden_buckets = [index for index, bucket in enumerate(buckets) if bucket.is_hidden]
        others = [bucket for bucket in buckets if not bucket.is_hidden]
        self.adamw = AdamW(cfg, others, mesh)
        self.momentum: dict[int, Tensor] = {}
        for index in self.hidden_buckets:
            self.momentum[index] = zeros_like_master(buckets[index])

        held = self.hidden_boxes(each_once=False)
        counted = self.hidden_boxes(each_once=True)
        of_ranks = comm.all_gather_objects((held, counted), self.group)
        owned = [boxes for boxes, _ in of_ranks]
        alone = [boxes for _, boxes in of_ranks]
        self.plan = plan_matrix_exchange(owned, alone, self.group.index)

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
    def step(self, step: int, lr: float, grad_scale: Tensor, is_finite: Tensor) -> None:
        """Update number `step` (from 1), with the gradients multiplied by `grad_scale`.

        is_finite: a bool scalar. Where it is False the step is skipped, and nothing changes.
        """
        # is_finite is the same on every rank, so no rank waits for another in the exchange
        if is_finite.device.type == "cpu" and not is_finite:
            return
        self.adamw.step(step, lr, grad_scale, is_finite)
        updates = self.update_momentum(grad_scale, is_finite)

        views: list[BoxValues] = []
        for index in self.hidden_buckets:
            views += boxes_of(self.buckets[index], updates[index])
        self.orthogonalize(views)

        for index in self.hidden_buckets:
            self.update_weights(self.buckets[index], updates[index], lr, is_finite)

    def update_momentum(self, grad_scale: Tensor, is_finite: Tensor) -> dict[int, Tensor]:
        """Updates the momentum. Returns {bucket index: update, not orthogonalized yet}."""
        updates: dict[int, Tensor] = {}
        decay = self.cfg.momentum
        for index in self.hidden_buckets:
            grad = self.buckets[index].grads.local * grad_scale
            momentum = self.momentum[index]
            copy_where([momentum], (momentum * decay + grad,), is_finite)
            updates[index] = grad + decay * momentum  # Nesterov's look-ahead
        return updates

    def update_weights(self, bucket: Bucket, update: Tensor, lr: float, is_finite: Tensor) -> None:
        """update: flat, over the owned share of the bucket."""
        for run, _, lr_factor, _ in update_ranges(bucket):
            weight = bucket.weights.master[run]
            decayed = weight * (1 - lr * self.cfg.weight_decay)
            new_weight = decayed - lr * lr_factor * update[run]
            copy_where([weight], (new_weight,), is_finite)
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


def extract_boxes(views: list[BoxValues], wanted: list[Box]) -> list[Tensor]:
    return [extract_box(views, box) for box in wanted]


def extract_box(views: list[BoxValues], wanted: Box) -> Tensor:
    """The values of `wanted`, as a part of the first of the views that covers it."""
    for box, values in views:
        if box.key == wanted.key and box.intersection(wanted) == wanted:
            return values[wanted.slices_in(box)]
    raise LookupError(f"no view covers {wanted}")
