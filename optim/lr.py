"""Learning-rate schedules: a pure function of the step."""
import math

from config import OptimConfig


def learning_rate(cfg: OptimConfig, step: int, steps: int) -> float:
    """The learning rate of update `step` (from 1) of `steps`.

    After a linear warmup, cfg.decay gives the shape: cosine, wsd (arXiv 2404.06395), linear or constant.
    """
    # at most a tenth of the run is warmup
    warmup = min(cfg.warmup, steps // 10)
    if step <= warmup:
        return cfg.lr * step / warmup
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
