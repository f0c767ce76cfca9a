"""The buckets of one rank, by arithmetic: what model/*.py and build.py would make there, without a tensor (no torch).

What plan/bytes.py and plan/memory.py count is built on it; a test compares it with the real buckets, slot by slot.
"""
from dataclasses import dataclass
from typing import NamedTuple

from config import Config, head_dim, kv_heads, padded_vocab
import parallel.packing as packing
from parallel.layout import Layout
from parallel.schedule import Schedule

BYTES = {"fp64": (8, 8), "fp32": (4, 4), "bf16": (2, 4)}  # train.dtype: compute, accumulation


class Param(NamedTuple):
    """numel: elements on this rank; whole: every tp rank holds all of it; partial: the axis over which its gradient is a part."""
    name: str
    numel: int
    decay: bool
    whole: bool
    partial: str | None = None


@dataclass(eq=False)
class Bucket:
    """offsets: of the parameters; size: elements with padding; lo, hi: what this rank owns; users: parts that use it."""
    params: tuple[Param, ...]
    offsets: list[int]
    size: int
    lo: int
    hi: int
    users: int = 0

    @property
    def share(self) -> int:
        return self.hi - self.lo

    def partial(self, axis: str) -> int:
        """Owned elements whose gradient is partial over `axis`."""
        return sum(max(0, min(at + p.numel, self.hi) - max(at, self.lo)) for p, at in zip(self.params, self.offsets) if p.partial == axis)


@dataclass(frozen=True)
class Job:
    """One rank of a run. schedule: parallel/schedule.py; cuts: [(first, last)] blocks of each stage (model/split.py)."""
    cfg: Config
    layout: Layout
    rank: int
    schedule: Schedule
    cuts: list[tuple[int, int]]

    @property
    def pp(self) -> int:
        return self.layout.coords(self.rank)["pp"]

    @property
    def shard(self) -> int:
        """This rank's place in mesh.shard."""
        c = self.layout.coords(self.rank)
        return c["dp"] * self.layout.cp + c["cp"]

    def stages(self) -> list[int]:
        return [s for s, rank in enumerate(self.schedule.place) if rank == self.pp]

    @property
    def shards(self) -> int:
        """Ranks of mesh.shard."""
        return self.layout.dp * self.layout.cp


def norm(cfg: Config, name: str) -> list[Param]:
    d, partial = cfg.model.hidden, "tp" if cfg.parallel.sp else None
    out = [Param(f"{name}.weight", d, False, True, partial)]
    return out + ([Param(f"{name}.bias", d, False, True, partial)] if cfg.model.norm == "layernorm" else [])


def block(cfg: Config) -> list[Param]:
    """In the order in which torch lists a Block's parameters."""
    m, tp, sp = cfg.model, cfg.parallel.tp, "tp" if cfg.parallel.sp else None
    hd, q, kv = head_dim(m), m.heads * head_dim(m), kv_heads(m) * head_dim(m)
    inner = m.ffn * (2 if m.activation == "swiglu" else 1)
    split = tp == 1
    bias = m.bias or m.qkv_bias
    if kv_heads(m) < tp:  # parallel/tensor.py: SharedHeads
        heads = [Param(f"{x}.weight", kv * m.hidden, True, True, "tp") for x in "kv"]
        heads += [Param(f"{x}.bias", kv, False, True, "tp") for x in "kv" if bias]
        q_share = q // tp
    else:
        heads, q_share = [], (q + 2 * kv) // tp
    heads += [Param("qkv.weight", q_share * m.hidden, True, split), *([Param("qkv.bias", q_share, False, split)] if bias else [])]
    return [*norm(cfg, "attn_norm"),
            *([Param(n, hd, False, True, "tp") for n in ("q_norm", "k_norm")] if m.qk_norm else []),
            *heads,
            Param("out.weight", q * m.hidden // tp, True, split),
            *([Param("out.bias", m.hidden, False, True, sp)] if m.bias else []),
            *norm(cfg, "mlp_norm"),
            Param("inner.weight", inner * m.hidden // tp, True, split),
            *([Param("inner.bias", inner // tp, False, split)] if m.bias else []),
            Param("down.weight", m.ffn * m.hidden // tp, True, split),
            *([Param("down.bias", m.hidden, False, True, sp)] if m.bias else [])]


def buckets(job: Job) -> dict[int, list[list[Bucket]]]:
    """{stage of this rank: the buckets of each part}; a tied table of two parts is one Bucket in both."""
    cfg, m, p = job.cfg, job.cfg.model, job.cfg.parallel
    ends = job.schedule.place[0], job.schedule.place[-1]
    table = Param("table", padded_vocab(m) * m.hidden // p.tp, True, p.tp == 1, "tied" if m.tied and ends[0] != ends[1] else None)
    cap = int(p.bucket_mb * 2**20 / BYTES[cfg.train.dtype][1])
    index = job.shard if p.zero else 0

    def make(params: list[Param]) -> Bucket:
        offsets, size = packing.place([x.numel for x in params], job.shards if p.zero else job.shards * p.dp_rep)
        share = size // (job.shards if p.zero else 1)
        return Bucket(tuple(params), offsets, size, share * index, share * (index + 1))

    def pack(params: list[Param]) -> list[Bucket]:
        params = sorted(params, key=lambda x: (not x.decay, x.whole))
        return [make([params[i] for i in group]) for group in packing.pack([x.numel for x in params], cap)]

    shared: Bucket | None = None  # a tied table
    out: dict[int, list[list[Bucket]]] = {}
    for stage in job.stages():
        first, last = job.cuts[stage]
        parts = out[stage] = []
        if first == 0:
            positions = [Param("positions", m.context * m.hidden, True, True, "tp" if p.sp else None)] if m.positions == "learned" else []
            shared = make([table]) if m.tied else None
            parts.append([shared, *pack(positions)] if m.tied else pack([table, *positions]))
        parts += [pack(block(cfg)) for _ in range(first, last)]
        if last == m.layers:
            if m.tied:
                parts.append([shared or make([table]), *pack(norm(cfg, "norm"))])
            else:
                parts.append(pack([table, *norm(cfg, "norm")]))
    for b in (b for parts in out.values() for part in parts for b in part):
        b.users += 1
    return out


def unique(stages: dict[int, list[list[Bucket]]]) -> list[Bucket]:
    """Every bucket of the rank, once."""
    return list({id(b): b for parts in stages.values() for part in parts for b in part}.values())
