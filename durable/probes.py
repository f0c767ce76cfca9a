"""Probe devices and links before the first step, and report those that are faulty or slow.

A device that computes wrong products or a link that corrupts bits ends a run after days, or silently spoils
it. So before the first step

- each rank multiplies matrices of small integers, whose product is known exactly, in the dtype of the run;
  a difference ends the job with code 80 and names the host;
- each group of ranks gathers a message with known content; a difference does the same;
- both are timed and compared with the other ranks, and with the other groups of an axis. Anything that takes
  longer than SLOW_RATIO times the median and SLOW_MS more is reported in one line, and the run continues.

Costs: one small GEMM, one or two exchanges of at most MAX_GATHERED bytes in each group of several ranks, and
a gather of a few numbers. Collective.
"""
import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.topology.dims import GROUP_AXES
from parallel.topology.mesh import Mesh
from parallel.wire import comm
from parallel.wire.comm import Group

SLOW_RATIO = 3.0
SLOW_MS = 5.0  # less is timing noise
MAX_NAMED = 4  # slow devices or links named per kind
MAX_GATHERED = 32 << 20  # bytes that a rank receives; messages are smaller in large groups
MIN_MESSAGE = 1 << 10  # bytes


@dataclass(frozen=True)
class ProbeSize:
    """n: rows and columns of the product. message: bytes each rank sends. repeats: timed runs after a warm-up
    that connects; the fastest counts."""

    n: int
    message: int
    repeats: int


# On a GPU the message must outweigh the latency. On a CPU, where runs are tests, a small probe is enough.
SIZES = {"cuda": ProbeSize(n=4096, message=4 << 20, repeats=3)}
SMALL = ProbeSize(n=64, message=1 << 10, repeats=1)


class WrongResult(RuntimeError):
    """A link corrupts bits. Exit code 80, so that a host can be excluded."""

    exit_code = 80


class WrongDevice(WrongResult):
    """This rank's device computes a wrong product. scripts/launch.py can exclude it."""

    is_of_device = True


@dataclass(frozen=True)
class Probed:
    """The measurements of this rank in ms. links: {axis: time of its group's exchange}."""

    product: float
    links: dict[str, float]

    def row(self) -> list[float]:
        """Return one number for each of COLUMNS, -1 for axes in which this rank has no peers."""
        return [self.product, *(self.links.get(name, -1.0) for name in GROUP_AXES)]


def probe(mesh: Mesh, device: torch.device, dtype: torch.dtype, host: str) -> list[str]:
    """Probe devices and links, and return lines that name the slow ones, on rank 0. Collective.

    dtype: the dtype of the products. host: the name of this rank's host. Raises WrongResult.
    """
    size = SIZES.get(device.type, SMALL)
    probed = Probed(check_product(size, device, dtype, host), check_links(mesh, size, device, host))
    if mesh.world.size == 1:
        return []

    # gather the measurements and hosts of all ranks
    everyone = uncounted(mesh.world)
    rows = comm.all_gather(torch.tensor([probed.row()], dtype=torch.float64), everyone).tolist()
    hosts = comm.all_gather_objects(host, everyone)
    if mesh.world.index > 0:
        return []
    return [*slow_devices(rows, hosts), *slow_links(rows, hosts, mesh)]


# ---- devices -----------------------------------------------------------------------------------------------


def check_product(size: ProbeSize, device: torch.device, dtype: torch.dtype, host: str) -> float:
    """Check a product with a known result; return its time in ms. Raises WrongDevice."""
    left, right, expected = known_product(size.n, device, dtype)
    fastest = float("inf")
    for _ in range(size.repeats):
        comm.synchronize(device)
        began = time.perf_counter()
        product = left @ right
        comm.synchronize(device)
        fastest = min(fastest, time.perf_counter() - began)
        num_wrong = int((product != expected).sum())
        if num_wrong:
            raise WrongDevice(
                f"{device} of {host} multiplies wrongly: {num_wrong:,} of {expected.numel():,} elements of a "
                "known product differ; exclude this host, and have it checked"
            )
    return 1000 * fastest


def known_product(n: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return two matrices [n, n] and their product in dtype; integers make any summation order exact.

    Both have rank 1, so the product is known without a GEMM: (u v') (w z') = (v' w) u z'.
    """
    numbers = torch.arange(n, dtype=torch.float64)
    u, v = numbers % 3 - 1, numbers % 5 - 2
    w, z = numbers % 7 - 3, numbers % 4 - 1
    inner = (v @ w).item()
    left, right = torch.outer(u, v), torch.outer(w, z)
    expected = inner * torch.outer(u, z)
    return (
        left.to(device, dtype),
        right.to(device, dtype),
        expected.to(dtype).to(device),
    )


def slow_devices(rows: Sequence[Sequence[float]], hosts: Sequence[str]) -> list[str]:
    """Return a line for each of the slowest devices. rows: Probed.row() of each rank."""
    times = [row[0] for row in rows]
    usual = statistics.median_low(times)
    slow = [rank for rank, ms in enumerate(times) if is_slow(ms, usual)]
    slow.sort(key=lambda rank: -times[rank])
    return [
        f"slow rank {rank} on {hosts[rank]}: a product takes {times[rank]:.1f} ms, usually {usual:.1f} ms"
        for rank in slow[:MAX_NAMED]
    ]


def is_slow(ms: float, usual: float) -> bool:
    return ms > SLOW_RATIO * usual and ms > usual + SLOW_MS


# ---- links -------------------------------------------------------------------------------------------------


def check_links(mesh: Mesh, size: ProbeSize, device: torch.device, host: str) -> dict[str, float]:
    """Return {axis: ms of a gather in this rank's group}; groups of the same ranks are probed once.

    Raises WrongResult.
    """
    result: dict[str, float] = {}
    done: dict[tuple[int, ...], float] = {}
    for name in GROUP_AXES:
        group: Group = getattr(mesh, name)
        if group.size == 1:
            continue
        if group.ranks not in done:
            done[group.ranks] = check_link(uncounted(group), size, device, host)
        result[name] = done[group.ranks]
    return result


def check_link(group: Group, size: ProbeSize, device: torch.device, host: str) -> float:
    """Check a gather of a known message; return its time in ms. Raises WrongResult, naming the senders."""
    num_bytes = max(MIN_MESSAGE, min(size.message, MAX_GATHERED // group.size))
    own = make_message(group.ranks[group.index], num_bytes).to(device)
    expected = torch.cat([make_message(rank, num_bytes) for rank in group.ranks]).to(device)
    fastest = float("inf")
    for _ in range(size.repeats):
        comm.all_gather(own[:1], group)  # synchronize and connect
        comm.synchronize(device)
        began = time.perf_counter()
        received = comm.all_gather(own, group)
        comm.synchronize(device)
        fastest = min(fastest, time.perf_counter() - began)
        wrong = (received != expected).view(group.size, -1).any(1).tolist()
        senders = [rank for rank, is_wrong in zip(group.ranks, wrong) if is_wrong]
        if senders:
            raise WrongResult(
                f"what {host} receives in group {group.name} from rank {', '.join(map(str, senders))} is not "
                "what was sent; exclude one of these hosts"
            )
    return 1000 * fastest


def make_message(rank: int, num_bytes: int) -> Tensor:
    """Return uint8 [num_bytes] that depend on the rank and on the position."""
    position = torch.arange(MIN_MESSAGE, dtype=torch.int64)
    of_rank = 97 * rank + (rank // 256) * (position // 7)
    block = ((131 * position + position // 251 + of_rank) % 256).to(torch.uint8)
    numbers = torch.arange(-(-num_bytes // MIN_MESSAGE), dtype=torch.int64) % 251
    return (block + numbers.to(torch.uint8).unsqueeze(1)).flatten()[:num_bytes]  # wraps at 256


def uncounted(group: Group) -> Group:
    """Return the group with a separate ledger, since the probes are not part of a step."""
    return dataclasses.replace(group, ledger=Counter())


def slow_links(rows: Sequence[Sequence[float]], hosts: Sequence[str], mesh: Mesh) -> list[str]:
    """Return a line for each of the slowest groups of each axis. rows: Probed.row() of each rank.

    The minimum over a group counts, because the last rank to arrive waits only for the link.
    """
    lines: list[str] = []
    named: set[tuple[int, ...]] = set()
    for column, name in enumerate(GROUP_AXES, start=1):
        groups = [tuple(ranks) for ranks in mesh.dims.groups(*GROUP_AXES[name]) if len(ranks) > 1]
        if len(groups) < 2:
            continue
        times = {ranks: min(rows[rank][column] for rank in ranks) for ranks in groups}
        usual = statistics.median_low(times.values())
        slow = [ranks for ranks in groups if is_slow(times[ranks], usual) and ranks not in named]
        slow.sort(key=lambda ranks: -times[ranks])
        for ranks in slow[:MAX_NAMED]:
            named.add(ranks)
            lines.append(
                f"{slow_link(ranks, hosts)}: a gather in group {name} takes {times[ranks]:.1f} ms, "
                f"usually {usual:.1f} ms"
            )
    return lines


def slow_link(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Format as "slow link of ranks 4, 5 on node2". hosts: the host of every rank."""
    own_hosts = dict.fromkeys(hosts[rank] for rank in ranks)
    return f"slow link of ranks {', '.join(map(str, ranks))} on {', '.join(own_hosts)}"
