"""Runs a ladder, each run by a process of train.py, and reads what came out.

A run that is done is skipped, one that was stopped goes on where it was. So the same command again finishes a
ladder that was killed, and an array job may run each size on a machine of its own.
"""
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from config import ConfigError
from config.exit_codes import STOPPED_EARLY
from runtime import restarts
from runtime.lines import is_missing, read_metrics
from runtime.stop import SIGNALS, is_under_nohup
from lab.scaling.ladder import Ladder, LadderRun, runs_of, train_arguments
from plan.points import NON_EMBEDDING, Array, Points, make_points

TRAIN_FILE = Path(__file__).parents[2] / "train.py"
Report = Callable[[str], None]


class Programs:
    """Runs programs, several at a time where threads ask for it.

    A signal that asks to stop is passed on to all that run: train.py then saves, and ends with code 75; no
    further one starts.

    Use it as a context, from the main thread.
    """

    def __init__(self) -> None:
        self.running: set[subprocess.Popen[bytes]] = set()
        self.is_stopped = False
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> "Programs":
        for number in SIGNALS:
            if is_under_nohup(number):
                continue
            self.previous[number] = signal.signal(number, self.pass_on)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def pass_on(self, number: int, frame: object) -> None:
        self.is_stopped = True
        for process in tuple(self.running):
            process.send_signal(number)

    def run(self, words: list[str], output: Path) -> int:
        """Runs a command, appends what it prints to a file, and returns its exit code."""
        if self.is_stopped:
            return STOPPED_EARLY
        # our modules are found in whatever folder this was started
        path = os.pathsep.join([str(TRAIN_FILE.parent), os.environ.get("PYTHONPATH", "")])
        with open(output, "a") as file:
            process = subprocess.Popen(
                words,
                env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self.running.add(process)
            if self.is_stopped:  # the signal came while it was started
                process.send_signal(signal.SIGTERM)
            try:
                return process.wait()
            finally:
                self.running.discard(process)

    def train(self, argv: list[str], ranks: int, output: Path, launcher: list[str] | None = None) -> int:
        """Runs train.py, here or by `launcher`: a command that starts its ranks and takes its words."""
        if launcher:
            return self.run([*launcher, *argv], output)
        if ranks == 1:
            return self.run([sys.executable, str(TRAIN_FILE), *argv], output)
        launch = [sys.executable, "-m", "scripts.launch", "--nproc", str(ranks), "--"]
        return self.run([*launch, *argv], output)


def torchrun_words(ranks: int) -> list[str]:
    """The words that start this many processes of another program on this node."""
    if ranks == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def kept_line(runs: Iterable[Path]) -> str:
    """For the scripts of array jobs: the steps that these runs have kept, 1 or 0 for whether another start
    may succeed of all that have not finished (- without any), and the hosts whose devices compute wrongly.
    """
    folders = [*runs]
    steps = sum(restarts.progress(folder).newest for folder in folders)
    reasons = [reason for reason in map(restarts.read_reason, folders) if reason and reason.code]
    again = str(int(all(reason.requeue for reason in reasons))) if reasons else "-"
    hosts = [host for folder in folders for host in restarts.hosts_with_wrong_devices(folder)]
    return f"{steps} {again} {restarts.words_of_hosts(set(hosts))}"


def run_all(chains: Iterable[Callable[[], int]], jobs: int) -> int:
    """Calls all chains, `jobs` at a time. Returns the first exit code that is not 0: after it none begins."""
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
    """Runs what is not done yet; returns the exit code of train.py: 0, or of the first run that failed.

    ranks: processes of each run, on this node. jobs: sizes that are trained at a time.
    """
    with Programs() as programs:
        def chain(depth: int) -> int:
            own = [run for run in runs if run.depth == depth]
            return run_size(ladder, own, folder, ranks=ranks, programs=programs, report=report)

        depths = dict.fromkeys(run.depth for run in runs)  # in their order
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
    """The runs of one size, in their order: the later ones branch from the first."""
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
    """The validation loss at the horizon of a run; None if it has not got there, NaN if it is not finite.

    Raises ConfigError if no target of the validation counts.
    """
    _, validations = read_metrics(folder)
    at_end = [row for row in validations if row["step"] == steps]
    if not at_end:
        return None
    if is_missing(at_end[-1], "val_loss"):
        raise ConfigError(f"{folder}: no target of its validation counts, so it has no loss; raise "
                          "eval.batches or train.seq_len in another folder")
    return math.nan if at_end[-1]["val_loss"] is None else at_end[-1]["val_loss"]


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
        losses = np.array([np.nan if row["loss"] is None else row["loss"] for row in rows], float)
        curves[depth] = flops, losses
    return curves
