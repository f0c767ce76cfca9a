"""How long a step takes on a cluster: a block's products and passes by a roofline, its exchanges by their links, and the very
schedule that would run, simulated (no torch).

    a product of [r, i] by [i, o]    2 r i o / (peak x gemm) + (r i + i o + r o) bytes / (hbm x stream): small ones are bound by memory
    attention's two products         the keys that a causal, windowed query sees, at peak x core; their backward is 2.5 times as much
    norms, activations, residuals    bytes / (hbm x stream), twice as many backward
    an exchange of n bytes           plan/bytes.py's, at a share of the link's bandwidth x N / (N - 1), + a hop's time x log2 N a call

What hides behind what is what our code starts early: gradients of tp's inputs behind the weights' gradients, keys and values of the ring
behind attention, dispatch and combine behind shared experts, ZeRO's gathers and sums behind the whole stage's compute, or behind that of
one microbatch where a step has one such exchange. `Efficiency` is fitted to what others have published (plan/published.py). Not in it:
experts of unequal load, other jobs on the links, stragglers.
"""
import functools
import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from config import HERE, Config, ConfigError, head_dim, in_fp8, is_moe, kv_heads, moe_ffn, of_stage, padded_vocab, read_yaml, remakes, value_dim
from parallel.layout import SPANS, Layout
from parallel.schedule import make
from plan import bytes as wire
from plan.count import keys_seen
from plan.memory import moments
from plan.parts import BYTES, Job, buckets, unique
from plan.simulate import simulate

DATA = ("shard", "loss", "dp_rep", "eshard", "eloss")  # groups over which gradients are summed and weights gathered
STEADY = 2  # times the pipeline's ranks: microbatches that are simulated; each further one takes what the busiest rank computes


@dataclass(frozen=True)
class Cluster:
    """flops: {train.dtype: FLOP/s}; memory: bytes a GPU; hbm, inside, between: bytes/s of a GPU's memory, and of its links within a node
    of `node` GPUs and to other nodes, one way."""
    name: str
    flops: dict[str, float] = field(hash=False)
    memory: float
    hbm: float
    node: int
    inside: float
    between: float


@dataclass(frozen=True)
class Efficiency:
    """Shares of what a data sheet says, and seconds."""
    gemm: float = 0.69
    gemm8: float = 0.80
    core: float = 0.35
    stream: float = 0.60
    inside: float = 0.50  # of the links within a node
    between: float = 0.50  # and to others
    hop: float = 20e-6  # of a message to another rank
    op: float = 93e-6  # of a block's forward or backward, in which the GPU waits for the host and between kernels
    route: float = 1.5e-3  # the same of a mixture's, more


@functools.lru_cache
def cluster(name: str) -> Cluster:
    """configs/clusters.yaml's. Raises ConfigError."""
    every = read_yaml(HERE / "clusters.yaml")
    if name not in every["clusters"]:
        raise ConfigError(f"--cluster: no such cluster {name!r}; configs/clusters.yaml has {', '.join(every['clusters'])}")
    c = every["clusters"][name]
    flops = {k: 1e12 * v for k, v in every["gpus"][c["gpu"]].items()}
    return Cluster(name, flops, c["memory"] * 1e9, c["hbm"] * 1e9, c["node"], c["inside"] * 1e9, c["between"] * 1e9)


# ---- one block's compute ---------------------------------------------------------------------------------------------

class Product(NamedTuple):
    """[rows, ins] by [ins, outs], `times` of them."""
    rows: float
    ins: float
    outs: float
    times: float = 1


class Work(NamedTuple):
    """Of one forward of one microbatch on this rank: products, attention's FLOPs, bytes that pass through memory."""
    products: list[Product]
    attention: float
    bytes: float

    @property
    def flops(self) -> float:
        return sum(2 * p.rows * p.ins * p.outs * p.times for p in self.products) + self.attention


def tokens_of(cfg: Config) -> int:
    """Tokens of one microbatch on one rank."""
    return cfg.train.micro_batch * cfg.train.seq_len // cfg.parallel.cp


def block_work(cfg: Config, layer: int) -> Work:
    """A block's forward."""
    m, p, c = cfg.model, cfg.parallel, BYTES[cfg.train.dtype][0]
    t, tp, d, hd, vd = tokens_of(cfg), p.tp, m.hidden, head_dim(m), value_dim(m)
    own, h, kv = t / (tp if p.sp else 1), m.heads / tp, max(1, kv_heads(m) / tp)
    out: list[Product] = [Product(t, h * vd, d)]
    if m.kv_rank:
        latent = (m.q_rank or 0) + m.kv_rank + m.rope_dim
        out += [Product(own, d, latent), Product(t, m.q_rank or d, h * hd), Product(t, m.kv_rank, h * (m.nope_dim + m.v_dim))]
    else:
        out.append(Product(t, d, (h + 2 * kv) * hd))
    moved = 8 * own * d + 2 * t * (h * (hd + vd) + 2 * kv * hd)  # two norms with their residuals; RoPE and what attention reads and writes
    gates = 3 if m.activation == "swiglu" else 2

    def mlp(rows: float, width: float, times: float = 1) -> None:
        nonlocal moved
        out.extend((Product(rows, d, width * (gates - 1), times), Product(rows, width, d, times)))
        moved += rows * width * gates * times

    if is_moe(m, layer):
        rows, local = t / tp * m.top_k * p.etp, m.experts / p.ep
        out.append(Product(t / tp, d, m.experts))
        mlp(rows / local, moe_ffn(m) / p.etp, local)
        moved += 4 * rows * d  # permuted, and back
        if m.shared_experts:
            mlp(t, m.shared_experts * moe_ffn(m) / tp)
        if m.shared_gate:
            out.append(Product(own, d, 1))
    else:
        mlp(t, m.ffn / tp)
    if m.attention == "reference":  # scores, their softmax and dropout pass through memory
        moved += 6 * t * keys_seen(m, cfg.train.seq_len) * h
    return Work(out, 2 * t * keys_seen(m, cfg.train.seq_len) * h * (hd + vd), moved * c)


def head_work(cfg: Config) -> Work:
    """The head, and the softmax of its logits."""
    m, t, v = cfg.model, tokens_of(cfg), padded_vocab(cfg.model) / cfg.parallel.tp
    return Work([Product(t, m.hidden, v)], 0, 4 * t * v * BYTES[cfg.train.dtype][0])


@dataclass(frozen=True)
class Times:
    """Seconds of one microbatch: forward, gradients of inputs (with what is made again), gradients of weights; of the forward, attention's
    products (core) and a mixture's shared experts."""
    f: float = 0.0
    i: float = 0.0
    w: float = 0.0
    core: float = 0.0
    shared: float = 0.0

    def __add__(self, o: "Times") -> "Times":
        return Times(self.f + o.f, self.i + o.i, self.w + o.w, self.core + o.core, self.shared + o.shared)


@functools.lru_cache(maxsize=4096)
def block_times(cfg: Config, layer: int | None, c: Cluster, e: Efficiency) -> Times:
    """Of a block, or of the head (layer None)."""
    work = head_work(cfg) if layer is None else block_work(cfg, layer)
    eight = layer is not None and in_fp8(cfg, layer)
    dtype, size = "fp8" if eight else "bf16" if cfg.train.dtype == "fp8" else cfg.train.dtype, 1 if eight else BYTES[cfg.train.dtype][0]
    peak, stream = c.flops[dtype], c.hbm * e.stream
    gemm = sum(p.times * (2 * p.rows * p.ins * p.outs / (peak * (e.gemm8 if eight else e.gemm))
                          + (p.rows * p.ins + p.ins * p.outs + p.rows * p.outs) * size / stream) for p in work.products)
    core = work.attention / (c.flops["bf16" if dtype == "fp8" else dtype] * e.core)
    rest = work.bytes / stream * (1.5 if eight else 1)  # quantizing reads again
    op = e.op * cfg.parallel.cp + (e.route if layer is not None and is_moe(cfg.model, layer) else 0.0)
    f = gemm + core + rest + op
    if layer is None:  # both gradients are made in the forward (kernels/cross_entropy.py)
        return Times(f + 2 * gemm, 0, 0)
    i = gemm + 2.5 * core + 2 * rest + op
    i += f if cfg.parallel.recompute == "full" else remakes(cfg, "core") * core + (remakes(cfg, "norm") + remakes(cfg, "act")) * rest / 2
    m, shared = cfg.model, 0.0
    if is_moe(m, layer) and m.shared_experts:
        width = m.shared_experts * moe_ffn(m) / cfg.parallel.tp
        shared = 6 * tokens_of(cfg) * m.hidden * width / (peak * e.gemm)
    return Times(f, i, gemm, core, shared)


# ---- exchanges -------------------------------------------------------------------------------------------------------

def crossing(layout: Layout, c: Cluster, group: str, verb: str, n: int) -> tuple[float, float]:
    """Of an exchange of n bytes (plan/bytes.py's) what a rank sends (within its node, to others). A ring over several nodes leaves
    each node once, over the links of all the group's ranks there; a part of an all-to-all goes straight to its rank."""
    ranks = layout.group(0, *SPANS[group])
    N, near = len(ranks), sum(r < c.node for r in ranks)
    if verb == "send":
        return (n, 0.0) if ranks[1] < c.node else (0.0, n)
    if verb == "all_to_all":
        return n * (near - 1) / N, n * (N - near) / N
    n *= (2 if verb == "all_reduce" else 1) * (N - 1) / N
    return (n, 0.0) if near == N else (n * (near - 1) / near, n / near)


@functools.lru_cache(maxsize=1 << 14)
def seconds(layout: Layout, c: Cluster, e: Efficiency, group: str, verb: str, calls: int, n: int) -> float:
    """Of `calls` exchanges with n bytes in all; nothing in a group of one."""
    N = math.prod(map(layout.size, SPANS[group]))
    if N == 1 or not calls:
        return 0.0
    near, far = crossing(layout, c, group, verb, n)
    return calls * e.hop * (1 if verb == "send" else math.log2(N)) + max(near / (c.inside * e.inside), far / (c.between * e.between))


def exchanges(job: Job, stage: int, c: Cluster, e: Efficiency) -> dict[str, float]:
    """{group: seconds} of one microbatch, forward and backward, in one stage."""
    out: dict[str, float] = defaultdict(float)

    def add(group: str, verb: str, calls: int, n: int) -> None:
        out[group] += seconds(job.layout, c, e, group, verb, int(calls), int(calls) * n)

    for part in (wire.tensor_bytes, wire.scale_bytes, wire.context_bytes, wire.mixture_bytes):
        part(job, stage, 1, add)
    return out


# ---- a step ----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Forecast:
    """Seconds of a step, and of that on the rank that computes longest: compute, exposed ({group: seconds; "data": of gradients and
    weights}), bubble, optimizer. sent: bytes of that rank within its node and to others."""
    step: float = math.inf
    compute: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0
    exposed: dict[str, float] = field(default_factory=dict)
    sent: tuple[float, float] = (0.0, 0.0)


def stage_times(job: Job, stage: int, c: Cluster, e: Efficiency) -> tuple[Times, dict[str, float]]:
    """(seconds of one microbatch in one stage, {group: those of them in which it only waits for an exchange})."""
    cfg, m = of_stage(job.cfg, stage), job.cfg.model
    total = sum((block_times(cfg, alike(cfg, i), c, e) for i in wire.layers(job, stage)), Times())
    if job.cuts[stage][1] == m.layers:
        total = sum([block_times(cfg, None, c, e)] * (1 + m.mtp), total)
    ring = total.core if cfg.parallel.cp_kind == "ring" else 0.0
    behind = {"tp": (0.0, total.w), "cp": (ring, 2.5 * ring), "experts": (total.shared, 2 * total.shared)}  # what hides it, forward and backward
    fore, waits, f, i = 1 / (2 + (cfg.parallel.recompute == "full")), {}, total.f, total.i
    for group, s in exchanges(job, stage, c, e).items():
        a, b = behind.get(group, (0.0, 0.0))
        a, b = max(0.0, s * fore - a), max(0.0, s * (1 - fore) - b)
        waits[group], f, i = a + b, f + a, i + b
    return replace(total, f=f, i=i), waits


def alike(cfg: Config, layer: int) -> int:
    """The first layer of the same kind."""
    return next(i for i in range(layer + 1) if (is_moe(cfg.model, i), in_fp8(cfg, i)) == (is_moe(cfg.model, layer), in_fp8(cfg, layer)))


@functools.lru_cache(maxsize=256)
def timeline(kind: str, p: int, m: int, v: int, f: tuple, i: tuple, w: tuple, hop: float) -> tuple[float, list[float]]:
    """(makespan, what each rank computes) of a schedule whose stages take so long: layouts that differ in ZeRO alone share it."""
    schedule = make(kind, p, m, v)
    line = simulate(schedule.order, schedule.n_stages, {"F": f, "I": i, "W": w}, hop)
    return line.makespan, [line.busy(r) for r in range(p)]


def forecast(job: Job, microbatches: int, c: Cluster, e: Efficiency) -> Forecast:
    """A step of so many microbatches; job.schedule has STEADY times the ranks of them, or all, where these are fewer."""
    cfg, schedule, L = job.cfg, job.schedule, job.layout
    stages = [stage_times(job, s, c, e) for s in range(schedule.n_stages)]
    cost = {kind: [getattr(t, kind.lower()) for t, _ in stages] for kind in "FIW"}
    boundary = wire.activation(cfg) // (L.tp if cfg.parallel.sp else 1)
    span, busy = timeline(schedule.kind, L.pp, schedule.microbatches, schedule.chunks, *map(tuple, cost.values()),
                          seconds(L, c, e, "pp", "send", 1, boundary))
    times = microbatches / schedule.microbatches
    worst = busy.index(max(busy))
    mine = [s for s, r in enumerate(schedule.place) if r == worst]
    here = replace(job, rank=worst * (L.world // L.pp))
    every, zero = unique(buckets(here)), cfg.parallel.zero

    sums = whole = near = far = 0.0  # seconds of gradients summed and of weights gathered, in the step; bytes
    for (group, verb), (calls, n) in wire.step_bytes(here).items():
        again = times if group not in DATA or zero > (2 if verb == "all_gather" else 1) else 1
        a, b = crossing(L, c, group, verb, n) if group in SPANS else (0.0, n)
        near, far = near + a * again, far + b * again
        if group in DATA:
            s = again * seconds(L, c, e, group, verb, calls, n)
            sums, whole = (sums, whole + s) if verb == "all_gather" else (sums + s, whole)
    forward, backward = sum(cost["F"][s] for s in mine), sum(cost["I"][s] + cost["W"][s] for s in mine)
    m, last = microbatches, 1 / len(every)  # the last bucket's sum has nothing to hide behind, nor has the first one's gathering
    shown = max(sums - backward * (m if zero > 1 else 1), sums * last / (m if zero > 1 else 1))
    shown += max(whole - ((forward + backward) * m if zero == 3 else forward), whole * last / (2 * m if zero == 3 else 1))

    kept = sum(b.share * (2 + 2 * moments(cfg.optim.name, b.params[0].hidden)) for b in every)  # masters and moments, read and written
    update = (kept * BYTES[cfg.train.dtype][1] + sum(b.share for b in every) * sum(BYTES[cfg.train.dtype])) / (c.hbm * e.stream)
    waits = {g: microbatches * sum(stages[s][1].get(g, 0.0) for s in mine) for g in SPANS} | {"data": shown}
    computes, all_of_it = max(busy) * times, span + max(busy) * (times - 1)
    return Forecast(all_of_it + shown + update, computes - sum(waits.values()) + shown, max(0.0, all_of_it - computes), update,
                    {g: s for g, s in waits.items() if s}, (near, far))
