"""Prove that every parallel layout trains like one process: python -m scripts.verify NAME --world 8 [--layouts all | N]

In fp64 on the CPU, over gloo: each step's loss, every gradient by its global name, the clip norm and the parameters after
the last step, each within a relative 1e-9 of one process that ran the same steps. A layout is proved or refused with the
reason that train.py would give.
"""
import argparse
import itertools
import random
import sys
import time
from dataclasses import replace

import torch
from torch import Tensor

import config
from build import build, plan_pipeline
from config import Config, ConfigError
from data.batch import Batch
from parallel import zigzag
from parallel.comm import World
from parallel.layout import Layout
from parallel.mesh import Mesh
from parallel.schedule import SCHEDULES
from runtime.failure import fail_cleanly
from runtime.guard import Guard
from runtime.pool import Pool
from train import train_step

STEPS = 2
BOUND = 1e-9
FLOOR = 1e-7  # smaller is noise: a gradient that is zero in exact arithmetic (a k bias without RoPE), and what Adam makes of it


# ---- what is trained -------------------------------------------------------------------------------------------------

def subject(name: str) -> Config:
    """The recipe shrunk to what a laptop proves in a second a layout; every feature of the family stays."""
    cfg = config.resolve(name, None, ["--train.dtype", "fp64", "--train.steps", "50", "--train.seq_len", "32", "--train.micro_batch", "1",
                                      "--train.global_batch", "8", "--optim.warmup", "2", "--optim.clip", "0.5", "--model.dropout", "0.1",
                                      "--optim.eps", "1e-4", "--parallel.bucket_mb", "0.03", "--parallel.node", "2"])
    m = cfg.model
    shrunk = replace(m, layers=8, hidden=32, heads=8, kv_heads=None if m.kv_heads is None else 4, head_dim=None if m.head_dim is None else 8,
                     ffn=48, vocab=125, vocab_multiple=32, context=32, window=None if m.window is None else 11, rope_original=16,
                     kv_rank=m.kv_rank and 12, q_rank=m.q_rank and 20, nope_dim=8, rope_dim=4, v_dim=6)
    return replace(cfg, model=shrunk)


class Tokens:
    """Microbatches of made-up tokens, a function of (seed, step) cut over the ranks as data/loader.py cuts real ones."""

    def __init__(self, cfg: Config, rank: int, world: int) -> None:
        self.cfg, self.rank, self.world = cfg, rank, world

    def microbatches(self, step: int) -> list[Batch]:
        t, v = self.cfg.train, self.cfg.model.vocab
        stream = torch.Generator().manual_seed(t.seed + step)
        ids = torch.randint(v, (t.global_batch, t.seq_len + 1), generator=stream)
        targets = ids[:, 1:].masked_fill(torch.rand(t.global_batch, t.seq_len, generator=stream) < 0.2, -100)
        targets[0, 1:] = -100  # one sequence that hardly counts: microbatches of very unequal weight
        starts = torch.rand(t.global_batch, t.seq_len, generator=stream) < 0.1
        starts[:, 0] = True
        place = torch.arange(t.seq_len).expand_as(starts)
        positions = place - torch.where(starts, place, 0).cummax(1).values if self.cfg.data.doc_mask else place
        docs = starts.cumsum(1, dtype=torch.int32) if self.cfg.data.doc_mask else None
        share = t.global_batch // self.world
        cuts = [slice(i, i + t.micro_batch) for i in range(self.rank * share, (self.rank + 1) * share, t.micro_batch)]
        return [Batch(ids[c, :-1], targets[c], positions[c], None if docs is None else docs[c],
                      torch.arange(c.start, c.stop), step) for c in cuts]


# ---- one layout ------------------------------------------------------------------------------------------------------

def run_layout(world: World, cfg: Config, truth: dict | None) -> dict:
    """Train STEPS steps. Without truth: return it {"step/what/name": tensor}. With: {"worst", "where", "ledger"}."""
    p = cfg.parallel
    mesh = Mesh.bind(Layout(world.size, p.tp, p.cp, p.pp, p.dp_rep), world)
    mesh.ledger.clear()
    run = build(cfg, mesh, torch.device("cpu"), None, cfg.train.steps)
    data, guard, worst = Tokens(cfg, mesh.data.index, mesh.data.size), Guard(), [(0.0, "")]
    made: dict[str, Tensor] = {}

    def hold(what: str, box, value: Tensor) -> None:
        if truth is None:
            made.setdefault(what, torch.zeros(box.shape if box else value.shape, dtype=torch.float64))
            made[what][tuple(slice(a, a + n) for a, n in zip(box.start, box.size)) if box else ...] = value.detach()
            return
        whole = truth[what]
        true = whole[tuple(slice(a, a + n) for a, n in zip(box.start, box.size))] if box else whole
        size = max(float(whole.abs().max()), FLOOR)
        worst.append((float((value.detach() - true).abs().max()) / size if value.numel() else 0.0, what))

    def gradients(point: str, step: int) -> None:
        if point == "step.backward":
            for bucket in run.buckets:
                for box, part in bucket.boxes(bucket.shard):
                    hold(f"step {step} gradient of {box.key}", box, part)

    for step in range(1, STEPS + 1):
        loss, norm, _ = train_step(run, step, data.microbatches(step - 1), guard, gradients)
        hold(f"step {step} loss", None, loss)
        hold(f"step {step} gradient norm", None, norm)
    for bucket in run.buckets:
        for box, part in bucket.boxes(bucket.master):
            hold(f"parameter {box.key}", box, part)
    batches = data.microbatches(99)
    hold("evaluation loss", None, run.pipeline.evaluate([zigzag.cut(b, mesh.cp) for b in batches]))
    prompt = torch.arange(cfg.train.seq_len)[None]  # generation: a whole sequence on every rank
    hold("logits of a prompt", None, run.pipeline.logits(prompt, prompt, None, cfg.train.seq_len - 3))
    return made if truth is None else {"worst": max(worst, key=lambda w: (w[0] != w[0], w[0])), "ledger": dict(mesh.ledger)}


def one_process(cfg: Config) -> dict[str, Tensor]:
    """What every layout must equal. Raises ConfigError where it is no oracle: two matrices that start identical."""
    plain = replace(cfg, parallel=config.Parallel())
    run, seen = build(plain, Mesh.single(), torch.device("cpu"), None, 1), {}
    for box, part in (pair for b in run.buckets for pair in b.boxes(b.master)):
        if part.dim() > 1:
            twin = seen.setdefault((part.shape, float(part.sum())), box.key)
            if twin != box.key:
                raise ConfigError(f"{box.key} starts with the same weights as {twin}; initial weights must depend on the name")
    return run_layout(World(), plain, None)


# ---- the lattice -----------------------------------------------------------------------------------------------------

AXES = {"tp": (1, 2, 4, 8), "sp": (False, True), "pp": (1, 2, 4, 8), "schedule": tuple(SCHEDULES), "cp": (1, 2, 4, 8), "cp_kind": ("ring", "ulysses"),
        "dp_rep": (1, 2, 4), "zero": (0, 1, 2, 3), "reduce": ("collective", "ring", "hierarchy", "server"), "micro_batch": (1, 2),
        "recompute": ("none", "selective", "full"), "doc_mask": (False, True)}


def lattice(cfg: Config, world: int) -> tuple[list[Config], dict[str, int]]:
    """(every legal layout of this world, {reason: how many cells it refused}): legal is what rules.validate lets pass."""
    legal, refused = [], {}
    for values in itertools.product(*AXES.values()):
        cell = dict(zip(AXES, values))
        try:
            if world % (cell["tp"] * cell["pp"] * cell["cp"] * cell["dp_rep"]):
                raise ConfigError("parallel.tp*pp*cp*dp_rep: does not divide the world size")
            if cell["cp"] == 1 and cell["cp_kind"] != "ring":
                raise ConfigError("parallel.cp_kind: does nothing at cp 1")
            if cell["sp"] and cell["tp"] == 1:
                raise ConfigError("parallel.sp: does nothing at tp 1")
            if cell["reduce"] != "collective" and cell["tp"] * cell["pp"] == world:
                raise ConfigError("parallel.reduce: all are the same at dp 1")
            if cell["pp"] == 1 and cell["schedule"] != "1f1b":
                raise ConfigError("parallel.schedule: all are the same at pp 1")
            train = replace(cfg.train, micro_batch=cell.pop("micro_batch"))
            data = replace(cfg.data, doc_mask=cell.pop("doc_mask"))
            layout = replace(cfg, parallel=replace(cfg.parallel, **cell), train=train, data=data)
            plan_pipeline(layout, world)
            legal.append(layout)
        except ConfigError as e:
            reason = str(e).split(":")[0].split(" = ")[0]
            refused[reason] = refused.get(reason, 0) + 1
    return legal, refused


def name_of(cfg: Config, world: int) -> str:
    p = cfg.parallel
    dp = world // (p.tp * p.pp * p.cp * p.dp_rep)
    words = [f"{k}{v}" for k, v in (("pp", p.pp), ("rep", p.dp_rep), ("dp", dp), ("cp", p.cp), ("tp", p.tp)) if v > 1]
    return " ".join(words + ["sp"] * p.sp + [f"zero{p.zero}"] + ([p.schedule] if p.pp > 1 else []) + [f"mb{cfg.train.micro_batch}"]
                    + [f"cp-{p.cp_kind}"] * (p.cp > 1) + ([p.reduce] if p.reduce != "collective" else []) + ["docs"] * cfg.data.doc_mask
                    + [p.recompute] * (p.recompute != "none"))


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(prog="python -m scripts.verify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("name", help="recipe whose model is proved (a tiny twin)")
    p.add_argument("--world", type=int, default=8, help="ranks, 1 to 8")
    p.add_argument("--layouts", default="12", help="all, or how many to draw")
    p.add_argument("--seed", type=int, default=0, help="of the draw")
    p.add_argument("--only", nargs="*", default=[], help="words that a layout's name must have, e.g. --only zb-v zero3")
    a = p.parse_args(argv)
    cfg = subject(a.name)
    legal, refused = lattice(cfg, a.world)
    legal = [layout for layout in legal if set(a.only) <= set(name_of(layout, a.world).split())]
    if not legal:
        raise ConfigError(f"--only: no legal layout of {a.world} ranks has the words {' '.join(a.only)}")
    if a.layouts != "all":
        legal = random.Random(a.seed).sample(legal, min(int(a.layouts), len(legal)))
    print(f"{a.name}: {len(legal)} layouts of {a.world} ranks, {STEPS} steps, fp64, bound {BOUND:.0e}")
    for reason, count in sorted(refused.items()):
        print(f"  refused by {reason}: {count}")
    truth = {docs: one_process(replace(cfg, data=replace(cfg.data, doc_mask=docs))) for docs in {layout.data.doc_mask for layout in legal}}
    pool, wrong, begun = Pool(a.world), 0, time.perf_counter()
    for layout in legal:
        results = pool.run(run_layout, layout, truth[layout.data.doc_mask])
        worst, where = max((r["worst"] for r in results), key=lambda w: (w[0] != w[0], w[0]))
        bad = not worst <= BOUND
        wrong += bad
        print(f"{'WRONG' if bad else 'ok':<6} {name_of(layout, a.world):<40} {worst:.1e}" + (f"  {where}" if bad else ""), flush=True)
    pool.close()
    print(f"{len(legal) - wrong} of {len(legal)} layouts train like one process ({time.perf_counter() - begun:.0f} s)")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(fail_cleanly(main, sys.argv[1:]))
