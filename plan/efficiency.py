"""Achieved fractions of chip and link peaks, by generation of the chip and kind of framework.

The constants are fitted to the rows of plan/published.csv whose use is "fit", separately for each class, by
`python -m scripts.plan --published --fit`. Steps of our own code are forecast like Megatron's on the same
chip, except that an all-to-all sends all copies of a token. Chips without rows use the shared constants.
"""
from dataclasses import replace
from typing import NamedTuple

from plan.cost import Cluster, Efficiency

SHARED = Efficiency()


class Class(NamedTuple):
    """Generation of a chip, and kind of framework."""
    generation: str
    kind: str

    def __str__(self) -> str:
        return f"{self.generation} {self.kind}"


class StepRange(NamedTuple):
    """Measured / forecast of 80 % of some runs, from `low` to `high`. `of` describes those runs."""
    low: float
    high: float
    of: str


class Fitted(NamedTuple):
    """range: measured / forecast of 80 % of the class's judged rows (10th and 90th percentile). rows: their
    number."""
    efficiency: Efficiency
    range: tuple[float, float]
    rows: int


GENERATIONS = {  # by GPU in configs/clusters.yaml; boards with less power are separate
    "a100": "ampere", "a800": "ampere",
    "h100": "hopper", "h800": "hopper", "h200": "hopper", "gh200": "hopper",
    "b200": "blackwell", "gb200": "blackwell",
}
OURS = "megatron"  # kind of framework
KINDS = {  # by framework in plan/published.csv; all others count as Megatron's
    "DeepSpeed ZeRO-3": "zero3",
    "Megatron-DeepSpeed": "deepspeed",
    "llm-foundry/Composer FSDP": "composer",
    "nanotron": "nanotron",
    "nanotron v0.5": "nanotron",
    "torchtitan": "torchtitan",
}
RELAYED = {Class("hopper", "megatron"), Class("blackwell", "megatron")}  # DeepEP's all-to-all

CLASSES: dict[Class, Fitted] = {
    Class("ampere", "composer"): Fitted(range=(0.95, 1.02), rows=14, efficiency=Efficiency(
        gemm=0.89, core=0.32, stream=0.55, inside=0.38, between=0.38, micro=0.0013, hidden=0.62,
    )),
    Class("ampere", "deepspeed"): Fitted(range=(0.96, 1.10), rows=22, efficiency=Efficiency(
        gemm=0.77, stream=0.42, inside=0.35, between=0.36, micro=0.0026, hidden=0.63,
    )),
    Class("ampere", "megatron"): Fitted(range=(0.79, 1.00), rows=13, efficiency=Efficiency(
        gemm=0.79, core=0.19, stream=0.61, inside=0.44, between=0.43, hidden=0.75,
    )),
    Class("ampere", "zero3"): Fitted(range=(1.28, 2.03), rows=2, efficiency=Efficiency(
        gemm=0.74, stream=0.64, between=0.37, micro=2.3e-06, hidden=0.14,
    )),
    Class("blackwell", "megatron"): Fitted(range=(0.84, 1.18), rows=4, efficiency=Efficiency(
        gemm=0.64, core=0.3, stream=0.74, inside=0.43, route=0.00025, relayed=True,
    )),
    Class("hopper", "composer"): Fitted(range=(0.96, 1.08), rows=12, efficiency=Efficiency(
        gemm=0.71, core=0.2, stream=0.53, micro=0.004, hidden=0.77,
    )),
    Class("hopper", "megatron"): Fitted(range=(0.58, 1.54), rows=16, efficiency=Efficiency(
        gemm=0.66, core=0.37, stream=0.91, inside=0.49, between=0.45, hop=4.2e-06, route=0.00027,
        hidden=0.99, relayed=True,
    )),
    Class("hopper", "nanotron"): Fitted(range=(0.79, 1.49), rows=8, efficiency=Efficiency(
        gemm=0.65, stream=0.59, between=0.38, hidden=0.63,
    )),
    Class("hopper", "torchtitan"): Fitted(range=(0.80, 0.98), rows=7, efficiency=Efficiency(
        gemm=0.6, core=0.21, stream=0.58, inside=0.4, between=0.4, micro=0.0012, hidden=0.59,
    )),
}

# Measured / forecast of a judged run, calibrated by another run of the same model and source
# (plan/measured.py).
MEASURED_PAIRS = 236
MEASURED_RANGE = StepRange(0.82, 1.21, f"{MEASURED_PAIRS} pairs of published runs of one model and source")


def get_class(gpu: str, framework: str = "") -> Class:
    """Return the class of a GPU (Cluster.gpu) and a published framework, or "" for our own code."""
    return Class(GENERATIONS.get(gpu, gpu), KINDS.get(framework, OURS))


def get_range(cluster: Cluster) -> StepRange | None:
    """Return the range of forecasts for a cluster, or None if no published run on such chips is judged."""
    fitted = CLASSES.get(get_class(cluster.gpu))
    return fitted and StepRange(*fitted.range, f"{fitted.rows} published runs on such chips")


def get_efficiency(cluster: Cluster) -> Efficiency:
    """Return the efficiency of our own code on a cluster."""
    fitted = CLASSES.get(get_class(cluster.gpu))
    return SHARED if fitted is None else replace(fitted.efficiency, relayed=False)
