"""Libraries for stateful layers (kernels/delta_rule.py, state_space.py, short_conv.py): whether one is
installed and agrees with the reference.

As in kernels/attention_libraries.py, a small call of each kind, forward and backward, is compared with the
reference before a library is used for that kind. The host waits for it once for each kind.
"""
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.attention_libraries import Function, installed_function
from kernels.triton_ import print_once

DEVICES = ("cuda",)  # where libraries run; the tests add "cpu", for test libraries
DTYPES = (torch.bfloat16, torch.float16)
TRIAL_ERROR = 0.03  # relative, of bf16
TRIAL_SHAPE = (2, 400)  # sequences and tokens
TRIAL_LENGTHS = (300, 1, 219, 280)  # of their documents; one continues in the second sequence

Computation = Callable[..., Sequence[Tensor]]


def find_library(what: str, package: str, module: str, name: str, *tensors: Tensor) -> Function | None:
    """Return the library's function if it applies to these tensors and is installed. Report a missing one
    once.

    what is the kernel, for messages. package is the one to install.
    """
    first = tensors[0]
    if first.device.type not in DEVICES or any(tensor.dtype != first.dtype for tensor in tensors):
        return None
    if first.dtype not in DTYPES or not first.numel():
        return None
    function = installed_function(module, name)
    if function is None:
        print_once(f"{what}: {module}.{name} is not installed (pip install {package}); torch's own "
                   "operations run instead: slower")
    return function


def trial_documents(device: torch.device) -> Tensor:
    """Return document ids of TRIAL_SHAPE."""
    lengths = torch.tensor(TRIAL_LENGTHS)
    return torch.arange(len(lengths)).repeat_interleave(lengths).view(TRIAL_SHAPE).to(device)


def normal_numbers(shapes: Sequence[tuple[int, ...]], device: torch.device) -> list[Tensor]:
    """Return random inputs of a trial, in fp32: the same every time."""
    stream = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=stream).to(device) for shape in shapes]


def passes_trial(
    what: str, by_library: Computation, by_definition: Computation, inputs: Sequence[Tensor]
) -> bool:
    """Whether both return the same results and gradients for floating-point inputs. If not, report why.

    what names the kernel, the library and the kind of call, for messages.
    """
    why = obstacle(by_library, by_definition, inputs)
    if why is not None:
        print_once(f"{what}: not used: {why}")
    return why is None


def obstacle(by_library: Computation, by_definition: Computation, inputs: Sequence[Tensor]) -> str | None:
    """Return why the library cannot be used; None if it can."""
    stream = torch.Generator().manual_seed(0)

    def run(compute: Computation, leaves: Sequence[Tensor], dys: list[Tensor]) -> list[Tensor]:
        with torch.enable_grad():
            leaves = [x.detach().clone().requires_grad_() for x in leaves]
            results = list(compute(*leaves))
            if not dys:
                dys += [torch.randn(y.shape, generator=stream).to(y.device) for y in results]
            gradients = [dy.to(y.dtype) for dy, y in zip(dys, results)]
            return [y.detach() for y in results] + list(torch.autograd.grad(results, leaves, gradients))

    dys: list[Tensor] = []
    exact = run(by_definition, [x.float() for x in inputs], dys)
    try:
        found = run(by_library, inputs, dys)
    except Exception as error:  # libraries raise their own classes
        return (str(error) or type(error).__name__).splitlines()[0]
    for got, want in zip(found, exact, strict=True):
        error = (got.float() - want).norm() / want.norm()
        if not error < TRIAL_ERROR:  # fails for NaN too
            return f"a wrong result, by {error:.2g}"
    return None
