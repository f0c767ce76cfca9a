"""Find the fastest layouts of a job that fit into a cluster's memory.

The compute of a layout is a lower bound on its step time. Layouts are visited in the order of their bounds,
and fully priced (plan/cost.py) only while the bound, including the schedule's bubble for equal stages
(plan/simulate.py), is below the step times of the best layouts so far.
"""
import math
from collections.abc import Iterator, MutableSequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import NamedTuple

from config import Config, ConfigError, ModelConfig, divisors
from config.axes import axis_degrees, ranks_of_layout, ranks_of_microbatch
from config.reading.run_name import ELASTIC_KEYS, KEYS_OF_STAGES
from config.tree import with_values
from config.values import Values, combinations
from model.describe import PartDescription
from model.precision import accumulation_bytes, compute_bytes
from model.router import mixture
from parallel.pipeline.schedule import SCHEDULES
from plan.communicators import Gpu, communicator_bytes, reserved_bytes
from plan.cost import STEADY, Cluster, Efficiency, Forecast, slower, stage_times
from plan.count import parameters
from plan.job import Job, make_rank_job
from plan.memory import passing_bytes, peak_activation_bytes, state_bytes
from plan.parts import records_of_part
from plan.simulate import closed_form
from plan.what_if import WhatIf, forecast_under, get_slowdown, least_step, waiting_ranks

Axes = dict[str, tuple]  # {section.key: values}

# searched keys
LAYOUT_KEYS = tuple(key for key in ELASTIC_KEYS if key not in KEYS_OF_STAGES)
TRANSIENT_BYTES = 2**29  # logits and other temporary tensors
MARGIN = 0.02  # of tensor bytes: activations are undercounted by up to 1.5 % (lab/docs/planner.md)
RECOMPUTE_MODES = ("none", "selective", "full")  # the simplest first
EP_CHUNKS = (1, 2, 4)  # candidate numbers of chunks
WHOLE_BACKWARD = ("gpipe", "1f1b", "interleaved")  # schedules that do not split the backward
RECORDED_APART = ("parallel.tp", "parallel.cp", "parallel.recompute")  # their choices never share a record
TOKENS_OF_CP_RANK = 2048  # minimum; fewer do not justify a context-parallel rank


class MemoryUse(NamedTuple):
    """Bytes of the fullest rank. communicators, reserved: plan/communicators.py."""
    state: int
    activations: int
    communicators: int
    reserved: int

    @property
    def total(self) -> int:
        return sum(self) + TRANSIENT_BYTES

    @property
    def margin(self) -> float:
        """Bytes by which tensors may exceed the count."""
        return MARGIN * (self.state + self.activations)


class PricedLayout(NamedTuple):
    """A layout that fits. microbatches: per step, for each pipeline."""
    cfg: Config
    microbatches: int
    forecast: Forecast
    held: MemoryUse


@dataclass
class SearchResult:
    """found: the fastest first. counts: numbers of layouts that were "priced", "too large", or "refused" by
    the rules.
    smallest: lower bound in bytes for the smallest layout that is too large. passed_over: layouts that could
    not lead the near ties of the fastest at that time."""
    found: list[PricedLayout] = field(default_factory=list[PricedLayout])
    counts: dict[str, int] = field(default_factory=lambda: {"priced": 0, "too large": 0, "refused": 0})
    smallest: float = math.inf
    passed_over: list["Candidate"] = field(default_factory=list["Candidate"])


class SearchShare(NamedTuple):
    """One process's share of a search by several (plan/search_processes.py): index out of count. seconds:
    times of the fastest and the top-th fastest step of each process, in shared memory; each process writes
    its own two."""
    index: int
    count: int
    seconds: MutableSequence[float]

    def has(self, number: int) -> bool:
        """Return whether this process searches the given choice of the compute axes."""
        return number % self.count == self.index

    def tell(self, fastest: float, last: float) -> None:
        self.seconds[2 * self.index : 2 * self.index + 2] = fastest, last


NO_SHARE = SearchShare(0, 1, (math.inf, math.inf))


@dataclass(frozen=True)
class Target:
    """The machine to search layouts for. world: number of GPUs. what_if: its slow rank and jitter.
    leaves_margin: a layout must fit with the margin for uncounted bytes. teacher: the model of
    distill.teacher."""
    world: int
    cluster: Cluster
    efficiency: Efficiency
    what_if: WhatIf = WhatIf()
    leaves_margin: bool = False
    teacher: ModelConfig | None = None

    @property
    def gpu(self) -> Gpu:
        return Gpu(self.cluster.gpu, self.cluster.node)

    def has_room(self, held: MemoryUse) -> bool:
        """Return whether the fullest rank's bytes fit."""
        return held.total + (held.margin if self.leaves_margin else 0.0) <= self.cluster.memory


# ---- what is searched --------------------------------------------------------------------------------------


def compute_axes(cfg: Config, world: int, cluster: Cluster) -> Axes:
    """Return the keys that determine the compute time of a microbatch, with their choices."""
    model, seq_len = cfg.model, cfg.train.seq_len
    degrees = divisors(world)
    most_cp = max(1, seq_len // TOKENS_OF_CP_RANK)
    experts = mixture(model)
    ep = [degree for degree in divisors(experts.experts) if world % degree == 0] if experts else [1]
    return {
        "parallel.tp": tuple(degree for degree in degrees if degree <= cluster.node),
        "parallel.cp": tuple(degree for degree in degrees if degree <= most_cp),
        "parallel.ep": tuple(ep),
        "train.micro_batch": (1, 2, 4, 8, 16),
        "parallel.recompute": recompute_modes(cfg),
    }


def recompute_modes(cfg: Config) -> tuple[str, ...]:
    """Return the modes, without "selective" if it equals "none", as with a fused attention kernel."""
    has_other_parts = cfg.parallel.recompute_parts != "core"
    return tuple(mode for mode in RECOMPUTE_MODES if mode != "selective" or has_other_parts)


def layout_axes(cfg: Config, world: int) -> Axes:
    """Return all other keys with their choices. With dp_rep "node", ZeRO shards within a node."""
    return {
        "parallel.pp": tuple(degree for degree in divisors(world) if degree <= cfg.model.layers),
        "parallel.zero": (1, 2, 3),
        "parallel.dp_rep": (1, "node"),
        "parallel.schedule": ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"),
        "parallel.vpp": (None, 2, 3, 4, 6, 8),
    }


def with_fixed(axes: Axes, fixed: Values) -> Axes:
    """Restrict the axes to the fixed values."""
    return {path: (fixed[path],) if path in fixed else values for path, values in axes.items()}


# ---- one layout --------------------------------------------------------------------------------------------


def make_job(cfg: Config, world: int, teacher: ModelConfig | None = None) -> tuple[Job, int]:
    """Return (the job with at most STEADY microbatches for each pipeline rank, its real number of
    microbatches).

    teacher: see make_rank_job. Raises ConfigError if train.py refuses the job.
    """
    parallel, train = cfg.parallel, cfg.train
    degrees = axis_degrees(parallel)
    if world % ranks_of_layout(degrees):
        raise ConfigError("parallel.pp: does not divide")

    sequences = train.micro_batch * (world // ranks_of_microbatch(degrees))  # per microbatch, over all ranks
    microbatches, rest = divmod(train.global_batch, sequences)
    if rest or (parallel.schedule == "interleaved" and microbatches % parallel.pp):
        raise ConfigError("train.global_batch: does not divide")

    # the pipeline is steady after this many; GPipe holds all microbatches at once
    simulated = microbatches if parallel.schedule == "gpipe" else min(microbatches, STEADY * parallel.pp)
    shorter = replace(cfg, train=replace(train, global_batch=simulated * sequences, ramp=None))
    return make_rank_job(shorter, world, rank=0, advise=False, teacher=teacher), microbatches


def held_bytes(job: Job, gpu: Gpu) -> MemoryUse:
    """Return the bytes of the fullest pipeline rank. Its communicators are assumed to be the first rank's,
    which is in every kind of group."""
    return tensor_bytes(job, gpu)._replace(communicators=communicator_bytes(job, gpu))


def tensor_bytes(job: Job, gpu: Gpu) -> MemoryUse:
    """Return held_bytes without the communicators. The stages of a rank determine its state."""
    state_of_stages: dict[tuple[tuple[PartDescription, ...], ...], int] = {}
    ranks: list[tuple[int, int]] = []
    for here in job.of_pipeline_ranks():
        stages = tuple(job.parts[number] for number in here.stages())
        if stages not in state_of_stages:
            state_of_stages[stages] = sum(state_bytes(here).values()) + passing_bytes(here)
        ranks.append((state_of_stages[stages], peak_activation_bytes(here)))
    return MemoryUse(*max(ranks, key=sum), communicators=0, reserved=reserved_bytes(gpu))


def price(cfg: Config, target: Target, result: SearchResult) -> PricedLayout | None:
    """Price a layout by its forecast and its bytes. Return None if it is refused or too large, and count that
    in `result`."""
    planned = possible_job(cfg, target, result)
    return None if planned is None else price_job(cfg, planned, target, result)


def possible_job(cfg: Config, target: Target, result: SearchResult) -> tuple[Job, int] | None:
    """Return make_job. Return None if it is refused, and count that in `result`."""
    try:
        return make_job(cfg, target.world, target.teacher)
    except ConfigError:
        result.counts["refused"] += 1
        return None


def price_job(cfg: Config, planned: tuple[Job, int], target: Target,
              result: SearchResult) -> PricedLayout | None:
    """Price `planned`, the layout's make_job. Return None if it is too large, and count that in `result`."""
    job, microbatches = planned
    counts = result.counts
    held = tensor_bytes(job, target.gpu)
    if target.has_room(held):
        held = held._replace(communicators=communicator_bytes(job, target.gpu))
    if not target.has_room(held):
        counts["too large"] += 1
        result.smallest = min(result.smallest, held.total)
        return None
    counts["priced"] += 1
    step = forecast_under(job, microbatches, target.cluster, target.efficiency, target.what_if)
    return PricedLayout(cfg, microbatches, step, held)


# ---- bounds ------------------------------------------------------------------------------------------------


class Bound(NamedTuple):
    """Lower bounds for a choice of compute axes, with the whole model on one stage.

    f, i, w: seconds of a microbatch's forward, input gradients and weight gradients. waits: the part of them
    spent only waiting for an exchange. least: bound for all three with chunked expert exchanges, however many
    chunks.
    microbatches: per step, on a rank. kept: bytes that the blocks keep per microbatch. The first rank keeps
    about as much for any pp: 1 / pp of the blocks, pp times. With Target.what_if: slowdown: factor on the
    compute time; coupled: ranks that wait for each other at each op.
    """
    f: float
    i: float
    w: float
    waits: float
    least: float
    microbatches: float
    kept: float
    values: Values
    slowdown: float
    coupled: int

    @property
    def step(self) -> float:
        """Seconds of a step in which every stage is always busy."""
        return self.microbatches * (self.f + self.i + self.w)

    @property
    def least_step(self) -> float:
        return self.microbatches * self.least

    @property
    def step_without_waits(self) -> float:
        return self.microbatches * (self.f + self.i + self.w - self.waits)


def make_bound(cfg: Config, values: Values, target: Target) -> Bound | None:
    """Bound the compute axes `values`, and parallel.ep_chunks. Return None for an invalid combination."""
    one_stage = {
        "parallel.sp": values["parallel.tp"] > 1,
        "parallel.pp": 1,
        "parallel.schedule": "1f1b",
        "parallel.vpp": None,
        "parallel.zero": 1,
        "parallel.dp_rep": 1,
    }
    whole = with_values(cfg, values | one_stage)
    ranks = ranks_of_microbatch(axis_degrees(whole.parallel))
    if target.world % ranks:
        return None
    sequences = whole.train.micro_batch * (target.world // ranks)
    try:
        job, _ = make_job(
            with_values(whole, {"train.global_batch": sequences}), target.world, target.teacher)
    except ConfigError:
        return None

    # the most microbatches that can share the exchanges made once per step
    coupled = waiting_ranks(job.layout, zero=1).ranks
    slowdown = get_slowdown(target.what_if, coupled)
    machine = slower(target.cluster, target.efficiency, slowdown)
    times = stage_times(job, 0, cfg.train.global_batch, *machine)
    blocks = job.parts[0][2:-2]  # without the model's ends and their blocks
    kept = sum(records_of_part(part, whole.train.micro_batch)[0].kept for part in blocks)
    microbatches = cfg.train.global_batch / sequences
    return Bound(
        f=times.f,
        i=times.i,
        w=times.w,
        waits=sum(times.waits.values()),
        least=times.least,
        microbatches=microbatches,
        kept=kept,
        values=values,
        slowdown=slowdown,
        coupled=coupled,
    )


def step_with_bubble(bound: Bound, layout: Values, num_layers: int) -> float:
    """Return a lower bound in seconds for a step under the schedule of `layout`, or infinity if the schedule
    is invalid or equals another one."""
    ranks, kind, vpp = layout["parallel.pp"], layout["parallel.schedule"], layout["parallel.vpp"]
    is_interleaved = kind == "interleaved"
    chunks = vpp or SCHEDULES[kind].chunks or 1
    microbatches = round(bound.microbatches * ranks)
    is_whole = microbatches >= 1 and abs(microbatches - bound.microbatches * ranks) < 1e-6
    is_possible = (
        is_whole
        and ranks * chunks <= num_layers
        and is_interleaved == (vpp is not None)
        and not (is_interleaved and microbatches % ranks)
        and (ranks > 1 or kind == "1f1b")
    )
    if not is_possible:
        return math.inf
    if ranks == 1:
        return bound.step
    # the other positions may run at full speed; weight gradients fit better into a slow one's gaps
    f, i, w = (part / ranks / bound.slowdown for part in (bound.f, bound.i, bound.w))
    known = closed_form(kind, ranks, microbatches, chunks, f=f, i=i, w=w)
    is_filled = bound.slowdown > 1 and kind not in WHOLE_BACKWARD
    with_bubble = bound.step + (known[1] if known and not is_filled else 0.0)

    # the last microbatch starts after all others, and passes through all stages and back
    last_begins = (microbatches - 1) * f / chunks
    return max(with_bubble, last_begins + ranks * (f + i) + w / chunks)


def least_bytes(cfg: Config, target: Target, bound: Bound) -> float:
    """Return a lower bound on a rank's bytes: cheaper than held_bytes, and enough to refuse most layouts."""
    parallel, counted = cfg.parallel, parameters(cfg.model)
    total = counted["total"] + counted["ahead"]
    dense = total - counted["experts"]
    own = dense / parallel.tp + counted["experts"] / (parallel.ep * parallel.etp)
    grad_bytes = accumulation_bytes(cfg.train.dtype)
    of_element = compute_bytes(cfg.train.dtype) if parallel.zero < 3 else 0
    of_element += grad_bytes if parallel.zero < 2 else 0
    activations = bound.kept * min(1.0, bound.microbatches)
    state = own / parallel.pp * of_element + total * grad_bytes / target.world
    return state + activations + reserved_bytes(target.gpu)


# ---- the search --------------------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """A layout that has not been priced yet. least: lower bound on its step in seconds."""
    cfg: Config
    bound: Bound
    least: float


def search(
    cfg: Config,
    target: Target,
    fixed: Values,
    top: int,
    *,
    near: float = 0.0,
    is_any_enough: bool = False,
    share: SearchShare = NO_SHARE,
) -> SearchResult:
    """Return the `top` fastest layouts that fit. `fixed` {section.key: value} is not searched.

    `near` is the fraction of a step within which layouts count as equally fast: beyond the `top` fastest,
    find the simplest of those as fast as the first. `is_any_enough` stops as soon as one fits. `share` is
    this process's part of the choices, if others search the rest.
    """
    best = Best(top, near, share)
    for bound in iter_bounds(cfg, target, fixed, share):
        if bound.step >= best.longest():
            break
        for least, layout in bound_layouts(bound, cfg, target, fixed):
            if least >= best.longest():
                break
            candidate = make_candidate(cfg, bound, layout, least, target, fixed)
            if candidate is not None:
                consider(candidate, target, best)
            if is_any_enough and best.result.found:
                return best.result
    return best.result if share.count > 1 else settled(best, target)


def settled(best: "Best", target: Target) -> SearchResult:
    """Return the result.
    Price the layouts that were passed over for one that is not a near tie of the fastest."""
    for candidate in best.pop_passed_over():
        consider(candidate, target, best)
    return best.result


def make_candidate(
    cfg: Config, bound: Bound, layout: Values, least: float, target: Target, fixed: Values
) -> Candidate | None:
    """Make a candidate from values of the layout axes. Return None if ZeRO cannot shard within a node."""
    values = bound.values | layout
    if "parallel.sp" not in fixed:
        values["parallel.sp"] = values["parallel.tp"] > 1
    if values["parallel.dp_rep"] == "node":
        replicas, rest = divmod(target.world // values["parallel.pp"], target.cluster.node)
        if replicas < 2 or rest:
            return None
        values["parallel.dp_rep"] = replicas
    return Candidate(with_values(cfg, values), bound, least)


def consider(candidate: Candidate, target: Target, best: "Best") -> None:
    """Price a layout if it may count, and keep it if it fits."""
    cfg, bound, least = candidate
    result = best.result
    if not best.could_take(candidate):
        return
    at_least = least_bytes(cfg, target, bound)
    if at_least > target.cluster.memory:
        result.counts["too large"] += 1
        result.smallest = min(result.smallest, at_least)
        return
    planned = possible_job(cfg, target, result)
    if planned is None:
        return
    least = least_step(*planned, target.cluster, target.efficiency, target.what_if, span=least)
    if not best.could_take(candidate._replace(least=least)):
        return
    priced = price_job(cfg, planned, target, result)
    if priced is not None:
        best.add(priced)


class Best:
    """The best layouts so far. top, near, share: see search."""

    def __init__(self, top: int, near: float, share: SearchShare = NO_SHARE) -> None:
        self.top = top
        self.near = near
        self.share = share
        self.result = SearchResult()

    def add(self, found: PricedLayout) -> None:
        """Keep the `top` fastest, and those within `near` of the fastest."""
        result = self.result
        result.found.append(found)
        result.found.sort(key=lambda one: (one.forecast.step, *simplicity(one.cfg), one.held.total))
        longest = self.longest()
        result.found[self.top :] = [one for one in result.found[self.top :] if one.forecast.step < longest]
        if self.share.count > 1:
            is_full = len(result.found) >= self.top
            last = result.found[self.top - 1].forecast.step if is_full else math.inf
            self.share.tell(result.found[0].forecast.step, last)

    def fastest(self) -> float:
        """Return the seconds of the fastest step found by any process, or infinity."""
        found = self.result.found
        return min([*self.share.seconds[::2], *(one.forecast.step for one in found[:1])])

    def last(self) -> float:
        """Return the seconds of the slowest of the `top` fastest, or infinity until there are enough."""
        found = self.result.found
        own = found[self.top - 1].forecast.step if len(found) >= self.top else math.inf
        return min([*self.share.seconds[1::2], own])

    def longest(self) -> float:
        """Return the seconds that a step must beat to count."""
        last = self.last()
        return last if math.isinf(last) else max(last, self.fastest() * (1 + self.near))

    def could_take(self, candidate: Candidate) -> bool:
        """Return whether a layout may be among the fastest, or the simplest of the near ties of the first.
        Remember those that are passed over for a simpler near tie."""
        if candidate.least < self.last():
            return True
        if candidate.least >= self.longest():
            return False
        if not self.could_lead(candidate):
            self.result.passed_over.append(candidate)
            return False
        return True

    def could_lead(self, candidate: Candidate) -> bool:
        """Return whether a layout may be the simplest of the near ties of the fastest."""
        longest = self.fastest() * (1 + self.near)
        near_ties = [
            (simplicity(one.cfg), rounded(one.forecast.step))
            for one in self.result.found
            if one.forecast.step <= longest
        ]
        own = simplicity(candidate.cfg), rounded(candidate.least)
        return not near_ties or own <= min(near_ties)

    def pop_passed_over(self) -> list[Candidate]:
        """Remove and return the layouts that were passed over, the fastest first."""
        passed_over, self.result.passed_over = self.result.passed_over, []
        return sorted(passed_over, key=lambda one: one.least)


def rounded(seconds: float) -> float:
    """Round to four digits: the time model is not more precise."""
    return float(f"{seconds:.4g}")


def simplicity(cfg: Config) -> tuple[int, ...]:
    """Return a key, smaller for simpler layouts: fewer kinds of parallelism, less recompute, lower ZeRO."""
    parallel = cfg.parallel
    degrees = axis_degrees(parallel).values()
    return (
        sum(degree > 1 for degree in (*degrees, parallel.ep_chunks)),
        RECOMPUTE_MODES.index(parallel.recompute),
        parallel.zero,
    )


def iter_bounds(
    cfg: Config, target: Target, fixed: Values, share: SearchShare = NO_SHARE
) -> Iterator[Bound]:
    """Yield the bound of every valid choice of the compute axes, in ascending order.

    Each choice has the fastest number of expert chunks, on which nothing else depends. Chunked exchanges at
    best fully overlap the compute among them, so other numbers than the first are only tried once the choice
    with that bound is next.
    """
    queue: list[tuple[float, int, Bound, list[Values]]] = []  # [(seconds, index, bound, chunks to try)]
    axes = with_fixed(compute_axes(cfg, target.world, target.cluster), fixed)
    for index, values in enumerate(combinations(axes)):
        if not share.has(sum(axes[key].index(values[key]) for key in RECORDED_APART)):
            continue
        first, *others = [values | {"parallel.ep_chunks": n} for n in chunks_of_experts(cfg, values, fixed)]
        bound = make_bound(cfg, first, target)
        if bound is None:  # if one chunk is invalid, several are, too
            continue
        seconds = bound.least_step if others else bound.step
        heappush(queue, (seconds, index, bound, others))

    while queue:
        _, index, bound, others = heappop(queue)
        if not others:
            yield bound
            continue
        chunked = [make_bound(cfg, values, target) for values in others]
        best = min([bound, *filter(None, chunked)], key=lambda one: one.step)
        heappush(queue, (best.step, index, best, []))


def chunks_of_experts(cfg: Config, values: Values, fixed: Values) -> tuple[int, ...]:
    """Return the choices of parallel.ep_chunks, given the values of the compute axes."""
    if "parallel.ep_chunks" in fixed:
        return (fixed["parallel.ep_chunks"],)
    is_exchanged = values["parallel.ep"] * cfg.parallel.etp > 1
    return EP_CHUNKS if is_exchanged else (1,)


def ranks_that_wait(bound: Bound, layout: Values, target: Target) -> int:
    """Return a lower bound on the ranks that wait for each other at each op (plan/what_if.py)."""
    ranks = layout["parallel.pp"]
    if layout["parallel.zero"] < 2:
        return bound.coupled * ranks
    replicas = layout["parallel.dp_rep"]
    if replicas == "node":
        return target.cluster.node * ranks
    return target.world // replicas


def bound_layouts(bound: Bound, cfg: Config, target: Target, fixed: Values) -> list[tuple[float, Values]]:
    """Return [(lower bound on the step in seconds, values of the layout axes)], in ascending order."""
    layouts: list[tuple[float, Values]] = []
    for layout in combinations(with_fixed(layout_axes(cfg, target.world), fixed)):
        least = step_with_bubble(bound, layout, cfg.model.layers)
        if least < math.inf and target.what_if.jitter:
            slowdown = get_slowdown(target.what_if, ranks_that_wait(bound, layout, target))
            least = max(least, bound.step_without_waits * slowdown / bound.slowdown)
        if least < math.inf:
            layouts.append((least, layout))
    return sorted(layouts, key=lambda entry: entry[0])
