"""torch.compile for the pure functions inside the kernels, where train.compile asks for it."""
import functools
from typing import Callable

import torch


@functools.cache
def compiled(function: Callable) -> Callable:
    """One compiled twin a function: every layer shares its code. Another shape compiles once more."""
    return torch.compile(function, dynamic=False)


def jit(function: Callable, fused: bool) -> Callable:
    """The function itself, or its compiled twin."""
    return compiled(function) if fused else function
