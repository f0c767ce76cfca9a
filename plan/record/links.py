"""Time of an exchange on a cluster's links, given the participating ranks (plan/cost.py)."""

from typing import NamedTuple

from parallel.wire.lanes import PostedExchange
from plan.cost import Cluster, Efficiency, num_hops, seconds_on_links, sent_bytes


class ClusterLinks(NamedTuple):
    cluster: Cluster
    efficiency: Efficiency = Efficiency()


def seconds_of_exchange(links: ClusterLinks, rank: int, exchange: PostedExchange) -> float:
    """Return the seconds from when all ranks are ready. Assumes that nothing else uses the links."""
    _, ranks = exchange.lane
    if exchange.peer is not None:
        ranks = (rank, exchange.peer)
    node = links.cluster.node
    near = sum(other // node == rank // node for other in ranks)
    sent = sent_bytes(exchange.verb, size=len(ranks), near=near, nbytes=exchange.nbytes)
    return seconds_on_links(*links, sent, hops=num_hops(exchange.verb, len(ranks)))
