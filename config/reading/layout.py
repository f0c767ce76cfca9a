"""The layout of a model that only computes: which ranks hold which weights."""
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from config import Config, ConfigError, ParallelConfig, divisors
from config.reading.rules import RULES_OF_WEIGHTS
from config.rule import Rule
from config.tree import with_values
from model.router import mixture

Rules = Callable[[Config, int], Iterator[Rule]]


class RequestedLayout(NamedTuple):
    """Requested degrees, and the number of the job's ranks per node.

    If only one of tp and pp is given, the other follows. Without both, tp is the largest degree that divides
    the model and the ranks of a node, and pp takes the remaining ranks.
    """
    tp: int | None = None
    pp: int | None = None
    on_node: int = 1


def layout_of_weights(cfg: Config, world: int, layout: RequestedLayout) -> Config:
    """Return the config with a layout in which `world` ranks hold one model together. Raises ConfigError
    if they cannot."""
    tp, pp, on_node = layout
    if world == 1 and tp in (None, 1) and pp in (None, 1):
        return with_values(cfg, {"parallel": ParallelConfig()})
    if tp is not None or pp is not None:
        tp = max(1, world // (pp or 1)) if tp is None else tp
        pp = max(1, world // tp) if pp is None else pp
        if tp * pp != world:
            plural = "s" if world > 1 else ""
            raise ConfigError(
                f"parallel.tp*pp = {tp}*{pp} = {tp * pp} on {world} rank{plural}: each rank holds a "
                f"different part of the model; start {tp * pp} ranks, or choose degrees whose product is "
                f"{world}"
            )
        asked = with_degrees(cfg, tp, pp)
        problem = find_problem(asked, world)
        if problem is not None:
            raise ConfigError(problem)
        return asked

    found = default_layout(cfg, world, on_node)
    if found is None:
        sizes = range(world - 1, 0, -1)
        fewer = next(size for size in sizes if default_layout(cfg, size, min(size, on_node)))
        raise ConfigError(
            f"parallel.tp: no degree divides a node's ranks and the model so that the rest of {world} ranks "
            f"are stages (model.mixer.heads={cfg.model.mixer.heads}, model.layers={cfg.model.layers}); "
            f"start {fewer} rank{'s' if fewer > 1 else ''}"
        )
    return found


def default_layout(cfg: Config, world: int, on_node: int) -> Config | None:
    """Return the layout with the largest possible tp, or None."""
    for tp in reversed(divisors(math.gcd(world, on_node))):
        candidate = with_degrees(cfg, tp, world // tp)
        if find_problem(candidate, world) is None:
            return candidate
    return None


def with_degrees(cfg: Config, tp: int, pp: int) -> Config:
    """Return the config with these degrees. For a mixture, tp ranks shard the experts, and any remaining
    factor their inner width."""
    ep = etp = 1
    experts = mixture(cfg.model)
    if experts is not None:
        ep = math.gcd(experts.experts, tp)
        etp = tp // ep if experts.width % (tp // ep) == 0 else 1
    return with_values(cfg, {"parallel": ParallelConfig(tp=tp, pp=pp, ep=ep, etp=etp)})


def find_problem(cfg: Config, world: int) -> str | None:
    """Return why the ranks cannot hold a model in this layout, or None."""
    divisible = with_values(cfg, {"train.seq_len": cfg.parallel.tp})  # tokens are padded as needed
    broken = first_broken(RULES_OF_WEIGHTS, divisible, world)
    if broken is not None:
        return broken
    if cfg.parallel.pp > cfg.model.layers:
        return (
            f"parallel.pp: {cfg.parallel.pp} stages, and model.layers is {cfg.model.layers}; lower it, or "
            "raise parallel.tp"
        )
    return None


def first_broken(every: Iterable[Rules], cfg: Config, world: int) -> str | None:
    """Return the message of the first rule that does not hold, or None."""
    for rules in every:
        for rule in rules(cfg, world):
            if not rule.holds:
                return rule.message
    return None
