"""Grouped GEMMs by torch._grouped_mm (CUTLASS), if it passes a trial.

It multiplies rows in expert order, forward and for the input gradient. It does not gather rows, and would
return a weight gradient in 16 bits: both are left to kernels/grouped_gemm.py. Hopper only: on Blackwell,
experts without rows have been reported to spoil gradients (pytorch issues 172439 and 193633).
"""
from functools import cache

import torch
from torch import Tensor

from kernels.triton_ import chip_name, print_once

DEVICES = ("cuda",)  # where it is tried; the tests add "cpu"
CHIPS = (9,)
DTYPES = (torch.bfloat16,)
TRIAL_ROWS = (3, 0, 17, 0, 130)  # of each expert
TRIAL_INPUTS, TRIAL_OUTPUTS = 64, 48


def multiply_by_library(x: Tensor, weight: Tensor, offsets: Tensor, back: bool = False) -> Tensor:
    """x [m, n], weight [e, o, n] -> [m, o]. back: [m, o] -> [m, n].

    offsets int32 [e + 1], on the device, are where the rows of each expert start, and where the last ones
    end.
    """
    matrices = weight if back else weight.transpose(1, 2)
    return torch._grouped_mm(  # pyright: ignore[reportPrivateImportUsage]  # missing in torch's stubs
        x, matrices, offs=offsets[1:]
    )


@cache
def library_multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether multiply_by_library works on this device: tried once, on products with known results.

    If not, a line says so.
    """
    if device.type not in DEVICES or chip_name(device) not in CHIPS or dtype not in DTYPES:
        return False
    why = obstacle_to_library(device, dtype)
    if why is not None:
        print_once(f"grouped products in {dtype}: torch._grouped_mm does not work here ({why}); our own "
                   "kernel runs instead, which may be slower")
    return why is None


def obstacle_to_library(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why multiply_by_library cannot be used, or None. Products are of -1, 0 and 1, hence exact."""
    counts = torch.tensor(TRIAL_ROWS)
    owner = torch.arange(len(counts)).repeat_interleave(counts)
    weight = small_numbers(len(counts), TRIAL_OUTPUTS, TRIAL_INPUTS)
    offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0))).to(device, torch.int32)
    for back in (False, True):
        x = small_numbers(len(owner), TRIAL_OUTPUTS if back else TRIAL_INPUTS)
        want = torch.einsum("mo,mon->mn" if back else "mn,mon->mo", x, weight[owner])
        try:
            got = multiply_by_library(x.to(device, dtype), weight.to(device, dtype), offsets, back)
        except (AttributeError, RuntimeError, TypeError) as error:
            return str(error).splitlines()[0]
        if got.dtype != dtype or not torch.equal(got.float().cpu(), want):
            return "a wrong result"
    return None


def small_numbers(*shape: int) -> Tensor:
    """Return -1, 0 and 1, on the CPU, without random numbers."""
    numbers = torch.arange(torch.Size(shape).numel())
    return ((numbers * numbers // 7) % 3 - 1).float().view(shape)
