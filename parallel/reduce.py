"""Sums over data-parallel ranks: the backend's collectives, point-to-point sends to be read and compared, or 8 bits an element.

n: bytes of the bucket; N: ranks; k: ranks of one node. Bytes that a rank sends:

    collective   the backend's choice; the ledger counts an all-reduce of n
    ring         2 (N-1)/N n                              bandwidth-optimal (Patarasuk and Yuan 2009; Horovod, arXiv 1802.05799)
    hierarchy    2 (k-1)/k n + 2 (N/k - 1)/(N/k) n/k       slow links between nodes carry 1/k of it (Horovod's hierarchical all-reduce)
    server       n, and (N-1) n from rank 0               the parameter server: rank 0 is the bottleneck (Li et al. 2014)
    int8, fp8    of 1 + 4/block bytes an element: an all-to-all and an all-gather (parallel/compress.py): lossy

Every sum is taken in a fixed order, so the same layout gives the same bits. ZeRO needs a reduce-scatter only, which is the
first half of the ring, (N-1)/N n; hierarchy and server sum whole buckets on every rank and are refused with it (rules.validate).
Sends run where they are called: the others overlap with the backward.
"""
from collections.abc import Sequence

import torch
from torch import Tensor

from parallel import comm, compress
from parallel.comm import Group, Work


def start_sum(x: Tensor, group: Group, kind: str, node: int | None = None, block: int = 0) -> Work | compress.Sum:
    """In place: x [n] summed over the group, on every rank. n is a multiple of the group's size (and block). node: ranks of a node;
    block: elements of a scale."""
    if kind == "collective" or group.size == 1:
        return comm.start_sum(x, group)
    if kind in compress.CODES:
        return compress.Sum(x, group, kind, block)
    everyone = tuple(range(group.size))
    if kind == "ring":
        ring_scatter(x, group, everyone)
        ring_gather(x, group, everyone)
    elif kind == "hierarchy":
        hierarchy(x, group, node)
    else:
        server(x, group)
    return Work(x)


def start_scatter_sum(x: Tensor, group: Group, kind: str, block: int = 0) -> Work | compress.ScatteredSum:
    """x [n] of each rank -> this rank's [n / size] of the sum. x is scratch afterwards."""
    if kind == "collective" or group.size == 1:
        return comm.start_scatter_sum(x, group)
    if kind in compress.CODES:
        return compress.ScatteredSum(x, group, kind, block)
    return Work(ring_scatter(x, group, tuple(range(group.size))).clone())


def start_gather(x: Tensor, group: Group, out: Tensor, kind: str, block: int = 0) -> Work | compress.Gather:
    """x [n / size] of each rank -> out [n] on every rank. kind: none, int8 or fp8."""
    if kind == "none" or group.size == 1:
        return comm.start_gather(x, group, out)
    return compress.Gather(x, group, out, kind, block)


def swap(send: Tensor, to: int, source: int, group: Group) -> Tensor:
    """Send to one rank of the group while receiving as much from another."""
    out = torch.empty_like(send)
    for work in comm.exchange([(send, to)], [(out, source)], group):
        work.wait()
    return out


def ring_scatter(x: Tensor, group: Group, ring: Sequence[int]) -> Tensor:
    """Sum over the ranks `ring` (indexes in the group, this one among them) in N - 1 steps -> this rank's chunk of x, a view.

    In step t every rank passes on the partial sum of one chunk and adds its own part to the one that comes in; the sum of
    chunk c starts at the rank after c and ends at c."""
    size, here, parts = len(ring), ring.index(group.index), x.chunk(len(ring))
    for t in range(1, size):
        parts[(here - t - 1) % size].add_(swap(parts[(here - t) % size], ring[(here + 1) % size], ring[here - 1], group))
    return parts[here]


def ring_gather(x: Tensor, group: Group, ring: Sequence[int]) -> None:
    """Every rank's own chunk of x to all of the ring, in N - 1 steps: what came in last is passed on."""
    size, here, parts = len(ring), ring.index(group.index), x.chunk(len(ring))
    for t in range(size - 1):
        parts[(here - t - 1) % size].copy_(swap(parts[(here - t) % size], ring[(here + 1) % size], ring[here - 1], group))


def nodes(ranks: Sequence[int], node: int | None) -> list[list[int]]:
    """Indexes of a group's ranks, by the node that they are on (global rank // node; None: all on one)."""
    table: dict[int, list[int]] = {}
    for i, rank in enumerate(ranks):
        table.setdefault(rank // node if node else 0, []).append(i)
    return list(table.values())


def hierarchy(x: Tensor, group: Group, node: int | None) -> None:
    """Scatter the sum inside the node, sum each chunk between the nodes, gather inside. Nodes hold equally many ranks."""
    every = nodes(group.ranks, node)
    mine = next(n for n in every if group.index in n)
    chunk = ring_scatter(x, group, mine)
    peers = [n[mine.index(group.index)] for n in every]  # who holds the same chunk, a rank of each node
    ring_scatter(chunk, group, peers)
    ring_gather(chunk, group, peers)
    ring_gather(x, group, mine)


def server(x: Tensor, group: Group) -> None:
    """All to rank 0, which adds in the order of ranks, and back."""
    others = range(1, group.size)
    if group.index:
        works = comm.exchange([(x, 0)], [], group)
    else:
        parts = [torch.empty_like(x) for _ in others]
        works = comm.exchange([], list(zip(parts, others)), group)
    for work in works:
        work.wait()
    if group.index == 0:
        for part in parts:
            x.add_(part)
        works = comm.exchange([(x, i) for i in others], [], group)
    else:
        works = comm.exchange([], [(x, 0)], group)
    for work in works:
        work.wait()
