"""Compares what ranks hold alike: before each save, and every checkpoint.check_replicas steps."""
from typing import Any

from checkpoint.state import RunState, moments_of
from config import is_due
from parallel.extras import Extra
from parallel.sharding.bucket import wait_param_gathers
from parallel.sharding.replicas import check_replicas
from parallel.topology.dims import GROUP_AXES
from parallel.wire import comm


def compare_replicas(run: RunState) -> None:
    """Waits for the updated weights. Raises ReplicasDiffer if ranks that hold the same numbers differ, and
    ExchangesDiffer if those of a group have not run the same collectives.
    """
    wait_param_gathers(run.buckets)
    comm.check_collectives([getattr(run.mesh, name) for name in GROUP_AXES])
    routers = [(box.key, tensor) for box, tensor in run.routers.boxes()]
    check_replicas(run.buckets, moments_of(run), run.mesh, routers)


class ReplicaChecks(Extra):
    """Compares the ranks every so many steps, where no save has done it."""

    def __init__(self, every: int) -> None:
        self.every = every

    def after_save(self, run: Any, step: int, saved: bool) -> bool:
        if is_due(self.every, step) and not saved:
            compare_replicas(run)
        return saved
