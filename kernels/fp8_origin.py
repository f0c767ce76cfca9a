"""Metadata from the producer of a tensor to the fp8 linear that reads it: its maxima, or how to compute it.

A quantizer needs max |x| before it casts x. A producer with x in registers finds the maxima on the way
(with_maxima). And if an fp8 linear is the sole consumer of a result, nobody needs it in 16 bits: the producer
leaves it `unwritten`, and the linear's casts compute it, tile by tile, from tensors that the producer saves
for its backward anyway (kernels/fp8_formula.py).

Both travel as an attribute of the tensor, from the producer to the next function that gets this very tensor;
autograd passes gradients on the same way. Any operation that creates a new tensor, such as an exchange, loses
the attribute, and the reader finds the maxima itself. So nothing here depends on who reads.
"""
from collections.abc import Sequence
from dataclasses import dataclass, replace
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

    formula is WRITTEN, or one of the table in kernels/fp8_formula.py. operands are those of the formula; for
    a written tensor, itself.
    maxima holds max |x| for scales of this kind, if the producer found them.
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
    """A tensor with an origin: metadata from the producer, valid for this version of the tensor."""
    origin: tuple[Origin, int]


def unwritten(origin: Origin, shape: Sequence[int], like: Tensor) -> Tensor:
    """Return a tensor of this shape without elements, with the device and dtype of `like`.

    Reading it without asking for its origin yields NaN, so a mistake stops the first step.
    """
    tensor = like.new_full((1,), float("nan")).expand(shape)
    cast(TensorWithOrigin, tensor).origin = origin, tensor._version
    return tensor


def with_maxima(x: Tensor, kind: str, maxima: Maxima) -> Tensor:
    """Attach maxima to a written x [..., n]."""
    origin = Origin(WRITTEN, (x.numel() // x.shape[-1], x.shape[-1]), (), kind, maxima)
    cast(TensorWithOrigin, x).origin = origin, x._version
    return x


def origin_of(x: Tensor) -> Origin:
    """Return the origin of x [..., n] as a matrix."""
    origin, version = getattr(x, "origin", (None, 0))
    if origin is not None and not origin.is_written:
        return origin
    matrix = x.flatten(0, -2)
    if origin is None or version != x._version:  # x was modified since
        return Origin.of_matrix(matrix)
    return replace(origin, operands=(matrix,))
