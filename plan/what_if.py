"""A forecast with other links, one slow rank, or variable times: `scripts.plan --what-if`.

    links=0.5        all links have this fraction of their bandwidth; the time of a hop is unchanged
    slow-rank=1.2    one rank computes this many times as long. A step is synchronous, so all wait for it. It
                     is at the most expensive position of the pipeline.
    jitter=0.05      the time of each op (a forward or a backward of a microbatch in a stage) is normal and
                     independent, with a standard deviation of this fraction; sigma below

The expected maximum of n such times is about sigma sqrt(2 ln n) above the mean, and never more. n ranks wait
for each other at each op: those of tp, cp, pp and ep, and from ZeRO 2 on those that share a copy of the
state. So each op takes 1 + sigma sqrt(2 ln n) times as long. The other ranks, m such groups, meet once per
step, after the k ops of a step have averaged out: sigma sqrt(2 ln m / k) times the compute is added.
"""
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from config import ConfigError
from parallel.topology.dims import ParallelDims, min_world_size
from plan.cost import (
    Cluster,
    Efficiency,
    Forecast,
    busiest_rank,
    forecast,
    get_links,
    times_of_stages,
)
from plan.job import Job

OPS_OF_MICROBATCH = 2  # of a stage: forward and backward


@dataclass(frozen=True)
class WhatIf:
    """links: fraction of bandwidth; slow_rank: compute factor of one rank; jitter: fraction of an op."""
    links: float = 1.0
    slow_rank: float = 1.0
    jitter: float = 0.0


class Question(NamedTuple):
    """key: of WhatIf. least: lower limit; at_least: whether the limit itself is allowed. assumed: the
    assumption, with the value for {}."""
    key: str
    least: float
    at_least: bool
    assumed: str


QUESTIONS = {
    "links": Question(
        "links", 0.0, False, "all links have {} of their bandwidth; a hop takes as long as before"
    ),
    "slow-rank": Question(
        "slow_rank",
        1.0,
        True,
        "one rank computes {} times as long, at the pipeline place where it costs most; all ranks wait for "
        "it in each step",
    ),
    "jitter": Question(
        "jitter",
        0.0,
        True,
        "times of ops are normal and independent, sigma {} of each; E[max of n] ~ sigma sqrt(2 ln n) over "
        "the n ranks that wait for each other at each op (tp, cp, pp, ep; from ZeRO 2 on also those that "
        "share a copy of the state); m groups of them meet once a step of k ops: sigma sqrt(2 ln m / k)",
    ),
}


def parse_what_if(text: str) -> tuple[WhatIf, str]:
    """Parse "links=0.5" into the what-if and its assumption. Raises ConfigError."""
    name, _, value = text.partition("=")
    if name not in QUESTIONS:
        raise ConfigError(f"--what-if: no {name!r}; there are links=0.5, slow-rank=1.2 and jitter=0.05")
    question = QUESTIONS[name]
    try:
        number = float(value)
    except ValueError:
        raise ConfigError(f"--what-if: {text}: needs a number, as {name}=1.2") from None
    is_large_enough = number > question.least or (question.at_least and number == question.least)
    if not is_large_enough or math.isinf(number):
        bound = "not be below" if question.at_least else "be above"
        raise ConfigError(f"--what-if: {text}: must be finite and {bound} {question.least:g}")
    return WhatIf(**{question.key: number}), question.assumed.format(f"{number:g}")


def cluster_under(cluster: Cluster, what_if: WhatIf) -> Cluster:
    """Return the cluster with the what-if's links."""
    return replace(
        cluster, inside=cluster.inside * what_if.links, between=cluster.between * what_if.links
    )


def expected_largest(sigma: float, n: int) -> float:
    """Return an upper bound on how far the largest of n normal values is expected above their mean."""
    return sigma * math.sqrt(2 * math.log(n))


class Waiting(NamedTuple):
    """Ranks that wait for each other at each op, and groups of such ranks, which meet once per step."""
    ranks: int
    groups: int


def waiting_ranks(layout: ParallelDims, zero: int) -> Waiting:
    """Return the waiting ranks of a layout. Those of tp and cp, and of ep and etp, are contiguous blocks."""
    of_stage = min_world_size(layout.degrees() | {"pp": 1, "dp_replicate": 1})
    if zero >= 2:
        of_stage = layout.group_size("dp_shard", "cp", "tp")
    ranks = of_stage * layout.pp
    return Waiting(ranks, layout.world // ranks)


def get_slowdown(what_if: WhatIf, ranks: int) -> float:
    """Return the compute factor of the slow rank and its peers, if `ranks` wait for each other at each op."""
    return what_if.slow_rank * (1 + expected_largest(what_if.jitter, ranks))


def least_step(
    job: Job, microbatches: int, cluster: Cluster, efficiency: Efficiency, what_if: WhatIf, span: float
) -> float:
    """Return a lower bound on forecast_under's step in seconds without simulation.
    `span` bounds the pipeline's."""
    if what_if.slow_rank > 1:
        return span
    at_each_op = 1 + expected_largest(what_if.jitter, waiting_ranks(job.layout, job.cfg.parallel.zero).ranks)
    slowdown = (at_each_op,) * job.layout.pp
    seconds, _ = times_of_stages(job, microbatches, cluster, efficiency, slowdown)
    links = get_links(job, cluster, efficiency)
    rank = busiest_rank(job, links, seconds, microbatches=microbatches, slowdown=slowdown)
    return max(span, rank.seconds) + rank.data_wait + rank.update


def forecast_under(
    job: Job, microbatches: int, cluster: Cluster, efficiency: Efficiency, what_if: WhatIf
) -> Forecast:
    """Like plan.cost.forecast, with the what-if's slow rank and jitter; the links are those of the cluster
    (cluster_under). The wait between groups once per step counts as bubble."""
    waiting = waiting_ranks(job.layout, job.cfg.parallel.zero)
    at_each_op = 1 + expected_largest(what_if.jitter, waiting.ranks)
    places = job.layout.pp
    slowest: list[Forecast] = []
    for slow in range(places if what_if.slow_rank > 1 else 1):
        slowdown = [at_each_op * (what_if.slow_rank if place == slow else 1.0) for place in range(places)]
        slowest.append(forecast(job, microbatches, cluster, efficiency, tuple(slowdown)))
    step = max(slowest, key=lambda one: one.step)

    ops = OPS_OF_MICROBATCH * microbatches * job.schedule.chunks
    once = step.compute * expected_largest(what_if.jitter, waiting.groups) / math.sqrt(ops)
    return replace(step, step=step.step + once, bubble=step.bubble + once)
