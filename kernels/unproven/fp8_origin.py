"""A result that the fp8 linear reading it computes itself.

If an fp8 linear is the sole consumer of a result, nobody needs it in 16 bits: the producer leaves it
`deferred_tensor`, and the linear's casts compute it, tile by tile, from tensors that the producer saves for
its backward anyway (kernels/unproven/fp8_formula.py).

How to compute it travels as an attribute of the tensor, from the producer to the next function that gets this
very tensor; autograd passes gradients on the same way. The producer's caller knows that no other operation
comes between (model/unproven.py).
"""
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

from torch import Tensor

from kernels.fp8 import Maxima, triton_fits

WRITTEN = "written"  # the formula of a materialized tensor


class Reader(NamedTuple):
    """The fp8 linear that is a tensor's sole consumer: kind of its scales, and side of a block."""
    kind: str
    side: int

    def takes(self, *operands: Tensor | None) -> bool:
        """Whether its casts can compute a tensor from these operands."""
        return all(triton_fits(x, self.kind, self.side) for x in operands if x is not None)


@dataclass(frozen=True)
class Origin:
    """Where the elements of a matrix [m, n] come from.

    formula is WRITTEN, or one of the table in fp8_formula.py. operands are those of the formula; for a
    written tensor, itself.
    maxima holds max |x| for scales of this kind, if the producer of an unwritten one found them.
    """
    formula: str
    shape: tuple[int, int]
    operands: tuple[Tensor | None, ...]
    kind: str | None = None
    maxima: Maxima = Maxima()

    @property
    def is_written(self) -> bool:
        return self.formula == WRITTEN

    @staticmethod
    def of_matrix(x: Tensor) -> "Origin":
        return Origin(WRITTEN, (x.shape[0], x.shape[1]), (x,))


class TensorWithOrigin(Protocol):
    """A tensor that `deferred_tensor` returned."""
    origin: Origin


def deferred_tensor(origin: Origin, shape: Sequence[int], like: Tensor) -> Tensor:
    """Return a tensor of this shape without elements, with the device and dtype of `like`.

    Reading it without asking for its origin yields NaN, so a mistake stops the first step.
    """
    tensor = like.new_full((1,), float("nan")).expand(shape)
    cast(TensorWithOrigin, tensor).origin = origin
    return tensor


def find_origin(x: Tensor) -> Origin:
    """Return the origin of x [..., n] as a matrix."""
    origin: Origin | None = getattr(x, "origin", None)
    return Origin.of_matrix(x.flatten(0, -2)) if origin is None else origin
