"""How long an exchange takes on the links of a cluster, from the ranks that take part: the shares of the data
sheet's bytes/s, and the time of a hop, are those that plan/cost.py fits to published steps.
"""

import math
from functools import lru_cache
from typing import NamedTuple

from plan.cost import Cluster, Efficiency
from plan.record.events import PostedExchange

TRANSFERS = ("send", "receive")


class ClusterLinks(NamedTuple):
    cluster: Cluster
    efficiency: Efficiency = Efficiency()


def seconds_of_exchange(links: ClusterLinks, rank: int, exchange: PostedExchange) -> float:
    """Of one that this rank takes part in, from when all are there. Others do not use the links meanwhile."""
    _, ranks = exchange.lane
    if exchange.peer is not None:
        ranks = (rank, exchange.peer)
    node = links.cluster.node
    near = sum(other // node == rank // node for other in ranks)
    return seconds_of_message(
        links, exchange.verb, size=len(ranks), near=near, nbytes=exchange.nbytes
    )


@lru_cache(maxsize=1 << 14)
def seconds_of_message(links: ClusterLinks, verb: str, *, size: int, near: int, nbytes: int) -> float:
    """size: ranks that take part; near: of them in the node of this one.

    A ring over several nodes leaves each node once, over the links of all its ranks there; a part of an
    all-to-all goes straight to its rank.
    """
    cluster, efficiency = links
    sent_near, sent_far = sent_bytes(verb, size, near, nbytes)
    hops = 1.0 if verb in TRANSFERS else math.log2(size)
    inside = sent_near / (cluster.inside * efficiency.inside)
    between = sent_far / (cluster.between * efficiency.between)
    return hops * efficiency.hop + max(inside, between)


def sent_bytes(verb: str, size: int, near: int, nbytes: int) -> tuple[float, float]:
    """(bytes that a rank sends within its node, to others)."""
    if verb in TRANSFERS:
        return (nbytes, 0.0) if near == size else (0.0, nbytes)
    if verb == "all_to_all":
        return nbytes * (near - 1) / size, nbytes * (size - near) / size
    rounds = 2 if verb == "all_reduce" else 1
    sent = nbytes * rounds * (size - 1) / size
    return (sent, 0.0) if near == size else (sent * (near - 1) / near, sent / near)
