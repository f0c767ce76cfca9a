"""A measured machine (lab/benchmarks/machine.py) as a cluster, for forecasts on hardware that is not in
configs/clusters.yaml, such as a laptop."""
import json
from dataclasses import dataclass
from pathlib import Path

from plan.cost import Cluster, Efficiency
from plan.job import UNBOUNDED_MEMORY

OPERATIONS_OF_BLOCK = 40  # torch operations in the forward of a block


@dataclass(frozen=True)
class Machine:
    """Rates per rank while all ranks work. flops, attention_flops: FLOP/s; stream, link: bytes/s; hop,
    operation: s."""
    ranks: int
    dtype: str
    flops: float
    attention_flops: float
    stream: float
    link: float
    hop: float
    operation: float

    def as_cluster(self) -> Cluster:
        """Return a cluster with all ranks on one node."""
        return Cluster(
            "this machine",
            flops={self.dtype: self.flops},
            memory=UNBOUNDED_MEMORY,
            hbm=self.stream,
            node=1 << 30,
            inside=self.link,
            between=self.link,
        )

    def as_efficiency(self) -> Efficiency:
        """Return an efficiency of 1, since the rates are already measured."""
        host = OPERATIONS_OF_BLOCK * self.operation
        return Efficiency(
            gemm=1.0,
            gemm8=1.0,
            core=self.attention_flops / self.flops,
            stream=1.0,
            inside=1.0,
            between=1.0,
            hop=self.hop,
            op=host,
            route=host,
        )


def read_machine(path: Path) -> Machine:
    return Machine(**json.loads(path.read_text()))
