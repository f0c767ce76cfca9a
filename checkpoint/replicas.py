"""Check that replicas are identical, before each save and every checkpoint.check_replicas steps."""
from typing import Any

from checkpoint.state import get_moments
from config import is_due
from parallel.extras import Extra
from parallel.sharding.bucket import wait_param_gathers
from parallel.sharding.replicas import check_replicas
from parallel.topology.dims import GROUP_AXES
from parallel.wire import comm
from runtime.run import TrainingRun


def compare_replicas(run: TrainingRun) -> None:
    """Wait for the updated weights and compare all replicas.

    Raises ReplicaMismatch if replicas differ, and CollectiveMismatch if the ranks of a group have not run the
    same collectives.
    """
    wait_param_gathers(run.buckets)
    comm.check_collectives([getattr(run.mesh, name) for name in GROUP_AXES])
    routers = [(box.key, tensor) for box, tensor in run.routers.boxes()]
    check_replicas(run.buckets, get_moments(run), run.mesh, routers)


class ReplicaChecks(Extra):
    """Compare the replicas every `every` steps, unless a save has just done so."""

    def __init__(self, every: int) -> None:
        self.every = every

    def after_save(self, run: Any, step: int, saved: bool) -> bool:
        if is_due(self.every, step) and not saved:
            compare_replicas(run)
        return saved
