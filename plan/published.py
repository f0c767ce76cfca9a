"""Steps that others have measured and published (published.csv), beside what plan/cost.py says of the same jobs (no torch).

A row has a source, our keys for the job, and seconds of a step: as published, or from tokens/s or FLOP/s by its source's own count. use:
`fit` rows chose the constants of Efficiency, `judge` rows did not. The frameworks are others, with other overlap and other kernels.
"""
import csv
import math
import statistics
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import config
from config import Config
from plan.cost import Cluster, Efficiency, cluster, forecast
from plan.parts import Job
from plan.search import Make, job_of

BOUNDS = {"gemm": (0.5, 0.85), "gemm8": (0.5, 0.8), "core": (0.35, 0.7), "stream": (0.5, 0.9), "inside": (0.4, 0.9), "between": (0.4, 0.9),
          "hop": (3e-6, 2e-5), "op": (3e-5, 3e-4), "route": (2e-4, 1.5e-3)}  # of Efficiency: what a chip can do


class Measured(NamedTuple):
    use: str
    group: str
    job: Job
    microbatches: int
    cluster: Cluster
    step: float

    def error(self, e: Efficiency) -> float:
        """The natural logarithm of forecast / measured."""
        return math.log(forecast(self.job, self.microbatches, self.cluster, e).step / self.step)


def config_of(row: dict[str, str]) -> Config:
    tree: dict = {"train": {"steps": 1}}
    for path, value in row.items():
        section, dot, key = path.partition(".")
        if dot and value != "":
            tree.setdefault(section, {})[key] = value
    tree["model"]["context"] = row["train.seq_len"]
    return config.from_tree(tree)


def rows(make: Make, uses: tuple[str, ...] = ("fit", "judge", "sanity")) -> list[Measured]:
    """make: a job's schedule and cuts (plan/search.py)."""
    out = []
    with open(Path(__file__).parent / "published.csv", newline="") as file:
        for row in (r for r in csv.DictReader(file) if r["use"] in uses):
            job, n = job_of(config_of(row), int(row["gpus"]), make)
            out.append(Measured(row["use"], row["group"], job, n, cluster(row["cluster"]), float(row["step_s"])))
    return out


def table(every: list[Measured], e: Efficiency) -> list[str]:
    """Markdown: of each group of rows, and of all that were fitted to and all that were not, the ratio forecast / measured and the error."""
    out = ["| rows | use | number | median ratio | smallest | largest | median error |", "|---|---|---|---|---|---|---|"]
    seen = [(m, m.error(e)) for m in every]
    names = dict.fromkeys((m.group, m.use) for m in every)
    for (name, use) in [*sorted(names), ("all", "fit"), ("all", "judge")]:
        errors = [x for m, x in seen if m.use == use and name in (m.group, "all")]
        ratios = [math.exp(x) for x in errors]
        out.append(f"| {name} | {use} | {len(errors)} | {statistics.median(ratios):.2f} | {min(ratios):.2f} | {max(ratios):.2f} | "
                   f"{statistics.median(abs(r - 1) for r in ratios):.0%} |")
    return out


def fit(every: list[Measured], e: Efficiency) -> Efficiency:
    """Constants with the least mean |error| of the rows to fit, a group's weight the root of its size: coordinate descent in BOUNDS."""
    groups: dict[str, list[Measured]] = {}
    for m in every:
        if m.use == "fit":
            groups.setdefault(m.group, []).append(m)

    def loss(e: Efficiency) -> float:
        means = [(math.sqrt(len(ms)), statistics.fmean(min(abs(m.error(e)), 1.0) for m in ms)) for ms in groups.values()]
        return sum(w * x for w, x in means) / sum(w for w, _ in means)

    best, steps = loss(e), {f.name: 1.25 for f in fields(e)}
    while max(steps.values()) > 1.03:
        for name, step in steps.items():
            low, high = BOUNDS[name]
            tried = [replace(e, **{name: min(high, max(low, getattr(e, name) * by))}) for by in (1 / step, step)]
            least, one = min(((loss(x), i) for i, x in enumerate(tried)))
            if least < best - 1e-5:
                best, e = least, tried[one]
            else:
                steps[name] = math.sqrt(step)
    return e
