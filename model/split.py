"""Assign layers to pipeline stages: from parallel.stages, or balanced by FLOPs so that no stage waits for
a heavier one."""
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from config import Config, ModelConfig, positive_integers
from model.flops import flops_of_parts


class Split(NamedTuple):
    """A split of the first layers into stages. `sizes` counts the layers per stage; `heaviest` is the cost
    of the most expensive stage."""
    heaviest: float
    sizes: tuple[int, ...]


BestSplits = dict[int, Split]  # by the number of layers in the stages so far


def split_layers(cfg: Config, stages: int) -> list[tuple[int, int]]:
    """Return (first, end) of each stage's blocks: first .. end - 1. Every stage has at least one block."""
    if cfg.parallel.stages:
        sizes = positive_integers(cfg.parallel.stages)
    else:
        sizes = split_by_cost(cfg.model, stages, cfg.train.seq_len)
    ends = accumulate(sizes)
    return [(end - size, end) for size, end in zip(sizes, ends)]


@cache
def split_by_cost(model: ModelConfig, stages: int, seq_len: int) -> tuple[int, ...]:
    """Return the number of layers per stage that minimizes the cost of the heaviest stage.

    Cost is FLOPs per token: lookups are free, a mixture counts the experts that a token uses, and the head
    includes multi-token prediction. Searches all splits into consecutive layers (dynamic programming, exact).
    """
    costs, head = relative_costs(model, seq_len)

    best: BestSplits = {0: Split(0.0, ())}
    for stage in range(1, stages + 1):
        extra = head if stage == stages else 0.0
        most_layers = model.layers - (stages - stage)  # every later stage needs a layer
        best = with_one_more_stage(best, costs[:most_layers], extra)
    return best[model.layers].sizes


def with_one_more_stage(best: BestSplits, costs: list[float], extra: float) -> BestSplits:
    """Extend the best splits by one stage. `costs` covers the layers that it may hold; `extra` is the cost
    of its other parts."""
    result: BestSplits = {}
    for start, before in best.items():
        stage_cost = 0.0
        for end in range(start + 1, len(costs) + 1):
            stage_cost += costs[end - 1]
            heaviest = max(before.heaviest, stage_cost + extra)
            if end not in result or heaviest < result[end].heaviest:
                result[end] = Split(heaviest, (*before.sizes, end - start))
    return result


def relative_costs(model: ModelConfig, seq_len: int) -> tuple[list[float], float]:
    """Return FLOPs per token of each block and of the head, relative to the last block."""
    _, *blocks, head = flops_of_parts(model, (seq_len,), seq_len)
    unit = blocks[-1]
    return [block / unit for block in blocks], head / unit
