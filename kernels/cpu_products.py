"""Products of a CPU's library whose operands are fp32 tensors with values of bf16."""
import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def operands_are_bf16(dtype: torch.dtype) -> Iterator[None]:
    """Inside, the products of fp32 tensors on a CPU may read their operands as bf16, and sum in fp32.

    For operands that were widened from bf16 this loses nothing, and gives what no product of bf16 tensors
    does on a CPU: a result in fp32. The library then uses the processor's bf16 units (AMX), where it has
    them, and else fp32 kernels of its own.

    dtype: that the operands were widened from. Nothing is changed for any other than bf16.
    """
    if dtype != torch.bfloat16:
        yield
        return
    library = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]  # not in its stubs
    precision = library.fp32_precision
    library.fp32_precision = "bf16"
    try:
        yield
    finally:
        library.fp32_precision = precision
