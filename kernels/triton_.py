"""Triton where it is there, and the question that every kernel asks first: may this call run as a Triton kernel?

Triton is imported where torch was built for CUDA, or where the caller has imported it already (the tests, which run kernels
through its interpreter on a CPU). Elsewhere a stand-in lets the kernels be defined, and never run: no CPU run pays for the
import, and none needs the package.
"""
import functools
import sys
from types import SimpleNamespace

import torch
from torch import Tensor

if torch.version.cuda or "triton" in sys.modules:
    try:
        import triton
        import triton.language as tl
        from triton.tools.tensor_descriptor import TensorDescriptor
    except ImportError:  # a platform without a wheel
        triton = None
else:
    triton = None
HERE = triton is not None
if not HERE:
    triton, tl, TensorDescriptor = SimpleNamespace(jit=lambda function: function), SimpleNamespace(constexpr=lambda value: value), None

DEVICES = ("cuda",)  # where kernels run; the tests add the interpreter's "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fits(name: str, *tensors: Tensor | None, why: str | None = None) -> bool:
    """May `name` run as a Triton kernel on these? On a device that has them but with something a kernel does not do (a dtype;
    or `why`, the kernel's own reason), one line says so once, and the caller takes its reference."""
    if not HERE or tensors[0].device.type not in DEVICES:
        return False
    odd = [t.dtype for t in tensors if t is not None and t.dtype not in DTYPES]
    if odd:
        why = f"no kernel for {str(odd[0]).removeprefix('torch.')}"
    if why:
        say_once(f"{name}: {why}; the slower torch reference runs instead")
    return not why


@functools.cache
def say_once(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors: how many programs make partial sums side by side. (The interpreter has one; 3 shows a wrong sum.)"""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


@functools.cache
def chip(device: torch.device) -> int:
    """Which launch parameters fit: 9 Hopper, 10 data-centre Blackwell, 8 all others (they have less shared memory)."""
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9
    return major if major in (9, 10) else 8


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest that is not below n."""
    return 1 << (n - 1).bit_length()
