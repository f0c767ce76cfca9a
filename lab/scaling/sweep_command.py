"""The commands `sweep` (learning rates, batch sizes) and `systems` (ranks, layouts)."""
import argparse
import itertools
import math
import os
import shlex
from functools import partial

from config import ConfigError
from config.exit_codes import NON_FINITE
from config.terminal import output_width
from durable.programs import Programs
from lab.scaling import figures
from lab.scaling.experiment import kept_line, run_all, torchrun_words
from lab.scaling.settings import (
    LAPTOP_MODEL,
    LAPTOP_SETTINGS,
    get_jobs,
    parse_numbers,
    parse_settings,
    parse_whole_numbers,
    say,
)
from lab.scaling.sweep import (
    Sweep,
    SweepRun,
    check_sweep,
    critical_batch,
    get_sweep_runs,
    keep_sweep,
    read_curve,
    sweep_arguments,
    sweep_lines,
    write_sweep,
)
from lab.scaling.systems import (
    MODES,
    Hardware,
    ScalingCell,
    ScalingLayout,
    Systems,
    cell_arguments,
    cell_name,
    check_systems,
    config_of_recipe,
    keep_systems,
    make_cell,
    parse_layout,
    read_cells,
    systems_lines,
    write_cell,
    write_table,
)
from plan.cost import cluster
from plan.efficiency import get_efficiency
from plan.machine import read_machine
from runtime.setup import pick_device

# ---- sweep -------------------------------------------------------------------------------------------------


def sweep_command(args: argparse.Namespace, rest: list[str]) -> int:
    sweep = Sweep(
        recipe=args.recipe,
        rates=parse_numbers("--rates", args.rates),
        batches=parse_whole_numbers("--batches", args.batches),
        tokens=tokens_of(args.tokens),
        settings=parse_settings(args.recipe, rest, LAPTOP_SETTINGS | LAPTOP_MODEL),
    )
    jobs = get_jobs(args)
    check_sweep(sweep, args.out, args.ranks)
    runs = get_sweep_runs(sweep)
    if args.only is not None:
        if not 0 <= args.only < len(runs):
            raise ConfigError(f"--only: {args.only}, and the runs are 0 to {len(runs) - 1}")
        runs = [runs[args.only]]
    if args.kept:
        say(kept_line(args.out / run.name for run in runs))
        return 0
    keep_sweep(sweep, args.out)

    with Programs() as programs:
        chains = [partial(run_sweep_cell, sweep, run, args, programs) for run in runs]
        code = run_all(chains, jobs)
    if code or args.only is not None:
        return code
    curves = [curve for curve in (read_curve(run, args.out) for run in runs) if curve is not None]
    if not any(math.isfinite(curve.final_loss) for curve in curves):
        raise ConfigError("--rates: every run diverged; give lower ones")

    critical = critical_batch(curves, args.target)
    say("\n" + "\n".join(sweep_lines(curves, critical)))
    write_sweep(curves, critical, args.out / "sweep.csv")
    figures.draw_rates(curves, args.out / "rates.png")
    if critical is not None:
        figures.draw_critical_batch(critical, args.out / "critical_batch.png")
    say(f"\nfigures and sweep.csv in {args.out}")
    return 0


def tokens_of(number: float) -> int:
    """Return --tokens as a whole number. Raises ConfigError."""
    if not (math.isfinite(number) and number >= 1):
        raise ConfigError(f"--tokens: {number}; tokens of each run, at least 1, such as 1e6")
    return round(number)


def run_sweep_cell(sweep: Sweep, run: SweepRun, args: argparse.Namespace, programs: Programs) -> int:
    """Run a run unless it is done. Divergence is a result: the others continue."""
    output = args.out / f"{run.name}.log"
    if read_curve(run, args.out) is None:
        code = programs.train(sweep_arguments(sweep, run, args.out, args.ranks), args.ranks, output)
        if code not in (0, NON_FINITE):
            say(f"{run.name}: ended with code {code}; {output} says why")
            return code
    curve = read_curve(run, args.out)
    say(f"{run.name}: diverged" if curve is None or math.isnan(curve.final_loss)
        else f"{run.name}: {run.steps} steps, validation loss {curve.final_loss:.4f}")
    return 0


# ---- systems -----------------------------------------------------------------------------------------------


def systems_command(args: argparse.Namespace, rest: list[str]) -> int:
    systems = Systems(
        recipe=args.recipe,
        modes=MODES if args.mode == "both" else (args.mode,),
        layouts=tuple(parse_layout(text) for text in args.layout or ("", "zero 1")),
        ranks=parse_whole_numbers("--ranks", args.ranks),
        steps=args.steps,
        settings=parse_settings(args.recipe, rest, LAPTOP_SETTINGS | LAPTOP_MODEL),
    )
    check_systems(systems)
    if args.only is not None and args.only not in systems.ranks:
        raise ConfigError(f"--only: {args.only} is not one of --ranks {args.ranks}")
    named_hardware(systems, args)  # raises before anything is written
    keep_systems(systems, args.out, args.cluster)

    with Programs() as programs:
        failed = run_cells(systems, args, programs)
    measured = read_cells(args.out)
    if measured:
        say("\n" + "\n".join(systems_lines(measured, output_width())))
        write_table(measured, args.out / "systems.csv")
        figures.draw_systems(measured, args.out / "systems.png")
        say(f"\nsystems.png and systems.csv in {args.out}")
    return failed


def run_cells(systems: Systems, args: argparse.Namespace, programs: Programs) -> int:
    """Run all cells one after another. Returns the first nonzero exit code, or 0."""
    failed = 0
    for ranks in systems.ranks if args.only is None else (args.only,):
        hardware = get_hardware(systems, args, ranks, programs)
        for mode, layout in itertools.product(systems.modes, systems.layouts):
            try:
                cell = make_cell(systems, mode, layout, ranks, hardware)
            except ConfigError as error:
                say(f"{cell_name(mode, layout, ranks)}: not possible: {error}")
                continue
            code = run_cell(systems, cell, layout, args, programs)
            failed = failed or code
    return failed


def run_cell(
    systems: Systems, cell: ScalingCell, layout: ScalingLayout, args: argparse.Namespace, programs: Programs
) -> int:
    """Run a cell, report how it ended, and return train.py's exit code."""
    launcher = shlex.split(args.launcher) if args.launcher else None
    output = args.out / f"{cell.name}.log"
    code = programs.train(cell_arguments(systems, cell, layout, args.out), cell.ranks, output, launcher)
    if code:
        say(f"{cell.name}: ended with code {code}; {output} says why")
        return code
    write_cell(cell, args.out)
    say(f"{cell.name}: {systems.steps} steps")
    return 0


def named_hardware(systems: Systems, args: argparse.Namespace) -> Hardware | None:
    """Return the hardware that --cluster names, None without it. Raises ConfigError."""
    cfg = config_of_recipe(systems)
    if not args.cluster:
        return None
    known = cluster(args.cluster)
    hardware = Hardware(known, get_efficiency(known))
    if cfg.train.dtype not in hardware.cluster.flops:
        raise ConfigError(f"train.dtype: configs/clusters.yaml has no {cfg.train.dtype} for "
                          f"{args.cluster}; it has {', '.join(hardware.cluster.flops)}")
    return hardware


def get_hardware(
    systems: Systems, args: argparse.Namespace, ranks: int, programs: Programs
) -> Hardware | None:
    """Return the hardware behind the forecast for this number of ranks, None on a GPU without --cluster."""
    cfg = config_of_recipe(systems)
    named = named_hardware(systems, args)
    if named is not None:
        return named
    if args.launcher or pick_device(cfg.train.device, local_rank=0).type != "cpu":
        say("no forecast: --cluster names the row of configs/clusters.yaml that these GPUs are")
        return None
    file = args.out / f"machine-{ranks}.json"
    threads = cfg.train.threads or max(1, (os.cpu_count() or 1) // ranks)
    words = [*torchrun_words(ranks), "-m", "scripts.bench", "machine", "--out", str(file)]
    words += ["--dtype", cfg.train.dtype, "--threads", str(threads)]
    if programs.run(words, args.out / "machine.log"):
        raise ConfigError(f"--cluster: this machine could not be measured; {args.out}/machine.log says why; "
                          "name a row of configs/clusters.yaml")
    machine = read_machine(file)
    return Hardware(machine.as_cluster(), machine.as_efficiency())
