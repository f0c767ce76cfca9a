"""What runs get of their chips and links, by the chip's generation and the kind of framework.

The constants are fitted to the rows of plan/published.csv whose use is "fit", each class to its own, by
`python -m scripts.plan --published --fit`. Steps of our own code are forecast as Megatron's on the same chip,
but an all-to-all sends all copies of a token. Chips without rows have the constants that all share.
"""
from dataclasses import replace
from typing import NamedTuple

from plan.cost import Cluster, Efficiency

SHARED = Efficiency()


class Class(NamedTuple):
    """A chip's generation, and a kind of framework."""
    generation: str
    kind: str

    def __str__(self) -> str:
        return f"{self.generation} {self.kind}"


class Fitted(NamedTuple):
    """range: of measured / forecast, that of 80 % of the class's judged rows (10th and 90th percentile).
    rows: how many those are."""
    efficiency: Efficiency
    range: tuple[float, float]
    rows: int


GENERATIONS = {  # of a GPU in configs/clusters.yaml; boards with less power are others
    "a100": "ampere", "a800": "ampere",
    "h100": "hopper", "h800": "hopper", "h200": "hopper", "gh200": "hopper",
    "b200": "blackwell", "gb200": "blackwell",
}
OURS = "megatron"  # kind of framework
KINDS = {  # of a framework in plan/published.csv; all others are Megatron's
    "DeepSpeed ZeRO-3": "zero3",
    "Megatron-DeepSpeed": "deepspeed",
    "llm-foundry/Composer FSDP": "composer",
    "nanotron": "nanotron",
    "nanotron v0.5": "nanotron",
    "torchtitan": "torchtitan",
}
RELAYED = {Class("hopper", "megatron"), Class("blackwell", "megatron")}  # DeepEP's all-to-all

CLASSES: dict[Class, Fitted] = {
    Class("ampere", "composer"): Fitted(range=(0.95, 1.01), rows=14, efficiency=Efficiency(
        gemm=0.9, core=0.33, stream=0.54, inside=0.51, between=0.48, micro=0.001, hidden=0.53,
    )),
    Class("ampere", "deepspeed"): Fitted(range=(0.95, 1.11), rows=22, efficiency=Efficiency(
        gemm=0.74, stream=0.45, inside=0.45, between=0.43, op=9.4e-05, micro=0.0032, hidden=0.33,
    )),
    Class("ampere", "megatron"): Fitted(range=(0.83, 1.02), rows=13, efficiency=Efficiency(
        gemm=0.77, core=0.3, stream=0.55, inside=0.53, between=0.53, op=9.4e-05, micro=0.0001,
    )),
    Class("ampere", "zero3"): Fitted(range=(1.27, 2.12), rows=2, efficiency=Efficiency(
        gemm=0.7, stream=0.61, between=0.47, hidden=0.11,
    )),
    Class("blackwell", "megatron"): Fitted(range=(0.68, 1.16), rows=4, efficiency=Efficiency(
        gemm=0.71, gemm8=0.79, core=0.36, stream=0.75, inside=0.6, hop=1.9e-05, op=9.2e-05,
        route=0.0012, hidden=0.94, relayed=True,
    )),
    Class("hopper", "composer"): Fitted(range=(0.95, 1.06), rows=12, efficiency=Efficiency(
        gemm=0.72, core=0.21, stream=0.53, op=9.4e-05, micro=0.0031, hidden=0.69,
    )),
    Class("hopper", "megatron"): Fitted(range=(0.66, 1.14), rows=16, efficiency=Efficiency(
        gemm=0.63, gemm8=0.9, core=0.42, stream=0.64, between=0.69, hop=1.8e-05, op=8.9e-05,
        relayed=True,
    )),
    Class("hopper", "nanotron"): Fitted(range=(0.83, 1.53), rows=8, efficiency=Efficiency(
        gemm=0.63, stream=0.57, inside=0.46, between=0.41, hop=2.1e-05, op=9.2e-05, hidden=0.61,
    )),
    Class("hopper", "torchtitan"): Fitted(range=(0.82, 0.98), rows=7, efficiency=Efficiency(
        gemm=0.61, gemm8=0.79, core=0.28, stream=0.52, inside=0.46, between=0.49, hop=2.1e-05,
        micro=0.0013, hidden=0.11,
    )),
}


def class_of(gpu: str, framework: str = "") -> Class:
    """gpu: see Cluster.gpu. framework: of plan/published.csv, or "" for our own code."""
    return Class(GENERATIONS.get(gpu, gpu), KINDS.get(framework, OURS))


def efficiency_of(cluster: Cluster) -> Efficiency:
    """Of our own code on a cluster."""
    fitted = CLASSES.get(class_of(cluster.gpu))
    return SHARED if fitted is None else replace(fitted.efficiency, relayed=False)
