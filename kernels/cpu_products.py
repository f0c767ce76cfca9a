"""CPU GEMMs with fp32 operands that hold bf16 values."""
import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def operands_are_bf16(dtype: torch.dtype) -> Iterator[None]:
    """Let GEMMs of fp32 tensors on a CPU read their operands as bf16 and accumulate in fp32.

    For operands widened from bf16 this is lossless, and yields an fp32 result, which no bf16 GEMM does on a
    CPU. The library then uses the processor's bf16 units (AMX) if present, and otherwise its fp32 kernels.

    dtype is the one that the operands were widened from. Nothing changes for any other than bf16.
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
