"""The buckets of one rank, without storage: parallel/sharding/ applied to the parameters that the real
modules declare (model/describe.py)."""
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from model.describe import PartDescription
from model.sharding import sharding_config
from parallel.sharding.bucket import split_into_buckets
from parallel.sharding.packing import BucketLayout, bucket_layout
from parallel.sharding.powersgd import is_matrix, matrix_shape
from parallel.sharding.slots import ShardingConfig
from parallel.sharding.spec import ParameterSpec, ShardedParameter
from plan.job import Job

FULL_PARTS = 3  # parts whose full gradients (ZeRO-2, 3) or weights (ZeRO-3) exist at the same time


@dataclass(frozen=True, eq=False)
class PlannedBucket:
    """A bucket's parameter specs. `num_users` parts of this rank use it; a shared table may have two."""
    specs: tuple[ParameterSpec, ...]
    layout: BucketLayout
    is_hidden: bool = False
    num_users: int = 1

    @property
    def trains(self) -> bool:
        return not self.specs[0].is_frozen

    @property
    def is_expert(self) -> bool:
        return self.specs[0].is_expert

    @property
    def offsets(self) -> tuple[int, ...]:
        return self.layout.offsets

    @property
    def size(self) -> int:
        """Elements, including padding."""
        return self.layout.size

    @property
    def shard_start(self) -> int:
        return self.layout.shard_start

    @property
    def shard_end(self) -> int:
        return self.layout.shard_end

    @property
    def shard_size(self) -> int:
        """Elements that this rank owns."""
        return self.layout.shard_size

    def partial_elements(self, axis: str) -> int:
        """Owned elements whose gradient is partial over the axis."""
        if not self.trains:
            return 0
        elements = 0
        for spec, offset in zip(self.specs, self.offsets):
            if axis in spec.partial_over:
                end = min(offset + spec.numel, self.shard_end)
                elements += max(0, end - max(offset, self.shard_start))
        return elements

    def powersgd_elements(self, rank: int) -> tuple[int, int]:
        """Return the elements of PowerSGD's two exchanges (parallel/sharding/powersgd.py); the second has
        none if there are no matrices."""
        first = second = 0
        for spec in self.specs:
            if not is_matrix(spec):
                first += spec.numel
                continue
            count, rows, columns = matrix_shape(spec)
            factor_rank = min(rank, rows, columns)
            first += count * factor_rank * rows
            second += count * factor_rank * columns
        return first, second


BucketsOfParts = list[list[PlannedBucket]]  # for each part of a stage


class Sharers(NamedTuple):
    """The ranks that share a bucket: see bucket_layout."""
    num_shards: int
    shard_index: int
    num_replicas: int


def buckets(job: Job) -> dict[int, BucketsOfParts]:
    """Return {stage of this rank: buckets of each of its parts}. Blocks of one kind share the same objects; a
    shared table is one object in all parts that use it."""
    sharding = sharding_config(job.cfg)
    dense, experts = sharers(job, expert=False), sharers(job, expert=True)
    parts_of_stage = {number: job.parts[number] for number in job.stages()}
    table = shared_table_bucket(parts_of_stage.values(), sharding, dense)

    planned: dict[int, BucketsOfParts] = {}
    for number, parts in parts_of_stage.items():
        planned[number] = []
        for part in parts:
            found = list(buckets_of_part(part, sharding, dense, experts))
            if table is not None and part.shared_table is not None:
                found.insert(0, table)
            planned[number].append(found)
    return planned


def unique_buckets(planned: dict[int, BucketsOfParts]) -> list[PlannedBucket]:
    """Return every bucket of the rank, in build.py's order: a shared table once, a block's for each block,
    and frozen ones last."""
    results: list[PlannedBucket] = []
    for parts in planned.values():
        for part in parts:
            results += [bucket for bucket in part if bucket.num_users == 1 or bucket not in results]
    return sorted(results, key=lambda bucket: not bucket.trains)


def trained_buckets(planned: dict[int, BucketsOfParts]) -> list[PlannedBucket]:
    """Return the buckets of the rank that are not frozen."""
    return [bucket for bucket in unique_buckets(planned) if bucket.trains]


def sharers(job: Job, expert: bool) -> Sharers:
    return Sharers(job.shards(expert), job.place(expert), job.layout.dp_replicate)


def shared_table_bucket(stages: Iterable[tuple[PartDescription, ...]], sharding: ShardingConfig,
                        ranks: Sharers) -> PlannedBucket | None:
    """Return the bucket of a table used by several parts of the model, or None if it is elsewhere."""
    tables: list[ShardedParameter] = []
    for parts in stages:
        tables += [part.shared_table for part in parts if part.shared_table is not None]
    if not tables:
        return None
    return plan_bucket(tables[:1], sharding, ranks, num_users=len(tables))


@lru_cache(maxsize=1 << 14)
def buckets_of_part(part: PartDescription, sharding: ShardingConfig, dense: Sharers,
                    experts: Sharers) -> tuple[PlannedBucket, ...]:
    """Return the buckets of a part, without a shared table's."""
    planned: list[PlannedBucket] = []
    for params in split_into_buckets(list(part.params), sharding):
        ranks = experts if params[0].spec.is_expert else dense
        planned.append(plan_bucket(params, sharding, ranks))
    return tuple(planned)


def plan_bucket(params: list[ShardedParameter], sharding: ShardingConfig, ranks: Sharers,
                num_users: int = 1) -> PlannedBucket:
    """Lay out a bucket like parallel.sharding.bucket.Bucket, without storage."""
    layout = bucket_layout(
        [param.spec.numel for param in params],
        zero=sharding.zero,
        num_shards=ranks.num_shards,
        shard_index=ranks.shard_index,
        num_replicas=ranks.num_replicas,
        is_collective=sharding.reduce_algorithm == "collective",
        alignment=sharding.alignment,
    )
    is_hidden = sharding.separate_hidden and params[0].spec.is_hidden_matrix
    return PlannedBucket(tuple(param.spec for param in params), layout, is_hidden, num_users)


def max_consecutive_sum(sizes: Sequence[float], num_parts: int) -> float:
    """Return the largest sum of `num_parts` consecutive parts of a stage."""
    most = 0.0
    for first in range(len(sizes)):
        together = sizes[first:first + num_parts]
        most = max(most, sum(together))
    return most
