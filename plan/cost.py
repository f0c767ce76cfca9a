"""Step time on a cluster: the work of a microbatch (plan/parts.py) by a roofline, the communication of a rank
(plan/bytes.py) by its links, and a simulation of the actual pipeline schedule.

    products, attention              FLOPs / (peak x gemm, gemm8 or core)
    all that a kernel reads, writes  bytes / (hbm x stream), in addition to its FLOPs
    a kernel, a device value         op, route: host time, and the gap between kernels
    an exchange of n bytes           at a fraction of the link's bandwidth x N / (N - 1), + hop time x log2 N
                                     per call
    transfers of parallel.offload    bytes / host each way: activations overlap the stage's compute, the
                                     optimizer state overlaps its update

The record says what overlaps an exchange: the work between its start and its wait. ZeRO's gathers and sums
overlap the whole stage's compute, or that of one microbatch if a step has one such exchange per microbatch.
`Efficiency` is fitted to published results (plan/published.py), for each class of chip and framework
(plan/efficiency.py). Not modeled: expert imbalance, other jobs on the links, stragglers.
"""
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from config import OPTIMIZERS, Config, ConfigError, read_yaml
from config.reading import CONFIG_FOLDER
from model.precision import accumulation_bytes, compute_bytes
from model.router import mixture
from parallel.pipeline.schedule import make_schedule
from parallel.topology.dims import GROUP_AXES, ParallelDims
from plan import teacher
from plan.buckets import PlannedBucket, buckets, trained_buckets, unique_buckets
from plan.bytes import boundary_bytes, group_size, step_bytes
from plan.job import Job
from plan.parts import records_of_part, records_of_stage
from plan.record.part import Amount, PartRecord, PhaseRecord, Post
from plan.simulate import simulate

# Groups over which gradients are summed and weights gathered.
DATA_GROUPS = ("fsdp", "dp_cp", "dp_replicate", "expert_fsdp", "expert_dp")
EXPERT_GROUP = "ep_etp"  # over which tokens are exchanged with experts
HOST = "host"  # pseudo-group: waits for copies of parallel.offload
TRANSFERS = ("send", "receive")  # between two ranks; all other exchanges are collectives
# Times the pipeline's ranks: number of simulated microbatches. Each further one takes the compute time of the
# busiest rank.
STEADY = 2


@dataclass(frozen=True)
class Cluster:
    """flops: {train.dtype: FLOP/s}. memory: bytes of a GPU. hbm, inside, between: bytes/s of a GPU's memory,
    and of its links within a node of `node` GPUs and to other nodes, one way. gpu: its name in
    configs/clusters.yaml.
    watts: the limit of its board, 0 if unknown."""
    name: str
    flops: dict[str, float] = field(hash=False)
    memory: float
    hbm: float
    node: int
    inside: float
    between: float
    gpu: str = ""
    watts: float = 0.0


@dataclass(frozen=True)
class Efficiency:
    """Fractions of data-sheet values, and seconds."""
    gemm: float = 0.69
    gemm8: float = 0.90
    core: float = 0.28
    stream: float = 0.63
    inside: float = 0.37  # of the links within a node
    between: float = 0.39  # and across nodes
    hop: float = 4.3e-6  # per message to another rank
    op: float = 1.2e-6  # per kernel: waiting for the host, and between kernels
    route: float = 0.26e-3  # per value that the host waits for
    micro: float = 0.0  # per microbatch in a stage, forward or backward
    hidden: float = 1.0  # of what can overlap compute
    host: float = 20e9  # bytes/s to or from host memory, while all GPUs of a node copy: assumed
    relayed: bool = False  # an all-to-all of tokens sends each one to a node only once


@lru_cache
def cluster(name: str, asker: str = "--cluster") -> Cluster:
    """Return a cluster of configs/clusters.yaml. `asker` names the option in messages. Raises ConfigError."""
    table = read_yaml(CONFIG_FOLDER / "clusters.yaml")
    if name not in table["clusters"]:
        raise ConfigError(f"{asker}: no such cluster {name!r}; "
                          f"configs/clusters.yaml has {', '.join(table['clusters'])}")
    row = table["clusters"][name]
    teraflops = table["gpus"][row["gpu"]]
    return Cluster(
        name,
        flops={dtype: 1e12 * rate for dtype, rate in teraflops.items()},
        memory=row["memory"] * 2**30,
        hbm=row["hbm"] * 1e9,
        node=row["node"],
        inside=row["inside"] * 1e9,
        between=row["between"] * 1e9,
        gpu=row["gpu"],
        watts=row["watts"],
    )


# ---- compute -----------------------------------------------------------------------------------------------


class Seconds(NamedTuple):
    """Seconds in the forward and in the backward of a microbatch."""
    forward: float = 0.0
    backward: float = 0.0


@dataclass(frozen=True)
class Roofline:
    """Roofline of one GPU, for train.dtype `dtype`."""
    cluster: Cluster
    efficiency: Efficiency
    dtype: str

    @property
    def stream(self) -> float:
        """Memory bandwidth in bytes/s."""
        return self.cluster.hbm * self.efficiency.stream

    @property
    def flops(self) -> float:
        """Peak FLOP/s of products whose operands do not have 8 bits."""
        return self.cluster.flops["bf16" if self.dtype == "fp8" else self.dtype]

    def seconds(self, work: Amount) -> float:
        """Return the seconds of work between two exchanges."""
        products = work.products / (self.flops * self.efficiency.gemm)
        if work.products8:
            products += work.products8 / (self.cluster.flops["fp8"] * self.efficiency.gemm8)
        attention = work.attention / (self.flops * self.efficiency.core)
        host = work.launches * self.efficiency.op + work.host_reads * self.efficiency.route
        return products + attention + work.nbytes / self.stream + host


# ---- exchanges ---------------------------------------------------------------------------------------------


def crossing(
    layout: ParallelDims, cluster: Cluster, *, group: str, verb: str, nbytes: float
) -> tuple[float, float]:
    """Return the bytes that a rank sends in exchanges of nbytes (plan/bytes.py's): (within its node, to
    others)."""
    ranks = layout.group(0, *GROUP_AXES[group])
    if verb in TRANSFERS:
        ranks = ranks[:2]
    near = sum(rank < cluster.node for rank in ranks)
    return sent_bytes(verb, size=len(ranks), near=near, nbytes=nbytes)


def sent_bytes(verb: str, *, size: int, near: int, nbytes: float) -> tuple[float, float]:
    """Return the bytes that one of `size` ranks sends: (within its node, to others). `near` ranks are in its
    node.

    A ring across nodes leaves each node once, over the links of all the group's ranks there; a part of an
    all-to-all goes straight to its rank.
    """
    if verb in TRANSFERS:
        return (nbytes, 0.0) if near == size else (0.0, nbytes)
    if verb == "all_to_all":
        return nbytes * (near - 1) / size, nbytes * (size - near) / size

    rounds = 2 if verb == "all_reduce" else 1
    sent = nbytes * rounds * (size - 1) / size
    if near == size:
        return sent, 0.0
    return sent * (near - 1) / near, sent / near


def seconds_on_links(
    cluster: Cluster, efficiency: Efficiency, sent: tuple[float, float], *, hops: float
) -> float:
    """Return the seconds to send bytes (within the node, to others) in `hops` consecutive messages."""
    inside = sent[0] / (cluster.inside * efficiency.inside)
    between = sent[1] / (cluster.between * efficiency.between)
    return hops * efficiency.hop + max(inside, between)


def num_hops(verb: str, size: int) -> float:
    """Return the number of consecutive messages in one exchange of `size` ranks."""
    return 1.0 if verb in TRANSFERS else math.log2(size)


class Links(NamedTuple):
    """The links of a job.

    `copies` is the number of copies per token in an all-to-all if each node receives a token once and relays
    it, else 1.
    """
    layout: ParallelDims
    cluster: Cluster
    efficiency: Efficiency
    copies: int = 1


def get_links(job: Job, cluster: Cluster, efficiency: Efficiency) -> Links:
    experts = mixture(job.cfg.model)
    copies = experts.top_k if experts and efficiency.relayed else 1
    return Links(job.layout, cluster, efficiency, copies=copies)


@lru_cache(maxsize=1 << 14)
def exchange_seconds(links: Links, group: str, verb: str, *, calls: int, nbytes: float) -> float:
    """Return the seconds of `calls` exchanges with nbytes in total; 0 in a group of one rank."""
    size = group_size(links.layout, group)
    if size == 1 or not calls:
        return 0.0
    sent = crossing(links.layout, links.cluster, group=group, verb=verb, nbytes=nbytes)
    if verb == "all_to_all" and links.copies > 1:
        sent = relayed_bytes(sent, nbytes=nbytes, copies=links.copies)
    return seconds_on_links(links.cluster, links.efficiency, sent, hops=calls * num_hops(verb, size))


def relayed_bytes(sent: tuple[float, float], *, nbytes: float, copies: int) -> tuple[float, float]:
    """Return what an all-to-all of nbytes sends (within its node, to others) if each node receives a token
    once and relays it to its experts. Assumes evenly drawn experts."""
    inside, between = sent
    nodes = nbytes / (nbytes - between)
    of_token = nodes * (1 - (1 - 1 / nodes) ** copies)  # nodes with its experts
    return inside + between, between * of_token / copies


# ---- a part in a microbatch --------------------------------------------------------------------------------


class PhaseSeconds(NamedTuple):
    """computes: without waits. waits: {group: seconds spent only waiting for its exchanges}. among_experts:
    compute between the first and the last exchange of tokens with experts.
    """
    computes: float
    waits: dict[str, float]
    among_experts: float

    @property
    def seconds(self) -> float:
        return self.computes + sum(self.waits.values())

    @property
    def least(self) -> float:
        """Lower bound in seconds, if expert exchanges fully overlap the compute among them."""
        return self.seconds - min(self.waits.get(EXPERT_GROUP, 0.0), self.among_experts)


@lru_cache(maxsize=1 << 15)
def phase_seconds(phase: PhaseRecord, roofline: Roofline, links: Links) -> PhaseSeconds:
    """Walk through a rank's record. Exchanges of a group are sequential, and overlap its work."""
    hidden = roofline.efficiency.hidden
    clock = computes = 0.0
    waits: dict[str, float] = {}
    idle_from: dict[str, float] = {}  # {group: end of its last exchange}
    posted: dict[str, tuple[str, float, float]] = {}  # {number: (group, seconds, end)}
    before_experts: float | None = None  # seconds computed so far
    among_experts = 0.0
    for event in phase.events:
        if isinstance(event, Amount):
            seconds = roofline.seconds(event)
            computes += seconds
            clock += seconds
        elif isinstance(event, Post):
            seconds = exchange_seconds(links, event.group, event.verb, calls=1, nbytes=event.nbytes)
            end = max(clock, idle_from.get(event.group, 0.0)) + seconds
            idle_from[event.group] = end
            posted[event.number] = event.group, seconds, end
            if event.group == EXPERT_GROUP and before_experts is None:
                before_experts = computes
        else:
            group, seconds, end = posted.pop(event.number)
            wait = exposed_seconds(seconds, clock + seconds - end, hidden)
            waits[group] = waits.get(group, 0.0) + wait
            clock += wait
            if group == EXPERT_GROUP and before_experts is not None:
                among_experts = computes - before_experts
    waits = {group: seconds for group, seconds in waits.items() if seconds}
    return PhaseSeconds(computes, waits, among_experts)


@dataclass(frozen=True)
class Times:
    """Seconds of one microbatch. f: forward; i: input gradients, including recompute; w: weight gradients.
    waits: time of f and i spent only waiting, by group. least: lower bound for all three with chunked expert
    exchanges, however many chunks."""
    f: float = 0.0
    i: float = 0.0
    w: float = 0.0
    waits: Counter[str] = field(default_factory=Counter)
    least: float = 0.0

    def plus(self, part: "Times", repeats: int) -> "Times":
        """Add a part that occurs `repeats` times."""
        waits = Counter(self.waits)
        for group, seconds in part.waits.items():
            waits[group] += repeats * seconds
        f = self.f + repeats * part.f
        i = self.i + repeats * part.i
        w = self.w + repeats * part.w
        return Times(f, i, w, waits, self.least + repeats * part.least)


def part_times(
    record: PartRecord, roofline: Roofline, links: Links, *, microbatches: int, is_split: bool
) -> Times:
    """Return the times of a part.
    A step has `microbatches`. If `is_split`, the backward runs in two parts."""
    forward = phase_seconds(record.forward, roofline, links)
    first = phase_seconds(record.first, roofline, links)
    backward = phase_seconds(record.inputs if is_split else record.backward, roofline, links)
    weights = roofline.seconds(record.backward.weights)

    waits: Counter[str] = Counter()
    shares = (first, 1 / microbatches), (forward, 1 - 1 / microbatches), (backward, 1.0)
    for phase, share in shares:
        for group, seconds in phase.waits.items():
            waits[group] += share * seconds
    f = sum(share * phase.seconds for phase, share in shares[:2])
    i = backward.seconds - (0.0 if is_split else weights)
    least = sum(share * phase.least for phase, share in shares) + (weights if is_split else 0.0)
    return Times(f, i, weights, waits, least)


# ---- a step ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forecast:
    """Seconds of a step, split up for the rank that computes longest: compute, exposed ({group: seconds;
    "data": of gradients and weights}), bubble, optimizer. sent: bytes of that rank within its node and to
    others."""
    step: float = math.inf
    compute: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0
    exposed: dict[str, float] = field(default_factory=dict)
    sent: tuple[float, float] = (0.0, 0.0)


def stage_times(
    job: Job, stage: int, microbatches: int, cluster: Cluster, efficiency: Efficiency
) -> Times:
    """Return the times of one microbatch in one stage. A step has `microbatches`."""
    roofline = Roofline(cluster, efficiency, job.cfg.train.dtype)
    links = get_links(job, cluster, efficiency)
    is_split = job.schedule.splits_backward
    total = Times()
    for record, repeats in Counter(records_of_stage(job, stage)).items():
        part = part_times(record, roofline, links, microbatches=microbatches, is_split=is_split)
        total = total.plus(part, repeats)
    if teacher.has_teacher(job, stage):
        seconds = teacher_seconds(job, roofline, links)
        total = replace(total, f=total.f + seconds, least=total.least + seconds)
    micro = efficiency.micro
    total = replace(total, f=total.f + micro, i=total.i + micro, least=total.least + 2 * micro)

    # activations that go to the host in the forward, and return in the backward
    copies = offloaded_bytes(job, stage) / efficiency.host
    hidden = efficiency.hidden
    out = exposed_seconds(copies, total.f, hidden)
    back = exposed_seconds(copies, total.i + (0.0 if is_split else total.w), hidden)
    if not out + back:
        return total
    waits = total.waits + Counter({HOST: out + back})
    return replace(total, f=total.f + out, i=total.i + back, waits=waits, least=total.least + out + back)


def teacher_seconds(job: Job, roofline: Roofline, links: Links) -> float:
    """Return the seconds of a teacher's forward in a microbatch."""
    assert job.teacher is not None
    micro_batch = job.cfg.train.micro_batch
    repeats = Counter(teacher.blocks_of(job.teacher, micro_batch))
    blocks = sum(times * phase_seconds(record.forward, roofline, links).seconds
                 for record, times in repeats.items())
    return blocks + roofline.seconds(teacher.head_product(job.teacher, micro_batch))


def offloaded_bytes(job: Job, stage: int) -> float:
    """Return the bytes per microbatch that a stage's blocks keep in host memory (parallel.offload)."""
    cfg = job.cfg
    if cfg.parallel.offload not in ("activations", "both"):
        return 0.0
    blocks = [part for part in job.parts[stage] if isinstance(part.layer, int)]
    is_split = job.schedule.splits_backward
    records = [records_of_part(part, cfg.train.micro_batch, is_split) for part in blocks]
    return sum(record.kept for own in records for record in own)


def exposed_seconds(seconds: float, behind: float, hidden: float) -> float:
    """Return the exposed seconds of an exchange, if at most a fraction `hidden` overlaps `behind`."""
    return max(seconds - behind, (1 - hidden) * seconds)


class StageSeconds(NamedTuple):
    """Seconds of each op of a microbatch, by stage."""
    f: tuple[float, ...]
    i: tuple[float, ...]
    w: tuple[float, ...]

    def of_stages(self, stages: list[int]) -> "Seconds":
        """Return the sum over these stages."""
        forward = sum(self.f[stage] for stage in stages)
        backward = sum(self.i[stage] + self.w[stage] for stage in stages)
        return Seconds(forward, backward)


@lru_cache(maxsize=256)
def makespan(
    kind: str, *, ranks: int, microbatches: int, chunks: int, seconds: StageSeconds, hop: float
) -> float:
    """Return the seconds of a schedule from its first op to its last. Cached, for layouts that only differ in
    ZeRO."""
    schedule = make_schedule(kind, ranks, microbatches, chunks)
    op_seconds = {"F": seconds.f, "I": seconds.i, "W": seconds.w}
    return simulate(schedule.order, schedule.n_stages, op_seconds, hop).makespan


def slower(cluster: Cluster, efficiency: Efficiency, times: float) -> tuple[Cluster, Efficiency]:
    """Scale the compute time of the GPUs by `times`; the links stay the same."""
    if times == 1:
        return cluster, efficiency
    flops = {dtype: rate / times for dtype, rate in cluster.flops.items()}
    host = replace(
        efficiency,
        op=efficiency.op * times,
        route=efficiency.route * times,
        micro=efficiency.micro * times,
    )
    return replace(cluster, flops=flops, hbm=cluster.hbm / times), host


def forecast(
    job: Job, microbatches: int, cluster: Cluster, efficiency: Efficiency, slowdown: tuple[float, ...] = ()
) -> Forecast:
    """Forecast a step of `microbatches`. job.schedule has STEADY times its ranks, or all if there are fewer.
    `slowdown` is a factor for each place of the pipeline, 1 by default."""
    schedule = job.schedule
    slowdown = slowdown or (1.0,) * job.layout.pp
    links = get_links(job, cluster, efficiency)
    seconds, waits = times_of_stages(job, microbatches, cluster, efficiency, slowdown)
    rank = busiest_rank(job, links, seconds, microbatches=microbatches, slowdown=slowdown)

    # pipeline: microbatches beyond those of the schedule take the compute time of the busiest rank
    hop = exchange_seconds(links, "pp", "send", calls=1, nbytes=max(boundary_bytes(job)))
    span = makespan(
        schedule.kind,
        ranks=job.layout.pp,
        microbatches=schedule.microbatches,
        chunks=schedule.chunks,
        seconds=seconds,
        hop=hop,
    )
    span += rank.seconds / microbatches * (microbatches - schedule.microbatches)

    module_waits = waits_by_group([waits[stage] for stage in rank.stages], microbatches)
    return Forecast(
        step=span + rank.data_wait + rank.update,
        compute=rank.seconds - sum(module_waits.values()),
        bubble=max(0.0, span - rank.seconds),
        optimizer=rank.update,
        exposed=module_waits | ({"data": rank.data_wait} if rank.data_wait else {}),
        sent=(rank.traffic.inside, rank.traffic.between),
    )


class BusiestRank(NamedTuple):
    """The rank that computes longest in a step. seconds: of its ops. data_wait: time spent only waiting for
    gradients and weights. update: time of the optimizer. traffic: its exchanges."""
    stages: list[int]
    seconds: float
    data_wait: float
    update: float
    traffic: "StepTraffic"


def busiest_rank(
    job: Job, links: Links, seconds: StageSeconds, *, microbatches: int, slowdown: tuple[float, ...]
) -> BusiestRank:
    """Find the busiest rank. `seconds` and `slowdown` are those of times_of_stages."""
    schedule, efficiency = job.schedule, links.efficiency
    stages_of_places = job.stages_of_places()
    computes = [sum(seconds.of_stages(stages)) for stages in stages_of_places]
    place = computes.index(max(computes))

    here = job.at_place(place)
    own_buckets = buckets(here)
    traffic = step_traffic(here, links, microbatches / schedule.microbatches)
    data_wait = exposed_data_seconds(
        traffic,
        zero=job.cfg.parallel.zero,
        microbatches=microbatches,
        num_buckets=len(unique_buckets(own_buckets)),
        compute=seconds.of_stages(stages_of_places[place]),
        hidden=efficiency.hidden,
    )
    stream = links.cluster.hbm * efficiency.stream / slowdown[place]
    update = update_seconds(job.cfg, trained_buckets(own_buckets), stream, efficiency.host)
    return BusiestRank(
        stages=stages_of_places[place],
        seconds=microbatches * computes[place],
        data_wait=data_wait,
        update=update,
        traffic=traffic,
    )


def times_of_stages(
    job: Job, microbatches: int, cluster: Cluster, efficiency: Efficiency, slowdown: tuple[float, ...]
) -> tuple[StageSeconds, list[Counter[str]]]:
    """Return (seconds of a microbatch's ops; for each stage, {group: seconds spent only waiting}).

    The seconds include the waits. `slowdown` is as in forecast.
    """
    stages: list[Times] = []
    for stage, rank in enumerate(job.schedule.rank_of_stage):
        machine = slower(cluster, efficiency, slowdown[rank])
        stages.append(stage_times(job, stage, microbatches, *machine))
    seconds = StageSeconds(
        f=tuple(times.f for times in stages),
        i=tuple(times.i for times in stages),
        w=tuple(times.w for times in stages),
    )
    return seconds, [times.waits for times in stages]


def waits_by_group(waits: list[Counter[str]], microbatches: int) -> dict[str, float]:
    """Return {group, or HOST: seconds per step} of waits, given those of a microbatch in each stage."""
    total: dict[str, float] = {}
    for group in (*GROUP_AXES, HOST):
        waited = sum(of_stage[group] for of_stage in waits)
        if waited:
            total[group] = microbatches * waited
    return total


class StepTraffic(NamedTuple):
    """One rank's bytes sent within its node and to others; seconds of gradient sums and weight gathers."""
    inside: float
    between: float
    sums: float
    gathers: float


def step_traffic(job: Job, links: Links, repeats: float) -> StepTraffic:
    """Return the traffic. A microbatch's exchanges occur `repeats` times per microbatch of job.schedule."""
    zero = job.cfg.parallel.zero
    inside = between = sums = gathers = 0.0
    for (group, verb), (calls, nbytes) in step_bytes(job).items():
        least_zero = 3 if verb == "all_gather" else 2  # from this stage on, each microbatch exchanges
        times = repeats if group not in DATA_GROUPS or zero >= least_zero else 1
        near, far = (0.0, float(nbytes))
        if group in GROUP_AXES:
            near, far = crossing(job.layout, links.cluster, group=group, verb=verb, nbytes=nbytes)
        inside += near * times
        between += far * times

        if group in DATA_GROUPS:
            seconds = times * exchange_seconds(links, group, verb, calls=calls, nbytes=nbytes)
            if verb == "all_gather":
                gathers += seconds
            else:
                sums += seconds
    return StepTraffic(inside, between, sums, gathers)


def exposed_data_seconds(
    traffic: StepTraffic, *, zero: int, microbatches: int, num_buckets: int, compute: Seconds, hidden: float
) -> float:
    """Return the seconds of sums and gathers that are not overlapped. `compute` is a microbatch's, and
    `hidden` the largest fraction that overlaps.

    ZeRO-3 gathers weights in each forward and again in each backward, where the gradient sums follow them
    over the same links. The last bucket's sum and the first one's gather have nothing to overlap with.
    """
    sums_in_step = microbatches if zero >= 2 else 1
    gathers_in_step = 2 * microbatches if zero == 3 else 1
    gathers_in_backward = traffic.gathers / 2 if zero == 3 else 0.0
    gathers_in_forward = traffic.gathers - gathers_in_backward
    forwards = compute.forward * (microbatches if zero == 3 else 1)
    backwards = compute.backward * sums_in_step

    first_gather = traffic.gathers / num_buckets / gathers_in_step
    last_sum = traffic.sums / num_buckets / sums_in_step
    in_forward = exposed_seconds(gathers_in_forward, forwards, hidden)
    in_backward = exposed_seconds(gathers_in_backward + traffic.sums, backwards, hidden)
    return max(in_forward, first_gather) + max(in_backward, last_sum)


def update_seconds(cfg: Config, every: list[PlannedBucket], stream: float, host: float) -> float:
    """Return the seconds of the optimizer: it reads and writes masters and moments, reads gradients and
    writes weights, plus the moving average of train.ema. State in host memory (parallel.offload) is copied
    both ways at the same time, overlapped with it. `stream` and `host` are bytes/s of the GPU's memory, and
    of copies each way."""
    optimizer = OPTIMIZERS[cfg.optim.name]
    wide_bytes = accumulation_bytes(cfg.train.dtype)
    nbytes = copied = 0
    for bucket in every:
        states = 1 + optimizer.moments_for(bucket.is_hidden)
        of_element = 2 * states * wide_bytes + wide_bytes + compute_bytes(cfg.train.dtype)
        nbytes += bucket.shard_size * of_element
        if cfg.train.ema is not None:  # reads the masters, reads and writes the average
            nbytes += bucket.shard_size * 3 * wide_bytes
            states += 1
        copied += bucket.shard_size * states * wide_bytes
    if cfg.parallel.offload not in ("optimizer", "both"):
        copied = 0
    return max(nbytes / stream, copied / host)
