"""Approximate the nearest orthogonal matrix: Newton-Schulz iteration with quintic coefficients.

As in Keller Jordan's Muon, 2024. Five steps bring every singular value above a thousandth of the norm to
between 0.7 and 1.2, using only GEMMs. Two of the three GEMMs of a step have a symmetric result: a kernel
computes the tiles on and below the diagonal and writes each twice, which is half the work.
"""
import torch
from torch import Tensor

# a x + b x^3 + c x^5 for a singular value x: the steepest start that still stays in [0.7, 1.2]
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz(x: Tensor, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """x [m, n] -> about U V^T [m, n] of its singular value decomposition U S V^T, in x's dtype.

    Computes in fp64 for fp64, else in fp32 on a CPU and in bf16 elsewhere.
    """
    a, b, c = COEFFICIENTS
    y = x.to(compute_dtype(x))
    y = y / (y.norm() + eps)
    is_tall = x.shape[0] > x.shape[1]
    if is_tall:  # makes the Gram matrix that of the shorter side
        y = y.t().contiguous()
    for _ in range(steps):
        gram = y @ y.t()
        polynomial = torch.addmm(gram, gram, gram.t(), beta=b, alpha=c)  # b gram + c gram^2
        y = torch.addmm(y, polynomial, y, beta=a)
    return (y.t() if is_tall else y).to(x.dtype)


def compute_dtype(x: Tensor) -> torch.dtype:
    if x.dtype == torch.float64:
        return torch.float64
    return torch.float32 if x.device.type == "cpu" else torch.bfloat16
