"""Approximate the nearest orthogonal matrix: Newton-Schulz iteration with quintic coefficients.

As in Keller Jordan's Muon, 2024. Five steps bring every singular value above a thousandth of the norm to
between 0.7 and 1.2, using only GEMMs. Two of the three GEMMs of a step have a symmetric result: a kernel
computes the tiles on and below the diagonal and writes each twice, which is half the work.
"""
import torch
from torch import Tensor

from kernels.linear import skewed
from kernels.tiles import inside_matrix, load_fp32, tile_offsets
from kernels.triton_ import TensorDescriptor, ceil_div, kernel_is_available, tl, triton

# a x + b x^3 + c x^5 for a singular value x: the steepest start that still stays in [0.7, 1.2]
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
TILE = {"M": 128, "K": 64, "num_warps": 8, "num_stages": 4}  # M: of the result, K: of the contracted dim


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
        gram = symmetric_product(y)
        polynomial = symmetric_product(gram, c, gram, b)  # b gram + c gram^2
        y = torch.addmm(y, polynomial, y, beta=a)
    return (y.t() if is_tall else y).to(x.dtype)


def compute_dtype(x: Tensor) -> torch.dtype:
    if x.dtype == torch.float64:
        return torch.float64
    return torch.float32 if x.device.type == "cpu" else torch.bfloat16


def symmetric_product(x: Tensor, scale: float = 1.0, add: Tensor | None = None, beta: float = 0.0) -> Tensor:
    """scale x x^T + beta add, in x's dtype. x is [m, n]; add is symmetric [m, m], or None."""
    product = launch_symmetric_product if triton_fits(x) else symmetric_product_reference
    return product(x, scale, add, beta)


def symmetric_product_reference(x: Tensor, scale: float, add: Tensor | None, beta: float) -> Tensor:
    """Reference for symmetric_product."""
    if add is None:
        return scale * (x @ x.t())
    return torch.addmm(add, x, x.t(), beta=beta, alpha=scale)


# ---- Triton ----------------------------------------------------------------------------------------------

@triton.jit
def symmetric_kernel(
    X, ADDED, OUT, m, n, scale, beta,
    ADD: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
):
    """Compute one tile [M, M] of OUT [m, m] = scale X X^T + beta ADDED, and its mirror image.

    X is a descriptor of [m, n], in blocks of [M, K]. ADD: whether ADDED is given.
    """
    row = tl.program_id(0) * M
    column = tl.program_id(1) * M
    if column <= row:
        total = tl.zeros((M, M), tl.float32)
        for k in range(0, n, K):  # out of bounds, a load returns 0
            left = X.load([row, k])  # [M, K]
            right = X.load([column, k])  # [M, K]
            total = tl.dot(left, right.T, total)
        total *= scale

        rows = row + tl.arange(0, M)
        columns = column + tl.arange(0, M)
        inside = inside_matrix(rows, columns, m, m)
        offsets = tile_offsets(rows, columns, m)
        if ADD:
            total += beta * load_fp32(ADDED + offsets, inside)
        y = total.to(OUT.dtype.element_ty)
        tl.store(OUT + offsets, y, inside)

        # the same numbers above the diagonal
        if column < row:
            mirrored = OUT + tile_offsets(columns, rows, m)
            tl.store(mirrored, tl.trans(y), inside_matrix(columns, rows, m, m))


def triton_fits(x: Tensor) -> bool:
    """Whether the kernel can compute x x^T. fp32 is left to the library's GEMMs, which are exact."""
    if x.dtype == torch.float32 or x.numel() == 0:
        return False
    return kernel_is_available("Newton-Schulz", x, why=skewed(x))


def launch_symmetric_product(x: Tensor, scale: float, add: Tensor | None, beta: float) -> Tensor:
    """Run symmetric_product_reference as a kernel."""
    m, n = x.shape
    tiles = ceil_div(m, TILE["M"])
    out = x.new_empty(m, m)
    symmetric_kernel[(tiles, tiles)](
        TensorDescriptor.from_tensor(x, [TILE["M"], TILE["K"]]),
        out if add is None else add,  # not read if there is nothing to add
        out, m, n, scale, beta,
        ADD=add is not None,
        **TILE,
    )
    return out
