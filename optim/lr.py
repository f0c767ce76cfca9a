"""Learning-rate schedules, as pure functions of the step, and header lines about them."""
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from config import Config, OptimConfig
from config.reading import Phases

WARMUP = "optim.warmup"
BATCH_POWERS = {"linear": 1.0, "sqrt": 0.5}  # {optim.lr_rule: exponent of the batch}


@dataclass(frozen=True)
class RateSchedule:
    """Learning-rate schedule for a span of the run's steps.

    `cfg` holds the peak and the shape. Updates first + 1 .. last follow this schedule. The shape ends at step
    `end`, and the rate is constant after it; a schedule with last < end is cut off before it has fully
    decayed.
    """
    cfg: OptimConfig
    first: int
    last: int
    end: int


def get_rate_schedules(phases: Phases, steps: int) -> list[RateSchedule]:
    """Return the schedules of a run of `steps` steps, in order.

    A schedule spans from a phase that sets one of its keys to the next such phase, or to the end of the run.
    """
    beginning = [phase for phase in phases.all if phase.begins_schedule]
    lasts = [phase.steps_before for phase in beginning[1:]] + [steps]
    schedules: list[RateSchedule] = []
    for phase, last in zip(beginning, lasts):
        end = phases.schedule_end(phase) or steps
        schedules.append(RateSchedule(phase.cfg.optim, phase.steps_before, last, end))
    return schedules


def learning_rates(phases: Phases, steps: int) -> Callable[[int], float]:
    """Return the learning rate of a run of `steps` steps, as a function of the update (from 1)."""
    of_schedules = partial(learning_rate_of_run, get_rate_schedules(phases, steps))
    if all(phase.cfg.optim.lr_rule is None for phase in phases.all):
        return of_schedules
    return partial(learning_rate_of_batch, phases, of_schedules)


def learning_rate_of_run(schedules: list[RateSchedule], step: int) -> float:
    """Return the learning rate of update `step` (from 1) of a run.

    The warmup of a later schedule starts from the rate of the step before it.
    """
    rate = 0.0
    for schedule in schedules:
        length = schedule.end - schedule.first
        here = min(step, schedule.last) - schedule.first
        rate = learning_rate(schedule.cfg, here, length, rate)
        if step <= schedule.last:
            break
    return rate


def learning_rate_of_batch(phases: Phases, rate: Callable[[int], float], step: int) -> float:
    """Return rate(step) times batch_factor of the phase of update `step` (from 1)."""
    return rate(step) * batch_factor(phases.of_step(step).cfg)


def batch_factor(cfg: Config) -> float:
    """Return the factor that optim.lr_rule gives the learning rates, 1 without a rule.

    The factor is (train.global_batch / optim.base_batch)^p, where p = 1 for linear (arXiv 1706.02677) and 1/2
    for sqrt (arXiv 2205.10287). A smaller batch in train.ramp does not change it.
    """
    if cfg.optim.lr_rule is None or cfg.optim.base_batch is None:
        return 1.0
    return (cfg.train.global_batch / cfg.optim.base_batch) ** BATCH_POWERS[cfg.optim.lr_rule]


def warmup_steps(cfg: OptimConfig, steps: int) -> int:
    """Return the warmup of a schedule of `steps` steps, capped at a tenth of them."""
    return min(cfg.warmup, steps // 10)


def learning_rate(cfg: OptimConfig, step: int, steps: int, rate_before: float = 0.0) -> float:
    """Return the learning rate of update `step` (from 1) of `steps`.

    After a linear warmup from `rate_before`, cfg.decay selects the shape: cosine, wsd (arXiv 2404.06395),
    linear or constant. The rate is constant beyond `steps`.
    """
    warmup = warmup_steps(cfg, steps)
    if step <= warmup:
        return rate_before + (cfg.lr - rate_before) * step / warmup
    if cfg.decay == "constant":
        return cfg.lr

    # fraction of the decay that is done, in [0, 1]
    done = (step - warmup) / max(1, steps - warmup)
    if cfg.decay == "wsd":  # decay over the last fraction of the whole run, warmup included
        decay_start = max(warmup, (1 - cfg.decay_fraction) * steps)
        done = max(0.0, (step - decay_start) / (steps - decay_start))

    if cfg.decay == "cosine":
        remaining = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    else:
        remaining = max(0.0, 1 - done)
    min_lr = cfg.lr / 10 if cfg.min_lr is None else cfg.min_lr
    return min_lr + (cfg.lr - min_lr) * remaining


# ---- the header --------------------------------------------------------------------------------------------


def batch_rate_notes(phases: Phases, done: int) -> list[str]:
    """Return a line for each upcoming phase where optim.lr_rule changes the factor of the learning rates.

    done: completed steps.
    """
    results: list[str] = []
    before = 1.0
    for phase in phases.from_step(done):
        cfg, factor = phase.cfg, batch_factor(phase.cfg)
        if factor != before:
            place = "" if phase.number == 1 else f"phase {phase.number}: "
            root = "the root of " if cfg.optim.lr_rule == "sqrt" else ""
            results.append(f"{'rate':<9}{place}optim.lr {cfg.optim.lr:g} x {factor:.4g} = "
                           f"{cfg.optim.lr * factor:.4g}, by {root}train.global_batch / optim.base_batch = "
                           f"{cfg.train.global_batch}/{cfg.optim.base_batch}")
        before = factor
    return results


def warmup_notes(phases: Phases, steps: int, stated: Collection[str], done: int) -> list[str]:
    """Return a line for each upcoming learning rate schedule whose stated warmup is too long.

    stated: keys (section.key) set on the command line or in its file; a recipe's own warmup is meant for long
    runs. steps: of the run. done: completed ones.
    """
    results: list[str] = []
    beginning = [phase for phase in phases.all if phase.begins_schedule]
    for phase, schedule in zip(beginning, get_rate_schedules(phases, steps)):
        length = schedule.end - schedule.first
        longest = warmup_steps(schedule.cfg, length)
        is_stated = WARMUP in (stated if phase.number == 1 else phase.changes)
        if is_stated and schedule.last > done and longest < schedule.cfg.warmup:
            place = "" if phase.number == 1 else f"phase {phase.number}: "
            results.append(f"{'warmup':<9}{place}{WARMUP}: {schedule.cfg.warmup:,} steps are cut to "
                           f"{longest:,}, a tenth of the {length:,} of the schedule")
    return results
