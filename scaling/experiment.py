"""Runs a ladder, one process of train.py after another, and reads what came out.

A run that is done is skipped, one that was stopped goes on where it was. So the same command again finishes a
ladder that was killed, and an array job may run each size on a machine of its own.
"""
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from config import ConfigError
from runtime.lines import read_metrics
from scaling.ladder import Ladder, LadderRun, runs_of, train_arguments
from scaling.points import Array, Points, make_points

TRAIN_FILE = Path(__file__).parent.parent / "train.py"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
Report = Callable[[str], None]


def run_ladder(
    ladder: Ladder, runs: Iterable[LadderRun], folder: Path, *, ranks: int, report: Report
) -> int:
    """Runs what is not done yet; returns the exit code of train.py: 0, or of the first run that failed.

    ranks: processes of each run, on this node.
    """
    for run in runs:
        loss = final_loss(folder / run.name, run.steps)
        if loss is None:
            report(f"{run.name}: {run.parameters:,} parameters, {run.tokens:,} tokens, {run.flops:.3g} FLOPs")
            output = folder / f"{run.name}.log"
            code = run_training(train_arguments(ladder, run, folder), ranks, output)
            if code:
                report(f"{run.name}: ended with code {code}; {output} says why")
                return code
            loss = final_loss(folder / run.name, run.steps)
        report(f"{run.name}: validation loss {loss}")
    return 0


def run_training(argv: list[str], ranks: int, output: Path, launcher: list[str] | None = None) -> int:
    """Runs train.py; returns its exit code. A signal that asks to stop is passed on: the run saves, and ends
    with code 75.

    launcher: the words that start its processes; None: as many as `ranks` on this node.
    """
    return run_program([*(launcher or launcher_of(ranks)), str(TRAIN_FILE), *argv], output)


def launcher_of(ranks: int) -> list[str]:
    """The words that start this many processes of a program on this node."""
    if ranks == 1:
        return [sys.executable]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, "--nproc-per-node", str(ranks), "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1"]


def run_program(words: list[str], output: Path) -> int:
    """Runs a command, appends what it prints to a file, and returns its exit code."""
    with open(output, "a") as file:
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        try:
            for number in STOP_SIGNALS:
                signal.signal(number, lambda caught, _: process.send_signal(caught))
            return process.wait()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def final_loss(folder: Path, steps: int) -> float | None:
    """The validation loss at the horizon of a run; None if it has not got there."""
    _, validations = read_metrics(folder)
    at_end = [row["val_loss"] for row in validations if row["step"] == steps]
    return at_end[-1] if at_end else None


def ladder_points(ladder: Ladder, folder: Path, depths: Iterable[int] | None = None) -> Points:
    """The points of the finished runs. depths: of these sizes alone.

    Raises ConfigError, which names the run, where one is not done, or has no finite loss.
    """
    rows: list[dict[str, float | str]] = []
    for run in (run for depth in depths or ladder.depths for run in runs_of(ladder, depth)):
        loss = final_loss(folder / run.name, run.steps)
        if loss is None:
            raise ConfigError(f"{folder / run.name}: not done ({run.steps} steps and an evaluation); finish "
                              "it with the command of the ladder, which skips what is done")
        rows.append({
            "run": run.name,
            "parameters": run.parameters,
            "tokens": run.tokens,
            "flops": run.flops,
            "loss": loss,
        })
    return make_points(rows, str(folder))


def training_curves(ladder: Ladder, folder: Path) -> dict[int, tuple[Array, Array]]:
    """{depth: (FLOPs [steps], training loss [steps])} of the longest run of each size."""
    curves: dict[int, tuple[Array, Array]] = {}
    for depth in ladder.depths:
        trunk = runs_of(ladder, depth)[0]
        rows, _ = read_metrics(folder / trunk.name)
        of_step = trunk.flops / trunk.steps
        flops = np.array([row["step"] * of_step for row in rows])
        losses = np.array([np.nan if row["loss"] is None else row["loss"] for row in rows])
        curves[depth] = flops, losses
    return curves
