"""Global gradient norm and the factor that clips it, as device scalars: nothing is read back to the host."""
import torch
from torch import Tensor

from parallel import comm
from parallel.mesh import Mesh
from parallel.params import Bucket


@torch.no_grad()
def grad_norm(buckets: list[Bucket], mesh: Mesh) -> Tensor:
    """L2 norm over every gradient element of the model, each counted once whatever the layout (parallel/params.py: Slot.once)."""
    parts = [torch.linalg.vector_norm(b.shard[run]) for b in buckets for run, _, once in b.runs() if once]
    total = torch.stack(parts).square().sum() if parts else buckets[0].shard.new_zeros(())
    if buckets[0].zero:
        total = comm.sum_(total, mesh.shard)
    return comm.sum_(total, mesh.model).sqrt()


def clip_factor(norm: Tensor, clip: float | None) -> Tensor:
    """min(1, clip / norm); 1 where clipping is off."""
    return torch.ones_like(norm) if clip is None else (clip / (norm + 1e-6)).clamp(max=1.0)
