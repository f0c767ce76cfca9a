"""Prove that every parallel layout trains like one process: python -m scripts.verify NAME --world 8 [--layouts all | N]

In fp64 on the CPU, over gloo: each step's loss, every gradient by its global name, the clip norm and the parameters after
the last step, each within a relative 1e-9 of one process that ran the same steps. The layouts are those that train.py's own
rules let pass; the rest is refused with the reason that train.py would give. `--layouts all` runs every layout, with
switches (recompute, microbatches, ...) chosen so that every legal pair of values meets; `--layouts product` every choice.
`--part 2/4` runs the second quarter of what was chosen: a long proof over several machines or sittings.

`--coord` proves no layout, but muP: how far training moves activations, by width (scripts/verify/coord.py).
"""
import argparse
import hashlib
import itertools
import json
import math
import re
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import config
from build import build, plan_pipeline
from config import Config, ConfigError
from data.batch import Batch
from parallel import zigzag
from parallel.comm import World
from parallel.layout import Layout
from parallel.mesh import Mesh
from plan import lattice
from plan.lattice import Lattice, Values
from runtime.guard import Guard
from runtime.pool import Pool
from scripts.verify import coord
from train import train_step

STEPS = 2
BOUND = 1e-9
KEPT = 200  # files of some megabytes
BY_MICROBATCH = ("tensorwise", "rowwise")  # fp8 whose scales span the tokens of a microbatch, and no fewer
FLOOR = 1e-7  # smaller is noise: a gradient that is zero in exact arithmetic (a k bias without RoPE), and what Adam makes of it


# ---- what is trained -------------------------------------------------------------------------------------------------

def subject(name: str, world: int = 1) -> Config:
    """The recipe shrunk to what a laptop proves in a second a layout; every feature of the family stays."""
    batch = world * (-(-8 // world)) * (1 if world % 2 == 0 or world == 1 else 2)  # every world divides it, and 2 mostly what is left
    cfg = config.resolve(name, None, ["--train.dtype", "fp64", "--train.steps", "50", "--train.seq_len", "32", "--train.micro_batch", "1",
                                      "--train.global_batch", str(batch), "--optim.warmup", "2", "--optim.clip", "0.5", "--model.dropout", "0.1",
                                      "--optim.eps", "1e-4", "--parallel.recompute_parts", "core,norm,act", "--parallel.bucket_mb", "0.03",
                                      "--parallel.node", "2", "--train.fp8_block", "4"])
    m = cfg.model
    shrunk = replace(m, layers=8, hidden=32, heads=8, kv_heads=None if m.kv_heads is None else 4, head_dim=None if m.head_dim is None else 8,
                     ffn=48, vocab=125, vocab_multiple=32, context=32, window=None if m.window is None else 11, rope_original=16,
                     kv_rank=m.kv_rank and 12, q_rank=m.q_rank and 20, nope_dim=8, rope_dim=4, v_dim=6)
    if m.experts:
        shrunk = replace(shrunk, experts=8, top_k=min(m.top_k, 3), moe_ffn=16, router_groups=min(m.router_groups, 4), router_bias_rate=0.01,
                         aux_loss=10 * m.aux_loss, jitter=0.05 if m.router == "softmax" else 0.0)
    return replace(cfg, model=shrunk)


class Tokens:
    """Microbatches of made-up tokens, a function of (seed, step) cut over the ranks as data/loader.py cuts real ones."""

    def __init__(self, cfg: Config, rank: int, world: int) -> None:
        self.cfg, self.rank, self.world = cfg, rank, world

    def microbatches(self, step: int) -> list[Batch]:
        t, v, size = self.cfg.train, self.cfg.model.vocab, config.batch_size(self.cfg.train, step)
        stream = torch.Generator().manual_seed(t.seed + step)
        ids = torch.randint(v, (size, t.seq_len + 1), generator=stream)
        targets = ids[:, 1:].masked_fill(torch.rand(size, t.seq_len, generator=stream) < 0.2, -100)
        targets[0, 1:] = -100  # one sequence that hardly counts: microbatches of very unequal weight
        starts = torch.rand(size, t.seq_len, generator=stream) < 0.1
        starts[:, 0] = True
        place = torch.arange(t.seq_len).expand_as(starts)
        positions = place - torch.where(starts, place, 0).cummax(1).values if self.cfg.data.doc_mask else place
        docs = starts.cumsum(1, dtype=torch.int32) if self.cfg.data.doc_mask else None
        share = size // self.world
        cuts = [slice(i, i + t.micro_batch) for i in range(self.rank * share, (self.rank + 1) * share, t.micro_batch)]
        return [Batch(ids[c, :-1], targets[c], positions[c], None if docs is None else docs[c],
                      torch.arange(c.start, c.stop), step) for c in cuts]


# ---- one layout ------------------------------------------------------------------------------------------------------

class Off(NamedTuple):
    """How far one value is from one process's, relative to the largest of its tensor; step: where it was seen."""
    error: float
    step: int
    what: str

    @property
    def bad(self) -> bool:
        return not self.error <= BOUND

    @property
    def rank(self) -> tuple[bool, float]:
        return self.error != self.error, self.error  # NaN is the worst of all

    def as_json(self) -> dict:
        return self._asdict() | ({} if math.isfinite(self.error) else {"error": None})


def run_layout(world: World, cfg: Config, truth: Path | None) -> dict[str, Tensor] | list[Off]:
    """Train STEPS steps. Without truth: return it, {which value: tensor}; with the file that holds it: how far off each value
    of this rank is, but only the worst of each step."""
    known = None if truth is None else load_file(truth)
    p = cfg.parallel
    mesh = Mesh.bind(Layout(world.size, p.tp, p.cp, p.pp, p.dp_rep, p.ep, p.etp), world)
    mesh.ledger.clear()
    run = build(cfg, mesh, torch.device("cpu"), None, cfg.train.steps)
    data, guard, seen = Tokens(cfg, mesh.data.index, mesh.data.size), Guard(), []
    made: dict[str, Tensor] = {}

    def hold(what: str, box, value: Tensor, step: int) -> None:
        if known is None:
            made.setdefault(what, torch.zeros(box.shape if box else value.shape, dtype=torch.float64))
            made[what][tuple(slice(a, a + n) for a, n in zip(box.start, box.size)) if box else ...] = value.detach()
            return
        whole = known[what]
        true = whole[tuple(slice(a, a + n) for a, n in zip(box.start, box.size))] if box else whole
        size = max(float(whole.abs().max()), FLOOR)
        seen.append(Off(float((value.detach() - true).abs().max()) / size if value.numel() else 0.0, step, what))

    def gradients(point: str, step: int) -> None:
        if point == "step.backward":
            for bucket in run.buckets:
                for box, part in bucket.boxes(bucket.shard):
                    hold(f"step {step} gradient of {box.key}", box, part, step)

    for step in range(1, STEPS + 1):
        loss, norm, _ = train_step(run, step, data.microbatches(step - 1), guard, gradients)
        hold(f"step {step} loss", None, loss, step)
        hold(f"step {step} gradient norm", None, norm, step)
        if run.routers.told is not None:
            hold(f"step {step} counts and losses of the routers", None, run.routers.told, step)
        for box, part in run.routers.boxes():
            hold(f"step {step} {box.key}", box, part, step)
    for bucket in run.buckets:
        for box, part in bucket.boxes(bucket.master):
            hold(f"parameter {box.key}", box, part, STEPS + 1)
    batches = data.microbatches(99)
    hold("evaluation loss", None, run.pipeline.evaluate([zigzag.cut(b, mesh.cp) for b in batches]), STEPS + 1)
    prompt = torch.arange(cfg.train.seq_len)[None]  # generation: a whole sequence on every rank
    hold("logits of a prompt", None, run.pipeline.logits(prompt, prompt, None, cfg.train.seq_len - 3), STEPS + 1)
    return made if known is None else [max((s for s in seen if s.step == n), key=lambda s: s.rank) for n in range(1, STEPS + 2)]


def plain(cfg: Config) -> Config:
    """The same job in one process: the whole batch at once (under a ramp, its first batch), nothing split, nothing summed up later. (Scales
    in fp8 that span a microbatch are a function of it: the same microbatches then.)"""
    whole = cfg.train.micro_batch if cfg.train.fp8 in BY_MICROBATCH else config.batch_size(cfg.train, 0)
    return replace(cfg, parallel=config.Parallel(), train=replace(cfg.train, micro_batch=whole))


def one_process(cfg: Config) -> dict[str, Tensor]:
    """What every layout must equal; cfg: a plain one. Raises ConfigError where it is no oracle: two matrices that start identical."""
    run, seen = build(cfg, Mesh.single(), torch.device("cpu"), None, 1), {}
    for box, part in (pair for b in run.buckets for pair in b.boxes(b.master)):
        if part.dim() > 1:
            twin = seen.setdefault((part.shape, float(part.double().sum())), box.key)
            if twin != box.key:
                raise ConfigError(f"{box.key} starts with the same weights as {twin}; initial weights must depend on the name")
    return run_layout(World(), cfg, None)


def prove(pool: Pool, cfg: Config, folder: Path) -> tuple[Off, Off]:
    """(what is wrong in the first step that has anything wrong, else what is farthest off; what is farthest off). Truths are
    kept in `folder` for other layouts of the same job, the last KEPT that were made."""
    alone = plain(cfg)
    truth = folder / f"{hashlib.sha256(repr(alone).encode()).hexdigest()}.safetensors"
    if not truth.exists():
        for old in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)[:-KEPT]:
            old.unlink()
        save_file({what: value.contiguous() for what, value in one_process(alone).items()}, truth)
    seen = [off for offs in pool.run(run_layout, cfg, truth) for off in offs]
    worst = max(seen, key=lambda off: off.rank)
    return min((off for off in seen if off.bad), key=lambda off: (off.step, *(-x for x in off.rank)), default=worst), worst


# ---- the lattice -----------------------------------------------------------------------------------------------------

def words(values: Values, world: int) -> list[str]:
    """A layout in words: `pp2 dp2 tp2 sp zero1 1f1b mb1`."""
    v = values
    dp = world // (v["tp"] * v["pp"] * v["cp"] * v["dp_rep"])
    degrees = [f"{k}{n}" for k, n in (("pp", v["pp"]), ("rep", v["dp_rep"]), ("dp", dp), ("cp", v["cp"]), ("tp", v["tp"]),
                                        ("ep", v["ep"]), ("etp", v["etp"])) if n > 1]
    return (degrees + ["sp"] * v["sp"] + [f"zero{v['zero']}"] + ([v["schedule"]] if v["pp"] > 1 else []) + [f"vpp{v['vpp']}"] * bool(v["vpp"])
            + [f"mb{v['micro_batch']}"] + [f"cp-{v['cp_kind']}"] * (v["cp"] > 1) + ([v["reduce"]] if v["reduce"] != "collective" else [])
            + ["ramp"] * v["ramp"] + ["uneven"] * bool(v["stages"]) + ["offload"] * (v["offload"] != "none") + ["docs"] * v["doc_mask"]
            + ["capacity"] * (v["capacity"] == 1.0) + ["padded"] * (v["capacity"] == "padded")
            + ["fp8", v["fp8"]] * (v["fp8"] is not None) + [v["name"]] * (v["name"] != "adamw") + ["mup"] * bool(v["mup_base"])
            + [v["recompute"]] * (v["recompute"] != "none"))


def chosen(found: Lattice, which: str, only: set[str], seed: int) -> list[Values]:
    """The cells that --layouts and --only ask for. Raises ConfigError where there are none."""
    must, never = {word for word in only if not word.startswith("no-")}, {word[3:] for word in only if word.startswith("no-")}
    first = {key: values[0] for key, values in lattice.SWITCHES.items()}
    turned = [first | {key: value} for key, values in lattice.SWITCHES.items() for value in values]  # each switch alone
    found = replace(found, layouts=[v for v in found.layouts if must <= {w for s in turned for w in words(v | s, found.world)}])

    def wanted(v: Values) -> bool:
        return must <= (named := set(words(v, found.world))) and not never & named

    if which == "all" and not only:
        return lattice.cover(found, seed)
    cells = list(lattice.product(found, wanted)) if which in ("all", "product") else lattice.draw(found, int(which), seed, wanted)
    if not cells:
        raise ConfigError(f"--only: no legal layout of {found.world} ranks has the words {' '.join(sorted(only))}")
    return cells


def part_of(cells: list[Values], part: str) -> list[Values]:
    """The k-th of n parts of the cells, "k/n", in their order: every cell is in exactly one. Raises ConfigError where there is no such part."""
    k, n = map(int, found.groups()) if (found := re.fullmatch(r"([0-9]+)/([0-9]+)", part)) else (0, 0)
    if not 1 <= k <= n <= len(cells):
        raise ConfigError(f"--part: {part!r} must be K/N with 1 <= K <= N <= {len(cells)} cells, as 2/4: the second quarter")
    return cells[(k - 1) * len(cells) // n:k * len(cells) // n]


def support(done: list[tuple[set[str], bool]]) -> list[str]:
    """A Markdown table of (the words of a layout, whether it is proven): how many proven layouts hold each pair of features."""
    degrees = ("pp", "rep", "dp", "cp", "tp", "ep", "etp")
    kinds = [{"".join(c for c in w if not c.isdigit()) if w[:-1] in degrees else w for w in ws} for ws, _ in done]
    columns = [c for c in ("tp", "sp", "pp", "cp-ring", "cp-ulysses", "ep", "etp", "dp", "rep", "zero1", "zero2", "zero3")
               if any(c in k for k in kinds)]
    rows = [*columns, *sorted(set().union(*kinds) - set(columns) - {"cp", "mb1"})]
    lines = ["| with | " + " | ".join(columns) + " | all |", "|---" * (len(columns) + 2) + "|"]
    for row in rows:
        pairs = [[ok for k, (_, ok) in zip(kinds, done) if {row, c} <= k] for c in (*columns, row)]
        lines.append(f"| {row} | " + " | ".join("-" if not p else f"{sum(p)}" if all(p) else f"**{sum(p)} of {len(p)}**" for p in pairs) + " |")
    return lines


def write_table(path: Path, name: str, lines: list[str]) -> None:
    """Between the marks of `name` where the file has them, else as the whole file."""
    begin, end = f"<!-- scripts.verify {name} -->", "<!-- end -->"
    old = path.read_text() if path.exists() else f"{begin}\n{end}\n"
    if begin not in old:
        raise ConfigError(f"--table: {path} has no line {begin}; add it, and {end} after it")
    before, rest = old.split(begin, 1)
    path.write_text(before + "\n".join([begin, *lines, end]) + rest.split(end, 1)[1])


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(prog="python -m scripts.verify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("name", help="recipe whose model is proved (a tiny twin)")
    p.add_argument("--world", type=int, default=8, help="ranks, 1 to 8")
    p.add_argument("--layouts", default="12", help="how many to draw; all: every layout; product: with every choice of switches")
    p.add_argument("--seed", type=int, default=0, help="of the draw")
    p.add_argument("--only", nargs="*", default=[], help="words that a layout's name must have, or not have: --only zb-v zero3 no-sp")
    p.add_argument("--part", default="1/1", help="K/N: the K-th of N parts of the chosen cells")
    p.add_argument("--table", type=Path, help="write the table of proven pairs into this Markdown file, between its marks")
    p.add_argument("--json", action="store_true", help="one JSON object a layout, for programs")
    p.add_argument("--coord", action="store_true", help="instead of layouts: the coordinate check of muP, at widths that double")
    p.add_argument("--out", type=Path, help="of --coord: draw it into this .png")
    a = p.parse_args(argv)
    if a.coord:
        return coord.check(a.name, a.json, a.out)
    if a.out:
        raise ConfigError("--out: is the picture of --coord; give that too")
    if not 1 <= a.world <= 8:
        raise ConfigError(f"--world: {a.world} must lie in 1..8; the layouts of more ranks are made of the same parts")
    if a.layouts not in ("all", "product") and not a.layouts.isdigit():
        raise ConfigError(f"--layouts: {a.layouts!r} is neither a number nor all nor product")
    cfg = subject(a.name, a.world)
    found = lattice.layouts(cfg, a.world, lambda c: plan_pipeline(c, a.world, advise=False))
    cells = part_of(chosen(found, a.layouts, set(a.only), a.seed), a.part)
    part = "" if a.part == "1/1" else f"part {a.part}: "
    say = (lambda *text: None) if a.json else lambda *text: print(*text, flush=True)
    say(f"{a.name}: {part}{len(cells)} cells of {len(found.layouts)} layouts of {a.world} ranks, {STEPS} steps, fp64, bound {BOUND:.0e}")
    for _, group in itertools.groupby(sorted(found.refused.items()), lambda item: item[0].split(":")[0].split(" = ")[0]):
        whys = list(group)
        say(f"  refused {sum(n for _, n in whys)}: {whys[0][0]}")
    done, begun, folder, pool = [], time.perf_counter(), tempfile.TemporaryDirectory(prefix="bevatron-verify-"), Pool(a.world)
    for values in cells:
        named = words(values, a.world)
        try:
            first, worst = prove(pool, found.config(values), Path(folder.name))
        except ConfigError:
            raise
        except Exception as error:  # this layout's; the others go on, with ranks that are not stuck in it
            traceback.print_exception(error)
            pool.close()
            pool, first = Pool(a.world), Off(math.inf, 0, "died: " + str(error).strip().splitlines()[-1])
            worst = first
        done.append((set(named), not first.bad))
        if a.json:
            print(json.dumps({"layout": " ".join(named), "ok": not first.bad, "first": first.as_json(), "worst": worst.as_json()}), flush=True)
        why = first.what if math.isinf(first.error) else f"first {first.what} ({first.error:.1e}); worst {worst.what}"
        say(f"{'WRONG' if first.bad else 'ok':<6} {' '.join(named):<40} {worst.error:.1e}" + f"  {why}" * first.bad)
    pool.close()
    folder.cleanup()
    proven = sum(ok for _, ok in done)
    closing = f"{part}{proven} of {len(done)} layouts train like one process ({time.perf_counter() - begun:.0f} s)"
    say(closing)
    if a.table:
        write_table(a.table, a.name, [f"`python -m scripts.verify {' '.join(argv)}`: {closing}.", "", *support(done)])
    return 0 if proven == len(done) else 1

