"""SlowRanks: find slow ranks, their hosts, and whether compute, data loading or a link is the cause.

Ranks wait for each other, so a step takes equally long on all of them. They differ in how they spend the time
of a step, in ms:

    compute   the step, minus the following
    data      waiting for the loader
    link      waiting in collectives, by group. The last rank of a group to arrive waits least, and only for
              the transfers, so the minimum wait of a group is the time of its link
    stopped   the process did not run at all: a signal, or no core for it on its host (PauseClock)

Each rank takes medians over a window of steps, which single outliers do not move, and the ranks gather them.
A rank is compared with the others of its pipeline stage, which do the same work; a group with the others of
its axis; and either with its own earlier windows if there are no others. An excess of SLOW_SHARE of a step in
two consecutive windows is reported once, and not repeated while it lasts.

Costs: a host exchange of 8 x (4 + groups) bytes per rank once per window, at a step whose numbers are read
anyway; rank 0 judges. A window is at least log.slow_window steps, and at least a hundredth of the number of
ranks, because gloo's gather takes as many hops as there are ranks.
"""
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from durable.probes import slow_link
from parallel.extras import Extra
from parallel.topology.dims import GROUP_AXES, ParallelDims
from parallel.wire import comm
from runtime.metrics import MetricsLogger, PendingStep

COMPUTE, DATA, LINK, STOPPED = "compute", "data", "link", "stopped"
SLOW_FIELDS = {  # metrics.jsonl fields with the cost of a slow rank or link
    COMPUTE: "slow_compute_ms",
    DATA: "slow_data_ms",
    LINK: "slow_link_ms",
    STOPPED: "slow_stopped_ms",
}
Place = tuple[str, tuple[int, ...]]  # (reason or group name, ranks)

SLOW_SHARE = 0.2  # minimum excess of a slow rank or link, as a fraction of a step
MIN_MS = 2.0  # less is timing noise
RANKS_PER_STEP = 100  # a window has at least (number of ranks / this) steps
HISTORY = 20  # earlier windows to compare with
FIRST_HISTORY = 3  # windows needed before comparing with earlier ones

TICK_SECONDS = 0.25  # interval of a PauseClock
PAUSE_SECONDS = 1.0  # a delay of a tick that counts as a pause

STAGE = "pipeline_stage"
LINK_GROUPS = tuple(name for name in GROUP_AXES if name != "world")
COLUMNS = (COMPUTE, DATA, STOPPED, "step", *LINK_GROUPS)


@dataclass(frozen=True)
class StepShares:
    """Time breakdown of one step on this rank, in ms. waits: {group: ms}."""
    step: int
    step_ms: float
    data_ms: float
    exposed_ms: float
    waits: Mapping[str, float]

    @property
    def compute_ms(self) -> float:
        return max(0.0, self.step_ms - self.data_ms - self.exposed_ms)


@dataclass(frozen=True)
class Slow:
    """A slow rank or link. why: COMPUTE, DATA, LINK or STOPPED.

    ranks: the slow rank, or for a link the ranks of its group, named `group`. ms: time per step, or per
    window for STOPPED. usual_ms: that of the others, or of earlier windows.
    """
    why: str
    ranks: tuple[int, ...]
    ms: float
    usual_ms: float = 0.0
    group: str = ""

    @property
    def excess_ms(self) -> float:
        return self.ms - self.usual_ms

    @property
    def place(self) -> Place:
        """Key that identifies it across windows."""
        return self.why, self.ranks


class PauseClock:
    """Measure the time in which this process did not run, by how late a thread wakes up."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True, name="pauses")
        self.thread.start()

    def watch(self) -> None:
        last = time.monotonic()
        while not self.stop.wait(TICK_SECONDS):
            now = time.monotonic()
            late = now - last - TICK_SECONDS
            if late > PAUSE_SECONDS:
                self.seconds += late
            last = now

    def take(self) -> float:
        """Return the paused seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def close(self) -> None:
        self.stop.set()
        self.thread.join()


class SlowRanks:
    """Find slow ranks: call add() after each step on every rank, and close() at the end.

    window: steps (log.slow_window). Without it, or in a single-rank job, nothing is measured. host: the host
    of this rank. Collective if it measures.
    """

    def __init__(self, window: int | None, dims: ParallelDims, everyone: comm.Group, host: str) -> None:
        self.everyone = everyone
        self.measures = window is not None and everyone.size > 1
        self.window = max(window or 0, everyone.size // RANKS_PER_STEP)
        self.hosts: list[str] = []
        self.has_begun = False
        self.begin_phase(dims)
        self.pauses: PauseClock | None = None
        if self.measures:
            self.hosts = comm.all_gather_objects(host, everyone)
            self.pauses = PauseClock()

    def begin_phase(self, dims: ParallelDims) -> None:
        """Reset the history, since the settings change with the phase."""
        self.shares: list[StepShares] = []
        self.suspects: set[Place] = set()  # in the previous window
        self.named: set[Place] = set()  # already reported and still slow
        self.history: dict[Place, list[float]] = {}
        self.peers: dict[str, list[tuple[int, ...]]] = {}  # {group name: ranks of each group with several}
        if self.measures and self.everyone.index == 0:
            for name in (STAGE, *LINK_GROUPS):
                groups = dims.groups(*GROUP_AXES[name])
                self.peers[name] = [tuple(ranks) for ranks in groups if len(ranks) > 1 or name == STAGE]

    def add(self, shares: Sequence[StepShares]) -> tuple[list[str], list[Slow]]:
        """Add the steps read since the last call, the same number on all ranks.

        Returns (console lines, slow ranks and links) on rank 0, usually empty. Collective once per window.
        """
        if not self.measures or self.pauses is None:
            return [], []
        if not self.has_begun:  # the first step, which compiles and connects
            self.has_begun = True
            self.pauses.take()
        self.shares += shares
        if len(self.shares) < self.window:
            return [], []
        own = summarize(self.shares, 1000 * self.pauses.take())
        rows = comm.all_gather(torch.tensor([own], dtype=torch.float64), self.everyone).tolist()
        first, last = self.shares[0].step, self.shares[-1].step
        self.shares = []
        slow = self.judge(rows) if self.everyone.index == 0 else []
        return [self.line(one, first, last) for one in slow if self.is_new(one)], slow

    def judge(self, rows: list[list[float]]) -> list[Slow]:
        """Return the ranks and links that are slow in two consecutive windows, and stopped ranks at once.

        rows: [ranks][COLUMNS].
        """
        step_ms = max(column(rows, "step"))  # a rank that is early may wait for the others after its step
        tolerance = max(MIN_MS, SLOW_SHARE * step_ms)
        stopped = column(rows, STOPPED)
        usual = statistics.median_low(stopped)  # above 0 if whole hosts stood still
        found = [Slow(STOPPED, (rank,), ms, usual) for rank, ms in enumerate(stopped)]
        found = [one for one in found if one.excess_ms > 1000 * PAUSE_SECONDS]

        # check links only if no rank is slow, since waiting for a slow rank looks like a slow link
        suspects = [one for why in (COMPUTE, DATA) for one in self.slow_ranks(column(rows, why), why)]
        links = [one for name in LINK_GROUPS for one in self.slow_links(column(rows, name), name)]
        suspects = [one for one in suspects if one.excess_ms > tolerance]
        if not suspects and not found:
            suspects = [one for one in links if one.excess_ms > tolerance]
        lasting = [one for one in suspects if one.place in self.suspects]
        self.suspects = {one.place for one in suspects}
        self.named &= self.suspects
        return found + lasting

    def slow_ranks(self, values: list[float], why: str) -> list[Slow]:
        """Compare each rank with the others of its pipeline stage. values: one per rank."""
        results: list[Slow] = []
        for ranks in self.peers[STAGE]:
            own = [values[rank] for rank in ranks]
            usual = self.usual((why, ranks), own)
            if usual is not None:
                results += [Slow(why, (rank,), values[rank], usual) for rank in ranks]
        return results

    def slow_links(self, waits: list[float], name: str) -> list[Slow]:
        """Compare the minimum wait of each group of an axis with the others. waits: one per rank."""
        groups = self.peers[name]
        if not groups:
            return []
        least = [min(waits[rank] for rank in ranks) for ranks in groups]
        usual = self.usual((name, ()), least)
        if usual is None:
            return []
        return [Slow(LINK, ranks, value, usual, name) for ranks, value in zip(groups, least)]

    def usual(self, place: Place, values: list[float]) -> float | None:
        """Return the low median of the values, or for a single value the median of earlier windows."""
        if len(values) > 1:
            return statistics.median_low(values)
        past = self.history.setdefault(place, [])
        usual = statistics.median(past) if len(past) >= FIRST_HISTORY else None
        past += values
        del past[:-HISTORY]
        return usual

    def is_new(self, one: Slow) -> bool:
        """Return whether it has not been reported since it became slow."""
        if one.why == STOPPED:
            return True
        is_new = one.place not in self.named
        self.named.add(one.place)
        return is_new

    def line(self, one: Slow, first: int, last: int) -> str:
        """Format as: slow rank 1 on node7: compute takes 12.8 ms a step, usually 2.8 ms (steps 2 to 21)."""
        steps = f"(steps {first:,} to {last:,})"
        if one.why == LINK:
            return (f"{slow_link(one.ranks, self.hosts)}: exchanges in group {one.group} take "
                    f"{one.ms:.1f} ms a step, usually {one.usual_ms:.1f} ms {steps}")
        rank = one.ranks[0]
        where = f"slow rank {rank} on {self.hosts[rank]}"
        if one.why == STOPPED:
            return f"{where}: stopped for {one.ms / 1000:.1f} s, or its host had no core for it {steps}"
        return f"{where}: {one.why} takes {one.ms:.1f} ms a step, usually {one.usual_ms:.1f} ms {steps}"

    def close(self) -> None:
        if self.pauses is not None:
            self.pauses.close()


class SlowReports(Extra):
    """Log the findings of SlowRanks."""

    def __init__(self, slow: SlowRanks, log: MetricsLogger) -> None:
        self.slow = slow
        self.log = log
        self.shares: list[StepShares] = []  # read, but not yet compared with other ranks
        log.observers.append(self.add_step)

    def add_step(self, row: dict[str, Any], pending: PendingStep) -> None:
        """Keep this rank's time breakdown of a step, except the first of a process, which compiles and
        connects."""
        if pending.step > self.log.start_step + 1:
            exposed_ms, _ = pending.comm.read() if pending.comm else (0.0, 0.0)
            waits = pending.comm.read_by_group() if pending.comm else {}
            share = StepShares(pending.step, pending.step_ms(), pending.data_ms, exposed_ms, waits)
            self.shares.append(share)

    def on_resume(self, run: Any, step: int) -> None:
        self.slow.begin_phase(run.mesh.dims)

    def after_step(self, run: Any, step: int) -> None:
        lines, slow = self.slow.add(self.shares)
        self.shares = []
        for line in lines:
            self.log.log_line(line)
        self.log.add_fields(step, slow_fields(slow))

    def close(self) -> None:
        self.slow.close()


def slow_fields(slow: Sequence[Slow]) -> dict[str, float]:
    """Return metrics.jsonl fields for the most costly entry, if any: slow_rank, and one of SLOW_FIELDS."""
    if not slow:
        return {}
    worst = max(slow, key=lambda one: one.excess_ms)
    return {"slow_rank": worst.ranks[0], SLOW_FIELDS[worst.why]: worst.excess_ms}


def summarize(shares: Sequence[StepShares], stopped_ms: float) -> list[float]:
    """Return COLUMNS of this rank: medians over the steps, and the time it was stopped."""
    def median(values: list[float]) -> float:
        return statistics.median(values)

    return [
        median([share.compute_ms for share in shares]),
        median([share.data_ms for share in shares]),
        stopped_ms,
        median([share.step_ms for share in shares]),
        *(median([share.waits.get(name, 0.0) for share in shares]) for name in LINK_GROUPS),
    ]


def column(rows: list[list[float]], name: str) -> list[float]:
    index = COLUMNS.index(name)
    return [row[index] for row in rows]
