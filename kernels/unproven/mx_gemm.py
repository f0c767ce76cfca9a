"""Products of MXFP8 by torch._scaled_mm, which runs them in the tensor cores of sm_100 and newer.

The library reads the scales as bytes of E8M0, in tiles of 128 rows and 4 columns (swizzled_scales). Until a
GPU has confirmed it, it is tried once on a small product with a known result. Where it fails, a line says so
and kernels/fp8_gemm.py runs.
"""
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import fp8
from kernels.fp8_gemm import MX_CHIP, QuantizedMatrix, scaled_product, write_scaled_product
from kernels.fp8_linear import Products
from kernels.triton_ import print_once

TILE_ROWS, TILE_COLUMNS = 128, 4  # of scales
ROWS_APART = 32  # of a tile: rows this far apart are neighbors in memory


def swizzled_scales(scale: Tensor) -> Tensor:
    """scale [m, n/32], powers of two -> their E8M0 bytes, flat, as cuBLAS reads them."""
    return in_tiles(e8m0_bytes(scale)).view(torch.float8_e8m0fnu)


def in_tiles(scale: Tensor) -> Tensor:
    """Bytes of scales [m, columns], uint8 -> the same, flat, in the tiles that cuBLAS reads.

    The layout is that of "1D block scaling factors" in cuBLAS's manual: row r and column c of a tile are at
    16 (r mod 32) + 4 (r div 32) + c. Tiles follow each other along a row. Both sizes are padded with zeros.
    """
    m, columns = scale.shape
    padded = F.pad(scale, (0, -columns % TILE_COLUMNS, 0, -m % TILE_ROWS))
    tiles = padded.view(
        len(padded) // TILE_ROWS, TILE_ROWS // ROWS_APART, ROWS_APART, -1, TILE_COLUMNS
    )
    return tiles.permute(0, 3, 2, 1, 4).flatten()


def e8m0_bytes(scale: Tensor) -> Tensor:
    """Return the E8M0 codes, as uint8, of powers of two in fp32: their biased exponents; NaN: 255."""
    bits = scale.contiguous().view(torch.int32)
    return (bits >> 23 & 0xFF).to(torch.uint8)  # that of 2^-127, a subnormal, is 0


def product(a: QuantizedMatrix, b: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """fp8_gemm.scaled_product by the library, if it can."""
    if dtype == torch.bfloat16 and library_multiplies(a.q.device, dtype):
        return multiply_by_library(a, b, dtype)
    return scaled_product(a, b, dtype)


def write_product(
    into: Tensor | None, a: QuantizedMatrix, b: QuantizedMatrix, dtype: torch.dtype, add: bool
) -> Tensor:
    """fp8_gemm.write_scaled_product by the library, if it can."""
    if into is None:
        return product(a, b, dtype)
    if into.dtype != torch.float32 or not library_multiplies(a.q.device, torch.float32):
        return write_scaled_product(into, a, b, dtype, add)
    if add:
        return into.add_(multiply_by_library(a, b, torch.float32))
    return multiply_by_library(a, b, torch.float32, out=into)


def multiply_by_library(
    a: QuantizedMatrix, b: QuantizedMatrix, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """a [m, k], b [n, k], of kind mx -> a b^T [m, n] in dtype, written to `out` if there is one."""
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]  # missing in torch's stubs
        a.q,
        b.q.t(),
        scale_a=swizzled_scales(a.scale),
        scale_b=swizzled_scales(b.scale),
        out_dtype=dtype,
        out=out,
    )


PRODUCTS = Products(product, write_product)  # of an Fp8Scaling


@cache
def library_multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the library returns products in dtype on this device: tried once. If not, a line says so; of a
    chip without MXFP8, kernels/fp8_gemm.py does."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < MX_CHIP:
        return False
    why = obstacle_to_library(device, dtype)
    if why is not None:
        print_once(f"mxfp8: torch._scaled_mm does not return {dtype} here ({why}); our own kernel runs "
                   "instead, and is slower")
    return why is None


def obstacle_to_library(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the library cannot be used; None if it can.

    All sums of the trial are integers, and exact in fp32. The scales differ between rows and along them, and
    neither size fills the tiles.
    """
    a, b = (trial_operand(rows, device) for rows in (160, 144))
    want = a.dequantized() @ b.dequantized().t()
    written = torch.full_like(want, float("nan"), dtype=dtype)
    address = written.data_ptr()
    try:
        result = multiply_by_library(a, b, dtype)
        multiply_by_library(a, b, dtype, out=written)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        return str(error).splitlines()[0]
    is_in_place = written.data_ptr() == address
    is_exact = result.dtype == dtype and bool((result == want.to(dtype)).all() and (written == result).all())
    return None if is_in_place and is_exact else "a wrong result"


def trial_operand(rows: int, device: torch.device) -> QuantizedMatrix:
    """Return [rows, 160] of small integers, with scales of 1, 2, 4 and 8."""
    groups = 5
    places = torch.arange(rows * groups * fp8.MX_SIDE, device=device).view(rows, -1)
    q = (places % 7 - 3).float().to(fp8.E4M3)
    row, group = torch.arange(rows, device=device)[:, None], torch.arange(groups, device=device)
    scale = 2.0 ** ((row + row // ROWS_APART + 3 * group) % 4)
    return QuantizedMatrix(q, scale.float(), "mx", fp8.MX_SIDE)
