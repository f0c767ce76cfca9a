"""Calibrate forecasts for a cluster by a step that a run has measured on it.

The measured step includes what a forecast leaves out (kernels of this version, the host, the real links). All
times are multiplied by the single ratio measured / forecast, so the fastest layout does not change.
"""
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import config
from config import Config, ConfigError
from config.reading import from_tree
from config.reading.earlier import current_tree
from plan.cost import Cluster, Efficiency, forecast
from plan.efficiency import MEASURED_RANGE, StepRange, get_efficiency, get_range
from plan.job import check_routing
from plan.search import make_job

KEY = "--measured"
MOST = 5.0  # ratio to the forecast, or its inverse: anything beyond is a different machine
SECONDS = ("hop", "op", "route", "micro")  # fields of Efficiency
AS_IT_IS = ("hidden", "relayed")  # all others are rates, or fractions of data-sheet values


class CostRates(NamedTuple):
    """Basis of forecasts for a cluster. range: that of real runs, or None if unknown. note: describes the
    measured step, or ""."""
    efficiency: Efficiency
    range: StepRange | None
    note: str = ""


class MeasuredStep(NamedTuple):
    """run: its folder. world: number of GPUs. seconds: median step time."""
    run: Path
    cfg: Config
    world: int
    seconds: float


def get_rates(hardware: Cluster, run: Path | None = None) -> CostRates:
    """Return the rates, calibrated by `run`, the folder of a run on such GPUs. Raises ConfigError."""
    efficiency = get_efficiency(hardware)
    if run is None:
        return CostRates(efficiency, get_range(hardware))
    measured = read_measured(run)
    ratio = times_the_forecast(measured, hardware, efficiency)
    note = (f"a step of {run.name} took {measured.seconds:.3f} s, {ratio:.2f} times the forecast of its job; "
            "all times here are in this proportion")
    return CostRates(scaled(efficiency, ratio), MEASURED_RANGE, note)


def read_measured(run: Path) -> MeasuredStep:
    """Read config.yaml and summary.json of a run folder. Raises ConfigError."""
    try:
        cfg = from_tree(current_tree(config.read_yaml(run / "config.yaml")))
        summary = json.loads((run / "summary.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{KEY}: {run}: cannot be read ({error}); give the folder of a run that has ended, "
                          "with config.yaml and summary.json") from error
    speed, world = summary.get("tokens_per_s"), summary.get("world")
    if not speed or not world:
        raise ConfigError(f"{KEY}: {run}: summary.json has no tokens_per_s or world; give a run with steps")
    if cfg.train.phases or cfg.train.ramp:
        raise ConfigError(f"{KEY}: {run}: its steps differ (train.phases, train.ramp); give another run")
    return MeasuredStep(run, cfg, world, cfg.train.global_batch * cfg.train.seq_len / speed)


def times_the_forecast(measured: MeasuredStep, hardware: Cluster, efficiency: Efficiency) -> float:
    """Return measured / forecast. Raises ConfigError if the run was not on such GPUs."""
    check_routing(measured.cfg)
    if measured.cfg.train.dtype not in hardware.flops:
        raise ConfigError(f"{KEY}: {measured.run}: trained in {measured.cfg.train.dtype}, for which "
                          f"{hardware.name} has no figure in configs/clusters.yaml; give another run")
    job, microbatches = make_job(measured.cfg, measured.world)
    expected = forecast(job, microbatches, hardware, efficiency).step
    ratio = measured.seconds / expected
    if not 1 / MOST < ratio < MOST:
        took = f"a step took {measured.seconds:.3g} s"
        raise ConfigError(f"{KEY}: {measured.run}: {took}, and the forecast for {hardware.name} is "
                          f"{expected:.3g} s; give a run on such GPUs")
    return ratio


def scaled(efficiency: Efficiency, ratio: float) -> Efficiency:
    """Scale the efficiency such that every forecast takes `ratio` times as long."""
    values: dict[str, float] = {}
    for name in (field.name for field in fields(efficiency)):
        if name not in AS_IT_IS:
            value = getattr(efficiency, name)
            values[name] = value * ratio if name in SECONDS else value / ratio
    return replace(efficiency, **values)
