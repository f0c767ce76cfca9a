"""torch.compile for the pure functions inside the kernels, where train.compile asks for it."""
import functools
from collections.abc import Callable

import torch
from torch import Tensor


@functools.cache
def compiled(function: Callable) -> Callable:
    """One compiled twin a function: every layer shares its code. Another shape compiles once more."""
    twin = torch.compile(function, dynamic=False)
    return lambda *args: twin(*(a.detach() if isinstance(a, Tensor) else a for a in args))  # the kernels have their own backward


def jit(function: Callable, fused: bool) -> Callable:
    """The function itself, or its compiled twin."""
    return compiled(function) if fused else function
