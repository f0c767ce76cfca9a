"""A whole run, from its step time: days, GPU-hours, failures and the time lost to them, money and energy.

The time between failures of a job on n GPUs is that of one GPU divided by n, with independent failures
(exponential gaps). With M seconds between failures, R to resume training, d of training blocked per save, and
t of training between saves, a run with T seconds of training takes

    M exp(R / M) (exp((t + d) / M) - 1) T / t

(J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22, 2006,
equation 13). The optimal t is near sqrt(2 d M) (J. W. Young, CACM 17, 1974), and closer with Daly's terms
(equation 37). ETTR is productive time divided by total time (arXiv 2410.21680).
"""

import math
from dataclasses import dataclass

HOUR = 3600.0
DAY = 24 * HOUR

# 419 unexpected interruptions of 16,384 H100 in 54 days (Llama 3, arXiv 2407.21783, section 3.3.4)
GPU_HOURS_BETWEEN_FAILURES = 16_384 * 54 * 24 / 419


@dataclass(frozen=True)
class Reliability:
    """gpu_hours: between failures of one GPU, including its share of the rest of the system. restart: seconds
    from a failure until training resumes. blocking, writing: seconds for which a save blocks training, and
    for which it then writes in the background until it is safe."""

    gpu_hours: float = GPU_HOURS_BETWEEN_FAILURES
    restart: float = 600.0
    blocking: float = 10.0
    writing: float = 60.0

    def between_failures(self, gpus: int) -> float:
        """Return the seconds between failures of a job on `gpus` GPUs."""
        return self.gpu_hours * HOUR / gpus


@dataclass(frozen=True)
class WholeRun:
    """steps; seconds: of training alone, and of wall-clock time with failures and saves. every: steps between
    saves.
    failures: expected number. ettr: training / wall-clock time."""

    gpus: int
    steps: int
    training: float
    wall: float
    every: int
    failures: float

    @property
    def days(self) -> float:
        return self.wall / DAY

    @property
    def gpu_hours(self) -> float:
        return self.gpus * self.wall / HOUR

    @property
    def ettr(self) -> float:
        return self.training / self.wall

    def megawatt_hours(self, watts: float, pue: float) -> float:
        """Return the energy for a power per GPU in watts, with the building's PUE."""
        return self.gpu_hours * watts * pue / 1e6


def wall_seconds(training: float, interval: float, blocking: float, restart: float, between: float) -> float:
    """Return the expected seconds of a run (see above). `interval` is the training time between two saves."""
    exponents = (interval + blocking) / between, restart / between
    if max(exponents) > 700:  # overflows a float: it never ends
        return math.inf
    segment = between * math.exp(exponents[1]) * math.expm1(exponents[0])
    return segment * training / interval


def best_interval(blocking: float, between: float) -> float:
    """Return the optimal seconds of training between two saves (Daly's higher order estimate)."""
    if blocking >= 2 * between:
        return between
    ratio = blocking / (2 * between)
    return math.sqrt(2 * blocking * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - blocking


def whole_run(
    tokens: float, tokens_of_step: int, step: float, gpus: int, reliability: Reliability
) -> WholeRun:
    """Return the run for `tokens`, given the seconds per step, with the checkpoint interval that loses least.

    A save starts after the previous one is written.
    """
    steps = math.ceil(tokens / tokens_of_step)
    training = steps * step
    between = reliability.between_failures(gpus)
    interval = max(best_interval(reliability.blocking, between), reliability.writing)
    every = min(max(1, round(interval / step)), steps)

    # a failure also loses the save that is being written
    unwritten = reliability.writing - reliability.blocking
    wall = wall_seconds(
        training,
        interval=every * step,
        blocking=reliability.blocking,
        restart=reliability.restart + unwritten,
        between=between,
    )
    return WholeRun(gpus, steps, training, wall, every, failures=wall / between)


# ---- the batch ---------------------------------------------------------------------------------------------


def batch_costs(batch_tokens: float, noise_scale: float) -> tuple[float, float]:
    """Return (steps of this batch / the fewest steps of any, its tokens / the fewest of any) to the same
    loss.

    noise_scale: tokens (log.noise_scale). arXiv 1812.06162, equation 2.11.
    """
    return 1 + noise_scale / batch_tokens, 1 + batch_tokens / noise_scale
