"""torch.compile for the pure functions inside the kernels, if train.compile asks for it."""
import functools
from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., object])


@functools.cache
def compile_function(function: Callable[..., object]) -> Callable[..., object]:
    """Compile a function. All layers share the compiled code; another shape compiles again.

    Arguments are detached, because the kernels have separate backwards.
    """
    compiled = torch.compile(function, dynamic=False)

    def call(*args: object) -> object:
        detached = [arg.detach() if isinstance(arg, Tensor) else arg for arg in args]
        return compiled(*detached)
    return call


def jit(function: Function, compiled: bool) -> Function:
    """Return the function itself, or compiled."""
    return cast(Function, compile_function(function)) if compiled else function
