"""Prove that every parallel layout trains like one process.

    python -m scripts.verify NAME --world 8 [--layouts all | N] [--section.key VALUE ...]

It runs train.py's own loop, on the CPU over gloo, in fp64: real files through loader and packing, evaluation,
sampling, warm-up and decay, a step skipped for a non-finite gradient, a save, a stop and a resume under the
layout. The run is compared with one uninterrupted process (lab/proof/verify/trial.py has the full list).
Equal, or within a relative 1e-9, are: every token, loss, gradient by its global name, norm, learning rate,
validation loss, sampled id, and every parameter and moment of the checkpoints.

The layouts are those that train.py's own rules accept; the others are refused for the reason that train.py
reports. `--layouts all` runs every layout, with switches (recompute, microbatches, ...) chosen so that every
legal pair of values is in some cell; `--layouts product` runs every layout with every switch setting.
`--part 2/4` runs every fourth of the chosen cells starting from the second, to split a long proof across
machines or calls.

`--strict` catches misuse that gloo forgives and NCCL does not: every started exchange runs on private copies,
its result is NaN until it is awaited, and nothing may be written meanwhile (parallel/wire/strict.py).

`--lanes` logs the exchanges of every rank, and runs their order by NCCL's rules: one communicator runs them
one after the other, and a send ends with its receive. A job that would block there is named instead.

`--precision` proves the dtypes used for training, bf16, fp16, fp32 and fp8, over every optimizer and ZeRO
stage, within bounds derived from the dtype (lab/proof/precision/__init__.py).
`--coord` checks muP instead of layouts: how far training moves activations, by width (lab/proof/mup.py).

Overrides, in train.py's syntax, prove an edit of the model without a new recipe: `--model.mlp.activation
gelu` is set in the tiny twin of NAME, for every cell and for the single process. Keys that the cells vary
(use --only for those) and keys that the proof needs are refused.
"""
import difflib
import json
import math
import tempfile
import time
import traceback
from argparse import Namespace
from pathlib import Path

import config
from config import Config, ConfigError
from config.command_line import CommandParser
from config.parts import part_of
from config.reading import dotted_overrides
from config.reading.kinds import every_path
from config.reading.schedules import plan_pipeline
from config.terminal import hanging_lines, output_width
from durable.pool import WorkerPool, last_line
from lab.proof import lattice, mup, precision
from lab.proof.lattice import Lattice, Values
from lab.proof.verify.cells import chosen, words
from lab.proof.verify.overrides import (
    Overrides,
    check_free,
    check_only_model,
    check_phases,
    check_reached,
    read_overrides,
    split_overrides,
)
from lab.proof.verify.table import support_table, write_table
from lab.proof.verify.tiny_config import LAST, tiny_config
from lab.proof.verify.trial import BOUND, Deviation, make_references, prove, single_process

__all__ = ["chosen", "main", "part_of", "prove", "tiny_config", "words"]

# Cells whose single-process runs are made together, spread over the ranks: one by one they would use one
# core.
MAX_CONCURRENT_REFERENCES = 16


def main(argv: list[str]) -> int:
    """Run the command. Returns 0 if everything holds, else 1. Raises ConfigError."""
    own, settings = split_overrides(argv)
    options = parse_options(own)
    overrides = read_overrides(settings, options.name)
    if options.coord:
        check_only_model(overrides, "--coord")
        return mup.check(options.name, options.json, options.out, overrides=overrides)
    if options.precision:
        check_only_model(overrides, "--precision")
        draw = int(options.layouts) if options.layouts.isdigit() else None
        return precision.check(
            options.name,
            options.world,
            options.json,
            draw=draw,
            seed=options.seed,
            overrides=overrides,
        )
    check_free(overrides)
    return prove_layouts(options, overrides, argv)


def parse_options(argv: list[str]) -> Namespace:
    """Parse the command line without overrides. Raises ConfigError if a value is out of its range."""
    parser = CommandParser(
        prog="python -m scripts.verify",
        description=__doc__,
    )
    add = parser.add_argument
    add("name", help="recipe whose model is proved (a tiny twin)")
    add("--world", type=int, default=8, help="ranks, 1 to 8")
    add(
        "--layouts",
        default="12",
        help="how many to draw; all: every layout; product: with every choice of switches",
    )
    add("--seed", type=int, default=0, help="of the draw")
    add(
        "--only",
        nargs="*",
        default=[],
        help="words that a layout's name must have, or not have: --only zb-v zero3 no-sp",
    )
    add("--part", default="1/1", help="K/M: the K-th of M parts of the chosen cells")
    add(
        "--table",
        type=Path,
        help="write the table of proven pairs into this Markdown file, between its marks",
    )
    add(
        "--strict",
        action="store_true",
        help="check every started exchange and copy too: nothing is used before it has arrived",
    )
    add(
        "--lanes",
        action="store_true",
        help="check that the exchanges complete in NCCL's order too, which gloo does not show",
    )
    add("--json", action="store_true", help="one JSON object a layout, for programs")
    add(
        "--precision",
        action="store_true",
        help="instead of fp64: bf16, fp16, fp32 and fp8, within bounds of each",
    )
    add(
        "--coord",
        action="store_true",
        help="instead of layouts: the coordinate check of muP, at widths that double",
    )
    add("--out", type=Path, help="of --coord: draw it into this .png")
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        refuse_unknown(unknown, [f"--{name}" for name in vars(options)])

    if options.coord:
        return options
    if options.out:
        raise ConfigError("--out: is the picture of --coord; give that too")
    if not 1 <= options.world <= 8:
        raise ConfigError(
            f"--world: {options.world} must lie in 1..8; the layouts of more ranks are made of the same parts"
        )
    if options.layouts not in ("all", "product") and not options.layouts.isdigit():
        raise ConfigError(f"--layouts: {options.layouts!r} is neither a number nor all nor product")
    without_effect = {
        "--only": options.only,
        "--strict": options.strict,
        "--lanes": options.lanes,
        "--table": options.table,
    }
    for option, value in without_effect.items():
        if options.precision and value:
            raise ConfigError(
                f"{option}: is of layouts in fp64, and --precision has its own cells; leave it out"
            )
    if options.precision and options.world not in (1, 2, 4):
        raise ConfigError(
            f"--world: {options.world} must be 1, 2 or 4 with --precision; they hold every kind of sharing"
        )
    return options


def refuse_unknown(words: list[str], options: list[str]) -> None:
    """Raise ConfigError for words that are neither one of the command's options nor an override."""
    option = words[0].partition("=")[0]
    keys = {path.rpartition(".")[2] for path in every_path(config.Config)}
    near = difflib.get_close_matches(option, options, 1)
    if near and option.removeprefix("--") not in keys:
        raise ConfigError(f"{option}: no such option; did you mean {near[0]}?")
    dotted_overrides(words)  # names the section that the key is in


def prove_layouts(options: Namespace, overrides: Overrides, argv: list[str]) -> int:
    """Prove the chosen cells and print one line for each. Returns 0 if all are proven, else 1."""
    world = options.world
    cfg = tiny_config(options.name, world, overrides)
    check_phases(cfg, LAST)
    plan_pipeline(single_process(cfg), 1, advise=False)  # one line for a config that no layout can run
    found = lattice.find_layouts(cfg, world, kept=overrides.keys())
    cells = part_of(chosen(found, options.layouts, set(options.only), options.seed), options.part)
    check_reached(overrides, [found.config(values) for values in cells], world, "the proof")

    part = "" if options.part == "1/1" else f"part {options.part}: "
    if not options.json:
        print_header(f"{overrides.title(options.name)}: {part}", cells, found)

    proofs: list[tuple[set[str], bool]] = []  # (words of a cell, whether it is proven)
    begun = time.perf_counter()
    folder = tempfile.TemporaryDirectory(prefix="bevatron-verify-")
    home = Path(folder.name)
    pool = launch_pool(world, cfg, overrides)
    for i, values in enumerate(cells):
        if i % MAX_CONCURRENT_REFERENCES == 0:
            group = [found.config(cell) for cell in cells[i:i + MAX_CONCURRENT_REFERENCES]]
            try:
                make_references(pool, group, home)
            except RuntimeError:  # one of them failed: each cell makes its own, and reports its error
                pool.close()
                pool = launch_pool(world, cfg, overrides)
        try:
            checks = {"is_strict": options.strict, "on_lanes": options.lanes}
            first, worst = prove(pool, found.config(values), home, **checks)
        except ConfigError:
            raise
        except Exception as error:  # only this cell failed; new ranks prove the others
            traceback.print_exception(error)
            pool.close()
            pool = launch_pool(world, cfg, overrides)
            first = worst = Deviation(error=math.inf, step=0, what=f"died: {last_line(error)}")
        name = words(values, world)
        proofs.append((set(name), not first.is_wrong))
        title = overrides.title(" ".join(name)) if options.json else " ".join(name)
        print_proof(title, first, worst, options.json)
    pool.close()
    folder.cleanup()

    proven = sum(ok for _, ok in proofs)
    seconds = time.perf_counter() - begun
    closing = f"{part}{proven} of {len(proofs)} layouts train like one process ({seconds:.0f} s)"
    if not options.json:
        print(closing, flush=True)
    if options.table:
        command = f"`python -m scripts.verify {' '.join(argv)}`: {closing}."
        write_table(options.table, overrides.title(options.name), [command, "", *support_table(proofs)])
    return 0 if proven == len(proofs) else 1


def launch_pool(world: int, cfg: Config, overrides: Overrides) -> WorkerPool:
    """Launch the ranks of a proof. `cfg` includes the overrides.

    An override of parallel.timeout_s also applies to these ranks: on a busy machine a cell takes longer than
    their usual limit.
    """
    is_set = "parallel.timeout_s" in overrides.keys()
    return WorkerPool(world, cfg.parallel.timeout_s) if is_set else WorkerPool(world)


def print_header(title: str, cells: list[Values], found: Lattice) -> None:
    """Print how many cells follow, and how many layouts each config key rules out."""
    print(
        f"{title}{len(cells)} cells of {len(found.layouts)} layouts of {found.world} ranks, {LAST} steps, "
        f"fp64, bound {BOUND:.0e}",
        flush=True,
    )

    counts: dict[str, int] = {}
    for reason, count in found.refused.items():
        key = reason.split(":")[0].split(" = ")[0]
        counts[key] = counts.get(key, 0) + count
    if counts:
        told = ", ".join(f"{count} by {key}" for key, count in sorted(counts.items()))
        print("\n".join(hanging_lines("  ", f"refused by the rules: {told}", output_width())), flush=True)


def print_proof(name: str, first: Deviation, worst: Deviation, as_json: bool) -> None:
    """Print the verdict on one cell. `first` and `worst` are as returned by `prove`."""
    if as_json:
        row = {"layout": name, "ok": not first.is_wrong, "first": first.as_json(), "worst": worst.as_json()}
        print(json.dumps(row), flush=True)
        return

    start = f"{'WRONG' if first.is_wrong else 'ok':<6} "
    line = f"{name:<40} {worst.error:.1e}"
    if first.is_wrong and math.isinf(first.error):
        line += f"  {first.what}"
    elif first.is_wrong:
        line += f"  first {first.what} ({first.error:.1e}); worst {worst.what}"
    print("\n".join(hanging_lines(start, line, output_width())), flush=True)
