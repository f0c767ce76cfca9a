"""The bytes that one rank holds: its state, and the activations along the ops of its schedule.

P: elements of the rank's buckets with padding. N: ranks that share them. c, g: bytes of an element of the
compute dtype and of the accumulation dtype.

    zero   weights   masters (bf16)   gradients   moments of AdamW
    0      P c       P g              P g         2 P g
    1      P c       P g / N          P g         2 P g / N
    2      P c       P g / N          P g / N     2 P g / N     + the full gradients of at most 3 parts
    3      P c / N   P g / N          P g / N     2 P g / N     + the full weights of at most 3 parts

Compressed weights (parallel.compress_weights, ZeRO-1 and 2) have masters in every dtype. With optim.states
bf16, an element of masters and moments has 2 bytes in place of g, and weights in bf16 are their own masters.
PowerSGD keeps its errors, P g, beside the gradients; train.ema an average, of g bytes an element, beside each
master. config/optimizers.py says how many moments an optimizer has.

The modules say what a forward keeps and what a backward computes again (parallel/cost.py).
tests/plan/test_memory.py holds all of it against what a rank really holds.
"""
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from config import OPTIMIZERS
from model.block import TransformerBlock
from model.describe import PartDescription, StageDescription, workload
from model.head import OutputHead
from model.precision import accumulation_bytes, compute_bytes
from parallel.cost import RECOMPUTABLE_PARTS, Cost, Part, Workload, total
from parallel.pipeline.schedule import Op
from plan.buckets import PlannedBucket, buckets, unique_buckets
from plan.job import Job

PARTS: tuple[Part, ...] = (*RECOMPUTABLE_PARTS, "rest")
FULL_PARTS = 3  # parts whose full gradients (ZeRO-2, 3) or weights (ZeRO-3) exist at the same time


# ---- state -------------------------------------------------------------------------------------------------


def state_bytes(job: Job) -> dict[str, int]:
    """{"weights", "masters", "gradients", "optimizer"}: on the device, between two steps."""
    parallel = job.cfg.parallel
    weight_bytes = compute_bytes(job.cfg.train.dtype)
    grad_bytes = accumulation_bytes(job.cfg.train.dtype)
    every = unique_buckets(buckets(job))
    full = sum(bucket.size for bucket in every)
    owned = sum(bucket.shard_size for bucket in every)

    on_device = 0 if parallel.offload in ("optimizer", "both") else master_bytes(job)
    with_master = [bucket for bucket in every if has_separate_master(job, bucket)]
    masters = sum(bucket.shard_size for bucket in with_master)
    errors = powersgd_errors(job, every)

    weights = owned if parallel.zero == 3 else full
    grads = full if parallel.zero < 2 else owned
    return {
        "weights": weight_bytes * weights,
        "masters": on_device * masters,
        "gradients": grad_bytes * (grads + errors),
        "optimizer": on_device * moment_elements(job, every) + (ema_bytes(job, every) if on_device else 0),
    }


def host_bytes(job: Job) -> int:
    """Masters, moments and the average of the masters in host memory (parallel.offload)."""
    if job.cfg.parallel.offload not in ("optimizer", "both"):
        return 0
    return kept_bytes(job)


def kept_bytes(job: Job) -> int:
    """Masters, moments and the average of the masters, wherever they are: what a checkpoint holds."""
    every = unique_buckets(buckets(job))
    owned = sum(bucket.shard_size for bucket in every)
    return master_bytes(job) * (owned + moment_elements(job, every)) + ema_bytes(job, every)


def master_bytes(job: Job) -> int:
    """Bytes of an element of masters and moments."""
    return 2 if job.cfg.optim.states == "bf16" else accumulation_bytes(job.cfg.train.dtype)


def ema_bytes(job: Job, every: Iterable[PlannedBucket]) -> int:
    """The moving average of the masters (train.ema), in fp32 whatever optim.states is."""
    if job.cfg.train.ema is None:
        return 0
    owned = sum(bucket.shard_size for bucket in every)
    return accumulation_bytes(job.cfg.train.dtype) * owned


def moment_elements(job: Job, every: Iterable[PlannedBucket]) -> int:
    optimizer = OPTIMIZERS[job.cfg.optim.name]
    return sum(bucket.shard_size * optimizer.moments_for(bucket.is_hidden) for bucket in every)


def has_separate_master(job: Job, bucket: PlannedBucket) -> bool:
    """Whether the masters of a bucket are stored beside the weights that compute."""
    dtype, parallel = job.cfg.train.dtype, job.cfg.parallel
    if job.cfg.optim.states == "bf16":
        other_dtype = dtype != "bf16"
    else:
        other_dtype = compute_bytes(dtype) != accumulation_bytes(dtype)
    is_compressed = parallel.compress_weights != "none" and parallel.zero in (1, 2)
    is_shared = job.shards(bucket.is_expert) > 1
    return other_dtype or (is_compressed and is_shared)


def powersgd_errors(job: Job, every: Iterable[PlannedBucket]) -> int:
    """Elements of what PowerSGD has not sent yet."""
    return sum(bucket.size for bucket in every if has_powersgd_error(job, bucket))


def has_powersgd_error(job: Job, bucket: PlannedBucket) -> bool:
    parallel = job.cfg.parallel
    if parallel.compress != "powersgd" or job.shards(bucket.is_expert) == 1:
        return False
    _, factors = bucket.powersgd_elements(parallel.powersgd_rank)
    return factors > 0


def passing_bytes(job: Job) -> int:
    """The most that full gradients (ZeRO-2, 3), full weights (ZeRO-3), weights in 8 bits (fp8) and what a
    rerun begins with add during a step."""
    zero, dtype = job.cfg.parallel.zero, job.cfg.train.dtype
    of_element = 0
    if zero >= 2:
        of_element += accumulation_bytes(dtype)
    if zero == 3:
        of_element += compute_bytes(dtype)
    most = 0
    for parts in buckets(job).values():
        sizes = [sum(bucket.size for bucket in part) for part in parts]
        most = max(most, most_together(sizes, FULL_PARTS))
    return of_element * most + quantized_weight_bytes(job) + rerun_bytes(job)


def rerun_bytes(job: Job) -> int:
    """The copy of PowerSGD's errors in a step that may be computed again (runtime/rerun.py)."""
    train = job.cfg.train
    if train.rerun_every is None and not train.rerun_suspects:
        return 0
    return accumulation_bytes(train.dtype) * powersgd_errors(job, unique_buckets(buckets(job)))


def quantized_weight_bytes(job: Job) -> int:
    """Weights in 8 bits (kernels/fp8_weight.py): of all parts; under ZeRO-3 of those with full weights."""
    work = workload(job.cfg)
    of_stages: list[list[int]] = []
    for number in job.stages():
        parts = job.stage(number).parts
        of_stages.append([kept_of_weights(part.cost(work)) for part in parts])
    if job.cfg.parallel.zero == 3:
        return max(most_together(sizes, FULL_PARTS) for sizes in of_stages)
    return sum(sum(sizes) for sizes in of_stages)


def kept_of_weights(cost: Cost) -> int:
    return sum(product.kept_weight_bytes for product in cost.products)


def most_together(sizes: list[int], num_parts: int) -> int:
    """The sum of the largest `num_parts` parts that follow one another in a stage."""
    most = 0
    for first in range(len(sizes)):
        together = sizes[first:first + num_parts]
        most = max(most, sum(together))
    return most


# ---- activations -------------------------------------------------------------------------------------------


class StageActivations(NamedTuple):
    """Bytes of one microbatch in one stage.

    kept: from its forward to its backward. recomputed: what the backward adds to it for a moment, at most.
    kept_for_weights: of a backward in two parts, from the gradients of the inputs (I) to those of the weights
    (W): the operands of the weight gradients. recomputed_in_split: as `recomputed`, of an I.
    """
    kept: int
    recomputed: int = 0
    kept_for_weights: int = 0
    recomputed_in_split: int = 0


def peak_of_ops(ops: Iterable[Op], stages: Mapping[int, StageActivations]) -> int:
    """The most that a rank holds at once while it runs its ops. stages: those of the rank."""
    held = peak = 0
    for op in ops:
        stage = stages[op.stage]
        if op.kind == "F":
            held += stage.kept
            peak = max(peak, held)
        elif op.kind == "W":
            held -= stage.kept_for_weights
        else:
            is_split = op.kind == "I"
            peak = max(peak, held + (stage.recomputed_in_split if is_split else stage.recomputed))
            held -= stage.kept
            held += stage.kept_for_weights if is_split else 0
            peak = max(peak, held)
    return peak


def peak_activation_bytes(job: Job, flash: bool = False) -> int:
    """The most that a rank holds for its backwards. flash: see Workload."""
    work = workload(job.cfg, flash=flash)
    stages: dict[int, StageActivations] = {}
    for number in job.stages():
        stages[number] = stage_activations(job.stage(number), work)
    ops = job.schedule.order[job.pp]
    return peak_of_ops(ops, stages)


@lru_cache(maxsize=1 << 12)
def stage_activations(stage: StageDescription, work: Workload) -> StageActivations:
    cost = stage.cost(work)
    kept = cost.saved_bytes()
    repeats = Counter(stage.parts)
    operands = sum(n * weight_grad_operands(part.cost(work), work) for part, n in repeats.items())
    recomputed = recomputed_at_first(stage.parts, work)

    # in the block that an I reaches last, all others have their operands, and have freed what they kept
    last = last_block(stage.parts)
    in_split = recomputed
    if last is not None and last.recompute and cost.recomputed is not None:
        of_block = last.cost(work)
        others = operands - weight_grad_operands(of_block, work)
        in_split = max(in_split, others + recomputed_of(of_block) - kept)
    return StageActivations(kept, recomputed, operands, in_split)


def weight_grad_operands(cost: Cost, work: Workload) -> int:
    """The input and the output's gradient of each matrix product, each tensor once."""
    nbytes = 0
    for product in cost.products:
        if product.grads_in_forward:
            continue
        features = product.inner + product.columns
        if product.fp8 and product.count == 1:  # experts quantize theirs in the W
            nbytes += features * (product.rows + product.scales * work.accumulation_bytes)
        else:
            nbytes += (features * product.rows - product.shared_operands) * work.compute_bytes
    return nbytes


def recomputed_at_first(parts: tuple[PartDescription, ...], work: Workload) -> int:
    """The bytes that a stage's backward computes again in its last block, with which it begins, less those
    that it has freed by then."""
    last = last_block(parts)
    if last is None or last.cost(work).recomputed is None:
        return 0
    cost = last.cost(work)
    head = parts[-1].module
    freed = loss_bytes(head, work) if isinstance(head, OutputHead) else 0
    if last.recompute:  # the block's input is kept already
        added = recomputed_of(cost) - cost.saved_bytes()
    else:
        added = recomputed_of(cost, "core") - kept_of_mlp_half(last, work)
    return max(0, added - freed)


def last_block(parts: tuple[PartDescription, ...]) -> TransformerBlock | None:
    blocks = [part.module for part in parts if isinstance(part.module, TransformerBlock)]
    return blocks[-1] if blocks else None


def recomputed_of(cost: Cost, *parts: Part) -> int:
    """Bytes that a backward computes again: of these parts; of all without one."""
    return 0 if cost.recomputed is None else cost.recomputed.saved_bytes(*parts)


def kept_of_mlp_half(block: TransformerBlock, work: Workload) -> int:
    """Bytes that a block's second half keeps under selective recompute: the first that its backward frees."""
    kept: list[Part] = [part for part in PARTS if part not in block.recomputed_parts]
    half = total((block.mlp_norm.cost(work), block.mlp.cost(work)))
    mask = block.hidden_elements(work) if block.dropout else 0
    return half.saved_bytes(*kept) + mask


def loss_bytes(head: OutputHead, work: Workload) -> int:
    """Bytes that the output head keeps without multi-token prediction."""
    return (head.norm.cost(work) + head.cross_entropy_cost(work)).saved_bytes()
