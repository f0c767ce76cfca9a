"""Async tensor parallelism: overlap the linear layers of a region with the transfers of the sequence.

Under sequence parallelism (arXiv 2205.05198) a column layer all-gathers its input and a row layer
reduce-scatters its output. With collectives, the GEMM starts once the last rank's part has arrived, and the
scatter starts once the whole GEMM is done. Here each rank's part of the sequence is a separate message and a
separate GEMM: a part is multiplied as soon as it arrives, and sent as soon as it is multiplied (Wang et al.,
Overlap Communication with Dependent Computation via Decomposition, ASPLOS 2023; Megatron-LM's
--tp-comm-overlap, torchtitan's async tensor parallel).

In round i of n - 1, rank r sends to rank r + i and receives from rank r - i: every round pairs up, and the
volume is the same as with collectives.
"""
from collections.abc import Iterator

from torch import Tensor

from kernels.grad import accumulation_dtype
from kernels.linear import product
from parallel.wire import comm
from parallel.wire.comm import Group, Transfer


def gather_and_multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group
) -> tuple[Tensor, Tensor]:
    """x [b, s/tp, n], weight [m, n], bias [m] -> the gathered x [b, s, n], and y [b, s, m] = x W^T + b.

    This rank's part is multiplied while the others are in flight; each other part while later ones are.
    """
    b, length, n = x.shape
    gathered = x.new_empty(group.size, b, length, n)  # by rank
    gathered[group.index] = x
    under_way: list[tuple[int, list[Transfer]]] = []
    for target, source in rounds(group):
        sends = [(gathered[group.index], target)]
        receives = [(gathered[source], source)]
        under_way.append((source, comm.start_transfers(sends, receives, group)))

    y = x.new_empty(group.size, b, length, weight.shape[0])
    product(gathered[group.index], weight, bias, out=y[group.index])
    for source, transfers in under_way:
        wait_all(transfers)
        product(gathered[source], weight, bias, out=y[source])
    return join_parts(gathered), join_parts(y)


def multiply_and_scatter(x: Tensor, weight: Tensor, group: Group) -> Tensor:
    """x [b, s, n/tp], weight [m, n/tp] -> this rank's part [b, s/tp, m] of the sum of x W^T over the group.

    The parts for other ranks are multiplied first, and travel while the next is multiplied. The sum is in
    fp32 or better, in rank order.
    """
    parts = x.unflatten(1, (group.size, -1)).transpose(0, 1)  # [tp, b, s/tp, n/tp]
    summands = x.new_empty(*parts.shape[:-1], weight.shape[0])  # by source rank, for this rank's part
    under_way: list[Transfer] = []
    sent: list[Tensor] = []  # must stay alive until received
    for target, source in rounds(group):
        partial = product(parts[target], weight)
        sent.append(partial)
        under_way += comm.start_transfers([(partial, target)], [(summands[source], source)], group)

    product(parts[group.index], weight, out=summands[group.index])
    wait_all(under_way)
    return summands.sum(0, dtype=accumulation_dtype(x.dtype)).to(x.dtype)


def rounds(group: Group) -> Iterator[tuple[int, int]]:
    """Yield (rank to send to, rank to receive from) for each round, as group indices."""
    for distance in range(1, group.size):
        yield (group.index + distance) % group.size, (group.index - distance) % group.size


def wait_all(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()


def join_parts(parts: Tensor) -> Tensor:
    """Join parts of the sequence by rank: [tp, b, s/tp, ...] -> [b, s, ...]; copies if b > 1."""
    return parts.transpose(0, 1).flatten(1, 2)
