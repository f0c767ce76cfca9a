"""Which layers a pipeline stage holds: as parallel.stages says, or divided by FLOPs, so that no stage waits
for a heavier one."""
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from config import Config, ModelConfig, positive_integers
from model.flops import flops_of_parts


class Split(NamedTuple):
    """The first layers, divided into stages. sizes: layers of each; heaviest: the largest cost of one."""
    heaviest: float
    sizes: tuple[int, ...]


BestSplits = dict[int, Split]  # by the number of layers in the stages so far


def layers_of_stages(cfg: Config, stages: int) -> list[tuple[int, int]]:
    """[(first, last)] of the blocks of each stage, last excluded; every stage has at least one."""
    if cfg.parallel.stages:
        sizes = positive_integers(cfg.parallel.stages)
    else:
        sizes = split_by_cost(cfg.model, stages, cfg.train.seq_len)
    ends = accumulate(sizes)
    return [(end - size, end) for size, end in zip(sizes, ends)]


@cache
def split_by_cost(model: ModelConfig, stages: int, seq_len: int) -> tuple[int, ...]:
    """Layers of each stage. The cost is a token's FLOPs: a lookup has none, a mixture those of the experts
    that a token uses, the head those of multi-token prediction as well.

    Chooses, among all divisions into consecutive layers, one whose heaviest stage is lightest (dynamic
    programming, exact).
    """
    costs, head = relative_costs(model, seq_len)

    best: BestSplits = {0: Split(0.0, ())}
    for stage in range(1, stages + 1):
        extra = head if stage == stages else 0.0
        most_layers = model.layers - (stages - stage)  # each later stage has a layer
        best = with_one_more_stage(best, costs[:most_layers], extra)
    return best[model.layers].sizes


def with_one_more_stage(best: BestSplits, costs: list[float], extra: float) -> BestSplits:
    """The best splits with a stage more. costs: of the layers that may be in it; extra: of what the stage has
    beside layers."""
    found: BestSplits = {}
    for start, before in best.items():
        stage_cost = 0.0
        for end in range(start + 1, len(costs) + 1):
            stage_cost += costs[end - 1]
            heaviest = max(before.heaviest, stage_cost + extra)
            if end not in found or heaviest < found[end].heaviest:
                found[end] = Split(heaviest, (*before.sizes, end - start))
    return found


def relative_costs(model: ModelConfig, seq_len: int) -> tuple[list[float], float]:
    """FLOPs of a token in each block, and in the head; those of the last block are 1."""
    _, *blocks, head = flops_of_parts(model, (seq_len,), seq_len)
    unit = blocks[-1]
    return [block / unit for block in blocks], head / unit
