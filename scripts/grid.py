"""Train one command at every combination of some keys' values, such as learning rates and seeds.

    python -m scripts.grid llama3-tiny --log.name rates --over optim.lr 1e-3 2e-3 4e-3 --over train.seed 1 2 3
    python -m scripts.compare runs/rates

All words but the options below are those of train.py, for all runs. A key that varies stands after --over,
its values as separate words: a comma would not do between them, since values such as data blends, ramps and
patterns have commas of their own. --log.name names the grid; its runs are folders in runs/NAME, named by
their values.

All runs are checked as train.py checks its own command before the first one begins. They run one after the
other, each with its output in runs/NAME/RUN.log. A run that fails is named and does not end the grid; the
exit code is then that of the first one. The same command again goes on: finished runs have nothing to do,
stopped ones resume. Values may be added later. runs/NAME/grid.json has the cells, and a grid with other
settings is refused under its name.

--part K/M runs every M-th run from the K-th, for instance on another machine. --sbatch FILE writes a SLURM
job array with a task for each run, and trains nothing; account, cores and the like come from the site file
(configs/site.example.yaml).
"""
import argparse
import json
import os
import shlex
import sys
from pathlib import Path

from checkpoint import branch
from config import ConfigError
from config.command_line import CommandParser
from config.exit_codes import FINISHED, MEANINGS, STOPPED_EARLY
from config.parts import part_of
from config.reading.grid import GridCell, cell_named, grid_cells, keep_grid, parse_grid
from config.site import SITE_VARIABLE, SiteSettings, read_site
from durable.programs import Programs, train_words
from durable.progress import steps_done
from plan import batch_file
from runtime.failure import fail_cleanly
from runtime.summary import SUMMARY_FILE
from start import check_config


def arguments() -> argparse.ArgumentParser:
    parser = CommandParser(prog="python -m scripts.grid", description=__doc__)
    parser.add_argument("--over", nargs="+", action="append", required=True, metavar=("KEY", "VALUE"),
                        help="a key and its values; may be given several times")
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="ranks of each run, on this node")
    parser.add_argument("--part", metavar="K/M", help="run only every M-th run, from the K-th")
    actions = parser.add_mutually_exclusive_group()
    actions.add_argument("--list", action="store_true", help="print the commands, and train nothing")
    actions.add_argument("--sbatch", type=Path, metavar="FILE", help="write a SLURM job array of the runs")
    parser.add_argument("--site", metavar="FILE",
                        help="--sbatch: the site file; none: BEVATRON_SITE, or configs/site.yaml")
    return parser


def main(argv: list[str]) -> int:
    args, words = arguments().parse_known_args(argv)
    if args.nproc < 1:
        raise ConfigError(f"--nproc: {args.nproc}; at least 1")
    batch_file.check_site(args.site, args.sbatch)
    grid = parse_grid(args.over, words)
    cells = grid_cells(grid, branch.resolve)
    for cell in cells:
        check_cell(cell, args.nproc)
    chosen = list(part_of(cells, args.part)) if args.part else cells
    if args.list:
        for cell in chosen:
            print(command_of(cell, args.nproc))
        return 0
    if args.sbatch is not None:
        batch_file.check_writable(args.sbatch)
        site = read_site(args.site or os.environ.get(SITE_VARIABLE))
        keep_grid(grid, cells)
        write_array(args.sbatch, grid.name, chosen, args.nproc, site)
        return 0
    keep_grid(grid, cells)
    return run_cells(chosen, args.nproc)


def check_cell(cell: GridCell, ranks: int) -> None:
    """Raise ConfigError, naming the cell, for one that train.py would refuse on this many ranks.

    A layout that follows the ranks (parallel.elastic, parallel.auto) is only decided by the run.
    """
    cfg = cell.cfg
    if cfg.parallel.elastic or cfg.parallel.auto is not None:
        return
    with cell_named(cell.name):
        check_config(cfg, ranks, steps_done(cfg, cell.folder) if cfg.train.phases is not None else 0)


def command_of(cell: GridCell, ranks: int) -> str:
    """Return the command line of a cell."""
    launch = ["-m", "scripts.launch", "--nproc", str(ranks), "--"] if ranks > 1 else ["train.py"]
    return shlex.join(["python", *launch, *cell.words])


def write_array(file: Path, name: str, cells: list[GridCell], ranks: int, site: SiteSettings) -> None:
    text = batch_file.array_text(
        [cell.words for cell in cells],
        ranks=ranks,
        has_gpus=cells[0].cfg.train.device != "cpu",
        title=f"The grid {name}: {len(cells)} runs, a task each (scripts.grid).",
        file=file,
        name=name,
        site=site,
    )
    batch_file.write_batch_file(file, text)
    print(f"batch    sbatch {shlex.quote(str(file))} · {len(cells)} tasks of {ranks} ranks")


def run_cells(cells: list[GridCell], ranks: int) -> int:
    """Run the cells one after another. Returns 0, or the exit code of the first that is not finished."""
    failed: dict[str, int] = {}
    with Programs() as programs:
        for number, cell in enumerate(cells, 1):
            output = cell.folder.with_name(f"{cell.name}.log")
            code = programs.run(train_words(cell.words, ranks), output)
            if code != FINISHED:
                failed[cell.name] = code
            if programs.is_stopped:
                print("stopped; the same command goes on", flush=True)
                return STOPPED_EARLY
            print(f"[{number}/{len(cells)}] {cell.name}: {outcome(cell, code, output)}", flush=True)
    if not failed:
        print(f"next     python -m scripts.compare {cells[0].folder.parent}")
        return FINISHED
    named = ", ".join(f"{name} ({code})" for name, code in failed.items())
    print(f"error: {len(failed)} of {len(cells)} runs are not finished: {named}", file=sys.stderr)
    return next(iter(failed.values()))


def outcome(cell: GridCell, code: int, output: Path) -> str:
    """Format how a run has ended."""
    if code != FINISHED:
        return f"ended with code {code} ({MEANINGS.get(code, 'killed')}); {output} says why"
    validation = json.loads((cell.folder / SUMMARY_FILE).read_text())["validation"]
    return "finished" if validation is None else f"validation loss {validation['val_loss']:.4f}"


if __name__ == "__main__":
    sys.exit(fail_cleanly(main, sys.argv[1:]))
