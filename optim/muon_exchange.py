"""Gather whole matrices for Muon, however they are sharded (optim/muon.py).

The ranks of a pipeline stage divide its matrices among themselves, balanced by FLOPs. One all-to-all sends
the momentum of each matrix to its owner, and another sends the results to all ranks that hold a part. Parts
already on the owner are not sent, so a matrix of n elements costs at most n elements on the way to the owner,
and n per copy on the way back.
"""
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from parallel.sharding.boxes import Box
from parallel.wire import comm

Shapes = dict[str, tuple[int, ...]]  # {key: (m, n)} of matrices
BoxesByRank = list[list[Box]]  # one list for each rank of the group
BoxValues = tuple[Box, Tensor]  # a box, and the values of its elements


@dataclass(frozen=True)
class MatrixExchange:
    """Send and receive lists of one rank around the orthogonalization.

    Sender and receiver list their boxes in the same order.

    shapes: {key: (m, n)} of the matrices that this rank owns and orthogonalizes.
    kept_here: parts of these matrices that are already on this rank.
    send_to, receive_from: for each rank of the group, the parts of the momentum sent to their owners.
    return_to, return_from: for each rank of the group, the parts of the results sent back.
    """
    shapes: Shapes
    kept_here: list[Box]
    send_to: BoxesByRank
    receive_from: BoxesByRank
    return_to: BoxesByRank
    return_from: BoxesByRank


def orthogonalization_cost(shape: tuple[int, ...]) -> int:
    """Return a number proportional to the FLOPs of Newton-Schulz: m n min(m, n)."""
    return prod(shape) * min(shape)


def assign_owners(shapes: Shapes, ranks: int) -> dict[str, int]:
    """Return {key: owner}: the most expensive matrix first, each to the least loaded rank."""
    cost = {key: orthogonalization_cost(shape) for key, shape in shapes.items()}
    load = [0] * ranks
    owner: dict[str, int] = {}
    for key in sorted(shapes, key=lambda key: (-cost[key], key)):
        least_loaded = load.index(min(load))
        owner[key] = least_loaded
        load[least_loaded] += cost[key]
    return owner


def plan_matrix_exchange(held_by_rank: BoxesByRank, counted_by_rank: BoxesByRank, me: int) -> MatrixExchange:
    """Plan the exchange for rank `me`.

    held_by_rank: for each rank of the group, the boxes that it holds.
    counted_by_rank: the subset of them that it counts, so that each element is counted on exactly one rank.
    """
    shapes = {box.key: box.shape for boxes in held_by_rank for box in boxes}
    owner = assign_owners(shapes, len(held_by_rank))

    def boxes_to_owner(rank: int, to: int) -> list[Box]:
        """Return the boxes that `rank` counts and sends to the owner `to`, less what `to` already holds."""
        if rank == to:
            return []
        parts = [box for box in counted_by_rank[rank] if owner[box.key] == to]
        for held in held_by_rank[to]:
            parts = subtract_box(parts, held)
        return parts

    def boxes_to_holder(rank: int, to: int) -> list[Box]:
        """Return the parts of the matrices owned by `rank` that `to` holds."""
        if rank == to:
            return []
        return [box for box in held_by_rank[to] if owner[box.key] == rank]

    ranks = range(len(held_by_rank))
    return MatrixExchange(
        shapes={key: shape for key, shape in shapes.items() if owner[key] == me},
        kept_here=[box for box in held_by_rank[me] if owner[box.key] == me],
        send_to=[boxes_to_owner(me, rank) for rank in ranks],
        receive_from=[boxes_to_owner(rank, me) for rank in ranks],
        return_to=[boxes_to_holder(me, rank) for rank in ranks],
        return_from=[boxes_to_holder(rank, me) for rank in ranks],
    )


def map_boxes(plan: MatrixExchange, mapped: Callable[[Box], Box | None]) -> MatrixExchange:
    """Return a plan with the same owners for another matrix beside each.

    mapped: a box of the matrix [m, n] -> a box of the other one, or None if the other has no such part.
    """
    def parts(boxes: list[Box]) -> list[Box]:
        return [part for part in map(mapped, boxes) if part is not None]

    wholes = parts([Box.whole(key, shape) for key, shape in plan.shapes.items()])
    return MatrixExchange(
        shapes={whole.key: whole.shape for whole in wholes},
        kept_here=parts(plan.kept_here),
        send_to=[parts(boxes) for boxes in plan.send_to],
        receive_from=[parts(boxes) for boxes in plan.receive_from],
        return_to=[parts(boxes) for boxes in plan.return_to],
        return_from=[parts(boxes) for boxes in plan.return_from],
    )


def row_box(box: Box) -> Box:
    """Return the box of the values [m, 1] of the rows of a box [m, n]."""
    return Box(box.key, (box.shape[0], 1), (box.start[0], 0), (box.size[0], 1))


def subtract_box(parts: list[Box], held: Box) -> list[Box]:
    """Remove `held` from the parts, which may belong to several tensors."""
    rest: list[Box] = []
    for part in parts:
        rest += part.difference(held) if part.key == held.key else [part]
    return rest


def gather_matrices(
    views: list[BoxValues], plan: MatrixExchange, group: comm.Group, like: Tensor
) -> dict[str, Tensor]:
    """Gather the matrices that this rank owns: {key: whole matrix [m, n]}. Collective over `group`.

    `views` lists (box, its values) for all parts of the group's matrices on this rank. `like` sets the dtype
    and the device.
    """
    outgoing = [extract_boxes(views, boxes) for boxes in plan.send_to]
    received = exchange_boxes(outgoing, plan.receive_from, group, like)
    received += zip(plan.kept_here, extract_boxes(views, plan.kept_here))
    matrices = {key: like.new_empty(shape) for key, shape in plan.shapes.items()}
    for box, values in received:
        whole = Box.whole(box.key, box.shape)
        matrices[box.key][box.slices_in(whole)] = values
    return matrices


def return_matrices(
    matrices: dict[str, Tensor],
    views: list[BoxValues],
    plan: MatrixExchange,
    *,
    group: comm.Group,
    like: Tensor,
) -> None:
    """Send owned matrices {key: [m, n]} to all ranks that hold parts, and write them to `views`, in place.

    The counterpart of gather_matrices, with the same arguments. Collective over `group`.
    """
    results: list[BoxValues] = []
    for key, matrix in matrices.items():
        results.append((Box.whole(key, matrix.shape), matrix))
    outgoing = [extract_boxes(results, boxes) for boxes in plan.return_to]
    received = exchange_boxes(outgoing, plan.return_from, group, like)
    received += zip(plan.kept_here, extract_boxes(results, plan.kept_here))
    for box, values in received:
        extract_box(views, box).copy_(values)


def exchange_boxes(
    parts: list[list[Tensor]], incoming: BoxesByRank, group: comm.Group, like: Tensor
) -> list[BoxValues]:
    """Send parts[r] to rank r and receive the boxes incoming[r] from rank r, in one all-to-all.

    Return [(box, its values)] for all incoming boxes. `like` sets the dtype and the device.
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


def extract_boxes(views: list[BoxValues], wanted: list[Box]) -> list[Tensor]:
    return [extract_box(views, box) for box in wanted]


def extract_box(views: list[BoxValues], wanted: Box) -> Tensor:
    """Return the values of `wanted` as a slice of the first view that covers it.

    Raises LookupError if no view does.
    """
    for box, values in views:
        if box.key == wanted.key and box.intersection(wanted) == wanted:
            return values[wanted.slices_in(box)]
    raise LookupError(f"no view covers {wanted}")
