"""GPU memory beyond tensors: the buffers of NCCL's communicators, and CUDA's overhead.

A rank has one communicator for each of its process groups (connections_of_rank), and NCCL shares no buffers
between them: torch splits them off the job's, without ncclConfig's splitShare (NVIDIA/nccl#986). Each
connection to another rank has, per channel, a buffer for every protocol on the receiver, and a page on the
sender. In pages of 2 MiB (transport/p2p.cc, init.cc):

    receives   LL 8 lines x 512 threads x 8 steps x 16 bytes + LL128 120 x 640 x 8 x 8 bytes
               + Simple NCCL_BUFFSIZE 4 MiB                                                   10 MiB
    sends      within a node                                                                   2 MiB
               to another node: all but LL's, if the network card reads GPU memory            10 MiB

NVIDIA/nccl#1685 counts allocations of these two sizes, 10,485,760 and 2,097,152 bytes, on 8 H100.

    collectives     a ring: one connection each way per channel. 24 channels within a node of H100s (NCCL's
                    log: "24 coll channels, 16 nvls channels, 32 p2p channels, 32 p2p channels per peer"), 16
                    across nodes (graph/connect.cc)
    NVLink SHARP    with more than two ranks in a node: 16 channels x 2 x 1 MiB for each of them
                    (transport/nvls.cc); since Hopper
    transfers and   one connection each way with every peer in the node, 32 channels each; 2 in groups across
    all-to-alls     nodes, and for other nodes two buffers shared by all peers, of 16 channels x 16 steps x
                    128 KiB (graph/paths.cc, transport/net.cc)

The verbs come from the ledger of the step (plan/bytes.py). So 8 ranks of a node that exchange expert tokens
need 7 x 32 x 12 MiB for it. The second connections of a tree and the memory of other libraries are not
counted (RCCL is assumed to be like NCCL). None of this has been compared with a GPU run of this code.
"""
from typing import NamedTuple

from config import Config
from parallel.topology.dims import connections_of_rank, requested_groups
from plan.bytes import step_bytes
from plan.job import Job

MIB = 2**20
PAGE = 2 * MIB
LL_BUFFER = 8 * 512 * 8 * 16
LL128_BUFFER = 120 * 640 * 8 * 8
SIMPLE_BUFFER = 4 * MIB  # NCCL_BUFFSIZE
SHARED_NETWORK_BUFFER = 16 * 16 * 128 * 2**10
NVLS_BUFFER = 16 * 2 * MIB  # per rank in the node
NODE = 8  # default GPUs per node, if no cluster says otherwise

# names of groups that connect neighbors at startup
MEET_NEIGHBOURS = {request.name for request in requested_groups().values() if request.meets_neighbours}

# communicators within one node, and across several
COLLECTIVE_CHANNELS = {"node": 24, "nodes": 16}
PEER_CHANNELS = {"node": 32, "nodes": 2}

# CUDA's memory on an H100 before any tensor: its context, the kernels of torch and of NCCL
# (NVIDIA/nccl#1685: 1.06 GB before the first all-to-all). No figure was found for other GPUs, which are
# assumed to be the same.
CONTEXT_BYTES = 1_060_000_000
# cuBLAS workspace, and the same for cublasLt: 32 MiB since Hopper, as its manual recommends, 8,320 KiB before
# (torch's ATen/cuda/CublasHandlePool.cpp; pytorch/pytorch#95668 finds 8,519,680 on an A10G).
WORKSPACE_BYTES = 32 * MIB
OLDER_WORKSPACE_BYTES = 8320 * 2**10
# Assumed: memory that torch's allocator holds between tensors, with expandable segments.
ALLOCATOR_BYTES = 500_000_000
BEFORE_HOPPER = ("v100", "a100", "a800", "a10g", "l4", "rtx")  # substrings of their names
WITHOUT_NVLS = (*BEFORE_HOPPER, "mi250x", "mi300x")


class Gpu(NamedTuple):
    """The properties of a GPU that determine its memory beyond tensors.

    `name` is from configs/clusters.yaml, or torch's in lower case, "" if unknown. `node` is the GPUs per
    node.
    """
    name: str = ""
    node: int = NODE

    def matches_any(self, names: tuple[str, ...]) -> bool:
        return any(name in self.name for name in names)


def reserved_bytes(gpu: Gpu) -> int:
    """Return the overhead on any GPU: CUDA's context, library workspaces, the allocator's gaps."""
    workspace = OLDER_WORKSPACE_BYTES if gpu.matches_any(BEFORE_HOPPER) else WORKSPACE_BYTES
    return CONTEXT_BYTES + 2 * workspace + ALLOCATOR_BYTES


def communicator_bytes(job: Job, gpu: Gpu) -> int:
    """Return the bytes of all communicators of the job's rank."""
    used: dict[str, set[str]] = {}
    for group, verb in step_bytes(job):
        used.setdefault(group, set()).add(verb)
    total = 0
    for (_, ranks), names in connections_of_rank(job.layout, job.rank).items():
        peers = 0
        for name in names:
            peers = max(peers, num_peers(job.cfg, name, used.get(name, set()), len(ranks)))
        total += communicator_nbytes(get_placement(ranks, job.rank, gpu.node), peers, gpu)
    return total


def num_peers(cfg: Config, group: str, verbs: set[str], size: int) -> int:
    """Return how many ranks of a group one sends to, other than in collectives. `verbs` are a step's."""
    if "all_to_all" in verbs:
        return size - 1
    if group in MEET_NEIGHBOURS:
        return min(2, size - 1)
    if "send" not in verbs:
        return 0
    is_ring = cfg.parallel.reduce in ("ring", "hierarchy") and group != "tp"
    return min(2, size - 1) if is_ring else size - 1  # async tensor parallelism, a server of gradients


class Placement(NamedTuple):
    """`near` of a communicator's `size` ranks are in the node of this rank."""
    size: int
    near: int

    @property
    def is_in_node(self) -> bool:
        return self.near == self.size


def get_placement(ranks: tuple[int, ...], rank: int, node: int) -> Placement:
    return Placement(len(ranks), sum(other // node == rank // node for other in ranks))


def communicator_nbytes(placement: Placement, peers: int, gpu: Gpu) -> int:
    """Return the bytes of one communicator. It sends to `peers` ranks, those in its node first."""
    extent = "node" if placement.is_in_node else "nodes"
    receives = in_pages(LL_BUFFER + LL128_BUFFER + SIMPLE_BUFFER)

    # rings: across nodes, each rank of a node carries its share of the outgoing connections
    sends = float(PAGE)
    if not placement.is_in_node:
        to_other_node = in_pages(LL128_BUFFER + SIMPLE_BUFFER)
        sends += (to_other_node - PAGE) / placement.near
    total = COLLECTIVE_CHANNELS[extent] * (receives + sends)
    if placement.near > 2 and not gpu.matches_any(WITHOUT_NVLS):
        total += NVLS_BUFFER * placement.near

    # point-to-point transfers
    near_peers = min(peers, placement.near - 1)
    total += near_peers * PEER_CHANNELS[extent] * (receives + PAGE)
    if peers and not placement.is_in_node:
        total += 2 * SHARED_NETWORK_BUFFER
    return round(total)


def in_pages(nbytes: int) -> int:
    """Round up to whole pages."""
    return -(-nbytes // PAGE) * PAGE
