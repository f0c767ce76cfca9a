"""The nearest orthogonal matrix, nearly: Newton-Schulz iteration with quintic coefficients (Keller Jordan's Muon, 2024).

Five steps bring every singular value above a thousandth of the norm to between 0.7 and 1.2, with GEMMs alone. Two of a step's
three have a symmetric result: a kernel makes the tiles on and below the diagonal and writes each twice, which is half the work.
"""
import torch
from torch import Tensor

from kernels.linear import skewed
from kernels.triton_ import TensorDescriptor, ceil_div, fits, tl, triton

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a x + b x^3 + c x^5: the steepest start that still stays in [0.7, 1.2]
TILE = {"M": 128, "K": 64, "num_warps": 8, "num_stages": 4}  # of the symmetric result, and of the summed dimension


def newton_schulz(x: Tensor, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """x [m, n] -> U V^T of its singular value decomposition, nearly; in fp64 for fp64, else in fp32 on a CPU and bf16 elsewhere."""
    dtype = x.dtype if x.dtype == torch.float64 else torch.float32 if x.device.type == "cpu" else torch.bfloat16
    a, b, c = COEFFICIENTS
    y = x.to(dtype)
    y = y / (y.norm() + eps)
    if tall := x.shape[0] > x.shape[1]:  # the Gram matrix of the shorter side
        y = y.t().contiguous()
    for _ in range(steps):
        gram = symmetric(y)
        y = torch.addmm(y, symmetric(gram, c, gram, b), y, beta=a)
    return (y.t() if tall else y).to(x.dtype)


def symmetric(x: Tensor, scale: float = 1.0, add: Tensor | None = None, beta: float = 0.0) -> Tensor:
    """scale x x^T + beta add, in x's dtype. x [m, n]; add [m, m]: symmetric, or None."""
    return (launch if triton_fits(x) else reference)(x, scale, add, beta)


def reference(x: Tensor, scale: float, add: Tensor | None, beta: float) -> Tensor:
    return scale * (x @ x.t()) if add is None else torch.addmm(add, x, x.t(), beta=beta, alpha=scale)


# ---- Triton ------------------------------------------------------------------------------------------------------------------

@triton.jit
def symmetric_kernel(X, ADDED, OUT, m, n, scale, beta, ADD: tl.constexpr, M: tl.constexpr, K: tl.constexpr):
    """One tile of OUT [m, m] and its mirror image. X: descriptor of [m, n], in blocks of [M, K]."""
    row, column = tl.program_id(0) * M, tl.program_id(1) * M
    if column <= row:
        total = tl.zeros((M, M), tl.float32)
        for k in range(0, n, K):  # what lies beyond the matrix reads as 0
            total = tl.dot(X.load([row, k]), X.load([column, k]).T, total)
        total *= scale
        rows, columns = row + tl.arange(0, M), column + tl.arange(0, M)
        inside = (rows < m)[:, None] & (columns < m)[None, :]
        at = rows.to(tl.int64)[:, None] * m + columns[None, :]
        if ADD:
            total += beta * tl.load(ADDED + at, inside, 0.0).to(tl.float32)
        y = total.to(OUT.dtype.element_ty)
        tl.store(OUT + at, y, inside)
        if column < row:
            tl.store(OUT + columns.to(tl.int64)[:, None] * m + rows[None, :], tl.trans(y), (columns < m)[:, None] & (rows < m)[None, :])


def triton_fits(x: Tensor) -> bool:
    """fp32 goes to the library's GEMMs, which are exact."""
    return x.dtype != torch.float32 and x.numel() > 0 and fits("Newton-Schulz", x, why=skewed(x))


def launch(x: Tensor, scale: float, add: Tensor | None, beta: float) -> Tensor:
    (m, n), tiles = x.shape, ceil_div(x.shape[0], TILE["M"])
    out = x.new_empty(m, m)
    symmetric_kernel[(tiles, tiles)](TensorDescriptor(x, x.shape, x.stride(), [TILE["M"], TILE["K"]]), out if add is None else add, out, m, n,
                                     scale, beta, ADD=add is not None, **TILE)
    return out
