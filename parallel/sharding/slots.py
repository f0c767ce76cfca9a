"""Slots, process groups and options of a bucket."""
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from parallel.sharding.packing import ALIGNMENT
from parallel.sharding.spec import ShardedParameter
from parallel.wire.comm import Group


@dataclass(frozen=True)
class ShardingConfig:
    """How data-parallel ranks share parameters: the relevant keys of config.parallel."""
    zero: int = 0  # 0 to 3
    max_elements: int = 1 << 24  # of a bucket
    alignment: int = ALIGNMENT  # elements, for slots and shards; with an 8-bit codec, its block size
    reduce_algorithm: str = "collective"  # parallel/wire/algorithms.py
    ranks_per_node: int | None = None  # for a hierarchical reduction
    powersgd_rank: int | None = None  # by default gradients are not compressed by PowerSGD
    weight_codec: str = "none"  # none, int8 or fp8: weights in an all-gather
    separate_hidden: bool = False  # hidden matrices have separate buckets (Muon)
    offload_master: bool = False  # master weights are in host memory
    bf16_master: bool = False  # master weights are bf16, rounded stochastically
    has_fp8_copies: bool = False  # linears keep 8-bit copies of their weights (kernels/fp8_weight.py)
    track_noise_scale: bool = False  # optim/noise.py needs the first microbatch's gradients


@dataclass(frozen=True)
class ShardingGroups:
    """The ranks that share a bucket."""
    shard: Group  # ranks that own its shards under ZeRO
    replica: Group  # ranks that own the same shard
    reduce: Group  # shard x replica: ranks over which gradients are reduced


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its bucket: elements offset .. offset + numel - 1.

    counted_in_norm: this rank counts the parameter in the gradient norm. If several ranks hold it in full,
    one of them does.
    """
    param: ShardedParameter
    offset: int
    counted_in_norm: bool

    @property
    def numel(self) -> int:
        return self.param.spec.numel

    def view_in(self, flat: Tensor) -> Tensor:
        """Return the parameter's part of a flat tensor [size of the bucket], in the parameter's shape."""
        return flat[self.offset:self.offset + self.numel].view(self.param.spec.shape)


class UpdateRange(NamedTuple):
    """Elements of the owned shard with equal treatment.

    has_decay, lr_factor, group_lr_factor and group_weight_decay are those of the ParameterSpec.
    counted_in_norm: this rank counts them in the gradient norm.
    """
    elements: slice
    has_decay: bool
    lr_factor: float
    group_lr_factor: float
    group_weight_decay: float | None
    counted_in_norm: bool
