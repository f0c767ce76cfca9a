"""The fastest layouts of a job on a cluster that fit into its memory.

What a layout computes bounds its step from below. Layouts come best bound first, and one is priced in full
(plan/cost.py) only while its bound, with the schedule's bubble for equal stages (plan/simulate.py), is below
the steps of the best that were found.
"""
import math
from collections.abc import Iterator, MutableSequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import NamedTuple

from config import Config, ConfigError, divisors
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
from plan.job import Job, job_of_rank
from plan.memory import passing_bytes, peak_activation_bytes, state_bytes
from plan.parts import records_of_part
from plan.simulate import closed_form
from plan.what_if import WhatIf, forecast_under, least_step, slowdown_of, waiting_ranks

Axes = dict[str, tuple]  # {section.key: values}

# that a search decides
LAYOUT_KEYS = tuple(key for key in ELASTIC_KEYS if key not in KEYS_OF_STAGES)
TRANSIENT_BYTES = 2**29  # logits and other tensors of the moment
MARGIN = 0.02  # of the bytes of tensors: activations are counted up to 1.5 % short (lab/docs/planner.md)
RECOMPUTE_MODES = ("none", "selective", "full")  # the simplest first
EP_CHUNKS = (1, 2, 4)  # numbers of chunks that are tried
WHOLE_BACKWARD = ("gpipe", "1f1b", "interleaved")  # schedules that do not divide it
RECORDED_APART = ("parallel.tp", "parallel.cp", "parallel.recompute")  # no record serves two of their choices
TOKENS_OF_CP_RANK = 2048  # at least; fewer are not worth a context-parallel rank


class Held(NamedTuple):
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
        """Bytes by which the tensors may be more than was counted."""
        return MARGIN * (self.state + self.activations)


class Found(NamedTuple):
    """A layout that fits. microbatches: of a step, for each pipeline."""
    cfg: Config
    microbatches: int
    forecast: Forecast
    held: Held


@dataclass
class SearchResult:
    """found: the fastest first. counts: layouts that were "priced", "too large", "refused" by the rules.
    smallest: bytes that the smallest of those that are too large needs at least. passed_over: layouts that
    could not lead the near ties of what was the fastest then."""
    found: list[Found] = field(default_factory=list[Found])
    counts: dict[str, int] = field(default_factory=lambda: {"priced": 0, "too large": 0, "refused": 0})
    smallest: float = math.inf
    passed_over: list["Candidate"] = field(default_factory=list["Candidate"])


class SearchShare(NamedTuple):
    """Of a search that several processes make (plan/search_processes.py): that of process `index` of `count`.
    seconds: of the fastest step that each process has found, and of its top-th; shared by all, each writes
    its two."""
    index: int
    count: int
    seconds: MutableSequence[float]

    def has(self, number: int) -> bool:
        """Whether a choice of the compute axes is looked at here."""
        return number % self.count == self.index

    def tell(self, fastest: float, last: float) -> None:
        self.seconds[2 * self.index : 2 * self.index + 2] = fastest, last


NO_SHARE = SearchShare(0, 1, (math.inf, math.inf))


@dataclass(frozen=True)
class Target:
    """The machine that layouts are searched for. world: number of GPUs. what_if: its slow rank and jitter.
    leaves_margin: a layout fits only if it does with the margin of what is counted, too."""
    world: int
    cluster: Cluster
    efficiency: Efficiency
    what_if: WhatIf = WhatIf()
    leaves_margin: bool = False

    @property
    def gpu(self) -> Gpu:
        return Gpu(self.cluster.gpu, self.cluster.node)

    def has_room(self, held: Held) -> bool:
        """For the bytes of its fullest rank."""
        return held.total + (held.margin if self.leaves_margin else 0.0) <= self.cluster.memory


# ---- what is searched --------------------------------------------------------------------------------------


def compute_axes(cfg: Config, world: int, cluster: Cluster) -> Axes:
    """Keys that decide how long a microbatch computes."""
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
    """Without the selective one where it is as none: a fused kernel keeps nothing of attention's core."""
    has_other_parts = cfg.parallel.recompute_parts != "core"
    return tuple(mode for mode in RECOMPUTE_MODES if mode != "selective" or has_other_parts)


def layout_axes(cfg: Config, world: int) -> Axes:
    """All other keys. dp_rep "node": the ranks of ZeRO are those of a node."""
    return {
        "parallel.pp": tuple(degree for degree in divisors(world) if degree <= cfg.model.layers),
        "parallel.zero": (1, 2, 3),
        "parallel.dp_rep": (1, "node"),
        "parallel.schedule": ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"),
        "parallel.vpp": (None, 2, 3, 4, 6, 8),
    }


def with_fixed(axes: Axes, fixed: Values) -> Axes:
    """The axes, with one value for each that is fixed."""
    return {path: (fixed[path],) if path in fixed else values for path, values in axes.items()}


# ---- one layout --------------------------------------------------------------------------------------------


def job_of(cfg: Config, world: int) -> tuple[Job, int]:
    """(the job with at most STEADY microbatches for each pipeline rank; how many it has).

    Raises ConfigError if train.py refuses the job.
    """
    parallel, train = cfg.parallel, cfg.train
    degrees = axis_degrees(parallel)
    if world % ranks_of_layout(degrees):
        raise ConfigError("parallel.pp: does not divide")

    sequences = train.micro_batch * (world // ranks_of_microbatch(degrees))  # of a microbatch, on all ranks
    microbatches, rest = divmod(train.global_batch, sequences)
    if rest or (parallel.schedule == "interleaved" and microbatches % parallel.pp):
        raise ConfigError("train.global_batch: does not divide")

    # the pipeline is steady after so many; GPipe holds all microbatches at once
    simulated = microbatches if parallel.schedule == "gpipe" else min(microbatches, STEADY * parallel.pp)
    shorter = replace(cfg, train=replace(train, global_batch=simulated * sequences, ramp=None))
    return job_of_rank(shorter, world, rank=0, advise=False), microbatches


def held_bytes(job: Job, gpu: Gpu) -> Held:
    """Of the fullest pipeline rank. Its communicators are taken to be those of the first rank, which is in
    every group that any rank is in."""
    return bytes_of_tensors(job, gpu)._replace(communicators=communicator_bytes(job, gpu))


def bytes_of_tensors(job: Job, gpu: Gpu) -> Held:
    """held_bytes without the communicators. The stages of a rank decide its state."""
    state_of_stages: dict[tuple[tuple[PartDescription, ...], ...], int] = {}
    ranks: list[tuple[int, int]] = []
    for here in job.of_pipeline_ranks():
        stages = tuple(job.parts[number] for number in here.stages())
        if stages not in state_of_stages:
            state_of_stages[stages] = sum(state_bytes(here).values()) + passing_bytes(here)
        ranks.append((state_of_stages[stages], peak_activation_bytes(here)))
    return Held(*max(ranks, key=sum), communicators=0, reserved=reserved_bytes(gpu))


def price(cfg: Config, target: Target, result: SearchResult) -> Found | None:
    """A layout with its forecast and its bytes. None if it is refused or too large, which `result` notes."""
    planned = possible_job(cfg, target, result)
    return None if planned is None else price_job(cfg, planned, target, result)


def possible_job(cfg: Config, target: Target, result: SearchResult) -> tuple[Job, int] | None:
    """job_of. None if it is refused, which `result` notes."""
    try:
        return job_of(cfg, target.world)
    except ConfigError:
        result.counts["refused"] += 1
        return None


def price_job(cfg: Config, planned: tuple[Job, int], target: Target, result: SearchResult) -> Found | None:
    """planned: job_of the layout. None if it is too large, which `result` notes."""
    job, microbatches = planned
    counts = result.counts
    held = bytes_of_tensors(job, target.gpu)
    if target.has_room(held):
        held = held._replace(communicators=communicator_bytes(job, target.gpu))
    if not target.has_room(held):
        counts["too large"] += 1
        result.smallest = min(result.smallest, held.total)
        return None
    counts["priced"] += 1
    step = forecast_under(job, microbatches, target.cluster, target.efficiency, target.what_if)
    return Found(cfg, microbatches, step, held)


# ---- bounds ------------------------------------------------------------------------------------------------


class Bound(NamedTuple):
    """Of a choice of compute axes, for the whole model on one stage.

    f, i, w: seconds of a microbatch's forward, and of its gradients of inputs and of weights. waits: those of
    them in which it only waits for an exchange. least: of all three with exchanges of experts in chunks,
    however many. microbatches: of a step, on a rank. kept: bytes that the blocks keep of one microbatch.
    Whatever pp is, the first rank keeps about as much: of 1 / pp of the blocks, pp times. Under
    Target.what_if: slowdown: how many times as long what it computes takes; coupled: ranks that wait for each
    other at each op.
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
        """Seconds of a step in which every stage is busy all the time."""
        return self.microbatches * (self.f + self.i + self.w)

    @property
    def least_step(self) -> float:
        return self.microbatches * self.least

    @property
    def step_without_waits(self) -> float:
        return self.microbatches * (self.f + self.i + self.w - self.waits)


def bound_of(cfg: Config, values: Values, target: Target) -> Bound | None:
    """values: of the compute axes, and parallel.ep_chunks. None if they are not possible together."""
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
        job, _ = job_of(with_values(whole, {"train.global_batch": sequences}), target.world)
    except ConfigError:
        return None

    # the most microbatches that can share what a step exchanges once
    coupled = waiting_ranks(job.layout, zero=1).ranks
    slowdown = slowdown_of(target.what_if, coupled)
    machine = slower(target.cluster, target.efficiency, slowdown)
    times = stage_times(job, 0, cfg.train.global_batch, *machine)
    blocks = job.parts[0][2:-2]  # without the ends of the model and their blocks
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
    """The least seconds of a step under a schedule; infinite if the schedule is another one's equal, or not
    possible. layout: values of the layout axes."""
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
    # the other places may be as fast as ever; in what a slow one leaves, gradients of weights fit better
    f, i, w = (part / ranks / bound.slowdown for part in (bound.f, bound.i, bound.w))
    known = closed_form(kind, ranks, microbatches, chunks, f=f, i=i, w=w)
    is_filled = bound.slowdown > 1 and kind not in WHOLE_BACKWARD
    with_bubble = bound.step + (known[1] if known and not is_filled else 0.0)

    # the last microbatch begins after all others, and goes through all stages and back
    last_begins = (microbatches - 1) * f / chunks
    return max(with_bubble, last_begins + ranks * (f + i) + w / chunks)


def least_bytes(cfg: Config, target: Target, bound: Bound) -> float:
    """Bytes that a rank holds at least. Cheaper than held_bytes, and enough to refuse most layouts."""
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
    """A layout that is yet to be priced. least: seconds of its step at least."""
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
    """The `top` fastest layouts that fit. fixed: {section.key: value} of what is not searched.

    near: share of a step within which layouts are taken as equally fast. Finds, beyond the `top` fastest, the
    simplest of those that are as fast as the first. is_any_enough: it is only asked whether one fits. share:
    of the choices, where other processes search the others.
    """
    best = Best(top, near, share)
    for bound in bounds_of(cfg, target, fixed, share):
        if bound.step >= best.longest():
            break
        for least, layout in layouts_of(bound, cfg, target, fixed):
            if least >= best.longest():
                break
            candidate = candidate_of(cfg, bound, layout, least, target, fixed)
            if candidate is not None:
                consider(candidate, target, best)
            if is_any_enough and best.result.found:
                return best.result
    return best.result if share.count > 1 else settled(best, target)


def settled(best: "Best", target: Target) -> SearchResult:
    """The result, with those that were passed over for a layout that is no near tie of the fastest."""
    for candidate in best.take_passed_over():
        consider(candidate, target, best)
    return best.result


def candidate_of(
    cfg: Config, bound: Bound, layout: Values, least: float, target: Target, fixed: Values
) -> Candidate | None:
    """layout: values of the layout axes. None if a node's ranks cannot be those of ZeRO."""
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
    """Prices a layout if it may count, and fits."""
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

    def add(self, found: Found) -> None:
        """Keeps the `top` fastest, and those within `near` of the fastest."""
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
        """Seconds of the fastest step that any process has found; infinite without one."""
        found = self.result.found
        return min([*self.share.seconds[::2], *(one.forecast.step for one in found[:1])])

    def last(self) -> float:
        """Seconds that the `top` fastest take at most; infinite until as many are found."""
        found = self.result.found
        own = found[self.top - 1].forecast.step if len(found) >= self.top else math.inf
        return min([*self.share.seconds[1::2], own])

    def longest(self) -> float:
        """Seconds that a step has to be shorter than to count."""
        last = self.last()
        return last if math.isinf(last) else max(last, self.fastest() * (1 + self.near))

    def could_take(self, candidate: Candidate) -> bool:
        """Whether a layout may be among the fastest, or the simplest of the near ties of the first. Keeps
        those in mind that a simpler near tie stands before."""
        if candidate.least < self.last():
            return True
        if candidate.least >= self.longest():
            return False
        if not self.could_lead(candidate):
            self.result.passed_over.append(candidate)
            return False
        return True

    def could_lead(self, candidate: Candidate) -> bool:
        """Whether a layout may be the simplest of the near ties of the fastest."""
        longest = self.fastest() * (1 + self.near)
        near_ties = [
            (simplicity(one.cfg), rounded(one.forecast.step))
            for one in self.result.found
            if one.forecast.step <= longest
        ]
        own = simplicity(candidate.cfg), rounded(candidate.least)
        return not near_ties or own <= min(near_ties)

    def take_passed_over(self) -> list[Candidate]:
        """Those that were passed over, the fastest first; forgets them."""
        passed_over, self.result.passed_over = self.result.passed_over, []
        return sorted(passed_over, key=lambda one: one.least)


def rounded(seconds: float) -> float:
    """To four digits: the model of the times is no finer."""
    return float(f"{seconds:.4g}")


def simplicity(cfg: Config) -> tuple[int, ...]:
    """The smaller, the simpler: fewer kinds of parallelism, less recompute, lower ZeRO."""
    parallel = cfg.parallel
    degrees = axis_degrees(parallel).values()
    return (
        sum(degree > 1 for degree in (*degrees, parallel.ep_chunks)),
        RECOMPUTE_MODES.index(parallel.recompute),
        parallel.zero,
    )


def bounds_of(
    cfg: Config, target: Target, fixed: Values, share: SearchShare = NO_SHARE
) -> Iterator[Bound]:
    """Yields the bound of every possible choice of the compute axes, the least first.

    It is that of the fastest number of chunks of experts: nothing else depends on them. Exchanges in chunks
    hide at best behind all that is computed among them. So other numbers than the first are tried once the
    choice with so few seconds comes first.
    """
    queue: list[tuple[float, int, Bound, list[Values]]] = []  # [(seconds, index, bound, chunks to try)]
    axes = with_fixed(compute_axes(cfg, target.world, target.cluster), fixed)
    for index, values in enumerate(combinations(axes)):
        if not share.has(sum(axes[key].index(values[key]) for key in RECORDED_APART)):
            continue
        first, *others = [values | {"parallel.ep_chunks": n} for n in chunks_of_experts(cfg, values, fixed)]
        bound = bound_of(cfg, first, target)
        if bound is None:  # what one chunk cannot do, several cannot
            continue
        seconds = bound.least_step if others else bound.step
        heappush(queue, (seconds, index, bound, others))

    while queue:
        _, index, bound, others = heappop(queue)
        if not others:
            yield bound
            continue
        chunked = [bound_of(cfg, values, target) for values in others]
        best = min([bound, *filter(None, chunked)], key=lambda one: one.step)
        heappush(queue, (best.step, index, best, []))


def chunks_of_experts(cfg: Config, values: Values, fixed: Values) -> tuple[int, ...]:
    """The choices of parallel.ep_chunks. values: of the compute axes."""
    if "parallel.ep_chunks" in fixed:
        return (fixed["parallel.ep_chunks"],)
    is_exchanged = values["parallel.ep"] * cfg.parallel.etp > 1
    return EP_CHUNKS if is_exchanged else (1,)


def ranks_that_wait(bound: Bound, layout: Values, target: Target) -> int:
    """For each other at each op (plan/what_if.py), at least. layout: values of the layout axes."""
    ranks = layout["parallel.pp"]
    if layout["parallel.zero"] < 2:
        return bound.coupled * ranks
    replicas = layout["parallel.dp_rep"]
    if replicas == "node":
        return target.cluster.node * ranks
    return target.world // replicas


def layouts_of(bound: Bound, cfg: Config, target: Target, fixed: Values) -> list[tuple[float, Values]]:
    """[(the least seconds of its step, values of the layout axes)], the least first."""
    layouts: list[tuple[float, Values]] = []
    for layout in combinations(with_fixed(layout_axes(cfg, target.world), fixed)):
        least = step_with_bubble(bound, layout, cfg.model.layers)
        if least < math.inf and target.what_if.jitter:
            slowdown = slowdown_of(target.what_if, ranks_that_wait(bound, layout, target))
            least = max(least, bound.step_without_waits * slowdown / bound.slowdown)
        if least < math.inf:
            layouts.append((least, layout))
    return sorted(layouts, key=lambda entry: entry[0])
