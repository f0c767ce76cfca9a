"""Suggest nearby config values that satisfy every rule, for the end of an error message."""
import contextlib
import dataclasses
from collections.abc import Callable, Iterable

from config import Config, ConfigError, divisors, positive_integers
from config.reading.rules import Rule, validate
from config.tree import value_at, with_values

MAX_SUGGESTIONS = 4
MAX_RAMPS_TRIED = 50


CanRun = Callable[[Config], bool]  # may raise ConfigError instead of returning False


def check_rules(cfg: Config, world: int = 1) -> None:
    """Raise ConfigError for the first rule that the config breaks, suggesting values that satisfy all
    rules."""
    broken = validate(cfg, world)
    if broken is None:
        return
    raise ConfigError(broken.message + suggestion(cfg, broken, lambda other: validate(other, world) is None))


def suggestion(cfg: Config, broken: Rule, can_run: CanRun) -> str:
    """Return the end of a broken rule's error: values that pass can_run, or "" if none do."""
    if broken.ramp_unit:
        return nearby_ramp(cfg, broken.ramp_unit, can_run)
    for key in broken.keys.split():
        values = nearby_values(cfg, key, broken.values, can_run)
        if values:
            return f"; try {key} {', '.join(map(str, values))}"
    return ""


def nearby_values(cfg: Config, key: str, values: Iterable[int], can_run: CanRun) -> list[int]:
    """Return up to four of `values` for `key` that pass can_run, nearest to its current value."""
    present = value_at(cfg, key) or 0
    nearest_first = sorted(set(values), key=lambda value: (abs(value - present), value))

    accepted: list[int] = []
    for value in nearest_first:
        if passes(with_values(cfg, {key: value}), can_run):
            accepted.append(value)
        if len(accepted) == MAX_SUGGESTIONS:
            break
    return sorted(accepted)


def nearby_ramp(cfg: Config, unit: int, can_run: CanRun) -> str:
    """Return the end of an error about train.ramp: the nearest ramp that passes can_run.

    Every batch size of the ramp is a multiple of `unit` (sequences).
    """
    train = cfg.train
    given = positive_integers(train.ramp)
    if len(given) not in (3, 4):
        given = [*given, unit, unit, 100 * train.global_batch]
    first, increment, samples = given[:3]

    candidates: list[tuple[int, int]] = []
    for start in range(unit, train.global_batch, unit):
        increments = divisors(train.global_batch - start)
        candidates += [(start, each) for each in increments if each % unit == 0]
    candidates.sort(key=lambda ramp: (abs(ramp[0] - first), abs(ramp[1] - increment)))

    for start, each in candidates[:MAX_RAMPS_TRIED]:
        ramp = f"{start},{each},{samples}"
        if passes(dataclasses.replace(cfg, train=dataclasses.replace(train, ramp=ramp)), can_run):
            return f"; try train.ramp {ramp}"
    return "; leave it out"


def passes(cfg: Config, can_run: CanRun) -> bool:
    with contextlib.suppress(ConfigError):
        return can_run(cfg)
    return False
