"""Learning-rate schedules: a pure function of the step."""
import math

from config import Optim


def learning_rate(o: Optim, step: int, steps: int) -> float:
    """The rate of update `step` (1-based) of `steps`: linear warmup, then cosine, WSD (arXiv 2404.06395), linear, constant."""
    low = o.lr / 10 if o.min_lr is None else o.min_lr
    warmup = min(o.warmup, steps // 10) if steps < 10 * o.warmup else o.warmup
    if step <= warmup:
        return o.lr * step / warmup
    done = (step - warmup) / max(1, steps - warmup)  # (0, 1]
    if o.decay == "constant":
        return o.lr
    if o.decay == "wsd":
        begin = max(warmup, (1 - o.decay_fraction) * steps)  # the last share of the whole horizon, as keys.py says
        done = max(0.0, (step - begin) / (steps - begin))
    share = 0.5 * (1 + math.cos(math.pi * min(1.0, done))) if o.decay == "cosine" else max(0.0, 1 - done)
    return low + (o.lr - low) * share
