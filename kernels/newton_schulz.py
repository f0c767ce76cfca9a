"""The nearest semi-orthogonal matrix by Newton-Schulz iterations, for Muon (arXiv 2502.16982): matrix products alone.

Each step maps every singular value s to a s + b s^3 + c s^5. These coefficients raise small ones fastest; after five steps all
lie between 0.7 and 1.2, which is near enough for an optimizer.
"""
import torch
from torch import Tensor

STEPS = 5
A, B, C = 3.4445, -4.7750, 2.0315
EPS = 1e-7  # added to the norm: a gradient of zeros stays zero


def orthogonalize(g: Tensor, steps: int = STEPS, dtype: torch.dtype | None = None) -> Tensor:
    """g [..., m, n] -> U V^T of its singular value decomposition, about, in g's dtype. dtype: of the products; none: g's."""
    x = g.to(dtype or g.dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT  # the products are as large as the smaller side
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + EPS)  # its largest singular value is at most 1
    for _ in range(steps):
        square = x @ x.mT
        x = A * x + (B * square + C * square @ square) @ x
    return (x.mT if tall else x).to(g.dtype)
