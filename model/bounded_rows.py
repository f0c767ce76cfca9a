"""Steps whose experts got more rows than parallel.ep_bound allows are computed again, exactly.

A bounded dispatch (parallel/expert/bounded.py) leaves out rows over the bound and counts them, like tokens
dropped by a capacity, in the statistics of the routers. After the backward of a step the counts of all
layers, microbatches and ranks are summed, and the host reads the sum: the only read of the mixtures in a
step. If it is not 0, forward and backward run again from the same state, and every layer sends what is
routed. Dropout masks are functions of seed, step and position, and statistics and gradients start over with
each computation. Only PowerSGD's error has to be restored: a copy is kept during the first one.
"""
import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from model.moe import MoE
from model.router import ROUTER_STATS
from model.transformer import PipelineStage
from parallel.extras import StepExtra
from parallel.sharding.bucket import Bucket, get_compression, restore_compression
from parallel.sharding.powersgd import CompressionState
from parallel.topology.mesh import Mesh
from parallel.wire import comm

DROPPED = ROUTER_STATS.index("dropped")


class BoundedRows(StepExtra):
    """Compute a step again if rows of any rank were over the bound.

    begun_with: each bucket's PowerSGD state before the step. num_steps, num_repeated: steps since the phase
    began, and how many of them were computed twice.
    """

    def __init__(
        self, bound: float, stages: Iterable[PipelineStage], buckets: list[Bucket], mesh: Mesh,
        device: torch.device,
    ) -> None:
        self.bound = bound
        self.mixtures = [each for stage in stages for each in stage.modules() if isinstance(each, MoE)]
        self.buckets = buckets
        self.everyone = mesh.world
        self.device = device
        self.begun_with: list[CompressionState | None] = []
        self.noted = 0  # the last step
        self.num_steps = 0
        self.num_repeated = 0
        self.lines: list[str] = []

    def around_gradients(self, run: Any, step: int, compute: Callable[[], Tensor]) -> Tensor:
        """Compute the gradients, twice if needed. Collective: one all-reduce, which the host reads."""
        self.begun_with = get_compression(self.buckets)
        loss = compute()
        fits = self.all_rows_fit()
        self.note(step, fits)
        if not fits:
            restore_compression(self.buckets, self.begun_with)
            with exact_dispatch(self.mixtures):
                loss = compute()
        self.begun_with = []
        return loss

    def all_rows_fit(self) -> bool:
        """Return whether no rank has left out a row in this step."""
        num_over = torch.zeros((), dtype=torch.float64, device=self.device)
        for mixture in self.mixtures:
            num_over += mixture.router.stats[mixture.num_experts + DROPPED]
        return bool(comm.all_reduce_sum(num_over, self.everyone) == 0)

    def note(self, step: int, fits: bool) -> None:
        """Count a step, and log it if it is the 1st, 2nd, 4th, 8th ... repeated one."""
        if step == self.noted:  # a rerun
            return
        self.noted = step
        self.num_steps += 1
        if fits:
            return
        self.num_repeated += 1
        if self.num_repeated & (self.num_repeated - 1) == 0:
            self.lines.append(
                f"step {step:,} had more rows for a rank of experts than parallel.ep_bound {self.bound:g} "
                f"allows, and was computed again with all of them, as {self.num_repeated:,} of "
                f"{self.num_steps:,} steps so far; a higher bound needs that less often"
            )

    def pop_lines(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


@contextlib.contextmanager
def exact_dispatch(mixtures: Iterable[MoE]) -> Iterator[None]:
    """Let the mixtures send what is routed, without a bound."""
    for mixture in mixtures:
        mixture.is_bounded = False
    try:
        yield
    finally:
        for mixture in mixtures:
            mixture.is_bounded = True
