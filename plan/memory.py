"""The bytes held by one rank: its state, and the activations along the ops of its schedule.

P: elements of the rank's buckets with padding. N: number of ranks that share them. c, g: bytes per element of
the compute dtype and the accumulation dtype.

    zero   weights   masters (bf16)   gradients   moments of AdamW
    0      P c       P g              P g         2 P g
    1      P c       P g / N          P g         2 P g / N
    2      P c       P g / N          P g / N     2 P g / N     + the full gradients of at most 3 parts
    3      P c / N   P g / N          P g / N     2 P g / N     + the full weights of at most 3 parts

Compressed weights (parallel.compress_weights, ZeRO-1 and 2) have masters in every dtype. With optim.states
bf16, masters and moments have 2 bytes per element instead of g, and bf16 weights are their own masters; with
8bit, each of the two moments has 1 byte per element and g for each block.
PowerSGD keeps its errors, P g, in addition to the gradients; train.ema keeps an average with g bytes per
element for each master; a teacher (distill.teacher) adds its weights to the ranks with the output head
(plan/teacher.py). config/optimizers.py says how many moments an optimizer has. Frozen parameters
(optim.groups) have weights alone.

What a microbatch holds in each part of a stage is recorded (plan/parts.py). tests/plan/test_memory.py
compares the state with a real rank, and the activations with the record of a whole step.
"""
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from config import OPTIMIZERS
from model.precision import accumulation_bytes, compute_bytes
from parallel.pipeline.schedule import Op
from parallel.sharding.packing import block_size
from plan import teacher
from plan.buckets import (
    FULL_PARTS,
    PlannedBucket,
    buckets,
    max_consecutive_sum,
    trained_buckets,
    unique_buckets,
)
from plan.bytes import boundary_bytes, shared_key_bytes
from plan.job import Job, has_row_bound
from plan.parts import records_of_stage
from plan.record.part import PartRecord

# ---- state -------------------------------------------------------------------------------------------------


def state_bytes(job: Job) -> dict[str, int]:
    """Return {"weights", "masters", "gradients", "optimizer"}: bytes on the device, between two steps."""
    parallel = job.cfg.parallel
    weight_bytes = compute_bytes(job.cfg.train.dtype)
    grad_bytes = accumulation_bytes(job.cfg.train.dtype)
    planned = buckets(job)
    every = trained_buckets(planned)
    of_weights = [b.shard_size if parallel.zero == 3 else b.size for b in unique_buckets(planned)]
    of_grads = [b.size if parallel.zero < 2 else b.shard_size for b in every]

    on_device = 0 if parallel.offload in ("optimizer", "both") else master_bytes(job)
    with_master = [bucket for bucket in every if has_separate_master(job, bucket)]
    masters = sum(bucket.shard_size for bucket in with_master)
    errors = powersgd_errors(job, every)

    return {
        "weights": weight_bytes * sum(of_weights) + teacher.weight_bytes(job),
        "masters": on_device * masters,
        "gradients": grad_bytes * (sum(of_grads) + errors),
        "optimizer": moment_bytes(job, every) + ema_bytes(job, every) if on_device else 0,
    }


def host_bytes(job: Job) -> int:
    """Return the bytes of masters, moments and their average in host memory (parallel.offload)."""
    if job.cfg.parallel.offload not in ("optimizer", "both"):
        return 0
    return trained_bytes(job, trained_buckets(buckets(job)))


def kept_bytes(job: Job) -> int:
    """Return the bytes of a checkpoint's content: masters, moments and their average, wherever stored, and
    frozen weights."""
    every = unique_buckets(buckets(job))
    frozen = sum(bucket.shard_size for bucket in every if not bucket.trains)
    trained = [bucket for bucket in every if bucket.trains]
    return trained_bytes(job, trained) + compute_bytes(job.cfg.train.dtype) * frozen


def trained_bytes(job: Job, every: list[PlannedBucket]) -> int:
    """Return the bytes of masters, moments and their average of these buckets."""
    owned = sum(bucket.shard_size for bucket in every)
    return master_bytes(job) * owned + moment_bytes(job, every) + ema_bytes(job, every)


def master_bytes(job: Job) -> int:
    """Return the bytes per element of masters, and of moments that do not have 8 bits."""
    return 2 if job.cfg.optim.states == "bf16" else accumulation_bytes(job.cfg.train.dtype)


def ema_bytes(job: Job, every: Iterable[PlannedBucket]) -> int:
    """Return the bytes of the moving average of the masters (train.ema), in fp32 for any optim.states."""
    if job.cfg.train.ema is None:
        return 0
    owned = sum(bucket.shard_size for bucket in every)
    return accumulation_bytes(job.cfg.train.dtype) * owned


def moment_bytes(job: Job, every: Iterable[PlannedBucket]) -> int:
    """Return the bytes of the moments; in 8 bits (optim.states), of their codes and scales."""
    optimizer = OPTIMIZERS[job.cfg.optim.name]
    nbytes = 0
    for bucket in every:
        of_moment = master_bytes(job) * bucket.shard_size
        if job.cfg.optim.states == "8bit":
            of_moment = bucket.shard_size + master_bytes(job) * num_scales(bucket)
        nbytes += of_moment * optimizer.moments_for(bucket.is_hidden)
    return nbytes


def num_scales(bucket: PlannedBucket) -> int:
    """Return the number of blocks in the owned elements (optim/adamw_8bit.py)."""
    blocks = 0
    for spec, offset in zip(bucket.specs, bucket.offsets):
        for box in spec.boxes:
            end = min(offset + box.volume, bucket.shard_end)
            blocks += max(0, end - max(offset, bucket.shard_start)) // block_size(box.shape)
            offset += box.volume
    return blocks


def has_separate_master(job: Job, bucket: PlannedBucket) -> bool:
    """Return whether a bucket's masters are stored separately from the compute weights."""
    dtype, parallel = job.cfg.train.dtype, job.cfg.parallel
    if job.cfg.optim.states == "bf16":
        other_dtype = dtype != "bf16"
    else:
        other_dtype = compute_bytes(dtype) != accumulation_bytes(dtype)
    is_compressed = parallel.compress_weights != "none" and parallel.zero in (1, 2)
    is_shared = job.shards(bucket.is_expert) > 1
    return other_dtype or (is_compressed and is_shared)


def powersgd_errors(job: Job, every: Iterable[PlannedBucket]) -> int:
    """Return the number of elements of PowerSGD's unsent error."""
    return sum(bucket.size for bucket in every if has_powersgd_error(job, bucket))


def has_powersgd_error(job: Job, bucket: PlannedBucket) -> bool:
    parallel = job.cfg.parallel
    if parallel.compress != "powersgd" or job.shards(bucket.is_expert) == 1:
        return False
    _, factors = bucket.powersgd_elements(parallel.powersgd_rank)
    return factors > 0


def passing_bytes(job: Job) -> int:
    """Return the peak of temporary memory in a step: full gradients (ZeRO-2, 3), full weights (ZeRO-3), 8-bit
    weights (fp8) and the starting state of a rerun."""
    zero, dtype = job.cfg.parallel.zero, job.cfg.train.dtype
    of_weight = compute_bytes(dtype) if zero == 3 else 0
    of_grad = accumulation_bytes(dtype) if zero >= 2 else 0
    most = 0
    for parts in buckets(job).values():
        sizes: list[int] = []
        for part in parts:
            sizes.append(sum(bucket.size * (of_weight + of_grad * bucket.trains) for bucket in part))
        most = max(most, round(max_consecutive_sum(sizes, FULL_PARTS)))
    return most + teacher.passing_bytes(job) + quantized_weight_bytes(job) + rerun_bytes(job)


def rerun_bytes(job: Job) -> int:
    """Return the bytes of the copies of PowerSGD's errors, if a step may be computed again
    (durable/rerun.py, model/bounded_rows.py)."""
    train = job.cfg.train
    copies = (train.rerun_every is not None or train.rerun_suspects) + has_row_bound(job)
    if not copies:
        return 0
    return copies * accumulation_bytes(train.dtype) * powersgd_errors(job, trained_buckets(buckets(job)))


def quantized_weight_bytes(job: Job) -> int:
    """Return the bytes of 8-bit weights (kernels/fp8_weight.py): of all parts, or under ZeRO-3 of those with
    full weights."""
    if job.cfg.train.dtype != "fp8":
        return 0
    of_stages: list[list[float]] = []
    for number in job.stages():
        of_stages.append([record.kept_in_step for record in records_of_stage(job, number)])
    if job.cfg.parallel.zero == 3:
        return round(max(max_consecutive_sum(sizes, FULL_PARTS) for sizes in of_stages))
    return round(sum(sum(sizes) for sizes in of_stages))


# ---- activations -------------------------------------------------------------------------------------------


class StageActivations(NamedTuple):
    """Bytes of one microbatch in one stage.

    kept: from its forward to its backward. kept_for_weights: with a split backward, from the input gradients
    (I) to the weight gradients (W). forward, backward, inputs: the most that a forward, a backward or an I
    adds to what is held when it begins.
    """
    kept: float
    forward: float = 0
    backward: float = 0
    kept_for_weights: float = 0
    inputs: float = 0


def peak_of_ops(ops: Iterable[Op], stages: Mapping[int, StageActivations]) -> int:
    """Return the peak over a rank's ops, given the activations of its stages."""
    held = peak = 0.0
    for op in ops:
        stage = stages[op.stage]
        before = held
        if op.kind == "F":
            held += stage.kept
            passing = stage.forward
        elif op.kind == "B":
            held -= stage.kept
            passing = stage.backward
        elif op.kind == "I":
            held += stage.kept_for_weights - stage.kept
            passing = stage.inputs
        else:
            held -= stage.kept_for_weights
            passing = 0.0
        peak = max(peak, before + passing, held)
    return round(peak)


def peak_activation_bytes(job: Job) -> int:
    """Return the peak of a rank's activations, plus a hidden state and a gradient that wait in a stage. If
    the copy of the masters that log.inside_every makes after the backward is larger, return its bytes.
    """
    stages: dict[int, StageActivations] = {}
    received = [*boundary_bytes(job), 0]
    waiting = 0
    for number in job.stages():
        records = tuple(records_of_stage(job, number))
        stages[number] = sum_activations(records, shared_key_bytes(job, number))
        if teacher.has_teacher(job, number):
            stages[number] = beside_teacher(stages[number], teacher.forward_bytes(job))
        waiting = max(waiting, received[number] + received[number + 1])
    return max(peak_of_ops(job.schedule.order[job.pp], stages) + waiting, copied_master_bytes(job))


def beside_teacher(stage: StageActivations, nbytes: float) -> StageActivations:
    """Add the forward of a teacher, which takes `nbytes`, to the end of the stage's forward."""
    return stage._replace(forward=max(stage.forward, stage.kept + nbytes))


def copied_master_bytes(job: Job) -> int:
    """Return the bytes of the copy of the masters, during the update of a step that log.inside_every records
    (model/inside.py).
    """
    cfg = job.cfg
    if cfg.log.inside_every is None or cfg.parallel.offload in ("optimizer", "both"):
        return 0
    return master_bytes(job) * sum(bucket.shard_size for bucket in unique_buckets(buckets(job)))


@lru_cache(maxsize=1 << 12)
def sum_activations(records: tuple[PartRecord, ...], keys: int = 0) -> StageActivations:
    """Sum up a stage from the records of its parts.

    `keys` are the bytes of the keys that it shares with earlier stages. Their gradients, just as large, are
    held through its backward.
    """
    shared = max(record.context for record in records) + keys

    held = forward = shared
    for record in records:
        forward = max(forward, held + record.forward.peak)
        held += record.kept

    # the backward begins with the last part, and frees each part's kept activations
    freed = backward = 0.0
    freed_by_inputs = inputs = 0.0
    for record in reversed(records):
        backward = max(backward, record.backward.peak - freed)
        freed += record.kept
        inputs = max(inputs, record.inputs.peak - freed_by_inputs)
        freed_by_inputs += record.kept - record.kept_for_weights
    kept_for_weights = sum(record.kept_for_weights for record in records)
    return StageActivations(held, forward, backward + keys, kept_for_weights, inputs + keys)
