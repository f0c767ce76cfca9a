"""Prove that every parallel layout trains like one process.

    python -m scripts.verify NAME --world 8 [--layouts all | N]

What is run is train.py's own loop, on the CPU over gloo, in fp64: real files through loader and packing,
evaluation, sampling, warm-up and decay, a step that is skipped for a non-finite gradient, a save, a stop and
a resume under the layout. What is compared with one process that ran through (scripts/verify/trial.py has
the list) is equal, or within a relative 1e-9: every token, loss, gradient by its global name, norm, rate,
validation loss, sampled id, and every parameter and moment of the checkpoints.

The layouts are those that train.py's own rules let pass; the rest is refused with the reason that train.py
would give. `--layouts all` runs every layout, with switches (recompute, microbatches, ...) chosen so that
every legal pair of values meets; `--layouts product` every choice. `--part 2/4` runs the second quarter of
what was chosen: a long proof over several machines or sittings.

`--precision` proves the dtypes that people train in, bf16, fp16, fp32 and fp8, over every optimizer and ZeRO
stage, within bounds that follow from the dtype (scripts/verify/precision.py).
`--coord` proves no layout, but muP: how far training moves activations, by width (scripts/verify/coord.py).
"""
import argparse
import itertools
import json
import math
import re
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path

from build import plan_pipeline
from config import ConfigError
from plan import lattice
from plan.lattice import Lattice, Values
from runtime.pool import Pool
from scripts.verify import coord, precision
from scripts.verify.subject import LAST, subject
from scripts.verify.trial import BOUND, Off, make_truths, prove

__all__ = ["main", "prove", "subject"]

AHEAD = 16  # cells whose runs of one process are made at once, one on each rank: one alone would use one core


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
            + [v["recompute"]] * (v["recompute"] != "none") + ["async"] * v["async_save"] + ["wide"] * (v["geometry"] == "wide"))


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
    p.add_argument("--precision", action="store_true", help="instead of fp64: bf16, fp16, fp32 and fp8, within bounds of each")
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
    if a.precision:
        if a.world not in (1, 2, 4):
            raise ConfigError(f"--world: {a.world} must be 1, 2 or 4 with --precision; they hold every kind of sharing")
        return precision.check(a.name, a.world, a.json, int(a.layouts) if a.layouts.isdigit() else None, a.seed)
    cfg = subject(a.name, a.world)
    found = lattice.layouts(cfg, a.world, lambda c: plan_pipeline(c, a.world, advise=False))
    cells = part_of(chosen(found, a.layouts, set(a.only), a.seed), a.part)
    part = "" if a.part == "1/1" else f"part {a.part}: "
    say = (lambda *text: None) if a.json else lambda *text: print(*text, flush=True)
    say(f"{a.name}: {part}{len(cells)} cells of {len(found.layouts)} layouts of {a.world} ranks, {LAST} steps, fp64, bound {BOUND:.0e}")
    for _, group in itertools.groupby(sorted(found.refused.items()), lambda item: item[0].split(":")[0].split(" = ")[0]):
        whys = list(group)
        say(f"  refused {sum(n for _, n in whys)}: {whys[0][0]}")
    done, begun, folder, pool = [], time.perf_counter(), tempfile.TemporaryDirectory(prefix="bevatron-verify-"), Pool(a.world)
    for at, values in enumerate(cells):
        named = words(values, a.world)
        try:
            if at % AHEAD == 0:
                make_truths(pool, [found.config(each) for each in cells[at:at + AHEAD]], Path(folder.name))
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

