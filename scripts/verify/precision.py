"""Prove the precisions that people train in: python -m scripts.verify NAME --precision --world 2

scripts.verify proves layouts in fp64. Here bf16, fp16, fp32 and fp8 run through train.train itself: every
optimizer, every ZeRO stage, on real files. After every step this must hold:

    agreement    own weights == masters rounded to the compute dtype; what forward and backward read == the
                 shares of all ranks side by side (in 8 bits: as parallel/compress.py defines it); replicas
                 equal: all of it bit for bit
    update       masters and moments == the optimizer's paper, computed here in fp64 from the gradients,
                 masters and moments that were there before: so weights cannot move without masters, nor
                 masters without weights
    movement     every matrix's masters change in every good step; the weights of the compute dtype within
                 the run
    norm         the told norm == the fp64 norm of the gradients / loss scale, to fp32's rounding
    wide         gradients are fp32 tensors with more digits than the compute dtype has; the loss is fp32
    skipped      a step whose gradient is not finite leaves masters, moments and weights bit for bit
    layout       gradients and loss like one process of the same dtype; masters like its masters; the same
                 steps are skipped. In fp16 with quantized weights, whose error moves a value across the edge
                 of fp16's range, one of the two may skip a step alone: the steps from there on are not
                 compared, and they may be at most NOT_COMPARED
    fp64         one process of the dtype like one process in fp64 from the same initial weights

Bounds. u: the unit roundoff of a dtype (fp32 2^-24, fp16 2^-11, bf16 2^-8, e4m3 2^-4, e5m2 2^-3). A
rounding to nearest is off by u / sqrt(6) of the value in the root mean square (uniform within half a unit;
the significand uniform in 1 .. 2). K roundings in a chain are independent, so they add up as sqrt(K)
(Higham and Mary 2019, SIAM J. Sci. Comput. 41-5): with SIGMAS standard deviations, as if each acted in full
on every output,

    E(dtype) = SIGMAS u sqrt(K / 6)            K: `roundings` below, counted from the model

is the relative error (Frobenius) of the gradients against exact arithmetic. Of two runs of one dtype whose
weights differ by delta (relative, measured on the weights that were read) and whose microbatches see the
same operations,

    error <= SIGMAS u32 sqrt(n) + M delta + E min(1, sqrt(M delta / u))           n: additions in fp32

M is the number of matrices in series: a product of M factors changes by the sum of their relative changes;
and a value that changed by M delta rounds to another neighbour with probability M delta / u, and is then
off by u. Layouts that cut a product or sum in another order (tp, cp, ep) have sqrt(2) E in the first place.
The masters' way m_s - m_0 follows by the optimizer: SGD and LARS are linear in the gradient; a direction
that is a sign (Lion; Adam's first steps, and LAMB's) turns where the error is larger than the gradient,
with probability rho / pi, and is then off by 2: 2 sqrt(rho / pi); Muon's polynomial multiplies a small
direction by at most 3.4445^5 = 485 (kernels/newton_schulz.py), and is never further off than 2.

Errors are those of the terms that a gradient is the sum of, and later in a run the terms cancel while they
stay as large: so gradients are held against the largest gradient of the run so far (at the start all tokens
pull one way), rho grows by as much. All of it is of first order: rates are chosen so that a step changes no
more than a few percent.
"""

import functools
import itertools
import json
import math
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import config
from build import plan_pipeline
from config import Config, ConfigError
from data import tokenizer
from data.indexed import Writer
from kernels.attention import attention
from kernels.cross_entropy import linear_cross_entropy
from kernels.newton_schulz import COEFFICIENTS
from kernels.norm import layer_norm, rms_norm
from kernels.partial_attention import partial
from parallel import comm, compress
from parallel.comm import World
from runtime.pool import Pool
from scripts.verify.loop import run_loop

UNIT = {
    "fp64": 2.0**-53,
    "fp32": 2.0**-24,
    "fp16": 2.0**-11,
    "bf16": 2.0**-8,
    "fp8": 2.0**-8,
}  # fp8: bf16 but for its products
U32, E4M3, E5M2 = 2.0**-24, 2.0**-4, 2.0**-3
SIGMAS = 2.0
STEPS, SCALED_STEPS = 6, 10  # of fp16: room for a scale that falls and grows
SPOILT = 3  # the step whose gradient is spoilt
NOT_COMPARED = 4  # last steps of fp16 with quantized weights, after one of two runs skipped a step alone
CERTAIN = 6.0  # standard deviations: of the mean of stochastic rounding
RATES = {"adamw": 3e-3, "adamw-bf16": 3e-5, "muon": 3e-3, "lamb": 1e-2, "lars": 5.0, "lion": 1e-3, "sgd": 0.1}
DTYPES = ("bf16", "fp16", "fp32", "fp8")
TRUST = 0.001  # LARS (arXiv 1708.03888): eta


# ---- what is trained ---------------------------------------------------------------------------------------


def corpus(folder: Path) -> str:
    """The prefix of a data set of 80 documents, written as scripts.tokenize writes them: letters, the early
    ones more often."""
    tok, rng = tokenizer.load("bytes"), np.random.default_rng(0)
    with Writer(folder / "text", tok.vocab) as w:
        for _ in range(80):
            w.add([*(97 + rng.geometric(0.15, rng.integers(10, 60)) % 26), tok.eod])
        w.finish(tok, 1)
    return str(folder / "text")


@functools.cache
def subject(name: str, data: str, dtype: str, optimizer: str) -> Config:
    """The recipe shrunk to a second of training; every feature of the family stays, but dropout and
    jitter."""
    states = "bf16" if optimizer == "adamw-bf16" else "fp32"
    cfg = config.resolve(
        name,
        None,
        [
            "--train.dtype",
            dtype,
            "--train.steps",
            str(SCALED_STEPS if dtype == "fp16" else STEPS),
            "--train.seq_len",
            "32",
            "--train.micro_batch",
            "1",
            "--train.global_batch",
            "8",
            "--train.loss_scale",
            str(2.0**24),
            "--train.loss_scale_window",
            "2",
            "--train.threads",
            "1",
            "--train.fp8_block",
            "16",
            "--optim.name",
            optimizer.removesuffix("-bf16"),
            "--optim.states",
            states,
            "--optim.lr",
            str(RATES[optimizer]),
            "--optim.warmup",
            "0",
            "--optim.decay",
            "constant",
            "--optim.clip",
            "0.5",
            "--optim.eps",
            "1e-6",
            "--data.path",
            data,
            "--eval.every",
            "none",
            "--eval.batches",
            "1",
            "--eval.sample",
            "0",
            "--checkpoint.every",
            "none",
            "--model.dropout",
            "0",
            "--model.jitter",
            "0",
            "--parallel.bucket_mb",
            "0.06",
            "--log.every",
            "1",
            "--log.name",
            "run",
        ],
    )
    m = cfg.model
    shrunk = replace(
        m,
        layers=4,
        hidden=64,
        heads=4,
        kv_heads=None if m.kv_heads is None else 2,
        ffn=64,
        vocab=None,
        head_dim=None if m.head_dim is None else 16,
        vocab_multiple=32,
        context=32,
        rope_original=16,
        window=None if m.window is None else 11,
        kv_rank=m.kv_rank and 32,
        q_rank=m.q_rank and 32,
        nope_dim=16,
        rope_dim=16,
        v_dim=16,
    )
    if m.experts:
        shrunk = replace(
            shrunk, experts=4, top_k=min(m.top_k, 2), moe_ffn=32, router_groups=1, router_group_top_k=1
        )
    return replace(cfg, model=shrunk)


def alone(cfg: Config) -> Config:
    """The same job in one process."""
    return replace(cfg, parallel=replace(config.Parallel(), bucket_mb=cfg.parallel.bucket_mb))


# ---- one rank of a run -------------------------------------------------------------------------------------


def bits(x: Tensor) -> Tensor:
    """The bits of x as integers, which compare as they are: NaN with NaN, and 0 not with -0."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


class Recorder:
    """The watch of one rank. Copies, after every step, what it owns; holds what is read against what was
    read before.

    spoilt: steps whose gradient becomes NaN on the ranks where `here`. wrong: what was seen that must not be.
    """

    def __init__(self, spoilt: frozenset[int], here: bool) -> None:
        self.spoilt, self.here = spoilt, here
        self.wrong: list[str] = []
        self.states: list[list[dict]] = (
            []
        )  # after each step, of each bucket: its masters, moments and own weights
        self.used: list[dict[int, Tensor]] = (
            []
        )  # {bucket: the whole weights that were read} between two steps
        self.grads: list[list[Tensor]] = []
        self.told: list[dict] = []
        self.run = None

    def __call__(self, point: str, step: int | None = None, **what) -> str | None:
        if point == "run.built":
            self.begin(what["run"], step)
        elif point == "step.backward":
            return self.backward(step)
        elif point == "step.end":
            self.end(step, **what)
        elif point == "eval.end":
            self.told[-1]["eval"] = what["loss"]
        return None

    def begin(self, run, step: int) -> None:
        self.run = run
        self.told.append({"step": step, "scale": float(run.scaler.scale), "good": float(run.scaler.good)})
        for i, bucket in enumerate(run.buckets):
            bucket.need = self.looking(i, bucket, bucket.need)
        self.snapshot(step)

    def looking(self, i: int, bucket, need):
        """need() of a bucket, which then looks at the weights that are about to be read."""

        def look() -> None:
            need()
            first = self.used[-1].setdefault(i, bucket.weights.clone())
            if not same(first, bucket.weights):
                self.wrong.append(
                    f"after step {self.told[-1]['step']}: bucket {i} was read twice and differed"
                )
            for slot in bucket.slots:
                if slot.param.data_ptr() != slot.of(bucket.weights).data_ptr():
                    self.wrong.append(
                        f"after step {self.told[-1]['step']}: {slot.param.spec.boxes[0].key} "
                        "is no view of its bucket"
                    )

        return look

    def snapshot(self, step: int) -> None:
        run, moments = self.run, self.run.optim.state()
        self.used.append({})
        now = [
            {
                "master": b.master.clone(),
                "own": b.own.clone(),
                **{name: flats[i].clone() for name, flats in moments.items() if flats[i] is not None},
            }
            for i, b in enumerate(run.buckets)
        ]
        for i, (b, state) in enumerate(zip(run.buckets, now)):
            rounded = state["master"].to(b.dtype)
            if b.quantized and b.zero < 3 and not self.states:  # from the first step on as the others see it
                continue
            if not same(state["own"], rounded):
                n = (
                    int((bits(state["own"]) != bits(rounded)).sum())
                    if state["own"].dtype == rounded.dtype
                    else len(rounded)
                )
                self.wrong.append(
                    f"after step {step}: {n} of {len(rounded)} own weights of bucket {i} "
                        "are not their masters rounded"
                )
        self.states.append(now)

    def backward(self, step: int) -> str | None:
        for i, b in enumerate(self.run.buckets):
            wide = torch.promote_types(b.dtype, torch.float32)
            if b.shard.dtype != wide or (b.grad is not None and b.grad.dtype != wide):
                self.wrong.append(f"step {step}: gradients of bucket {i} are {b.shard.dtype}, not {wide}")
        self.grads.append([b.shard.clone() for b in self.run.buckets])
        return "nan" if step in self.spoilt and self.here else None

    def end(self, step: int, loss: Tensor, norm: Tensor, ok: Tensor) -> None:
        wide = torch.promote_types(self.run.buckets[0].dtype, torch.float32)
        if loss.dtype != wide or norm.dtype != wide:
            self.wrong.append(f"step {step}: loss is {loss.dtype} and norm {norm.dtype}, not {wide}")
        self.told.append(
            {
                "step": step,
                "loss": float(loss),
                "norm": float(norm),
                "ok": bool(ok),
                "scale": float(self.run.scaler.scale),
                "good": float(self.run.scaler.good),
            }
        )
        self.snapshot(step)
        if not ok:
            for i, (old, new) in enumerate(zip(*self.states[-2:])):
                changed = [
                    name
                    for name in new
                    if not same(old[name], new[name])
                    and not (name == "own" and self.run.buckets[i].quantized)
                ]
                self.wrong += [
                    f"step {step} was skipped and changed {name} of bucket {i}" for name in changed
                ]

    def finish(self) -> dict:
        """After the run: what was read against the shares of all ranks; -> what `Told` is made of.
        Collective."""
        for n, (state, used) in enumerate(zip(self.states, self.used)):
            for i, b in enumerate(self.run.buckets):
                own = state[i]["master"].to(b.dtype)
                whole = comm.gather(own, b.group) if b.zero else own
                if b.quantized:
                    whole = compress.seen(whole, b.group.size, b.sharing.weights, b.sharing.align).to(b.dtype)
                if i in used and not same(whole, used[i]):
                    self.wrong.append(
                        f"after step {self.told[n]['step']}: what was read of bucket {i} "
                        "is not the shares of all ranks"
                    )
                if i not in used and n < len(self.states) - 1:
                    self.wrong.append(f"after step {self.told[n]['step']}: bucket {i} was never read")
                used.setdefault(i, whole)
        pieces = [
            [
                (box.key, box.shape, box.start, box.size, part.storage_offset() - b.master.storage_offset())
                for box, part in b.boxes(b.master)
            ]
            for b in self.run.buckets
        ]
        whole = [
            [(box.key, box.shape, box.start, box.size, at) for s in b.slots for box, at in placed(s)]
            for b in self.run.buckets
        ]
        return {
            "pieces": pieces,
            "whole": whole,
            "states": self.states,
            "used": self.used,
            "grads": self.grads,
            "told": self.told,
            "wrong": self.wrong,
        }


def placed(slot) -> list[tuple]:
    """[(box, its first element in the bucket)] of a parameter."""
    out, at = [], slot.offset
    for box in slot.param.spec.boxes:
        out.append((box, at))
        at += prod(box.size)
    return out


def record(world: World, cfg: Config, folder: Path, spoilt: frozenset[int]) -> int:
    """Train through train.train, and leave what was seen in folder/seen.RANK -> the exit code. Collective."""
    everywhere = (
        cfg.parallel.zero == 0 or cfg.parallel.dp_rep > 1
    )  # a gradient that is held whole spoils alike on every rank
    watch = Recorder(spoilt, everywhere or world.rank == world.size - 1)
    code = run_loop(world, cfg, folder, watch)
    torch.save(watch.finish(), folder / f"seen.{world.rank}")
    return code


# ---- a run as a whole --------------------------------------------------------------------------------------

Tensors = dict[str, Tensor]


@dataclass
class Told:
    """A run, whole tensors under their global names. masters, moments, weights [state 0 .. steps]; grads
    [steps], times the loss scale; told: of each step loss, norm, ok, and the scale and count of good steps
    after it."""

    cfg: Config
    masters: list[Tensors]
    moments: list[Tensors]
    weights: list[Tensors]
    grads: list[Tensors]
    told: list[dict]
    wrong: list[str] = field(default_factory=list)


def whole(parts, wrong: list[str], when: str) -> Tensors:
    """parts: (pieces, flat tensor) of every rank and bucket -> whole tensors. Replicas that differ are
    added to `wrong`."""
    out, there = {}, {}
    for pieces, flat in parts:
        for key, shape, start, size, at in pieces:
            part = flat[at : at + prod(size)].view(size)
            where = tuple(slice(a, a + n) for a, n in zip(start, size))
            if key not in out:
                out[key], there[key] = torch.full(shape, math.nan, dtype=flat.dtype), torch.zeros(
                    shape, dtype=torch.bool
                )
            known = there[key][where]
            if known.any() and not same(out[key][where][known], part[known]):
                wrong.append(f"{when}: replicas of {key} differ")
            out[key][where], there[key][where] = part, True
    wrong += [f"{when}: nobody holds all of {key}" for key, mask in there.items() if not mask.all()]
    return out


def read(cfg: Config, folder: Path, world: int) -> Told:
    """What `record` left of all ranks."""
    ranks = [torch.load(folder / f"seen.{r}", weights_only=True) for r in range(world)]
    wrong = list(dict.fromkeys(f"rank {r}: {w}" for r, rank in enumerate(ranks) for w in rank["wrong"]))
    if any(repr(rank["told"]) != repr(ranks[0]["told"]) for rank in ranks):  # as text: NaN is NaN
        wrong.append("ranks were told different losses, norms or loss scales")
    states, told = range(len(ranks[0]["states"])), ranks[0]["told"]
    masters, moments, weights = [], [], []
    for n in states:
        when = f"after step {told[n]['step']}"
        masters.append(
            whole(((p, s["master"]) for r in ranks for p, s in zip(r["pieces"], r["states"][n])), wrong, when)
        )
        names = dict.fromkeys(
            k for r in ranks for s in r["states"][n] for k in s if k not in ("master", "own")
        )
        every = {
            name: whole(
                ((p, s[name]) for r in ranks for p, s in zip(r["pieces"], r["states"][n]) if name in s),
                wrong,
                f"{when}, {name}",
            )
            for name in names
        }
        moments.append({f"{key}@{name}": t for name, some in every.items() for key, t in some.items()})
        weights.append(
            whole(
                ((p, r["used"][n][i]) for r in ranks for i, p in enumerate(r["whole"])),
                wrong,
                f"{when}, as read",
            )
        )
    grads = [
        whole(
            ((p, g) for r in ranks for p, g in zip(r["pieces"], r["grads"][n])),
            wrong,
            f"step {told[n + 1]['step']}, gradients",
        )
        for n in range(len(ranks[0]["grads"]))
    ]
    return Told(cfg, masters, moments, weights, grads, told, wrong)


def trained(
    pool: Pool, cfg: Config, folder: Path, spoilt: frozenset[int] = frozenset(), work: Callable = record
) -> Told:
    """Run it on the pool's ranks and read what was seen. work: what each rank calls, `record` or as that."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    codes = pool.run(work, cfg, folder, spoilt)
    told = read(cfg, folder, pool.size)
    shutil.rmtree(folder)
    if any(codes):
        told.wrong.append(f"exit codes {codes}")
    return told


# ---- what must hold ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """A number against its bound. what: which check; where: step and tensor."""

    what: str
    where: str
    error: float
    bound: float

    @property
    def share(self) -> float:
        """Of the bound; a NaN is infinitely far off."""
        return (
            math.inf
            if math.isnan(self.error)
            else self.error / self.bound if self.bound else math.inf if self.error else 0.0
        )


def norm_of(tensors) -> float:
    """The fp64 norm of all of them together."""
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


def apart(a: Tensors, b: Tensors) -> float:
    """|a - b| / |b| over all tensors."""
    return norm_of(a[key].double() - b[key].double() for key in b) / norm_of(b.values())


def matrices(tensors: Tensors) -> list[str]:
    return [key for key, t in tensors.items() if t.dim() > 1]


def norms(run: Told) -> list[Seen]:
    """The told norm against the fp64 norm: fp32 adds up n squares in blocks, off by u sqrt(n) at most on
    average."""
    out = []
    for n, grads in enumerate(run.grads):
        told, scale = run.told[n + 1], run.told[n]["scale"]
        if told["ok"]:
            exact = norm_of(grads.values()) / scale
            count = sum(g.numel() for g in grads.values())
            unit = U32 if run.cfg.train.dtype != "fp64" else UNIT["fp64"]
            out.append(
                Seen(
                    "norm",
                    f"step {told['step']}",
                    abs(told["norm"] - exact) / exact,
                    SIGMAS * unit * math.sqrt(count),
                )
            )
    return out


def digits(run: Told) -> list[Seen]:
    """The share of the summed gradients that the compute dtype holds exactly: sums of many microbatches,
    kept in fp32, seldom end on its grid. (A token that came once has one gradient, of the compute dtype:
    tables are left out.) A sum of two of its numbers with one exponent does every other time, for then a
    carry drops one digit; no other sum does so more often. Sums in the compute dtype always do."""
    low = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}.get(run.cfg.train.dtype)
    out = []
    for n, grads in enumerate(run.grads):
        if low is not None and run.told[n + 1]["ok"]:
            every = torch.cat([grads[key].flatten() for key in matrices(grads) if key.startswith("layers.")])
            every = every[
                every.abs() > (2.0**-8 if low is torch.float16 else 0.0)
            ]  # fp16's smallest have one grid, sums too
            if not len(every):
                continue
            out.append(
                Seen(
                    "wide",
                    f"step {run.told[n + 1]['step']}",
                    float((every.to(low).to(every.dtype) == every).double().mean()),
                    0.5,
                )
            )
    return out


def movement(run: Told) -> list[str]:
    """Matrices whose masters stay where they are in a good step, or whose weights do over the whole run."""
    out = []
    for n in range(1, len(run.masters)):
        if run.told[n]["ok"]:
            out += [
                f"step {run.told[n]['step']}: no master of {key} moved"
                for key in matrices(run.masters[n])
                if same(run.masters[n - 1][key], run.masters[n][key])
            ]
    return out + [
        f"no weight of {key} moved in {len(run.masters) - 1} steps"
        for key in matrices(run.weights[0])
        if same(run.weights[0][key], run.weights[-1][key])
    ]


def orthogonal(x: Tensor) -> Tensor:
    """Muon's polynomial (Keller Jordan 2024) in fp64, as U p(S) V^T of the singular values."""
    a, b, c = COEFFICIENTS
    u, s, v = torch.linalg.svd(x / (x.norm() + 1e-7), full_matrices=False)
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ v


def by_paper(run: Told, n: int) -> dict[str, tuple[Tensor, Tensor]]:
    """{name: (its value after step n in fp64, how far fp32 may be from that)}: masters and moments, from
    what was there before.

    u: fp32's. Each new value is a sum of a few terms, each a few roundings off: 4 u of the master and 64 u
    of its way (1 - beta2 and 1 - beta2^step are differences: 20 u), and twice that for what a ratio of
    norms adds."""
    o, u = run.cfg.optim, U32
    told, scale = run.told[n], run.told[n - 1]["scale"]
    factor = min(1.0, o.clip / (told["norm"] + 1e-6)) / scale
    step, lr = told["step"], o.lr
    w = {key: t.double() for key, t in run.masters[n - 1].items()}
    g = {key: t.double() * factor for key, t in run.grads[n - 1].items()}
    old = {key: t.double() for key, t in run.moments[n - 1].items()}
    out = {}

    def keep(key: str, way: Tensor, more: float = 64.0, **moments: Tensor) -> None:
        out[key] = w[key] + way, 4 * u * w[key].abs() + more * u * way.abs() + 1e-30
        for name, m in moments.items():
            was = old[f"{key}@{name}"]
            out[f"{key}@{name}"] = m, 16 * u * (was.abs() + m.abs() + (m - was).abs()) + 1e-30

    for key in w:
        decay = o.weight_decay if w[key].dim() > 1 else 0.0
        if f"{key}@muon_m" in old:
            m = o.momentum * old[f"{key}@muon_m"] + g[key]
            towards = g[key] + o.momentum * m
            turned = orthogonal(towards) * 0.2 * math.sqrt(max(w[key].shape))
            keep(key, -lr * decay * w[key] - lr * turned, muon_m=m)
            # a relative rounding of the matrix, sqrt(n) of them in a product, through a slope of 485
            slack = (
                485
                * SIGMAS
                * u
                * math.sqrt(max(w[key].shape))
                * float(turned.norm())
                / math.sqrt(min(w[key].shape))
            )
            out[key] = out[key][0], out[key][1] + lr * slack
        elif f"{key}@adam_m" in old:
            m = o.beta1 * old[f"{key}@adam_m"] + (1 - o.beta1) * g[key]
            v = o.beta2 * old[f"{key}@adam_v"] + (1 - o.beta2) * g[key] ** 2
            towards = m / (1 - o.beta1**step) / ((v / (1 - o.beta2**step)).sqrt() + o.eps)
            more = 64.0
            if o.name == "lamb":
                towards = towards + decay * w[key]
                ratio, more = trust(w[key], towards) if decay else 1.0, 128.0
                towards, decay = towards * ratio, 0.0
            keep(key, -lr * decay * w[key] - lr * towards, more, adam_m=m, adam_v=v)
            cancels = (o.beta1 * old[f"{key}@adam_m"]).abs() + (
                (1 - o.beta1) * g[key]
            ).abs()  # m is a difference of larger terms
            root = (v / (1 - o.beta2**step)).sqrt() + o.eps
            extra = 8 * u * cancels / (1 - o.beta1**step) / root * (ratio if o.name == "lamb" else 1.0)
            out[key] = out[key][0], out[key][1] + lr * extra
            out[f"{key}@adam_m"] = m, out[f"{key}@adam_m"][1] + 8 * u * cancels
        elif o.name == "lion":
            was = old[f"{key}@lion_m"]
            towards, m = o.beta1 * was + (1 - o.beta1) * g[key], o.beta2 * was + (1 - o.beta2) * g[key]
            keep(key, -lr * decay * w[key] - lr * towards.sign(), lion_m=m)
            unsure = towards.abs() <= 8 * u * (was.abs() + g[key].abs())  # a sign that a rounding turns
            out[key] = out[key][0], torch.where(unsure, 2.1 * lr, out[key][1])
            out[f"{key}@lion_m"] = m, 16 * u * (was.abs() + g[key].abs()) + 1e-30
        else:
            was = old[f"{key}@momentum"]
            towards = g[key] + decay * w[key]
            if o.name == "lars":
                m = o.momentum * was + lr * (TRUST * trust(w[key], towards) if decay else 1.0) * towards
                way = -m
            else:
                m = o.momentum * was + towards
                way = -lr * m
            keep(key, way, momentum=m)
            step_size = lr * (TRUST * trust(w[key], towards) if o.name == "lars" and decay else 1.0)
            terms = was.abs() + (g[key].abs() + decay * w[key].abs()) * (
                step_size if o.name == "lars" else 1.0
            )
            out[f"{key}@momentum"] = m, 32 * u * terms + 1e-30
            out[key] = out[key][0], out[key][1] + 32 * u * terms * (1.0 if o.name == "lars" else lr)
    return out


def trust(w: Tensor, towards: Tensor) -> float:
    """|w| / |direction|; 1 where either is zero (arXiv 1904.00962, 1708.03888)."""
    a, b = float(w.norm()), float(towards.norm())
    return a / b if a > 0 and b > 0 else 1.0


def updates(run: Told) -> list[Seen]:
    """Every good step against the paper. The error of a tensor is that of its worst element, as a share of
    that element's bound."""
    out = []
    for n in range(1, len(run.masters)):
        if not run.told[n]["ok"]:
            continue
        now, when = run.masters[n] | run.moments[n], f"step {run.told[n]['step']}"
        narrow = run.cfg.optim.states == "bf16"
        shifts, spread = 0.0, 0.0
        for key, (exact, room) in by_paper(run, n).items():
            off = now[key].double() - exact
            if not narrow:
                out.append(Seen("update", f"{when} {key}", float((off.abs() / room).max()), 1.0))
                continue
            below, above = neighbours(exact)
            out.append(
                Seen("update", f"{when} {key}", float((off.abs() / (above - below + room)).max()), 1.0)
            )
            if "@" not in key:  # rounding up or down, by chance: no way is favoured
                way = (exact - run.masters[n - 1][key].double()).sign()
                shifts += float((off * way).sum())
                spread += float(((above - exact) * (exact - below)).sum())
        if narrow:
            out.append(Seen("rounding", when, abs(shifts) / math.sqrt(spread), CERTAIN))
    return out


def neighbours(x: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of bf16 on either side of x, in fp64: x itself twice where bf16 holds it."""
    near = x.to(torch.bfloat16).double()
    _, exponent = torch.frexp(x.abs().clamp(min=2.0**-126))
    unit = torch.ldexp(torch.ones_like(x), exponent - 8)  # between numbers of x's binade
    below = torch.floor(x / unit) * unit
    return below, torch.where(near == x, below, below + unit)


# ---- two runs ----------------------------------------------------------------------------------------------


def series(cfg: Config) -> int:
    """Matrices in series: embedding, head, and four a layer on the way of any value (q or k or v, out; in,
    down)."""
    return 2 + 4 * cfg.model.layers


def roundings(cfg: Config) -> int:
    """K. A layer's forward rounds 13 tensors in a chain: norm, projection, RoPE, probabilities, attention,
    projection, sum, norm, inner, activation, down, sum, and the weights that they read; the backward as
    many; the ends four."""
    return 2 * (13 * cfg.model.layers + 4)


def exactness(cfg: Config) -> float:
    """E of the module's docstring: of the gradients of one process, relative, against exact arithmetic."""
    k = roundings(cfg)
    squares = k * UNIT[cfg.train.dtype] ** 2
    if cfg.train.dtype == "fp8":  # 4 linears a layer: x, W; W, x in the backward; dy twice
        layers = cfg.model.layers - 2 * cfg.train.fp8_keep
        dy = E4M3 if cfg.train.fp8 == "blockwise" else E5M2
        squares += layers * 4 * (4 * E4M3**2 + 2 * dy**2)
    return SIGMAS * math.sqrt(squares / 6)


def turned(cfg: Config, rho: float) -> float:
    """What a relative error of rho in the hidden states comes to with a mixture's routers: where the k-th
    and the next logit are closer than their errors, another expert is chosen. The gap of 4 normal logits
    has density 1.5 / sigma at 0, their errors a mean positive difference of 0.56 rho sigma: a layer turns a
    share rho of the tokens, whose gradients are then off by their size.
    """
    return rho + math.sqrt(cfg.model.layers * rho) if cfg.model.experts else rho


def reordered(cfg: Config) -> bool:
    """Does this layout cut products or their sums in another way than one process?"""
    p = cfg.parallel
    return p.tp > 1 or p.cp > 1 or p.ep > 1 or p.etp > 1


def allowed(cfg: Config, delta: float, reorder: bool) -> float:
    """Of the gradients of two runs of one dtype, relative: the module's docstring."""
    e, u, m = exactness(cfg), UNIT[cfg.train.dtype], series(cfg)
    additions = cfg.train.global_batch * cfg.train.seq_len
    base = math.sqrt(2) * e if reorder else SIGMAS * U32 * math.sqrt(additions)
    return base + m * delta + (0.0 if reorder else e * min(1.0, math.sqrt(m * delta / u)))


def along(cfg: Config, rho: float) -> float:
    """Of the masters' way from their start, relative, where gradients are off by rho."""
    if cfg.optim.name in ("sgd", "lars"):
        return rho
    sign = min(2.0, 2 * math.sqrt(rho / math.pi))
    return sign if cfg.optim.name != "muon" else min(2.0, max(sign, 485 * rho))


def logits_size(weights: Tensors) -> float:
    """The root mean square of the logits: rows of the head times a hidden state whose elements are of size
    1."""
    head = weights.get("head.weight", weights["embed.weight"])
    return float(head.double().square().mean().sqrt()) * math.sqrt(head.shape[1])


def compared(run: Told, truth: Told, against: str) -> list[Seen]:
    """A run against another of the same job: `layout`, one process of its dtype; `fp64`."""
    cfg, out, rho, largest = run.cfg, [], 0.0, 0.0

    def add(what: str, step: int, error: float, bound: float) -> None:
        out.append(Seen(f"{against} {what}", f"step {step}", error, bound))

    for n in range(1, len(run.masters)):
        ours, theirs = run.told[n], truth.told[n]
        step = theirs["step"]
        if ours["ok"] != theirs["ok"]:
            quantized = cfg.train.dtype == "fp16" and cfg.parallel.compress_weights != "none"
            not_compared = len(run.masters) - n
            allowed_steps = NOT_COMPARED if quantized and against == "layout" else 0
            add("steps from a skip of one run alone", step, not_compared, allowed_steps)
            break
        if not ours["ok"]:
            continue

        # gradients, as a share of the largest so far
        delta = apart(run.weights[n - 1], truth.weights[n - 1])
        reach = series(cfg) * delta
        error = exactness(cfg) + reach if against == "fp64" else allowed(cfg, delta, reordered(cfg))
        room = turned(cfg, error)
        a, b = (
            {key: g.double() / r.told[n - 1]["scale"] for key, g in r.grads[n - 1].items()}
            for r in (run, truth)
        )
        size = norm_of(b.values())
        largest = max(largest, size)
        add("gradient", step, apart(a, b) * size / largest, room)
        add("norm", step, abs(ours["norm"] - theirs["norm"]) / largest, room)
        rho = max(rho, room * largest / size)

        # the loss: logits off by `room` of their size, in directions independent of the softmax's gradient
        loss = math.sqrt(2) * room * logits_size(truth.weights[n - 1]) + SIGMAS * 4 * U32 * theirs["loss"]
        add("loss", step, abs(ours["loss"] - theirs["loss"]), loss)

        # the masters' way, each update rounded once: to nearest in fp32, by chance in bf16
        ways = [
            {key: now.double() - r.masters[0][key].double() for key, now in r.masters[n].items()}
            for r in (run, truth)
        ]
        unit = 2 * UNIT["bf16"] if cfg.optim.states == "bf16" else U32
        way = along(cfg, rho)
        noise = math.sqrt(n) * unit * norm_of(truth.masters[n].values()) / norm_of(ways[1].values())
        if against == "layout":  # they round alike, but where a boundary lies between them
            noise = math.sqrt(noise * way)
        add("masters", step, apart(*ways), way + noise)
    return out


def judge(run: Told, truth: Told | None, against: str) -> tuple[list[str], list[Seen]]:
    """(what is plainly wrong, every number with its bound)."""
    seen = [*norms(run), *digits(run), *updates(run)]
    wrong = [*run.wrong, *movement(run)]
    if truth is not None:
        seen += compared(run, truth, against)
    return wrong, seen


# ---- statistics and accumulation ---------------------------------------------------------------------------


def statistics() -> list[Seen]:
    """Softmax, log-sum-exp and norms of bf16 tensors against fp64 formulas, on inputs for which statistics
    in bf16 are off by several times the bound: the one rounding of the result, and those of the
    probabilities, which are bf16.
    """
    stream, u = torch.Generator().manual_seed(0), 1.01 * UNIT["bf16"]
    out = []

    def seen(what: str, got: Tensor, exact: Tensor, room: Tensor) -> None:
        out.append(Seen("statistics", what, float(((got.double() - exact).abs() / room).max()), 1.0))

    # scores of 30 and more: a bf16 score is off by 0.06, and its exponential by 6 %
    q, k, v = (torch.randn(2, 64, 4, 32, generator=stream) for _ in "qkv")
    q, k, v = (8 * q).bfloat16(), (2 * k[:, :, :2]).bfloat16(), v[:, :, :2].bfloat16()
    q64, k64, v64 = (
        t.double().transpose(1, 2) for t in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2))
    )
    late = torch.ones(64, 64, dtype=torch.bool).triu(1)
    p = torch.softmax((q64 @ k64.transpose(-1, -2) / math.sqrt(32)).masked_fill(late, -math.inf), -1)
    exact, room = (p @ v64).transpose(1, 2), u * ((p @ v64.abs()) + (p @ v64).abs()).transpose(1, 2) + 1e-4
    for kind in ("blocks", "sdpa", "reference"):
        seen(f"attention, {kind}", attention(q, k, v, None, kind), exact, room)
    scores = (q64 @ k64.transpose(-1, -2) / math.sqrt(32)).masked_fill(late, -math.inf)
    ring, lse = partial(q, k, v, ~late[None, None])
    seen(
        "attention, a part of the ring",
        ring,
        exact,
        64 * U32 * (scores.abs().masked_fill(late, 0).amax(-1).transpose(1, 2)[..., None] + 1),
    )
    exact = scores.logsumexp(-1).transpose(1, 2)
    seen("log-sum-exp of attention", lse, exact, 64 * U32 * (exact.abs() + 30))

    # rows of 4,096 whose squares are far apart: a sum of them in bf16 stops growing after 256 of a size
    x = (torch.randn(8, 4096, generator=stream) * torch.logspace(-2, 1, 4096)).bfloat16()
    w, b = (torch.randn(4096, generator=stream).bfloat16() for _ in "wb")
    x64, w64, b64 = x.double(), w.double(), b.double()
    exact = x64 / (x64.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w64
    seen("RMSNorm", rms_norm(x, w, 1e-5), exact, u * exact.abs() + 1e-30)
    y = (x + 64).bfloat16()  # a mean that is large beside the deviation
    y64 = y.double()
    hat = (y64 - y64.mean(-1, keepdim=True)) / (y64.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    exact = hat * w64 + b64
    seen(
        "LayerNorm",
        layer_norm(y, w, b, 1e-5),
        exact,
        u * exact.abs() + 4096**0.5 * U32 * 64 * (w64.abs() + b64.abs() + 1),
    )

    # logits that are whole numbers, which bf16 holds: what is off comes after them
    hidden, head = (torch.randint(-1, 2, (n, 64), generator=stream).bfloat16() for n in (4096, 288))
    targets = torch.randint(280, (4096,), generator=stream)
    logits = (hidden.double() @ head.double().t())[:, :280]
    exact = (logits.logsumexp(1) - logits.gather(1, targets[:, None])[:, 0]).sum()
    loss = linear_cross_entropy(hidden, head, targets, 1.0, 280)
    seen("the loss of 4,096 tokens", loss, exact, 4096 * U32 * exact)
    return out


def accumulation(pool: Pool, cfg: Config, folder: Path) -> list[Seen]:
    """The gradient of 8 microbatches against the fp64 sum of their gradients, each made alone: a run of 8
    steps of one sequence, at a rate at which nothing moves. Their products have the same bits; what differs
    are the additions, of at most one per token, in fp32. cfg: a layout that cuts no product, with
    micro_batch 1."""
    still = replace(
        cfg,
        optim=replace(cfg.optim, name="sgd", states="fp32", lr=1e-30, weight_decay=0.0),
        train=replace(cfg.train, steps=1, loss_scale=2.0**13, loss_scale_window=1000),
    )
    n = still.train.global_batch
    each = alone(replace(still, train=replace(still.train, steps=n, global_batch=1, loss_scale=2.0**13 / n)))
    one = Pool(1)
    try:
        together, apart_ = trained(pool, still, folder / "together"), trained(one, each, folder / "each")
    finally:
        one.close()
    out = []
    for key, total in together.grads[0].items():
        parts = torch.stack(
            [grads[key].double() / (told["scale"] * n) for grads, told in zip(apart_.grads, apart_.told)]
        )
        off = (total.double() / together.told[0]["scale"] - parts.sum(0)).abs().max()
        out.append(
            Seen(
                "sum",
                key,
                float(off),
                n * still.train.seq_len * U32 * float(parts.abs().sum(0).max()) + 1e-30,
            )
        )
    wrong = [w for run in (together, apart_) for w in run.wrong]
    return out + [Seen("sum", w, math.inf, 0.0) for w in wrong]


# ---- the lattice -------------------------------------------------------------------------------------------

LAYOUTS = {
    1: ({},),
    2: ({}, {"tp": 2, "sp": True}, {"pp": 2}, {"pp": 2, "schedule": "zb-v"}, {"cp": 2}, {"ep": 2}),
    4: (
        {},
        {"tp": 2, "sp": True},
        {"pp": 2},
        {"pp": 2, "tp": 2, "sp": True, "schedule": "zb-v"},
        {"cp": 2},
        {"dp_rep": 2},
        {"ep": 2},
        {"tp": 2, "ep": 2, "schedule": "zb-v", "pp": 2},
    ),
}
WITH = (
    {},
    {"offload": "optimizer"},
    {"compress_weights": "int8"},
    {"compress_weights": "fp8"},
    {"fp8": "rowwise"},
    {"fp8": "blockwise"},
)


@dataclass(frozen=True)
class Cell:
    """What is proved at once: a dtype, an optimizer, a ZeRO stage, a layout, and what else is switched on."""

    dtype: str
    optimizer: str
    zero: int
    layout: int  # of LAYOUTS[world]
    extra: int  # of WITH

    def config(self, name: str, world: int, data: str) -> Config:
        keys = LAYOUTS[world][self.layout] | WITH[self.extra]
        cfg = subject(name, data, self.dtype, self.optimizer)
        cfg = replace(cfg, train=replace(cfg.train, fp8=keys.pop("fp8", None)))
        return replace(cfg, parallel=replace(cfg.parallel, zero=self.zero, **keys))

    def words(self, world: int) -> str:
        keys = LAYOUTS[world][self.layout] | WITH[self.extra]
        short = {
            "sp": "sp",
            "schedule": "",
            "offload": "offload ",
            "compress_weights": "weights ",
            "fp8": "fp8 ",
        }
        how = [short[k] + ("" if k == "sp" else v) if k in short else f"{k}{v}" for k, v in keys.items()]
        dp = world // prod(keys.get(k, 1) for k in ("tp", "pp", "cp", "dp_rep"))
        return " ".join(
            [self.dtype, self.optimizer, f"zero{self.zero}", *([f"dp{dp}"] if dp > 1 else []), *how]
        )

    def pairs(self) -> set[tuple]:
        return set(
            itertools.combinations(
                enumerate((self.dtype, self.optimizer, self.zero, self.layout, self.extra)), 2
            )
        )


def cells(name: str, world: int) -> list[Cell]:
    """Every legal (dtype, optimizer, ZeRO stage) once, each with the layout and switch that bring most
    pairs nobody had yet, and of these the ones that were taken least."""
    taken: Counter = Counter()
    seen, out = set(), []
    for dtype, optimizer, zero in itertools.product(DTYPES, RATES, range(4)):
        near = [
            Cell(dtype, optimizer, zero, i, j) for i in range(len(LAYOUTS[world])) for j in range(len(WITH))
        ]
        ranked = sorted(
            near, key=lambda c: (-len(c.pairs() - seen), taken["layout", c.layout] + taken["extra", c.extra])
        )
        if (cell := next((c for c in ranked if runs(c, name, world)), None)) is not None:
            out.append(cell)
            seen |= cell.pairs()
            taken.update((("layout", cell.layout), ("extra", cell.extra)))
    return out


def runs(cell: Cell, name: str, world: int) -> bool:
    """Would train.py run it? Nothing is idle in it either: a switch that does nothing only repeats another
    cell."""
    extra = WITH[cell.extra]
    if ("fp8" in extra and cell.dtype != "fp8") or ("compress_weights" in extra and world == 1):
        return False
    cfg = cell.config(name, world, "none")
    try:
        plan_pipeline(replace(cfg, model=replace(cfg.model, vocab=257)), world, advise=False)
    except ConfigError:
        return False
    return True


class Prover:
    """Runs cells on warm ranks, and keeps the runs of one process that several are held against. pool:
    ranks that another closes."""

    def __init__(self, name: str, world: int, pool: Pool | None = None) -> None:
        self.name, self.world = name, world
        self.folder = tempfile.TemporaryDirectory(prefix="bevatron-precision-")
        self.root = Path(self.folder.name)
        self.data = corpus(self.root)
        self.one = Pool(1)
        self.pool = pool or (self.one if world == 1 else Pool(world))
        self.mine = {self.one, self.pool} - {pool}
        self.known: dict[str, Told] = {}

    def close(self) -> None:
        for pool in self.mine:
            pool.close()
        self.folder.cleanup()

    def single(self, cfg: Config, spoilt: frozenset[int]) -> Told:
        key = repr((alone(cfg), sorted(spoilt)))
        if key not in self.known:
            self.known[key] = trained(self.one, alone(cfg), self.root / "one", spoilt)
        return self.known[key]

    def exact(self, cfg: Config, skipped: frozenset[int]) -> Told:
        """The job in fp64, with the steps skipped that the dtype skipped."""
        wide = replace(
            cfg, train=replace(cfg.train, dtype="fp64", fp8=None), optim=replace(cfg.optim, states="fp32")
        )
        return self.single(wide, skipped)

    def prove(self, cell: Cell) -> tuple[list[str], list[Seen]]:
        """(what is plainly wrong, every number with its bound) of the cell, and of one process of its
        dtype."""
        cfg = cell.config(self.name, self.world, self.data)
        spoilt = frozenset({SPOILT})
        truth = self.single(cfg, spoilt)
        skipped = frozenset(told["step"] for told in truth.told[1:] if not told["ok"])
        wrong, seen = judge(truth, self.exact(cfg, skipped), "fp64")
        if self.world > 1:
            run = trained(self.pool, cfg, self.root / "many", spoilt)
            more, bounds = judge(run, truth, "layout")
            wrong, seen = [f"one process: {w}" for w in wrong] + more, seen + bounds
        else:
            run = truth
        if cfg.train.dtype == "fp16":
            scales = [told["scale"] for told in run.told]
            if not (
                any(b < a for a, b in zip(scales, scales[1:]))
                and any(b > a for a, b in zip(scales, scales[1:]))
            ):
                wrong.append(f"the loss scale never fell, or never grew: {scales}")
        return wrong, seen


def check(name: str, world: int, as_json: bool, draw: int | None = None, seed: int = 0) -> int:
    """The command: prints a row a cell, and the table of worst errors; 0 where everything holds, 1 where
    not. draw: so many cells, drawn by seed. Raises ConfigError."""
    if world not in LAYOUTS:
        raise ConfigError(f"--world: {world} must be 1, 2 or 4 with --precision")
    every = cells(name, world)
    if draw is not None:
        every = random.Random(seed).sample(every, min(draw, len(every)))
    say = (lambda *text: None) if as_json else functools.partial(print, flush=True)
    say(
        f"{name}: {len(every)} cells of {world} ranks, dtype x optimizer x ZeRO x layout, "
        f"{STEPS} steps ({SCALED_STEPS} of fp16)"
    )
    begun, bad, worst, prover = time.perf_counter(), 0, {}, Prover(name, world)
    try:
        rows = [("statistics", lambda: ([], statistics()))]
        rows += [
            (f"{dtype} sums of microbatches, zero{zero}", functools.partial(sums, prover, dtype, zero))
            for dtype, zero in (("bf16", 0), ("fp16", 1), ("fp8", 2), ("bf16", 3))
        ]
        rows += [(cell.words(world), functools.partial(prover.prove, cell)) for cell in every]
        for title, work in rows:
            try:
                wrong, seen = work()
            except RuntimeError as error:  # a rank died: of this cell
                wrong, seen = [f"died: {str(error).strip().splitlines()[-1]}"], []
                prover.close()
                prover = Prover(name, world)
            first = max(seen, key=lambda s: s.share, default=None)
            failed = bool(wrong) or (first is not None and first.share > 1)
            bad += failed
            for s in seen:
                kind = title.split()[0], s.what
                worst[kind] = max(worst.get(kind, s), s, key=lambda x: x.share)
            if as_json:
                print(
                    json.dumps(
                        {"cell": title, "ok": not failed, "wrong": wrong, "worst": first and vars(first)}
                    ),
                    flush=True,
                )
            text = f"{first.error:.1e} of {first.bound:.1e}  {first.what}, {first.where}" if first else ""
            say(
                f"{'WRONG' if failed else 'ok':<6}{title:<48} {text}"
                + "".join(f"\n      {w}" for w in wrong[:5])
            )
    finally:
        prover.close()
    say(f"\n{'dtype':<11}{'check':<17}{'error':>10}{'bound':>10}   worst share of its bound, where")
    for (kind, what), s in sorted(worst.items()):
        say(f"{kind:<11}{what:<17}{s.error:>10.1e}{s.bound:>10.1e}   {s.share:.2f}  {s.where}")
    say(f"{len(rows) - bad} of {len(rows)} rows hold ({time.perf_counter() - begun:.0f} s)")
    return 1 if bad else 0


def sums(prover: Prover, dtype: str, zero: int) -> tuple[list[str], list[Seen]]:
    cfg = subject(prover.name, prover.data, dtype, "sgd")
    return [], accumulation(prover.pool, replace(cfg, parallel=replace(cfg.parallel, zero=zero)), prover.root)
