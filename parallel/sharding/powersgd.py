"""PowerSGD (arXiv 1905.13727): all-reduce two thin factors of each matrix's gradient instead of the matrix.

    D = gradient + error
    P = sum over ranks of D Q, orthonormalized
    Q = sum over ranks of D^T P
    sum of gradients ~ P Q^T,   error = D - P (own D^T P)^T

For a matrix [m, n] at rank r, r (m + n) elements are sent, in two all-reduces per bucket. Each step runs one
subspace iteration, starting from the Q of the previous step. The unsent part is kept as the error: sent + the
ranks' errors = gradients + the previous errors, up to rounding. A rank of min(m, n) or more is lossless. All
other parameters are sent uncompressed in the first all-reduce: vectors, and matrices whose gradients are
summed over other ranks afterwards (routers, keys that tp ranks share, a table at both ends of the pipeline).
Under tp the shard of each rank is a separate matrix, as is each expert.

The sums are linear in the errors, so only the sum of the errors matters. A checkpoint stores that sum
(KEY@powersgd_error), and the ranks share it evenly whenever it is saved or loaded: a run can resume with any
number of ranks. The bases (KEY@powersgd_basis) belong to the shards; if a new layout has other shards, their
bases are redrawn. A skipped step leaves no error behind.
"""
import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.sharding.boxes import Box
from parallel.sharding.packing import least_loaded
from parallel.sharding.slots import Slot
from parallel.sharding.spec import ParameterSpec
from parallel.wire import comm
from parallel.wire.comm import Group

ERROR_SUFFIX = "@powersgd_error"
BASIS_MARK = "@powersgd_basis"


def matrix_shape(spec: ParameterSpec) -> tuple[int, int, int]:
    """Return (number of matrices, m, n) of a two-dimensional parameter: one matrix [m, n] for each expert."""
    rows, columns = spec.shape
    count = 1
    if spec.is_expert:
        count = len({box.key.rsplit(".", 2)[0] for box in spec.boxes})
    return count, rows // count, columns


def is_matrix(spec: ParameterSpec) -> bool:
    """Whether the parameter's gradient is sent as factors."""
    if len(spec.shape) != 2 or spec.partial_over:
        return False
    _, rows, columns = matrix_shape(spec)
    return min(rows, columns) > 1


def orthonormal(x: Tensor) -> Tensor:
    """Return an orthonormal basis [count, m, r] of the columns of x [count, m, r], with r at most m.

    If the columns are linearly dependent, the basis spans a larger space.
    """
    return torch.linalg.qr(x).Q


def draw_basis(spec: ParameterSpec, rank: int, seed: int) -> Tensor:
    """Draw the initial bases [count, n, r] of a parameter, in fp64.

    They depend on the seed and on which part of the tensor the parameter holds.
    """
    box = spec.boxes[0]
    digest = hashlib.sha256(f"{seed}/{box.key}/{box.start}/powersgd".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    count, rows, columns = matrix_shape(spec)
    shape = (count, columns, min(rank, rows, columns))
    return orthonormal(torch.randn(shape, generator=generator, dtype=torch.float64))


@dataclass(frozen=True)
class CompressionState:
    """State before an exchange of PowerSGD: a copy of the error, and the bases."""
    error: Tensor
    bases: list[Tensor]
    previous_bases: list[Tensor]


class PowerSGD:
    """The compression of one bucket's gradients.

    error [size of the bucket] is this rank's unsent part; bases holds the Q of each matrix. An exchange has
    two phases: start() .. start_next_phase() .. wait().
    """

    def __init__(
        self,
        slots: tuple[Slot, ...],
        size: int,
        group: Group,
        *,
        rank: int,
        seed: int,
        like: Tensor,
    ) -> None:
        """`like` is a tensor of the gradients' dtype and device."""
        self.group = group
        self.matrices = [slot for slot in slots if is_matrix(slot.param.spec)]
        self.others = [slot for slot in slots if not is_matrix(slot.param.spec)]
        self.error = like.new_zeros(size)
        self.bases: list[Tensor] = []
        for slot in self.matrices:
            self.bases.append(draw_basis(slot.param.spec, rank, seed).to(like))
        self.previous_bases = self.bases

        # state of the exchange in flight; `start` also sets grad, shapes and work
        self.left_factors: list[Tensor] = []  # the P of each matrix
        self.is_in_second_phase = False

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return views [count, m, n] of each matrix in a flat tensor [size]."""
        results: list[Tensor] = []
        for slot in self.matrices:
            shape = matrix_shape(slot.param.spec)
            results.append(slot.view_in(flat).view(shape))
        return results

    def start(self, grad: Tensor) -> "PowerSGD":
        """Start summing grad [size] over the group, in place: all-reduce the products D Q."""
        self.grad = grad
        self.left_factors = []
        self.is_in_second_phase = False
        matrices = self.views(grad)
        for matrix, error in zip(matrices, self.views(self.error)):
            matrix.add_(error)

        to_send = [matrix @ basis for matrix, basis in zip(matrices, self.bases)]
        to_send += [slot.view_in(grad) for slot in self.others]
        self.shapes = [part.shape for part in to_send]
        self.work = comm.start_all_reduce(flatten_parts(to_send), self.group)
        return self

    def start_next_phase(self) -> None:
        """Wait for the first all-reduce and start the second, of the right factors; only once."""
        if self.is_in_second_phase:
            return
        num_matrices = len(self.matrices)
        received = split_views(self.work.wait(), self.shapes)
        for slot, value in zip(self.others, received[num_matrices:]):
            slot.view_in(self.grad).copy_(value)
        self.left_factors = [orthonormal(product) for product in received[:num_matrices]]

        matrices = self.views(self.grad)
        errors = self.views(self.error)
        right_factors: list[Tensor] = []  # this rank's part
        for matrix, left, error in zip(matrices, self.left_factors, errors):
            right = matrix.mT @ left
            torch.sub(matrix, left @ right.mT, out=error)
            right_factors.append(right)
        self.work = comm.start_all_reduce(flatten_parts(right_factors), self.group)
        self.is_in_second_phase = True

    def wait(self) -> Tensor:
        """Wait for the sum and return it, in grad."""
        self.start_next_phase()
        shapes = [basis.shape for basis in self.bases]
        right_factors = split_views(self.work.wait(), shapes)
        matrices = self.views(self.grad)
        for matrix, left, right in zip(matrices, self.left_factors, right_factors):
            matrix.copy_(left @ right.mT)
        self.previous_bases = self.bases
        self.bases = [orthonormal(right) for right in right_factors]
        return self.grad

    def resolve_error_feedback(self, is_good: Tensor) -> None:
        """After the step, drop its errors and bases, which may be NaN, if it was skipped."""
        self.error.copy_(torch.where(is_good, self.error, 0))
        both = zip(self.bases, self.previous_bases)
        self.bases = [torch.where(is_good, new, old) for new, old in both]

    def state(self) -> CompressionState:
        """Return the state before the next exchange, including a copy of the error."""
        return CompressionState(self.error.clone(), self.bases, self.previous_bases)

    def restore(self, state: CompressionState) -> None:
        """Undo the exchanges since state()."""
        self.error.copy_(state.error)
        self.bases = state.bases
        self.previous_bases = state.previous_bases

    # ---- checkpoints ---------------------------------------------------------------------------------------

    def sum_errors(self) -> Tensor:
        """Return the sum [size] of the ranks' errors, and split it evenly between them.

        Collective: one all-reduce of the bucket's size.
        """
        total = comm.all_reduce_sum(self.error.clone(), self.group)
        self.set_summed_error(total)
        return total

    def set_summed_error(self, total: Tensor) -> None:
        """Take this rank's equal share of a sum of errors, total [size]."""
        torch.div(total, self.group.size, out=self.error)

    def basis_boxes(self, each_once: bool = False) -> list[tuple[Box, Tensor]]:
        """Return [(box, its elements)] of the bases, which a checkpoint stores next to the summed error.

        each_once skips bases that another rank saves: the matrices are balanced over ranks by size.
        """
        writers = least_loaded([basis.numel() for basis in self.bases], self.group.size)
        results: list[tuple[Box, Tensor]] = []
        for slot, basis, writer in zip(self.matrices, self.bases, writers):
            if each_once and not (slot.counted_in_norm and self.group.index == writer):
                continue
            # a basis belongs to the part, which its start names
            first = slot.param.spec.boxes[0]
            start = "x".join(map(str, first.start))
            basis_box = Box.whole(f"{first.key}{BASIS_MARK}.{start}", basis.shape)
            results.append((basis_box, basis))
        return results


def flatten_parts(parts: list[Tensor]) -> Tensor:
    """Concatenate all elements of the tensors: [sum of their sizes]."""
    return torch.cat([part.reshape(-1) for part in parts])


def split_views(flat: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    """Split a result of flatten_parts into views of these shapes."""
    sizes = [shape.numel() for shape in shapes]
    parts = flat.split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes)]
