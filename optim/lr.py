"""Learning-rate schedules: a pure function of the step."""
import math
from dataclasses import dataclass

from config import OptimConfig
from config.reading import Phases


@dataclass(frozen=True)
class RateSchedule:
    """The learning rate from one step of the run to another.

    cfg: its peak and shape. first, last: steps of the run, before the first update and of the last one. end:
    of its shape: after it the rate stays, and a schedule that is over before it has not decayed to its end.
    """
    cfg: OptimConfig
    first: int
    last: int
    end: int


def schedules_of(phases: Phases, steps: int) -> list[RateSchedule]:
    """The schedules of a run of `steps` steps, in order.

    One reaches from the phase that states a key of it to the next phase that does, or to the end of the run.
    """
    beginning = [phase for phase in phases.all if phase.begins_schedule]
    lasts = [phase.steps_before for phase in beginning[1:]] + [steps]
    schedules: list[RateSchedule] = []
    for phase, last in zip(beginning, lasts):
        end = phases.schedule_end(phase) or steps
        schedules.append(RateSchedule(phase.cfg.optim, phase.steps_before, last, end))
    return schedules


def learning_rate_of_run(schedules: list[RateSchedule], step: int) -> float:
    """The learning rate of update `step` (from 1) of a run.

    The warmup of a later schedule begins at the rate of the step before it.
    """
    rate = 0.0
    for schedule in schedules:
        length = schedule.end - schedule.first
        here = min(step, schedule.last) - schedule.first
        rate = learning_rate(schedule.cfg, here, length, rate)
        if step <= schedule.last:
            break
    return rate


def warmup_steps(cfg: OptimConfig, steps: int) -> int:
    """The warmup of a schedule of `steps` steps: at most a tenth of them."""
    return min(cfg.warmup, steps // 10)


def learning_rate(cfg: OptimConfig, step: int, steps: int, rate_before: float = 0.0) -> float:
    """The learning rate of update `step` (from 1) of `steps`.

    After a linear warmup from rate_before, cfg.decay gives the shape: cosine, wsd (arXiv 2404.06395), linear
    or constant. Beyond `steps` the rate stays.
    """
    warmup = warmup_steps(cfg, steps)
    if step <= warmup:
        return rate_before + (cfg.lr - rate_before) * step / warmup
    if cfg.decay == "constant":
        return cfg.lr

    # how much of the decay is done, in [0, 1]
    done = (step - warmup) / max(1, steps - warmup)
    if cfg.decay == "wsd":  # the decay is the last fraction of the whole run, warmup included
        decay_start = max(warmup, (1 - cfg.decay_fraction) * steps)
        done = max(0.0, (step - decay_start) / (steps - decay_start))

    if cfg.decay == "cosine":
        remaining = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    else:
        remaining = max(0.0, 1 - done)
    min_lr = cfg.lr / 10 if cfg.min_lr is None else cfg.min_lr
    return min_lr + (cfg.lr - min_lr) * remaining
