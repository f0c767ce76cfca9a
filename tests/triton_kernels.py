"""Where the Triton kernels of kernels/ are."""

import importlib
import pkgutil
from types import ModuleType
from typing import NamedTuple

import kernels


class Place(NamedTuple):
    """full_name: of the function, whatever module has imported it. module, name: where it is found."""

    full_name: str
    module: ModuleType
    name: str


def places() -> list[Place]:
    """Every place of every kernel that is launched: what triton.jit has made, under a name in _kernel."""
    found = []
    for info in pkgutil.walk_packages(kernels.__path__, "kernels."):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if name.endswith("_kernel") and hasattr(value, "arg_names"):
                found.append(Place(full_name(value), module, name))
    return found


def full_name(kernel) -> str:
    """kernels.norm.forward_kernel; also under Triton's interpreter."""
    return f"{kernel.fn.__module__}.{kernel.fn.__name__}"
