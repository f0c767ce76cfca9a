"""A number with its bound; norms and distances of sets of tensors."""
import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

Tensors = dict[str, Tensor]  # whole tensors under their global names

# Unit roundoffs: half a unit in the last place, relative.
UNIT = {
    "fp64": 2.0**-53,
    "fp32": 2.0**-24,
    "fp16": 2.0**-11,
    "bf16": 2.0**-8,
    "fp8": 2.0**-8,  # bf16, except in the products
}
U32 = UNIT["fp32"]
E4M3 = 2.0**-4
E5M2 = 2.0**-3
E2M1 = 2.0**-2

SIGMAS = 2.0  # standard deviations that the bounds allow


@dataclass(frozen=True)
class BoundedError:
    """A number and its bound. what: which check. where: step and tensor."""

    what: str
    where: str
    error: float
    bound: float

    @property
    def share(self) -> float:
        """The error relative to the bound: at most 1 if the bound holds, infinite for NaN."""
        if math.isnan(self.error):
            return math.inf
        if self.bound:
            return self.error / self.bound
        return math.inf if self.error else 0.0


def frobenius_norm(tensors: Iterable[Tensor]) -> float:
    """Return the joint fp64 norm of all tensors."""
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def relative_distance(ours: Tensors, theirs: Tensors) -> float:
    """Return |ours - theirs| / |theirs| over all tensors."""
    difference = frobenius_norm(ours[key].double() - theirs[key].double() for key in theirs)
    return difference / frobenius_norm(theirs.values())


def matrices(tensors: Tensors) -> list[str]:
    """Return the keys of the tensors that are not vectors."""
    return [key for key, tensor in tensors.items() if tensor.dim() > 1]


def is_convolution(key: str) -> bool:
    """Return whether the tensor [c, w] is a short convolution: w weights per channel, without mixing."""
    return key.endswith("conv.weight")
