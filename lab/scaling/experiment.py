"""Runs a ladder, each run in a train.py process, and reads the results.

Finished runs are skipped and stopped ones are resumed, so the same command finishes a ladder that was killed,
and an array job may run each size on another machine.
"""
import math
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from config import ConfigError
from durable import restarts
from durable.programs import Programs
from lab.scaling.ladder import Ladder, LadderRun, get_runs, train_arguments
from lab.scaling.scores import is_centered
from plan.points import NON_EMBEDDING, Array, Points, make_points
from runtime.lines import is_missing, read_metrics

Report = Callable[[str], None]


def torchrun_words(ranks: int) -> list[str]:
    """Return the arguments that start this many processes of another program on this node."""
    if ranks == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def kept_line(runs: Iterable[Path]) -> str:
    """Return a status line for the scripts of array jobs: the steps that these runs have saved, 1 or 0 for
    whether all unfinished runs may be requeued (- without any), and the hosts with devices that compute
    wrongly.
    """
    folders = [*runs]
    steps = sum(restarts.progress(folder).newest for folder in folders)
    reasons = [reason for reason in map(restarts.read_reason, folders) if reason and reason.code]
    again = str(int(all(reason.requeue for reason in reasons))) if reasons else "-"
    hosts = [host for folder in folders for host in restarts.hosts_with_wrong_devices(folder)]
    return f"{steps} {again} {restarts.host_words(set(hosts))}"


def run_all(chains: Iterable[Callable[[], int]], jobs: int) -> int:
    """Call all chains, `jobs` at a time, stopping at the first failure. Returns its exit code, or 0."""
    failed: list[int] = []

    def run_one(chain: Callable[[], int]) -> None:
        code = 0 if failed else chain()
        if code:
            failed.append(code)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run_one, chains))
    return failed[0] if failed else 0


def run_ladder(
    ladder: Ladder, runs: list[LadderRun], folder: Path, *, ranks: int, jobs: int, report: Report
) -> int:
    """Run what is not done yet. Returns train.py's exit code: 0, or that of the first failed run.

    `ranks` is the number of processes of each run, on this node. `jobs` is the number of sizes trained at a
    time.
    """
    with Programs() as programs:
        def chain(depth: int) -> int:
            own = [run for run in runs if run.depth == depth]
            return run_size(ladder, own, folder, ranks=ranks, programs=programs, report=report)

        depths = dict.fromkeys(run.depth for run in runs)  # an ordered set
        return run_all([partial(chain, depth) for depth in depths], jobs)


def run_size(
    ladder: Ladder,
    runs: list[LadderRun],
    folder: Path,
    *,
    ranks: int,
    programs: Programs,
    report: Report,
) -> int:
    """Run one size; its later runs branch from the first."""
    for run in runs:
        loss = final_loss(folder / run.name, run.steps)
        if loss is None:
            report(f"{run.name}: {run.parameters:,} parameters, {run.tokens:,} tokens, {run.flops:.3g} FLOPs")
            output = folder / f"{run.name}.log"
            code = programs.train(train_arguments(ladder, run, folder), ranks, output)
            if code:
                report(f"{run.name}: ended with code {code}; {output} says why")
                return code
            loss = final_loss(folder / run.name, run.steps)
        is_diverged = loss is not None and math.isnan(loss)
        report(f"{run.name}: diverged: its validation loss is not finite" if is_diverged
               else f"{run.name}: validation loss {loss:.4f}")
    return 0


def final_loss(folder: Path, steps: int) -> float | None:
    """Return the validation loss at the end of a run, None if it is not there yet, NaN if it is not finite.

    Raises ConfigError if the validation has no valid targets.
    """
    row = last_validation(folder, steps)
    if row is None:
        return None
    if is_missing(row, "val_loss"):
        raise ConfigError(f"{folder}: no target of its validation counts, so it has no loss; raise "
                          "eval.batches or train.seq_len in another folder")
    return math.nan if row["val_loss"] is None else row["val_loss"]


def final_scores(folder: Path, steps: int) -> dict[str, float]:
    """Return the centered scores of eval.tasks at the end of a run, by the names in metrics.jsonl."""
    row = last_validation(folder, steps) or {}
    return {name: value for name, value in row.items() if is_centered(name) and value is not None}


def last_validation(folder: Path, steps: int) -> dict[str, Any] | None:
    """Return the row of the validation after this step, or None if it is not there yet."""
    _, validations = read_metrics(folder)
    at_end = [row for row in validations if row["step"] == steps]
    return at_end[-1] if at_end else None


def ladder_points(ladder: Ladder, folder: Path, depths: Iterable[int] | None = None) -> Points:
    """Return the points of the finished runs, or only of these `depths`.

    Raises ConfigError, which names the run, if one is not done or has no finite loss.
    """
    rows: list[dict[str, float | str]] = []
    for run in (run for depth in depths or ladder.depths for run in get_runs(ladder, depth)):
        loss = final_loss(folder / run.name, run.steps)
        if loss is None:
            raise ConfigError(f"{folder / run.name}: not done ({run.steps} steps and an evaluation); finish "
                              "it with the command of the ladder, which skips what is done")
        if math.isnan(loss):
            raise ConfigError(f"{folder / run.name}: diverged: its validation loss is not finite; train a "
                              "ladder with a lower optim.lr in another folder")
        rows.append({
            "run": run.name,
            "parameters": run.parameters,
            NON_EMBEDDING: run.non_embedding_parameters,
            "tokens": run.tokens,
            "flops": run.flops,
            "loss": loss,
            **final_scores(folder / run.name, run.steps),
        })
    return make_points(rows, str(folder))


def training_curves(ladder: Ladder, folder: Path) -> dict[int, tuple[Array, Array]]:
    """Return {depth: (FLOPs [steps], training loss [steps])} of the longest run of each size."""
    curves: dict[int, tuple[Array, Array]] = {}
    for depth in ladder.depths:
        trunk = get_runs(ladder, depth)[0]
        rows, _ = read_metrics(folder / trunk.name)
        of_step = trunk.flops / trunk.steps
        flops = np.array([row["step"] * of_step for row in rows])
        losses = np.array([np.nan if row["loss"] is None else row["loss"] for row in rows], float)
        curves[depth] = flops, losses
    return curves
