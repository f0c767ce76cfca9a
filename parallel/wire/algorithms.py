"""Algorithms that reduce gradients over data-parallel ranks.

The backend's collectives, plain implementations that can be read and compared, or 8 bits per element.

n: bytes of a bucket; N: ranks; k: ranks per node. Bytes that a rank sends:

    collective   depends on the backend; the ledger counts an all-reduce of n
    ring         2 (N-1)/N n                             bandwidth-optimal (Patarasuk and Yuan, 2009)
    hierarchy    2 (k-1)/k n + 2 (N/k - 1)/(N/k) n/k     slow links between nodes carry 1/k of it (Horovod)
    server       n, and (N-1) n from rank 0              the parameter server (Li et al., 2014)
    int8, fp8    1 + 4/block bytes per element: an all-to-all and an all-gather; lossy (compress.py)

Horovod: arXiv 1802.05799. Every sum has a fixed order, so the same layout gives the same bits. ZeRO only
needs a reduce-scatter, the first half of the ring: (N-1)/N n. hierarchy and server sum whole buckets on every
rank, so ZeRO rejects them (config rules). They and the ring run synchronously; all others overlap with the
backward.
"""
from collections.abc import Sequence

import torch
from torch import Tensor

from parallel.wire import comm, compress
from parallel.wire.comm import Group, PendingExchange

Peer = tuple[Tensor, int]  # a tensor, and the group index of the rank that it goes to or comes from


def start_sum(
    x: Tensor,
    group: Group,
    algorithm: str,
    ranks_per_node: int | None = None,
    block: int = 0,
) -> PendingExchange | compress.CompressedAllReduce:
    """Start summing x [n] over the group, in place, on every rank. See the module for what it sends.

    n is a multiple of the group's size (and of block). ranks_per_node is for a hierarchy; with None, all
    ranks are on one node. block is the number of elements that share a scale, if the algorithm is a codec.
    """
    if algorithm == "collective" or group.size == 1:
        return comm.start_all_reduce(x, group)
    if algorithm in compress.CODECS:
        return compress.CompressedAllReduce(x, group, algorithm, block)
    if algorithm == "ring":
        ring = range(group.size)
        ring_reduce_scatter(x, group, ring)
        ring_all_gather(x, group, ring)
    elif algorithm == "hierarchy":
        hierarchical_all_reduce(x, group, ranks_per_node)
    else:
        parameter_server_all_reduce(x, group)
    return PendingExchange(x)


def start_scatter_sum(
    x: Tensor,
    group: Group,
    algorithm: str,
    block: int = 0,
    out: Tensor | None = None,
) -> PendingExchange | compress.CompressedReduceScatter:
    """Start a reduce-scatter of x [n] over the group; this rank gets its [n / size].

    x must not be used afterwards. Sends the same as the first half of start_sum. out: see
    comm.start_reduce_scatter; the ring and the codecs do not write to it.
    """
    if algorithm == "collective" or group.size == 1:
        return comm.start_reduce_scatter(x, group, out)
    if algorithm in compress.CODECS:
        return compress.CompressedReduceScatter(x, group, algorithm, block)
    own_chunk = ring_reduce_scatter(x, group, range(group.size))
    return PendingExchange(own_chunk.clone())


def start_gather(
    x: Tensor,
    group: Group,
    out: Tensor,
    codec: str,
    block: int = 0,
) -> PendingExchange | compress.CompressedAllGather:
    """Start gathering x [n / size] of each rank into out [n] on every rank: one all-gather.

    codec is none, int8 or fp8. block is the number of elements that share a scale, if there is a codec.
    """
    if codec == "none" or group.size == 1:
        return comm.start_all_gather(x, group, out)
    return compress.CompressedAllGather(x, group, out, codec=codec, block=block)


# ---- the ring ----------------------------------------------------------------------------------------------


def ring_reduce_scatter(x: Tensor, group: Group, ring: Sequence[int]) -> Tensor:
    """Sum x [n] over the N ranks of `ring`. Return this rank's chunk [n / N], a view of x that holds the sum.

    ring lists group indices, this rank's among them. There are N - 1 steps: in each a rank sends the partial
    sum of one chunk and adds its own part to the one that it receives. The sum of chunk c starts at the rank
    after c and ends at c.
    """
    size = len(ring)
    here = ring.index(group.index)
    chunks = x.chunk(size)
    for step in range(1, size):
        to_send = chunks[(here - step) % size]
        to_add = chunks[(here - step - 1) % size]
        to_add.add_(send_around(to_send, group, ring))
    return chunks[here]


def ring_all_gather(x: Tensor, group: Group, ring: Sequence[int]) -> None:
    """All-gather every rank's own chunk of x [n] over the N ranks of the ring, in place.

    There are N - 1 steps: in each a rank sends the chunk that it received last.
    """
    size = len(ring)
    here = ring.index(group.index)
    chunks = x.chunk(size)
    for step in range(size - 1):
        to_send = chunks[(here - step) % size]
        to_fill = chunks[(here - step - 1) % size]
        to_fill.copy_(send_around(to_send, group, ring))


def send_around(x: Tensor, group: Group, ring: Sequence[int]) -> Tensor:
    """Send x to the next rank of the ring and return as much from the previous one."""
    here = ring.index(group.index)
    next_rank = ring[(here + 1) % len(ring)]
    previous_rank = ring[here - 1]
    return send_receive(x, next_rank, previous_rank, group)


def send_receive(x: Tensor, target: int, source: int, group: Group) -> Tensor:
    """Send x to one rank of the group while receiving as much from another."""
    received = torch.empty_like(x)
    for transfer in comm.start_transfers([(x, target)], [(received, source)], group):
        transfer.wait()
    return received


# ---- hierarchy and parameter server ------------------------------------------------------------------------


def ranks_by_node(ranks: Sequence[int], ranks_per_node: int | None) -> list[list[int]]:
    """Return a group's indices, node by node. ranks_per_node is None if all ranks are on one node."""
    nodes: dict[int, list[int]] = {}
    for index, rank in enumerate(ranks):
        node = rank // ranks_per_node if ranks_per_node else 0
        nodes.setdefault(node, []).append(index)
    return list(nodes.values())


def hierarchical_all_reduce(x: Tensor, group: Group, ranks_per_node: int | None) -> None:
    """Sum x [n] in place, sending only one chunk of it between nodes.

    All nodes must hold equally many ranks of the group.
    """
    nodes = ranks_by_node(group.ranks, ranks_per_node)
    own_node = next(node for node in nodes if group.index in node)
    position = own_node.index(group.index)
    peers = [node[position] for node in nodes]  # the rank of each node that holds the same chunk

    chunk = ring_reduce_scatter(x, group, own_node)  # in the node
    ring_reduce_scatter(chunk, group, peers)  # between nodes
    ring_all_gather(chunk, group, peers)
    ring_all_gather(x, group, own_node)


def parameter_server_all_reduce(x: Tensor, group: Group) -> None:
    """Sum x [n] in place: all ranks send to rank 0, which adds in rank order and sends the sum back."""
    if group.index > 0:
        exchange(group, sends=[(x, 0)])
        exchange(group, receives=[(x, 0)])
        return

    others = range(1, group.size)
    parts = [torch.empty_like(x) for _ in others]
    exchange(group, receives=list(zip(parts, others)))
    for part in parts:
        x.add_(part)
    exchange(group, sends=[(x, other) for other in others])


def exchange(group: Group, sends: Sequence[Peer] = (), receives: Sequence[Peer] = ()) -> None:
    """Send [(tensor, target)] and receive [(buffer, source)]; return when all transfers have finished."""
    for transfer in comm.start_transfers(list(sends), list(receives), group):
        transfer.wait()
