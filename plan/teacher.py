"""What a teacher (distill.teacher) adds to the ranks that have the output head: its weights, and the forward
of each microbatch (model/distill.py).

The embedding and the blocks are recorded like the model's (plan/record/part.py). Of the head only the product
is counted: both models' logits take the room of one model's (kernels/distillation.py). What the divergence
reads and writes is not counted.
"""
from collections.abc import Sequence
from functools import lru_cache

from config import Config, padded_vocab
from model.describe import PartDescription, describe_stage
from model.precision import compute_bytes
from model.sharding import sharding_config
from plan.buckets import (
    FULL_PARTS,
    PlannedBucket,
    buckets_of_part,
    max_consecutive_sum,
    shared_table_bucket,
    sharers,
)
from plan.job import Job
from plan.parts import records_of_part
from plan.record.part import Amount, PartRecord


def has_teacher(job: Job, stage: int) -> bool:
    """Return whether a teacher runs in this stage."""
    return job.teacher is not None and stage == job.schedule.n_stages - 1


def is_here(job: Job) -> bool:
    """Return whether a teacher runs on this rank."""
    return any(has_teacher(job, stage) for stage in job.stages())


def weight_bytes(job: Job) -> int:
    """Return the bytes of the weights that this rank keeps between two microbatches."""
    if job.teacher is None or not is_here(job):
        return 0
    is_sharded = job.cfg.parallel.zero == 3
    every = [bucket for part in bucket_parts(job) for bucket in part]
    elements = sum(bucket.shard_size if is_sharded else bucket.size for bucket in every)
    return compute_bytes(job.teacher.train.dtype) * elements


def passing_bytes(job: Job) -> int:
    """Return the most bytes of full weights under ZeRO-3."""
    if job.teacher is None or job.cfg.parallel.zero < 3 or not is_here(job):
        return 0
    sizes = [sum(bucket.size for bucket in part) for part in bucket_parts(job)]
    return compute_bytes(job.teacher.train.dtype) * round(max_consecutive_sum(sizes, FULL_PARTS))


def forward_bytes(job: Job) -> float:
    """Return the most temporary bytes of a microbatch, without weights."""
    assert job.teacher is not None
    records = blocks_of(job.teacher, job.cfg.train.micro_batch)
    return max(record.context + record.forward.peak for record in records)


def bucket_parts(job: Job) -> list[list[PlannedBucket]]:
    """Return the buckets of each part. A tied table is in the first part alone."""
    assert job.teacher is not None
    sharding = sharding_config(job.teacher)
    dense, experts = sharers(job, expert=False), sharers(job, expert=True)
    parts = parts_of(job.teacher)
    found = [list(buckets_of_part(part, sharding, dense, experts)) for part in parts]
    table = shared_table_bucket([parts], sharding, dense)
    if table is not None:
        found[0].append(table)
    return found


def head_product(teacher: Config, micro_batch: int) -> Amount:
    """Return the work of the logits of a microbatch."""
    parallel, model = teacher.parallel, teacher.model
    tokens = micro_batch * teacher.train.seq_len // parallel.cp
    rows = padded_vocab(model) // parallel.tp
    numbers = tokens * (model.hidden + rows) + rows * model.hidden
    return Amount(
        products=2.0 * tokens * rows * model.hidden,
        nbytes=compute_bytes(teacher.train.dtype) * numbers,
        launches=1.0,
    )


@lru_cache(maxsize=1 << 10)
def blocks_of(teacher: Config, micro_batch: int) -> tuple[PartRecord, ...]:
    """Return the records of the embedding and the blocks."""
    records: list[PartRecord] = []
    for part in parts_of(teacher)[:-1]:
        records += records_of_part(part, micro_batch)
    return tuple(records)


def parts_of(teacher: Config) -> Sequence[PartDescription]:
    return describe_stage(teacher, 0, teacher.model.layers).parts
