"""The global gradient norm and its clipping factor, as device scalars without a host sync."""
import torch
from torch import Tensor

from parallel.sharding.bucket import Bucket
from parallel.topology.mesh import Mesh
from parallel.wire import comm


@torch.no_grad()
def grad_norm(buckets: list[Bucket], mesh: Mesh, *, has_experts: bool) -> Tensor:
    """Return the L2 norm of all gradients; each element counts once in every layout (Slot.counted_in_norm).

    `has_experts` says whether any pipeline stage has experts. Their gradients are summed over separate
    groups, so all ranks must join these all-reduces.
    """
    # dense parameters and experts: (is_expert, group that ZeRO shards over, group of the other model shards)
    kinds = [(False, mesh.fsdp, mesh.model_parallel)]
    if has_experts:
        kinds.append((True, mesh.expert_fsdp, mesh.expert_model_parallel))

    total = buckets[0].grads.local.new_zeros(())
    for is_expert, shard_group, model_group in kinds:
        squares = local_sum_of_squares(buckets, is_expert)
        if buckets[0].zero:
            squares = comm.all_reduce_sum(squares, shard_group)
        total += comm.all_reduce_sum(squares, model_group)
    return total.sqrt()


def local_sum_of_squares(buckets: list[Bucket], is_expert: bool) -> Tensor:
    """Sum the squares of the gradients counted on this rank: either the experts' or all others'."""
    norms: list[Tensor] = []
    for bucket in buckets:
        if bucket.is_expert != is_expert:
            continue
        for part in bucket.update_ranges:
            if part.counted_in_norm:
                norms.append(torch.linalg.vector_norm(bucket.grads.local[part.elements]))
    if not norms:
        return buckets[0].grads.local.new_zeros(())
    return torch.stack(norms).square().sum()


def clip_factor(norm: Tensor, clip: float | None) -> Tensor:
    """Return the factor that limits a gradient norm to `clip`: min(1, clip / (norm + 1e-6)), as in torch's
    clip_grad_norm_, or 1 if clip is None.
    """
    if clip is None:
        return torch.ones_like(norm)
    return (clip / (norm + 1e-6)).clamp(max=1.0)
