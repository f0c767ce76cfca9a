"""The buckets of one rank, by arithmetic: what model/*.py and build.py would make there, without a tensor (no torch).

What plan/bytes.py and plan/memory.py count is built on it; a test compares it with the real buckets, slot by slot.
"""
import itertools
from dataclasses import dataclass
from typing import NamedTuple

import parallel.packing as packing
from config import Config, head_dim, is_moe, kv_heads, moe_ffn, padded_vocab, scale_block
from parallel.layout import EXPERT, Layout
from parallel.schedule import Schedule

CODED = ("int8", "fp8")  # values of parallel.compress that send 8 bits an element

BYTES = {"fp64": (8, 8), "fp32": (4, 4), "bf16": (2, 4), "fp16": (2, 4), "fp8": (2, 4)}  # train.dtype: compute, accumulation


class Param(NamedTuple):
    """numel: elements on this rank; whole: every tp rank holds all of it; partial: the axis over which its gradient is a part;
    expert: shared out by the experts' factorization of the ranks. columns: of a matrix, 0: it is none; many: as many matrices."""
    name: str
    numel: int
    decay: bool
    whole: bool
    partial: str | None = None
    expert: bool = False
    columns: int = 0
    many: int = 1

    def factors(self, rank: int) -> tuple[int, int] | None:
        """Elements of the two factors of its gradient (parallel/powersgd.py), None where that is summed whole."""
        rows = self.numel // self.many // self.columns if self.columns else 0
        r = self.many * min(rank, rows, self.columns)
        return (r * rows, r * self.columns) if min(rows, self.columns) > 1 and not self.partial else None

    @property
    def hidden(self) -> bool:
        """As parallel/spec.py's Spec.hidden."""
        return self.decay and self.name not in ("table", "positions", "router", "gate")


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
    def expert(self) -> bool:
        return self.params[0].expert

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

    def stages(self) -> list[int]:
        return [s for s, rank in enumerate(self.schedule.place) if rank == self.pp]

    def shards(self, expert: bool = False) -> int:
        """Ranks that share a bucket under ZeRO: of mesh.shard, or of mesh.eshard."""
        return self.layout.edp if expert else self.layout.dp * self.layout.cp

    def place(self, expert: bool = False) -> int:
        """This rank's place among them."""
        if expert:
            return self.layout.coords(self.rank, EXPERT)["edp"]
        c = self.layout.coords(self.rank)
        return c["dp"] * self.layout.cp + c["cp"]


def norm(cfg: Config, name: str) -> list[Param]:
    d, partial = cfg.model.hidden, "tp" if cfg.parallel.sp else None
    out = [Param(f"{name}.weight", d, False, True, partial)]
    return out + ([Param(f"{name}.bias", d, False, True, partial)] if cfg.model.norm == "layernorm" else [])


def linears(cfg: Config, name: str, ffn: int) -> list[Param]:
    """An MLP's."""
    m, tp = cfg.model, cfg.parallel.tp
    inner = ffn * (2 if m.activation == "swiglu" else 1)
    return [Param(f"{name}inner.weight", inner * m.hidden // tp, True, tp == 1, columns=m.hidden),
            *([Param(f"{name}inner.bias", inner // tp, False, tp == 1)] if m.bias else []),
            Param(f"{name}down.weight", ffn * m.hidden // tp, True, tp == 1, columns=ffn // tp),
            *([Param(f"{name}down.bias", m.hidden, False, True, "tp" if cfg.parallel.sp else None)] if m.bias else [])]


def mixture(cfg: Config) -> list[Param]:
    """A MoE's, in the order in which torch lists them: its own first."""
    m, p = cfg.model, cfg.parallel
    one = m.experts // p.ep * moe_ffn(m) // p.etp * m.hidden
    return [*([Param("gate", m.hidden, True, True, "tp" if p.sp else None, columns=m.hidden)] if m.shared_gate else []),
            Param("router", m.experts * m.hidden, True, True, "tp", columns=m.hidden),
            Param("experts.inner", 2 * one, True, p.ep * p.etp == 1, None, True, m.hidden, m.experts // p.ep),
            Param("experts.down", one, True, p.ep * p.etp == 1, None, True, moe_ffn(m) // p.etp, m.experts // p.ep),
            *(linears(cfg, "shared.", m.shared_experts * moe_ffn(m)) if m.shared_experts else [])]


def latent(cfg: Config) -> list[Param]:
    """Latent attention's, its own first."""
    m, tp, sp = cfg.model, cfg.parallel.tp, "tp" if cfg.parallel.sp else None
    r, q = m.q_rank or 0, m.heads * head_dim(m) // tp
    return [Param("down", (r + m.kv_rank + m.rope_dim) * m.hidden, True, True, sp, columns=m.hidden),
            *([Param("q_norm", r, False, True, sp), Param("q_up", q * r, True, tp == 1, columns=r)] if r else []),
            Param("kv_norm", m.kv_rank, False, True, sp),
            Param("kv_up", m.heads * (m.nope_dim + m.v_dim) * m.kv_rank // tp, True, tp == 1, columns=m.kv_rank),
            *([] if r else [Param("q.weight", q * m.hidden, True, tp == 1, columns=m.hidden)]),
            Param("out.weight", m.heads * m.v_dim * m.hidden // tp, True, tp == 1, columns=m.heads * m.v_dim // tp)]


def ahead(cfg: Config) -> list[Param]:
    """The modules of multi-token prediction, without the table that they share."""
    m, sp = cfg.model, "tp" if cfg.parallel.sp else None
    return [p for k in range(m.mtp) for p in (
        Param("join", 2 * m.hidden ** 2, True, True, sp, columns=2 * m.hidden), *norm(cfg, "embed_norm"), *norm(cfg, "hidden_norm"),
        *block(cfg, m.layers + k), *norm(cfg, "head_norm"))]


def block(cfg: Config, layer: int) -> list[Param]:
    """In the order in which torch lists a Block's parameters."""
    m, tp, sp = cfg.model, cfg.parallel.tp, "tp" if cfg.parallel.sp else None
    if m.kv_rank:
        return [*norm(cfg, "attn_norm"), *latent(cfg), *norm(cfg, "mlp_norm"), *(mixture(cfg) if is_moe(m, layer) else linears(cfg, "", m.ffn))]
    hd, q, kv = head_dim(m), m.heads * head_dim(m), kv_heads(m) * head_dim(m)
    shared, bias = kv_heads(m) < tp, m.bias or m.qkv_bias  # parallel/tensor.py: SharedHeads
    split = q // tp if shared else (q + 2 * kv) // tp
    heads = [Param(f"{x}.weight", kv * m.hidden, True, True, "tp", columns=m.hidden) for x in "kv" if shared]
    heads += [Param(f"{x}.bias", kv, False, True, "tp") for x in "kv" if shared and bias]
    heads += [Param("qkv.weight", split * m.hidden, True, tp == 1, columns=m.hidden), *([Param("qkv.bias", split, False, tp == 1)] if bias else [])]
    return [*norm(cfg, "attn_norm"),
            *([Param(n, k // tp, False, tp == 1) for n, k in (("q_norm", q), ("k_norm", kv))] if m.qk_norm_whole else
              [Param(n, hd, False, True, "tp") for n in ("q_norm", "k_norm")] if m.qk_norm else []),
            *heads,
            Param("out.weight", q * m.hidden // tp, True, tp == 1, columns=q // tp),
            *([Param("out.bias", m.hidden, False, True, sp)] if m.bias else []),
            *norm(cfg, "mlp_norm"),
            *(mixture(cfg) if is_moe(m, layer) else linears(cfg, "", m.ffn))]


def buckets(job: Job) -> dict[int, list[list[Bucket]]]:
    """{stage of this rank: the buckets of each part}; a table of two parts (tied, or for multi-token prediction) is one Bucket in
    both."""
    cfg, m, p = job.cfg, job.cfg.model, job.cfg.parallel
    ends = job.schedule.place[0], job.schedule.place[-1]
    both = m.tied or m.mtp > 0  # both ends have the embedding
    table = Param("table", padded_vocab(m) * m.hidden // p.tp, True, p.tp == 1, columns=m.hidden)
    embed = table._replace(partial="tied" if both and ends[0] != ends[1] else None)
    cap, align = int(p.bucket_mb * 2**20 / BYTES[cfg.train.dtype][1]), scale_block(p) or packing.ALIGN

    def make(params: list[Param]) -> Bucket:
        expert = params[0].expert
        shards, index = job.shards(expert), job.place(expert) if p.zero else 0
        collective = p.reduce == "collective" and p.compress not in CODED
        shares = packing.shares(p.zero, collective, shards, p.dp_rep)
        offsets, size = packing.place([x.numel for x in params], shares, align)
        share = size // (shards if p.zero else 1)
        return Bucket(tuple(params), offsets, size, share * index, share * (index + 1))

    def pack(params: list[Param]) -> list[Bucket]:
        apart = cfg.optim.name == "muon"
        kinds = [sorted([x for x in params if (x.expert, apart and x.hidden) == kind], key=lambda x: (not x.decay, x.whole))
                 for kind in itertools.product((False, True), repeat=2)]
        return [make([kind[i] for i in group]) for kind in kinds for group in packing.pack([x.numel for x in kind], cap, align)]

    shared: Bucket | None = None  # a tied table
    out: dict[int, list[list[Bucket]]] = {}
    for stage in job.stages():
        first, last = job.cuts[stage]
        parts = out[stage] = []
        if first == 0:
            learned = Param("positions", m.context * m.hidden, True, True, "tp" if p.sp else None, columns=m.hidden)
            positions = [learned] if m.positions == "learned" else []
            shared = make([embed]) if both else None
            parts.append([shared, *pack(positions)] if both else pack([embed, *positions]))
        parts += [pack(block(cfg, i)) for i in range(first, last)]
        if last == m.layers:
            last_part = [*([] if m.tied else [table]), *norm(cfg, "norm"), *ahead(cfg)]
            parts.append([*([shared or make([embed])] if both else []), *pack(last_part)])
    for b in (b for parts in out.values() for part in parts for b in part):
        b.users += 1
    return out


def unique(stages: dict[int, list[list[Bucket]]]) -> list[Bucket]:
    """Every bucket of the rank, once."""
    return list({id(b): b for parts in stages.values() for part in parts for b in part}.values())
