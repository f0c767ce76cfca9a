"""Global gradient norm and the factor that clips it, as device scalars: nothing is read back to the host."""
import torch
from torch import Tensor

from parallel import comm
from parallel.mesh import Mesh
from parallel.params import Bucket


@torch.no_grad()
def grad_norm(buckets: list[Bucket], mesh: Mesh, mixture: bool = False) -> Tensor:
    """L2 norm over every gradient element of the model, each counted once whatever the layout (parallel/params.py: Slot.once).
    mixture: some stage has experts, which are summed over groups of their own, on every rank."""
    total = buckets[0].shard.new_zeros(())
    for expert, shard, model in ((False, mesh.shard, mesh.model), (True, mesh.eshard, mesh.emodel)):  # two ways of sharing the ranks out
        if expert and not mixture:
            continue
        kind = [b for b in buckets if b.expert == expert]
        parts = [torch.linalg.vector_norm(b.shard[run]) for b in kind for run, *_, once in b.runs() if once]
        squares = torch.stack(parts).square().sum() if parts else torch.zeros_like(total)
        if buckets[0].zero:
            squares = comm.sum_(squares, shard)
        total += comm.sum_(squares, model)
    return total.sqrt()


def clip_factor(norm: Tensor, clip: float | None) -> Tensor:
    """min(1, clip / norm); 1 where clipping is off."""
    return torch.ones_like(norm) if clip is None else (clip / (norm + 1e-6)).clamp(max=1.0)
