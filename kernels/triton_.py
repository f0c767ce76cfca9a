"""Triton, if available, and whether a call may run as a Triton kernel.

Triton is imported if torch was built for CUDA, or if the caller has imported it already (the tests, which run
kernels through its interpreter on a CPU). Otherwise a stand-in allows kernels to be defined and recorded
(plan/record), but not run: so a CPU run needs no Triton package and does not pay for the import. ROCm has a
Triton, but no kernel here has run on it: shared memory, warps and fp8 differ there, and the capabilities of
its chips look like NVIDIA's.
"""
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:  # for type checkers and editors: Triton's own language, and its decorator with types
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    Result = TypeVar("Result", covariant=True)

    class Kernel(Protocol[Result]):
        """A function under `triton.jit`. Its `tl.constexpr` parameters take plain numbers and bools."""

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
            """Launch `grid` programs: kernel[grid](...)."""
            ...

        def __call__(self, *args: object, **kwargs: object) -> Result:
            """Call it from another kernel: kernel(...)."""
            ...

    class triton:
        @staticmethod
        def jit(function: Callable[..., Result]) -> Kernel[Result]: ...

        @staticmethod
        def constexpr_function(function: Callable[..., Result]) -> Callable[..., Result]: ...


@dataclass(frozen=True)
class StandInKernel:
    """A kernel without Triton: kernel[grid](...) raises RuntimeError."""
    fn: Callable[..., object]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        raise RuntimeError(f"{self.fn.__name__}: Triton is not installed")


@dataclass(frozen=True)
class StandInDescriptor:
    """Names the tensor whose blocks a kernel would load."""
    base: Tensor
    block_shape: list[int]

    @classmethod
    def from_tensor(cls, tensor: Tensor, block_shape: list[int]) -> "StandInDescriptor":
        return cls(tensor, block_shape)


def load() -> tuple[object, object, type, type]:
    """Return (triton, triton.language, TensorDescriptor, class of kernel[grid]'s kernel), or stand-ins."""
    if not torch.version.hip and (torch.version.cuda or "triton" in sys.modules):
        try:
            import triton
            import triton.language
            from triton.runtime.jit import KernelInterface
            from triton.tools.tensor_descriptor import TensorDescriptor
            return triton, triton.language, TensorDescriptor, KernelInterface
        except ImportError:  # a platform without a wheel
            pass
    decorators = SimpleNamespace(jit=StandInKernel, constexpr_function=lambda function: function)
    language = SimpleNamespace(constexpr=constexpr)
    return decorators, language, StandInDescriptor, StandInKernel


def constexpr(value: object) -> object:
    """Stand in for tl.constexpr."""
    return value


if not TYPE_CHECKING:
    triton, tl, TensorDescriptor, Launchable = load()
TRITON_AVAILABLE: bool = Launchable is not StandInKernel

DEVICES = ("cuda",)  # where kernels run; the tests add the interpreter's "cpu"
MIN_CHIP = (8, 0)  # Ampere: bf16 in the tensor cores, and enough shared memory for the tiles
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def kernel_is_available(name: str, first: Tensor, *others: Tensor | None, why: str | None = None) -> bool:
    """Whether kernel `name` can run on these tensors. If not, the caller runs its reference.

    why is the kernel's reason not to run, if any. On a device that has kernels, a reason (this one, a dtype
    without a kernel, or no Triton) is printed once.
    """
    if not kernels_run_on(first.device):
        return False
    dtypes = [tensor.dtype for tensor in (first, *others) if tensor is not None]
    for dtype in dtypes:
        if dtype not in DTYPES:
            why = f"no kernel for {str(dtype).removeprefix('torch.')}"
            break
    if why:
        print_once(f"{name}: {why}; the slower torch reference runs instead")
    return not why


def kernels_run_on(device: torch.device) -> bool:
    """Whether any kernel runs on a device. One that should have kernels but has none is reported once."""
    if device.type not in DEVICES:
        return False
    obstacle = why_no_kernels(device)
    if obstacle:
        print_once(f"kernels: {obstacle}; plain torch operations run instead of ours: slower, with a higher "
                   "peak of memory")
    return obstacle is None


@functools.cache
def why_no_kernels(device: torch.device) -> str | None:
    """Return why no kernel at all runs on a device of DEVICES; None if kernels do."""
    if torch.version.hip:
        return f"torch is built for ROCm {torch.version.hip}, where our kernels are untested"
    if not TRITON_AVAILABLE:
        return "Triton is not installed (pip install triton)"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < MIN_CHIP:
        return f"{torch.cuda.get_device_name(device)} is older than our kernels require (sm_80)"
    return None


@functools.cache
def print_once(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@functools.cache
def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors: how many programs compute partial sums concurrently.

    The interpreter has one, but reports 3, which exposes wrong sums.
    """
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def chip_name(device: torch.device) -> int:
    """Return the chip that launch parameters are for: 9 Hopper, 10 data-center Blackwell, 8 all others.

    The others have less shared memory.
    """
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9
    return major if major in (9, 10) else 8


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def by_channel(x: Tensor) -> Tensor:
    """Return x with adjacent channels, copying if necessary."""
    return x if x.stride(-1) == 1 else x.contiguous()
