"""SlowRanks: which rank is slow, on which host, and whether its computation, its data or a link is.

Ranks wait for each other, so a step takes equally long on all of them. What tells them apart is where the
time of a rank goes, in ms of a step:

    compute   the step, less what follows
    data      waiting for the loader
    link      waiting in exchanges, by group. The rank of a group that comes last waits least, and only for
              the transfers: the least wait of a group is what its link takes
    stopped   the process did not run at all: a signal, or a host without a core for it (PauseClock)

Each rank takes medians over a window of steps, which one odd step does not move. Then the ranks gather these
numbers. A rank is compared with the others of its pipeline stage, which compute the same; a group with the
others of its axis. Where there is no other, it is compared with its own windows before. What exceeds that by
SLOW_SHARE of a step in two windows in a row is reported, once; what goes on is not repeated.

Costs: an exchange of 8 x (4 + groups) bytes a rank once a window, on the host, at a step whose numbers are
read anyway; rank 0 judges. A window is at least log.slow_window steps, and a hundredth of the number of
ranks: gloo's gather takes as many hops as there are ranks.
"""
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from parallel.extras import Extra
from parallel.topology.dims import GROUP_AXES, ParallelDims
from parallel.wire import comm
from runtime.metrics import MetricsLogger
from runtime.shares import COMPUTE, DATA, LINK, STOPPED, Place, Slow, StepShares, slow_link

SLOW_SHARE = 0.2  # of a step, which a rank or a link must cost before it is named
LEAST_MS = 2.0  # what is less than this is noise of clocks
RANKS_PER_STEP = 100  # a window is at least the number of ranks / this
HISTORY = 20  # windows before the present one that say what is usual
FIRST_HISTORY = 3  # windows, before which nothing is called usual

TICK_SECONDS = 0.25  # between two looks of a PauseClock
PAUSE_SECONDS = 1.0  # a gap between two looks that counts as a pause

STAGE = "pipeline_stage"
LINK_GROUPS = tuple(name for name in GROUP_AXES if name != "world")
COLUMNS = (COMPUTE, DATA, STOPPED, "step", *LINK_GROUPS)


class PauseClock:
    """Counts the time in which this process did not run: a thread that wakes late tells of it."""

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
        """Seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def close(self) -> None:
        self.stop.set()
        self.thread.join()


class SlowRanks:
    """Call add() once a step on every rank, and close() at the end.

    window: steps (log.slow_window). Without it, or in a job of one rank, nothing is measured. host: of this
    rank. Collective where it measures.
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
        """Forgets what was usual: other settings hold from now on."""
        self.shares: list[StepShares] = []
        self.suspects: set[Place] = set()  # of the window before
        self.named: set[Place] = set()  # and still slow
        self.history: dict[Place, list[float]] = {}
        self.peers: dict[str, list[tuple[int, ...]]] = {}  # {group: the ranks of each that has several}
        if self.measures and self.everyone.index == 0:
            for name in (STAGE, *LINK_GROUPS):
                groups = dims.groups(*GROUP_AXES[name])
                self.peers[name] = [tuple(ranks) for ranks in groups if len(ranks) > 1 or name == STAGE]

    def add(self, shares: Sequence[StepShares]) -> tuple[list[str], list[Slow]]:
        """Adds the steps that were read since the last call: as many on all ranks.

        Returns (lines for the console, what is slow) on rank 0; mostly empty. Collective once a window.
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
        """The ranks and links that are slow now and were a window before; those that stood still, at once.

        rows: [ranks][COLUMNS].
        """
        step_ms = max(column(rows, "step"))  # who comes first may wait for the others after its step
        tolerance = max(LEAST_MS, SLOW_SHARE * step_ms)
        stopped = column(rows, STOPPED)
        usual = statistics.median_low(stopped)  # above 0 where a host stood still with all that runs on it
        found = [Slow(STOPPED, (rank,), ms, usual) for rank, ms in enumerate(stopped)]
        found = [one for one in found if one.excess_ms > 1000 * PAUSE_SECONDS]

        # ranks, then links: who waits for a slow rank has no slow link
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
        """Each rank beside the others of its pipeline stage. values: of each rank."""
        found: list[Slow] = []
        for ranks in self.peers[STAGE]:
            own = [values[rank] for rank in ranks]
            usual = self.usual((why, ranks), own)
            if usual is not None:
                found += [Slow(why, (rank,), values[rank], usual) for rank in ranks]
        return found

    def slow_links(self, waits: list[float], name: str) -> list[Slow]:
        """Each group of an axis beside the others: what its ranks wait at least. waits: of each rank."""
        groups = self.peers[name]
        if not groups:
            return []
        least = [min(waits[rank] for rank in ranks) for ranks in groups]
        usual = self.usual((name, ()), least)
        if usual is None:
            return []
        return [Slow(LINK, ranks, value, usual, name) for ranks, value in zip(groups, least)]

    def usual(self, place: Place, values: list[float]) -> float | None:
        """The median of the values, of two the smaller; of one alone, that of the windows before."""
        if len(values) > 1:
            return statistics.median_low(values)
        past = self.history.setdefault(place, [])
        usual = statistics.median(past) if len(past) >= FIRST_HISTORY else None
        past += values
        del past[:-HISTORY]
        return usual

    def is_new(self, one: Slow) -> bool:
        """Whether it has not been named since it became slow."""
        if one.why == STOPPED:
            return True
        is_new = one.place not in self.named
        self.named.add(one.place)
        return is_new

    def line(self, one: Slow, first: int, last: int) -> str:
        """slow rank 1 on node7: compute takes 12.8 ms a step, usually 2.8 ms (steps 2 to 21)"""
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
    """Reports what SlowRanks finds, a window at a time."""

    def __init__(self, slow: SlowRanks, log: MetricsLogger) -> None:
        self.slow = slow
        self.log = log

    def on_resume(self, run: Any, step: int) -> None:
        self.slow.begin_phase(run.mesh.dims)

    def after_step(self, run: Any, step: int) -> None:
        self.log.log_slow(step, *self.slow.add(self.log.take_shares()))

    def close(self) -> None:
        self.slow.close()


def summarize(shares: Sequence[StepShares], stopped_ms: float) -> list[float]:
    """COLUMNS of this rank: medians over the steps, and the time in which it stood still."""
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
