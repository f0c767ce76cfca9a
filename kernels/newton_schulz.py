"""Approximate the nearest orthogonal matrix by odd polynomials of degree five, which take only GEMMs.

Each polynomial maps every singular value s of a matrix to a s + b s^3 + c s^5. Five of them bring the values
above a thousandth of the norm close to one. There are two sequences:

- newton-schulz (Keller Jordan's Muon, 2024): the same polynomial five times. Values end between 0.47 (those
  at a thousandth of the norm) and 1.20.
- polar-express (arXiv 2505.16932): each polynomial is the best approximation of 1 on the interval to which
  those before it have mapped [0.001, 1], and no other five of this degree map all of it closer to one. With
  the paper's precautions for bf16 (below), values end between 0.84 and 1.13.
  tests/kernels/test_newton_schulz.py computes the polynomials by Remez's algorithm.
"""
from typing import NamedTuple

import torch
from torch import Tensor

Polynomial = tuple[float, float, float]  # a, b, c of a x + b x^3 + c x^5

# the steepest start whose later values stay in [0.7, 1.2]
COEFFICIENTS: Polynomial = (3.4445, -4.7750, 2.0315)

# The best polynomial for a wide interval comes close to zero inside it, where rounding in bf16 could lose a
# value. So it is the best one from 0.024 of the upper end on (the paper's cushion, 0.02407327424182761), or
# from a higher lower end, scaled so that its values at both ends of the whole interval are equally far from
# one.
POLAR_EXPRESS: tuple[Polynomial, ...] = (
    (8.2872120181456, -23.5958865190988, 17.3003873125309),
    (4.1070591115422, -2.9478499167379, 0.5448431082927),
    (3.9486908534823, -2.9089021159629, 0.5518191394370),
    (3.3184196573706, -2.4884880243149, 0.5100489401237),
    (2.3006520199548, -1.6689039845747, 0.4188073119526),
)
SAFETY = 1.01  # p(x / 1.01): a value that rounding has put above an interval's end must not grow


class Iteration(NamedTuple):
    """The polynomials in their order. margin: the matrix is first divided by this many times its norm."""
    polynomials: tuple[Polynomial, ...]
    margin: float


def with_safety(polynomial: Polynomial) -> Polynomial:
    """Return p(x / SAFETY)."""
    a, b, c = polynomial
    return a / SAFETY, b / SAFETY**3, c / SAFETY**5


ITERATIONS = {  # by optim.orthogonalize
    "newton-schulz": Iteration((COEFFICIENTS,) * 5, margin=1.0),
    "polar-express": Iteration(tuple(map(with_safety, POLAR_EXPRESS)), margin=SAFETY),
}


def orthogonalize(x: Tensor, method: str = "newton-schulz", eps: float = 1e-7) -> Tensor:
    """x [m, n] -> about U V^T [m, n] of its singular value decomposition U S V^T, in x's dtype.

    `method` is a key of ITERATIONS. Computes in fp64 for fp64, else in fp32 on a CPU and in bf16 elsewhere.
    """
    polynomials, margin = ITERATIONS[method]
    y = x.to(compute_dtype(x))
    y = y / (margin * y.norm() + eps)
    is_tall = x.shape[0] > x.shape[1]
    if is_tall:  # makes the Gram matrix that of the shorter side
        y = y.t().contiguous()
    for a, b, c in polynomials:
        gram = y @ y.t()
        polynomial = torch.addmm(gram, gram, gram.t(), beta=b, alpha=c)  # b gram + c gram^2
        y = torch.addmm(y, polynomial, y, beta=a)
    return (y.t() if is_tall else y).to(x.dtype)


def compute_dtype(x: Tensor) -> torch.dtype:
    if x.dtype == torch.float64:
        return torch.float64
    return torch.float32 if x.device.type == "cpu" else torch.bfloat16
