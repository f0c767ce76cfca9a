"""Measured runs published by others (published.csv), compared with the planner's forecasts.

Each row has a source, our keys for the job, and the measurement. use:

    fit      seconds per step; these rows determine the constants of Efficiency
    judge    seconds per step; not used in the fit
    memory   no seconds: the run did not fit its GPUs, or only its memory is known

outcome: "ran", "out of memory", or "computed" (a figure of the paper's own formula). recompute_stated: "yes"
if the source says which activations it recomputes. The frameworks differ from ours in overlap and kernels;
plan/frameworks.py models their memory.
"""
import csv
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import spearmanr

from config import Config
from config.reading import from_tree
from config.tree import with_values
from model.router import mixture
from plan.cost import Cluster, Efficiency, cluster, forecast
from plan.count import parameters
from plan.efficiency import RELAYED, SHARED, Class, get_class
from plan.frameworks import held_bytes
from plan.job import Job
from plan.search import make_job

Row = dict[str, str]  # of published.csv

TIMED = ("fit", "judge")  # values of `use` for rows with seconds
LARGE_ERROR = 0.08  # of a row; larger ones count less than quadratically
PULL = 0.3  # pull of a constant to the shared one: a factor of e counts as much as this error of a row
PULL_ADDED = 0.09  # the same for ADDED
LAYOUTS = "BLOOM-TUNE"  # group of rows with many layouts of one job
EVALUATIONS = 12  # maximum evaluations of the rows' derivatives

# Physical limits of a chip, as bounds on the constants of Efficiency.
BOUNDS = {
    "gemm": (0.45, 0.95),
    "gemm8": (0.35, 0.9),
    "core": (0.15, 0.9),
    "stream": (0.3, 0.95),
    "inside": (0.15, 0.95),
    "between": (0.1, 0.95),
    "hop": (3e-6, 2e-4),
    "op": (1e-6, 2e-4),
    "route": (5e-5, 3e-3),
}
MICRO_UNIT = 10e-3  # s
ADDED = {"micro": 20.0, "hidden": 1.0}  # bounds of micro / MICRO_UNIT, and of 1 - hidden


class Measured(NamedTuple):
    """A row with seconds. microbatches: per step, for each pipeline. step: measured seconds."""
    use: str
    group: str
    of: Class
    job: Job
    microbatches: int
    cluster: Cluster
    step: float

    def seconds(self, efficiency: Efficiency) -> float:
        """Forecast the seconds of its step."""
        return forecast(self.job, self.microbatches, self.cluster, efficiency).step

    def error(self, efficiency: Efficiency) -> float:
        """Return the natural logarithm of forecast / measured."""
        return math.log(self.seconds(efficiency) / self.step)


class MemoryOfRun(NamedTuple):
    """A row with known recompute. held: bytes by the planner; gpu: bytes of a GPU."""
    row: str
    outcome: str
    held: float
    gpu: float

    @property
    def fits(self) -> bool:
        return self.held <= self.gpu


# ---- the table ---------------------------------------------------------------------------------------------


def read_rows() -> list[Row]:
    with open(Path(__file__).parent / "published.csv", newline="") as file:
        return list(csv.DictReader(file))


def build_config(row: Row) -> Config:
    keys = {path: value for path, value in row.items() if "." in path and value != ""}
    return from_tree({"train.steps": 1, "model.context": row["train.seq_len"], **keys})


def rows(uses: tuple[str, ...] = TIMED) -> list[Measured]:
    """Return the rows with seconds."""
    measured: list[Measured] = []
    for row in read_rows():
        if row["use"] in uses:
            job, microbatches = make_job(with_fused_attention(build_config(row)), int(row["gpus"]))
            measured.append(Measured(
                use=row["use"],
                group=row["group"],
                of=get_class(cluster(row["cluster"]).gpu, row["framework"]),
                job=job,
                microbatches=microbatches,
                cluster=cluster(row["cluster"]),
                step=float(row["step_s"]),
            ))
    return measured


def with_fused_attention(cfg: Config) -> Config:
    """Set a fused softmax: without a fully fused attention kernel these frameworks have one, unlike our code.
    Their constant for the attention core accounts for its lower speed."""
    return with_values(cfg, {"model.mixer.kernel": "auto"})


def memory_of_runs() -> Iterator[MemoryOfRun]:
    """Yield the rows whose source states the recompute."""
    for row in read_rows():
        if row["recompute_stated"]:
            job, _ = make_job(build_config(row), int(row["gpus"]))
            held = held_bytes(job, row["framework"])
            yield MemoryOfRun(row["row"], row["outcome"], held, cluster(row["cluster"]).memory)


# ---- forecasts of time -------------------------------------------------------------------------------------


def table(every: list[Measured], constants: dict[Class, Efficiency]) -> list[str]:
    """Return a Markdown table of forecast errors, with the shared and with each class's constants."""
    columns = "number | shared: median error | 90th percentile | classes: median error | 90th percentile"
    lines = [f"| rows | {columns} | smallest ratio | largest |", "|---|---|---|---|---|---|---|---|"]
    errors = {id(row): row.error(constants.get(row.of, SHARED)) for row in every}
    shared = {id(row): row.error(SHARED) for row in every}
    for name, members in make_groups(every).items():
        ratios = [math.exp(errors[id(row)]) for row in members]
        words = [name, str(len(ratios))]
        for of_rows in (shared, errors):
            off = [abs(math.expm1(of_rows[id(row)])) for row in members]
            words += [f"{np.quantile(off, share):.1%}" for share in (0.5, 0.9)]
        words += [f"{min(ratios):.2f}", f"{max(ratios):.2f}"]
        lines.append(f"| {' | '.join(words)} |")
    return lines


def make_groups(every: list[Measured]) -> dict[str, list[Measured]]:
    """Return {label: rows}: by class, and over all classes by kind of model."""
    groups: defaultdict[str, list[Measured]] = defaultdict(list)
    for row in sorted(every, key=lambda one: (one.of, one.use)):
        groups[f"{row.of}, {row.use}"].append(row)
    judged = [row for row in every if row.use == "judge"]
    groups["all, fit"] = [row for row in every if row.use == "fit"]
    groups["dense, judge"] = [row for row in judged if not mixture(row.job.cfg.model)]
    groups["mixtures, judge"] = [row for row in judged if mixture(row.job.cfg.model)]
    groups["all, judge"] = judged
    return {what: members for what, members in groups.items() if members}


def rank_correlation(rows: list[Measured], constants: dict[Class, Efficiency]) -> float:
    """Return Spearman's rank correlation of forecast and measured seconds."""
    forecasts = [row.seconds(constants.get(row.of, SHARED)) for row in rows]
    measured = [row.step for row in rows]
    return float(spearmanr(forecasts, measured).statistic)


def judged_range(rows: list[Measured], efficiency: Efficiency) -> tuple[float, float]:
    """Return the 10th and 90th percentile of measured / forecast."""
    logarithms = [-row.error(efficiency) for row in rows]
    low, high = np.quantile(logarithms, [0.1, 0.9])
    return math.exp(low), math.exp(high)


def paired_range(rows: list[Measured], constants: Mapping[Class, Efficiency]) -> tuple[float, float, int]:
    """Return the 10th and 90th percentile of measured / forecast after calibration by another run of the same
    model and source, on such chips (plan/measured.py), and the number of pairs."""
    alike: defaultdict[tuple, list[float]] = defaultdict(list)
    for row in rows:
        model = parameters(row.job.cfg.model)["total"]
        error = row.error(constants.get(row.of, SHARED))
        alike[row.of, row.group, row.cluster.name, model].append(error)
    differences = [one - two for errors in alike.values() for one, two in itertools.permutations(errors, 2)]
    low, high = np.quantile(differences, [0.1, 0.9])
    return math.exp(low), math.exp(high), len(differences)


def fit_classes(every: list[Measured]) -> dict[Class, Efficiency]:
    """Fit the constants of each class to its rows with use "fit"."""
    make_rows: defaultdict[Class, list[Measured]] = defaultdict(list)
    for row in every:
        if row.use == "fit":
            make_rows[row.of].append(row)
    return {one: fit(make_rows[one]) for one in sorted(make_rows)}


def fit(rows: list[Measured]) -> Efficiency:
    """Fit the constants of a class to its rows, while staying near the shared constants.

    Least squares of the logarithms of forecast / measured.
    """
    start = replace(SHARED, relayed=rows[0].of in RELAYED)
    has_experts = any(mixture(row.job.cfg.model) for row in rows)
    has_fp8 = any(row.job.cfg.train.dtype == "fp8" for row in rows)
    names = [name for name in BOUNDS if (name, False) not in (("route", has_experts), ("gemm8", has_fp8))]
    names += ADDED
    pulls = np.array([PULL_ADDED if name in ADDED else PULL for name in names])

    def residuals(x: np.ndarray) -> np.ndarray:
        efficiency = with_constants(start, names, x)
        errors = np.array([row.error(efficiency) for row in rows])
        # quadratic below LARGE_ERROR, linear above
        squares = 2 * (np.sqrt(1 + (errors / LARGE_ERROR)**2) - 1)
        soft = np.sign(errors) * LARGE_ERROR * np.sqrt(squares)
        return np.concatenate([soft, pulls * x])

    low = [0.0 if name in ADDED else math.log(BOUNDS[name][0] / getattr(start, name)) for name in names]
    high = [ADDED.get(name) or math.log(BOUNDS[name][1] / getattr(start, name)) for name in names]
    begin = [0.02 if name in ADDED else 0.0 for name in names]
    found = least_squares(residuals, begin, bounds=(low, high), diff_step=0.01, x_scale=0.3,
                          max_nfev=EVALUATIONS)
    return with_constants(start, names, found.x)


def with_constants(start: Efficiency, names: list[str], x: np.ndarray) -> Efficiency:
    """Apply x: the log ratio of a constant to that of `start`; micro / MICRO_UNIT; 1 - hidden."""
    values: dict[str, float] = {}
    for name, value in zip(names, map(float, x)):
        if name == "micro":
            values[name] = MICRO_UNIT * value
        elif name == "hidden":
            values[name] = 1 - value
        else:
            values[name] = getattr(start, name) * math.exp(value)
    return replace(start, **values)
