"""python -m scripts.verify NAME --precision: a line for each cell, and a table of the worst errors."""
import functools
import json
import random
import time
from collections.abc import Callable

from config import OPTIMIZERS, ConfigError
from durable.pool import last_line
from lab.proof.precision.bounds import gradient_error
from lab.proof.precision.cells import LAYOUTS, Cell, check_model, choose_cells
from lab.proof.precision.errors import BoundedError
from lab.proof.precision.job import FP16_STEPS, LEARNING_RATES, STEPS, precision_config
from lab.proof.precision.kernel_statistics import kernel_errors
from lab.proof.precision.prover import Prover, Verdict
from lab.proof.verify.overrides import Overrides, check_reached

SUMS = (("bf16", 0), ("fp16", 1), ("fp8", 2), ("bf16", 3))  # (dtype, ZeRO stage) of the accumulation checks

Worst = dict[tuple[str, str], BoundedError]  # {(dtype, check): the error that uses most of its bound}


def check(
    name: str,
    world: int,
    as_json: bool,
    *,
    draw: int | None = None,
    seed: int = 0,
    overrides: Overrides = Overrides(),
) -> int:
    """Run the command: print a line for each row, and the worst error of each dtype and check.

    `draw` is how many cells to draw with `seed`, None for all. `overrides` are the model keys to set.

    Returns 0 if everything holds, else 1. Raises ConfigError if this number of ranks has no layouts, or if an
    override is unusable.
    """
    if world not in LAYOUTS:
        raise ConfigError(f"--world: {world} must be 1, 2 or 4 with --precision")
    cfg = precision_config(name, "none", "fp32", "adamw", overrides=overrides)
    check_model(cfg)
    gradient_error(cfg)  # raises for a mixer without bounds
    cells = choose_cells(name, world, overrides)
    cfgs = [cell.config(name, world, "none", overrides) for cell in cells]
    check_reached(overrides, cfgs, world, "--precision")
    if draw is not None:
        cells = random.Random(seed).sample(cells, min(draw, len(cells)))
    if not as_json:
        for optimizer in sorted(set(OPTIMIZERS) - set(LEARNING_RATES)):
            print(
                f"not proved: {optimizer}; give it a rate in LEARNING_RATES (lab/proof/precision/job.py) and "
                "a formula in PAPERS (lab/proof/precision/paper.py)"
            )
        print(
            f"{overrides.title(name)}: {len(cells)} cells of {world} ranks, "
            f"dtype x optimizer x ZeRO x layout, {STEPS} steps ({FP16_STEPS} of fp16)",
            flush=True,
        )

    begun = time.perf_counter()
    num_failed = 0
    worst: Worst = {}
    prover = Prover(name, world, overrides=overrides)
    try:
        rows = make_rows(cells, world)
        for row_title, prove in rows:
            title = overrides.title(row_title) if as_json else row_title
            try:
                wrong, errors = prove(prover)
            except RuntimeError as error:  # a rank died in this row; new ranks prove the others
                wrong, errors = [f"died: {last_line(error)}"], []
                prover.close()
                prover = Prover(name, world, overrides=overrides)
            num_failed += not print_row(title, wrong, errors, as_json)
            update_worst(worst, title, errors)
    finally:
        prover.close()

    if not as_json:
        print_worst(worst)
        seconds = time.perf_counter() - begun
        print(f"{len(rows) - num_failed} of {len(rows)} rows hold ({seconds:.0f} s)", flush=True)
    return 1 if num_failed else 0


def make_rows(cells: list[Cell], world: int) -> list[tuple[str, Callable[[Prover], Verdict]]]:
    """Return [(title, function that proves it with a Prover)] for all rows of the command."""
    def prove_sums(prover: Prover, dtype: str, zero: int) -> Verdict:
        return prover.prove_sums(dtype, zero)

    def prove_cell(prover: Prover, cell: Cell) -> Verdict:
        return prover.prove(cell)

    rows: list[tuple[str, Callable[[Prover], Verdict]]] = [("statistics", lambda _: ([], kernel_errors()))]
    for dtype, zero in SUMS:
        prove = functools.partial(prove_sums, dtype=dtype, zero=zero)
        rows.append((f"{dtype} sums of microbatches, zero{zero}", prove))
    for cell in cells:
        rows.append((cell.words(world), functools.partial(prove_cell, cell=cell)))
    return rows


def print_row(title: str, wrong: list[str], errors: list[BoundedError], as_json: bool) -> bool:
    """Print the verdict on a row with its worst error, and return whether the row holds."""
    worst = max(errors, key=lambda error: error.share, default=None)
    holds = not wrong and (worst is None or worst.share <= 1)
    if as_json:
        row = {"cell": title, "ok": holds, "wrong": wrong, "worst": worst and vars(worst)}
        print(json.dumps(row), flush=True)
        return holds

    line = f"{'ok' if holds else 'WRONG':<6}{title:<48} "
    if worst is not None:
        line += f"{worst.error:.1e} of {worst.bound:.1e}  {worst.what}, {worst.where}"
    print("\n      ".join([line, *wrong[:5]]), flush=True)
    return holds


def update_worst(worst: Worst, title: str, errors: list[BoundedError]) -> None:
    for error in errors:
        kind = (title.split()[0], error.what)
        worst[kind] = max(worst.get(kind, error), error, key=lambda one: one.share)


def print_worst(worst: Worst) -> None:
    """Print the table of the worst error of each dtype and check."""
    print(f"\n{'dtype':<11}{'check':<17}{'error':>10}{'bound':>10}   worst share of its bound, where")
    for (dtype, what), error in sorted(worst.items()):
        line = f"{dtype:<11}{what:<17}{error.error:>10.1e}{error.bound:>10.1e}"
        print(f"{line}   {error.share:.2f}  {error.where}", flush=True)
