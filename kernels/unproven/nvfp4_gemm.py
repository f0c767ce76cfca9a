"""Products of NVFP4 by torch._scaled_mm, which runs them in the tensor cores of sm_100 and newer.

The library reads the scales of blocks as bytes of E4M3, in the tiles of kernels/unproven/mx_gemm.py; those of
the tensors are multiplied in afterwards, in fp32. Until a GPU has confirmed it, it is tried once on a small
product with a known result. Where it fails, a line says so and kernels/nvfp4_linear.py runs.
"""
from functools import cache

import torch
from torch import Tensor

from kernels.fp8 import E4M3
from kernels.nvfp4 import SIDE, Nvfp4Matrix, e2m1_codes, pack
from kernels.nvfp4_linear import CHIP, products_of, unscaled_product
from kernels.triton_ import print_once
from kernels.unproven.mx_gemm import in_tiles


def product(a: Nvfp4Matrix, b: Nvfp4Matrix) -> Tensor:
    """nvfp4_linear.unscaled_product by the library, if it can."""
    if library_multiplies(a.codes.device):
        return multiply_by_library(a, b)
    return unscaled_product(a, b)


def multiply_by_library(a: Nvfp4Matrix, b: Nvfp4Matrix) -> Tensor:
    """a [m, k], b [n, k] -> a b^T [m, n] in fp32, without the scales of the tensors."""
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]  # missing in torch's stubs
        a.codes.view(torch.float4_e2m1fn_x2),
        b.codes.view(torch.float4_e2m1fn_x2).t(),
        scale_a=laid_scales(a),
        scale_b=laid_scales(b),
        out_dtype=torch.float32,
    )


def laid_scales(x: Nvfp4Matrix) -> Tensor:
    """Return the scales of x [m, n], one for 16 columns of a row, flat, as cuBLAS reads them."""
    rows = len(x.codes) // len(x.scale)
    of_rows = x.scale.view(torch.uint8).repeat_interleave(rows, 0)
    return in_tiles(of_rows).view(E4M3)


PRODUCTS = products_of(product)  # of an Nvfp4Scaling


@cache
def library_multiplies(device: torch.device) -> bool:
    """Whether the library returns products in fp32 on this device: tried once. If not, a line says so; of a
    chip without NVFP4, kernels/nvfp4_linear.py does."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < CHIP:
        return False
    why = obstacle_to_library(device)
    if why is not None:
        print_once(f"nvfp4: torch._scaled_mm does not return fp32 here ({why}); torch multiplies in 16 bits "
                   "instead, and is slower")
    return why is None


def obstacle_to_library(device: torch.device) -> str | None:
    """Return why the library cannot be used; None if it can.

    All sums of the trial are multiples of 1/4, and exact in fp32. The scales differ between rows and along
    them, and neither size fills the tiles.
    """
    a, b = (trial_operand(rows, device) for rows in (160, 144))
    want = a.unscaled(torch.float32) @ b.unscaled(torch.float32).t()
    try:
        result = multiply_by_library(a, b)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError) as error:
        return str(error).splitlines()[0]
    is_exact = result.dtype == torch.float32 and bool((result == want).all())
    return None if is_exact else "a wrong result"


def trial_operand(rows: int, device: torch.device) -> Nvfp4Matrix:
    """Return [rows, 160] with all numbers of E2M1, and scales of 1, 2, 4 and 8."""
    groups = 10
    places = torch.arange(rows * groups * SIDE, device=device).view(rows, -1)
    codes = e2m1_codes(((places % 13) - 6).float() / 2)
    row, group = torch.arange(rows, device=device)[:, None], torch.arange(groups, device=device)
    scale = (2.0 ** ((row + row // 32 + 3 * group) % 4)).to(E4M3)
    return Nvfp4Matrix(pack(codes), scale, torch.ones(1, 1, device=device))
