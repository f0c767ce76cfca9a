"""The fastest layouts of a job on a cluster that fit into its memory (no torch).

What a layout computes bounds its step from below: best case first, a layout is priced in full (plan/cost.py) only while that bound, with
the schedule's bubble for equal stages (plan/simulate.py), is below what the best so far take.
"""
import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from config import Config, ConfigError, divisors, is_moe
from parallel.layout import Layout
from parallel.schedule import Schedule
from plan import memory
from plan.cost import STEADY, Cluster, Efficiency, Forecast, forecast, stage_times
from plan.count import mixture, parameters
from plan.lattice import Values, choices
from plan.parts import BYTES, Job
from plan.simulate import closed_form

Make = Callable[[Config, int], tuple[Schedule, list[tuple[int, int]]]]  # (job, world) -> schedule and cuts; raises ConfigError
RESERVED = 3e9  # bytes of a GPU for its context, NCCL's buffers and what the allocator cannot use
PASSING = 2 ** 29  # bytes of logits and other things of the moment


class Found(NamedTuple):
    cfg: Config
    microbatches: int
    forecast: Forecast
    state: int
    activations: int

    @property
    def memory(self) -> float:
        return self.state + self.activations + PASSING + RESERVED


def axes(cfg: Config, world: int, c: Cluster) -> tuple[dict[str, tuple], dict[str, tuple]]:
    """What is searched: what decides how long a microbatch computes, and how the rest is laid out."""
    m, t = cfg.model, cfg.train
    every, tokens = divisors(world), range(1, t.seq_len // 2048 + 1)
    core = {"parallel.tp": tuple(d for d in every if d <= c.node), "parallel.cp": tuple(d for d in every if d == 1 or d in tokens),
            "parallel.ep": tuple(d for d in divisors(m.experts) if world % d == 0) if m.experts else (1,),
            "train.micro_batch": (1, 2, 4, 8, 16), "parallel.recompute": ("none", "selective", "full")}
    rest = {"parallel.pp": tuple(d for d in every if d <= m.layers), "parallel.zero": (1, 2, 3), "parallel.dp_rep": (1, "node"),
            "parallel.schedule": ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"), "parallel.vpp": (None, 2, 3, 4, 6, 8)}
    return core, rest


def set_keys(cfg: Config, values: Values) -> Config:
    """values: {"parallel.tp": 8, ...}"""
    for path, value in values.items():
        section, key = path.split(".")
        cfg = replace(cfg, **{section: replace(getattr(cfg, section), **{key: value})})
    return cfg


def free(table: dict[str, tuple], fixed: Values) -> dict[str, tuple]:
    """The axes, of which those that are fixed have one value."""
    return {path: (fixed[path],) if path in fixed else values for path, values in table.items()}


def job_of(cfg: Config, world: int, make: Make) -> tuple[Job, int]:
    """(the job with at most STEADY microbatches a pipeline rank, how many it has). Raises ConfigError."""
    p, t = cfg.parallel, cfg.train
    dp = world // (p.tp * p.pp * p.cp)
    if world % (p.tp * p.pp * p.cp * p.dp_rep):
        raise ConfigError("parallel.pp: does not divide")
    n = t.global_batch // (t.micro_batch * dp)
    if t.global_batch % (t.micro_batch * dp) or (p.schedule == "interleaved" and n % p.pp):
        raise ConfigError("train.global_batch: does not divide")
    few = replace(cfg, train=replace(t, global_batch=min(n, STEADY * p.pp) * t.micro_batch * dp, ramp=None))
    schedule, cuts = make(few, world)
    return Job(few, Layout(world, p.tp, p.cp, p.pp, p.dp_rep, p.ep, p.etp), 0, schedule, cuts), n


def of_one_cp(cfg: Config) -> Config:
    """A job whose sequences are what a cp rank has of them (plan/memory.py counts whole ones)."""
    p = cfg.parallel
    return replace(cfg, train=replace(cfg.train, seq_len=cfg.train.seq_len // p.cp), parallel=replace(p, cp=1))


def held(job: Job) -> tuple[int, int]:
    """(state, activations) in bytes of the fullest pipeline rank."""
    p, world = job.cfg.parallel, job.layout.world
    own, out = of_one_cp(job.cfg), []
    for r in sorted({0, 1 % p.pp, p.pp - 1}):
        here = replace(job, rank=r * (world // p.pp))
        state = sum(memory.state_bytes(here).values()) + memory.passing_bytes(here)
        out.append((state, memory.peak_activation_bytes(replace(here, cfg=own), flash=True)))
    return max(out, key=sum)


class Bound(NamedTuple):
    """Of a choice of core axes: seconds of one microbatch through the whole model, microbatches / pp, and the bytes that blocks keep of
    one microbatch (whatever pp is, the first rank keeps about so much: 1 / pp of the blocks, pp times)."""
    f: float
    i: float
    w: float
    share: float
    kept: int
    values: Values

    @property
    def step(self) -> float:
        return self.share * (self.f + self.i + self.w)


def least(cfg: Config, values: Values, world: int, c: Cluster, e: Efficiency, make: Make) -> Bound | None:
    """What no pipeline can make faster: every stage busy all the time. None where the values cannot be together."""
    whole = set_keys(cfg, values | {"parallel.sp": values["parallel.tp"] > 1, "parallel.pp": 1, "parallel.schedule": "1f1b",
                                    "parallel.vpp": None, "parallel.zero": 1, "parallel.dp_rep": 1})
    p, b = whole.parallel, whole.train.micro_batch
    dp = world // (p.tp * p.cp)
    try:
        if world % (p.tp * p.cp):
            return None
        job, _ = job_of(set_keys(whole, {"train.global_batch": b * dp}), world, make)
    except ConfigError:
        return None
    t, _ = stage_times(job, 0, c, e)
    kept = memory.activation_bytes(of_one_cp(whole), 1, whole.model.layers - 1, flash=True)
    return Bound(t.f, t.i, t.w, cfg.train.global_batch / (b * dp), kept, values)


def with_bubble(bound: Bound, more: Values, layers: int) -> float:
    """A step's least time under a schedule; infinite for what is no schedule of its own, or cannot be."""
    p, kind, v = more["parallel.pp"], more["parallel.schedule"], more["parallel.vpp"]
    n, chunks = round(bound.share * p), v or (2 if kind in ("zb-v", "dualpipe-v") else 1)
    if n < 1 or abs(n - bound.share * p) > 1e-6 or p * chunks > layers or (p == 1 and (kind, v) != ("1f1b", None)):
        return math.inf
    if (kind == "interleaved") != (v is not None) or (kind == "interleaved" and n % p):
        return math.inf
    known = closed_form(kind, p, n, chunks, bound.f / p, bound.i / p, bound.w / p) if p > 1 else None
    return bound.step + (known[1] if known else 0.0)


def least_bytes(cfg: Config, world: int, bound: Bound) -> float:
    """What a rank holds at least. Cheaper than `held`, and enough to turn down most layouts."""
    m, p, (w, g), n = cfg.model, cfg.parallel, BYTES[cfg.train.dtype], parameters(cfg.model)
    total = n["total"] + n["ahead"]
    experts = sum(is_moe(m, i) for i in range(m.layers)) * (mixture(m, m.experts) - mixture(m, 0)) if m.experts else 0
    own = ((total - experts) / p.tp + experts / (p.ep * p.etp)) / p.pp
    return own * (w * (p.zero < 3) + g * (p.zero < 2)) + total * g / world + bound.kept * min(1.0, bound.share) + RESERVED


def price(cfg: Config, world: int, c: Cluster, e: Efficiency, make: Make, counts: dict[str, int]) -> Found | None:
    """A layout with its forecast and its bytes; None where it is refused or too large, which `counts` notes."""
    try:
        job, n = job_of(cfg, world, make)
    except ConfigError:
        counts["refused"] += 1
        return None
    found = Found(cfg, n, Forecast(), *held(job))
    if found.memory > c.memory:
        counts["too large"] += 1
        return None
    counts["priced"] += 1
    return found._replace(forecast=forecast(job, n, c, e))


def search(cfg: Config, world: int, c: Cluster, e: Efficiency, make: Make, fixed: Values, top: int) -> tuple[list[Found], dict[str, int]]:
    """(the `top` fastest layouts that fit, the fastest first; how many were priced, too large, refused by the rules)."""
    core, rest = axes(cfg, world, c)
    found: list[Found] = []
    counts = {"priced": 0, "too large": 0, "refused": 0}

    def last() -> float:
        return found[top - 1].forecast.step if len(found) >= top else math.inf

    bounds = [b for values in choices(free(core, fixed)) if (b := least(cfg, values, world, c, e, make))]
    for bound in sorted(bounds, key=lambda b: b.step):
        if bound.step >= last():
            break
        schedules = [(with_bubble(bound, more, cfg.model.layers), i, more) for i, more in enumerate(choices(free(rest, fixed)))]
        for best, _, more in sorted(s for s in schedules if s[0] < math.inf):
            if best >= last():
                break
            values = bound.values | more | ({} if "parallel.sp" in fixed else {"parallel.sp": bound.values["parallel.tp"] > 1})
            if values["parallel.dp_rep"] == "node":  # what is sharded lies within a node
                values["parallel.dp_rep"] = world // values["parallel.pp"] // c.node
                if values["parallel.dp_rep"] < 2 or world // values["parallel.pp"] % c.node:
                    continue
            job = set_keys(cfg, values)
            if least_bytes(job, world, bound) > c.memory:
                counts["too large"] += 1
            elif one := price(job, world, c, e, make, counts):
                found = sorted([*found, one], key=lambda x: (x.forecast.step, x.memory))[:top]
    return found, counts
