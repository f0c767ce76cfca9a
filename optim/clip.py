"""Global gradient norm and the factor that clips it, as device scalars: nothing is read back to the host."""
import torch
from torch import Tensor

from parallel.params import Bucket


@torch.no_grad()
def grad_norm(buckets: list[Bucket]) -> Tensor:
    """L2 norm over every gradient element, each counted once."""
    return torch.stack([torch.linalg.vector_norm(b.grad) for b in buckets]).norm()


def clip_factor(norm: Tensor, clip: float | None) -> Tensor:
    """min(1, clip / norm); 1 where clipping is off."""
    return torch.ones_like(norm) if clip is None else (clip / (norm + 1e-6)).clamp(max=1.0)
