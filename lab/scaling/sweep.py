"""A sweep: one model at several learning rates and batch sizes, each for the same tokens.

The rate is constant after its warmup, so the loss after any number of tokens is that of a separate run. A
batch of B tokens reaches a loss in S steps and E = S B tokens; arXiv 1812.06162 (section 2.3) finds

    (S / S_min - 1) (E / E_min - 1) = 1,    which is    S = S_min + E_min / B,

so a line through the steps over 1 / B yields both, and the critical batch E_min / S_min, at which a run takes
twice the minimum steps and twice the minimum tokens. For comparison there is the gradient noise scale
measured along the way (optim/noise.py), which predicts it.
"""
import csv
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import config
from config import Config, ConfigError
from config.manifest import keep_manifest
from config.reading import resolve
from lab.scaling.experiment import final_loss
from lab.scaling.settings import refuse_own_keys, to_arguments
from plan.job import make_rank_job
from plan.points import SMOOTHING, Array, smoothed
from runtime.lines import Rows, read_metrics

COLUMNS = ("run", "rate", "batch_tokens", "steps", "loss", "train_loss", "steps_to_target", "noise_scale")
MIN_STEPS = 20  # of a run, for the smoothing
SWEEP_FILE = "sweep.json"  # in the folder of a sweep
# keys that a sweep sets in every run, besides train.global_batch, which eval.batches depends on
OWN_KEYS = (
    "log.dir", "log.name", "train.steps", "train.tokens", "train.flops", "optim.decay", "eval.every",
    "eval.sample",
)


@dataclass(frozen=True)
class Sweep:
    """rates: of optim.lr. batches: sequences a step. tokens: of each run.

    settings: [key, value] pairs of train.py that hold for all runs.
    """
    recipe: str
    rates: tuple[float, ...]
    batches: tuple[int, ...]
    tokens: int
    settings: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep. batch: sequences a step; batch_tokens: their tokens."""
    name: str
    rate: float
    batch: int
    batch_tokens: int
    steps: int


@dataclass(frozen=True)
class SweepCurve:
    """The training curve of a run. tokens, loss (smoothed), noise_s, noise_g2: [steps].

    final_loss: of the final validation. noise_s and noise_g2 are NaN where they were not measured.
    """
    run: SweepRun
    tokens: Array
    loss: Array
    noise_s: Array
    noise_g2: Array
    final_loss: float

    def steps_to(self, target: float) -> float:
        """Return the interpolated steps until the smoothed loss reaches the target, NaN if it never does."""
        below = np.flatnonzero(self.loss <= target)
        if not len(below):
            return math.nan
        last = int(below[0])
        if last == 0:
            return 1.0
        before, at = self.loss[last - 1], self.loss[last]
        if math.isnan(before):  # no earlier step has a finite loss
            return last + 1.0
        return last + float((before - target) / (before - at))

    def noise_scale_at(self, steps: float) -> float:
        """Return the noise scale in tokens, with both parts averaged over the last half of the steps."""
        end = min(len(self.loss), max(1, round(steps)))
        part = slice(end // 2, end)
        known = np.isfinite(self.noise_s[part]) & np.isfinite(self.noise_g2[part])
        if not known.any():
            return math.nan
        trace = float(self.noise_s[part][known].mean())
        squared_gradient = float(self.noise_g2[part][known].mean())
        return trace / squared_gradient if squared_gradient > 0 else math.nan


@dataclass(frozen=True)
class CriticalBatch:
    """S = least_steps + least_tokens / B, fitted to the best rate of each batch.

    batches (tokens a step), steps, noise_scales: [n]. target: the loss that all of them reach.
    """
    target: float
    least_steps: float
    least_tokens: float
    batches: Array
    steps: Array
    noise_scales: Array

    @property
    def tokens(self) -> float:
        """The critical batch, in tokens."""
        return self.least_tokens / self.least_steps

    def __call__(self, batch: float | Array) -> float | Array:
        """Return the steps to the target at this batch size in tokens."""
        return self.least_steps + self.least_tokens / batch


# ---- the runs ----------------------------------------------------------------------------------------------


def config_of_sweep(sweep: Sweep) -> Config:
    """Return the recipe with the sweep's settings."""
    return resolve(sweep.recipe, None, to_arguments(sweep.settings))


def check_sweep(sweep: Sweep, folder: Path, ranks: int) -> None:
    """Raise ConfigError for a sweep that cannot be run."""
    if not sweep.rates or min(sweep.rates) <= 0 or len(set(sweep.rates)) != len(sweep.rates):
        raise ConfigError("--rates: different learning rates above 0, such as 1e-3,2e-3,4e-3")
    if not sweep.batches or min(sweep.batches) < 1 or len(set(sweep.batches)) != len(sweep.batches):
        raise ConfigError("--batches: different numbers of sequences, all at least 1, such as 8,16,32")
    refuse_own_keys(sweep.settings, OWN_KEYS, "a sweep")
    cfg = config_of_sweep(sweep)
    for key in ("ramp", "phases"):
        if getattr(cfg.train, key) is not None:
            raise ConfigError(f"train.{key}: a sweep counts steps of one batch, all with the same settings; "
                              "set it to none")
    sequences = validation_sequences(cfg)
    for batch in sweep.batches:
        if sequences % batch:
            raise ConfigError(
                f"--batches: {batch} does not divide the {sequences:,} sequences of a validation (eval."
                f"batches {cfg.eval.batches} of {cfg.train.global_batch}), which all runs share; try "
                f"--eval.batches {batches_for_all(sweep, cfg)}"
            )
    for run in get_sweep_runs(sweep):
        if run.steps < MIN_STEPS:
            raise ConfigError(
                f"--tokens: {run.name} would have {run.steps} steps of {run.batch_tokens:,} tokens, and "
                f"fewer than {MIN_STEPS} show nothing; raise --tokens, or leave the batch out"
            )
        name, *argv = sweep_arguments(sweep, run, folder, ranks)
        make_rank_job(resolve(name, None, argv), ranks, rank=0)


def keep_sweep(sweep: Sweep, folder: Path) -> None:
    """Write the description of a sweep and create its folder. Rates and batches may be added later.

    Raises ConfigError if the folder belongs to another sweep.
    """
    tree = {
        "recipe": sweep.recipe,
        "tokens": sweep.tokens,
        "settings": dict(sweep.settings),
        "rates": list(sweep.rates),
        "batches": list(sweep.batches),
    }
    has_results = any((folder / run.name).exists() for run in get_sweep_runs(sweep))
    keep_manifest(
        folder / SWEEP_FILE,
        tree,
        what="sweep",
        may_grow=("rates", "batches"),
        has_results=has_results,
    )


def validation_sequences(cfg: Config) -> int:
    """Return the validation sequences of every run of a sweep: eval.batches of the recipe's batch size."""
    return cfg.eval.batches * cfg.train.global_batch


def batches_for_all(sweep: Sweep, cfg: Config) -> int:
    """Return the smallest eval.batches, at least the config's, whose sequences all batch sizes divide."""
    unit = math.lcm(*sweep.batches, cfg.train.global_batch) // cfg.train.global_batch
    return math.ceil(cfg.eval.batches / unit) * unit


def get_sweep_runs(sweep: Sweep) -> list[SweepRun]:
    """Return every rate at every batch, largest batch first, since it has the fewest steps."""
    seq_len = config_of_sweep(sweep).train.seq_len
    runs: list[SweepRun] = []
    for batch in sorted(sweep.batches, reverse=True):
        for rate in sorted(sweep.rates):
            batch_tokens = batch * seq_len
            runs.append(SweepRun(
                name=f"batch{batch}-lr{rate:g}",
                rate=rate,
                batch=batch,
                batch_tokens=batch_tokens,
                steps=sweep.tokens // batch_tokens,
            ))
    return runs


def sweep_arguments(sweep: Sweep, run: SweepRun, folder: Path, ranks: int) -> list[str]:
    """Return the arguments of train.py for a run of the sweep in this folder.

    The noise scale is measured (unless log.noise_scale is set to false) if the batch has two parts: on one
    rank, two micro-batches.
    """
    given = dict(sweep.settings)
    largest = run.batch // (ranks if ranks > 1 else 2)
    micro_batch = choose_micro_batch(run.batch // ranks,
                                     min(config_of_sweep(sweep).train.micro_batch, largest))
    is_split = run.batch > micro_batch
    settings = given | {
        "log.dir": str(folder),
        "log.name": run.name,
        "log.noise_scale": given.get("log.noise_scale", "true") if is_split else "false",
        "train.steps": str(run.steps),
        "train.global_batch": str(run.batch),
        "train.micro_batch": str(micro_batch),
        "optim.lr": repr(run.rate),
        "optim.decay": "constant",
        "eval.every": "none",  # only at the end
        "eval.batches": str(validation_sequences(config_of_sweep(sweep)) // run.batch),
        "eval.sample": "0",
    }
    return [sweep.recipe, *to_arguments(settings.items())]


def choose_micro_batch(sequences: int, most: int) -> int:
    """Return the largest divisor of a rank's sequences that is at most `most` and at least 1."""
    return max(divisor for divisor in config.divisors(sequences) if divisor <= max(1, most))


# ---- results -----------------------------------------------------------------------------------------------


def read_curve(run: SweepRun, folder: Path) -> SweepCurve | None:
    """Read the curve of a run, None if it is unfinished. Raises ConfigError without validation targets."""
    final = final_loss(folder / run.name, run.steps)
    if final is None:
        return None
    steps, _ = read_metrics(folder / run.name, max_steps=run.steps + 1)
    tokens = column(steps, "tokens")
    return SweepCurve(
        run,
        tokens=tokens,
        loss=smoothed(tokens, column(steps, "loss")),
        noise_s=column(steps, "noise_s"),
        noise_g2=column(steps, "noise_g2"),
        final_loss=final,
    )


def column(rows: Rows, name: str) -> Array:
    return np.array([np.nan if row.get(name) is None else float(row[name]) for row in rows])


def best_of_batch(curves: list[SweepCurve]) -> dict[int, SweepCurve]:
    """Return {batch_tokens: the curve with the lowest final loss}, smallest batch first. Diverged runs are
    excluded.
    """
    best: dict[int, SweepCurve] = {}
    for curve in sorted(curves, key=lambda curve: curve.run.batch_tokens):
        if not math.isfinite(curve.final_loss):
            continue
        known = best.get(curve.run.batch_tokens)
        if known is None or curve.final_loss < known.final_loss:
            best[curve.run.batch_tokens] = curve
    return best


def best_rate(curves: list[SweepCurve]) -> float | None:
    """Return the vertex of a parabola through the losses over log rates of one batch, or None if it is not
    between the rates that were run, or fewer than three runs are finite.
    """
    finite = [curve for curve in curves if math.isfinite(curve.final_loss)]
    if len(finite) < 3:
        return None
    # near the lowest loss, where it is parabolic
    finite.sort(key=lambda curve: curve.run.rate)
    place = min(range(len(finite)), key=lambda index: finite[index].final_loss)
    if place in (0, len(finite) - 1):
        return None
    near = finite[place - 1:place + 2]
    rates = np.log([curve.run.rate for curve in near])
    curvature, slope, _ = np.polyfit(rates, [curve.final_loss for curve in near], 2)
    return float(np.exp(-slope / (2 * curvature))) if curvature > 0 else None


def critical_batch(curves: list[SweepCurve], target: float | None = None) -> CriticalBatch | None:
    """Fit the critical batch. Returns None for fewer than three batches, or if the steps defy the law.

    `target` is a training loss, by default the highest final loss among the batches at their best rates,
    which all of them reach. Raises ConfigError if a batch does not reach a given target.
    """
    best = list(best_of_batch(curves).values())
    if len(best) < 3:
        return None
    if target is None:
        target = max(float(np.nanmin(curve.loss)) for curve in best)
    steps = np.array([curve.steps_to(target) for curve in best])
    if not np.isfinite(steps).all():
        missing = best[int(np.flatnonzero(~np.isfinite(steps))[0])]
        least = float(np.nanmin(missing.loss))
        raise ConfigError(f"--target: {missing.run.name} ends at {least:.4f} and never reaches {target}; "
                          "give a higher loss, or raise --tokens")

    # relative least squares of S = S_min + E_min / B, since the steps differ by a factor
    batches = np.array([float(curve.run.batch_tokens) for curve in best])
    design = np.stack([np.ones_like(batches), 1 / batches], axis=1) / steps[:, None]
    (least_steps, least_tokens), *_ = np.linalg.lstsq(design, np.ones_like(batches), rcond=None)
    if least_steps <= 0 or least_tokens <= 0:
        return None
    noise = np.array([curve.noise_scale_at(step) for curve, step in zip(best, steps)])
    return CriticalBatch(
        target=target,
        least_steps=float(least_steps),
        least_tokens=float(least_tokens),
        batches=batches,
        steps=steps,
        noise_scales=noise,
    )


def sweep_lines(curves: list[SweepCurve], critical: CriticalBatch | None) -> list[str]:
    """Return a table of the losses, the best rate of each batch, and the critical batch."""
    rates = sorted({curve.run.rate for curve in curves})
    lines = [f"validation loss at the end{'':<2}" + "".join(f"{f'lr {rate:g}':>12}" for rate in rates)
             + f"{'best lr':>12}"]
    for batch_tokens in sorted({curve.run.batch_tokens for curve in curves}):
        row = {curve.run.rate: curve for curve in curves if curve.run.batch_tokens == batch_tokens}
        cells = "".join(f"{row[rate].final_loss:>12.4f}" if rate in row else f"{'':>12}" for rate in rates)
        lines.append(f"batch of {batch_tokens:>9,} tokens{'':<3}{cells}{best_rate_text(row):>12}")
    if critical is None:
        lines.append("critical batch: three batches or more are needed, whose steps fall as the batch grows")
        return lines
    lines.append(f"\nsteps to a training loss of {critical.target:.4f} (mean over the last {SMOOTHING:.0%} "
                 "of the tokens before), at the best rate of each batch")
    for batch, steps, noise in zip(critical.batches, critical.steps, critical.noise_scales):
        measured = "not measured" if math.isnan(noise) else f"{noise:,.0f} tokens"
        lines.append(f"  {batch:>10,.0f} tokens a step {steps:>10,.1f} steps {batch * steps:>14,.0f} tokens"
                     f"   the law {critical(batch):>10,.1f}   noise scale {measured}")
    lines.append(f"critical batch {critical.tokens:,.0f} tokens: at least {critical.least_steps:,.1f} steps, "
                 f"at least {critical.least_tokens:,.0f} tokens")
    return lines


def best_rate_text(curve_of_rate: dict[float, SweepCurve]) -> str:
    """Return the vertex of the parabola or the best rate, with "edge" if lower losses may lie outside."""
    vertex = best_rate(list(curve_of_rate.values()))
    if vertex is not None:
        return f"{vertex:.2g}"
    finite = [curve for curve in curve_of_rate.values() if math.isfinite(curve.final_loss)]
    if not finite:
        return "diverged"
    best = min(finite, key=lambda curve: curve.final_loss).run.rate
    is_edge = len(curve_of_rate) > 1 and best in (min(curve_of_rate), max(curve_of_rate))
    return f"{best:g}" + (" edge" if is_edge else "")


def write_sweep(curves: list[SweepCurve], critical: CriticalBatch | None, path: Path) -> None:
    """Write the runs as a CSV with COLUMNS; a number that was not measured is empty."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for curve in curves:
            run = curve.run
            steps = curve.steps_to(critical.target) if critical else math.nan
            noise = curve.noise_scale_at(run.steps)
            numbers = [run.rate, run.batch_tokens, run.steps, curve.final_loss, curve.loss[-1], steps, noise]
            cells = ["" if math.isnan(number) else repr(float(number)) for number in numbers]
            writer.writerow([run.name, *cells])
