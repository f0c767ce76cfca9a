"""Runs that others have measured and published (published.csv), beside what the planner says of them.

Each row has a source, our keys for the job, and what was measured. use:

    fit      seconds of a step; these rows chose the constants of Efficiency
    judge    seconds of a step; these rows chose none
    sanity   seconds of a step; hardware or batch are known roughly
    memory   no seconds: the run did not fit its GPUs, or only its memory is known

outcome: "ran", "out of memory", or "computed" (a figure of the paper's own formula). recompute_stated: "yes"
if the source says which activations it recomputes. The frameworks are others, with other overlap and other
kernels; plan/frameworks.py says what they hold.
"""
import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import config
from config import Config
from plan.cost import Cluster, Efficiency, cluster, forecast
from plan.frameworks import held_bytes
from plan.job import Job
from plan.search import job_of

Row = dict[str, str]  # of published.csv

TIMED = ("fit", "judge", "sanity")  # values of `use` of rows with seconds
LARGEST_ERROR = 1.0  # of a row, as the fit counts it: outliers do not decide
SMALLEST_FACTOR = 1.03  # by which the fit changes a constant
LEAST_GAIN = 1e-5  # of the mean error

# What a chip can do: bounds of the constants of Efficiency.
BOUNDS = {
    "gemm": (0.5, 0.85),
    "gemm8": (0.5, 0.8),
    "core": (0.35, 0.7),
    "stream": (0.5, 0.9),
    "inside": (0.4, 0.9),
    "between": (0.4, 0.9),
    "hop": (3e-6, 2e-5),
    "op": (3e-5, 3e-4),
    "route": (2e-4, 1.5e-3),
}


class Measured(NamedTuple):
    """A row with seconds. microbatches: of a step, for each pipeline. step: measured seconds."""
    use: str
    group: str
    job: Job
    microbatches: int
    cluster: Cluster
    step: float

    def error(self, efficiency: Efficiency) -> float:
        """The natural logarithm of forecast / measured."""
        foreseen = forecast(self.job, self.microbatches, self.cluster, efficiency)
        return math.log(foreseen.step / self.step)


class MemoryOfRun(NamedTuple):
    """A row whose recompute is known. held: bytes that the planner foresees; gpu: bytes of a GPU."""
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


def config_of(row: Row) -> Config:
    tree: dict = {"train": {"steps": 1}}
    for path, value in row.items():
        section, dot, key = path.partition(".")
        if dot and value != "":
            tree.setdefault(section, {})[key] = value
    tree["model"]["context"] = row["train.seq_len"]
    return config.from_tree(tree)


def rows(uses: tuple[str, ...] = TIMED) -> list[Measured]:
    """The rows with seconds."""
    measured: list[Measured] = []
    for row in read_rows():
        if row["use"] in uses:
            job, microbatches = job_of(config_of(row), int(row["gpus"]))
            measured.append(Measured(
                use=row["use"],
                group=row["group"],
                job=job,
                microbatches=microbatches,
                cluster=cluster(row["cluster"]),
                step=float(row["step_s"]),
            ))
    return measured


def memory_of_runs() -> Iterator[MemoryOfRun]:
    """The rows whose source says what is recomputed."""
    for row in read_rows():
        if row["recompute_stated"]:
            job, _ = job_of(config_of(row), int(row["gpus"]))
            held = held_bytes(job, row["framework"])
            yield MemoryOfRun(row["row"], row["outcome"], held, cluster(row["cluster"]).memory)


# ---- forecasts of time -------------------------------------------------------------------------------------


def table(every: list[Measured], efficiency: Efficiency) -> list[str]:
    """Markdown: the ratio forecast / measured and the error, of each group of rows, and of all that were
    fitted to and all that were not."""
    lines = [
        "| rows | use | number | median ratio | smallest | largest | median error |",
        "|---|---|---|---|---|---|---|",
    ]
    ratios: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for row in every:
        ratio = math.exp(row.error(efficiency))
        ratios[row.group, row.use].append(ratio)
        ratios["all", row.use].append(ratio)

    of_groups = sorted(key for key in ratios if key[0] != "all")
    for name, use in [*of_groups, ("all", "fit"), ("all", "judge")]:
        found = ratios[name, use]
        error = statistics.median(abs(ratio - 1) for ratio in found)
        lines.append(f"| {name} | {use} | {len(found)} | {statistics.median(found):.2f} | {min(found):.2f} | "
                     f"{max(found):.2f} | {error:.0%} |")
    return lines


def fit(every: list[Measured], efficiency: Efficiency) -> Efficiency:
    """Constants with the least mean |error| of the rows to fit: coordinate descent within BOUNDS.

    The weight of a group is the root of its size.
    """
    groups: defaultdict[str, list[Measured]] = defaultdict(list)
    for row in every:
        if row.use == "fit":
            groups[row.group].append(row)

    best = weighted_error(groups, efficiency)
    factors = {field.name: 1.25 for field in fields(efficiency)}
    while max(factors.values()) > SMALLEST_FACTOR:
        for name, factor in factors.items():
            tried = [changed(efficiency, name, by) for by in (1 / factor, factor)]
            errors = [weighted_error(groups, one) for one in tried]
            least = min(errors)
            if least < best - LEAST_GAIN:
                best, efficiency = least, tried[errors.index(least)]
            else:
                factors[name] = math.sqrt(factor)
    return efficiency


def changed(efficiency: Efficiency, name: str, factor: float) -> Efficiency:
    """With one constant times a factor, within its bounds."""
    low, high = BOUNDS[name]
    value = min(high, max(low, getattr(efficiency, name) * factor))
    return replace(efficiency, **{name: value})


def weighted_error(groups: dict[str, list[Measured]], efficiency: Efficiency) -> float:
    total = weights = 0.0
    for members in groups.values():
        weight = math.sqrt(len(members))
        errors = [min(abs(row.error(efficiency)), LARGEST_ERROR) for row in members]
        total += weight * statistics.fmean(errors)
        weights += weight
    return total / weights
