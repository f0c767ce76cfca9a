"""The bytes held by a rank of another framework, for comparison with published runs.

Shards, stages and schedules are the planner's. The differences come from the frameworks' own documentation,
and no number is fitted:

- Megatron-LM without flash attention keeps sbh (10 + 24/t + 5as/(ht)) bytes per layer and microbatch, with
  sequence parallelism sbh (34/t + 5as/(ht)); selective recompute drops 5as/(ht), full recompute only keeps
  the layer's input 2sbh (arXiv 2205.05198, table 2). The last stage keeps the input of its norm and of the
  output layer, and logits in fp32 (section 4.3).
- Megatron-DeepSpeed stores fp16 gradients in fp16. Its bf16 optimizer adds 4 bytes per parameter, which are
not
  sharded (bigscience tr11-176B-ml/chronicles-prequel.md, "Rebalancing layers"). Its pipeline keeps the output
  of each stage for the backward (deepspeed/runtime/pipe/engine.py).
- DeepSpeed ZeRO-3 shards fp16 weights and gradients and fp32 masters and moments: 16 bytes. At most 1e9
elements
  of full weights exist at a time, and 5e8 of gradients (stage3_max_live_parameters, reduce_bucket_size).
- PyTorch FSDP shards fp32 weights, gradients and moments, 16 bytes, and gathers the next block during compute
  of the current one; a block's gradient exists in the compute dtype until it is reduced.
"""
from dataclasses import dataclass, replace

from config import Config
from model.precision import compute_bytes
from plan.buckets import PlannedBucket, buckets, max_consecutive_sum, unique_buckets
from plan.job import Job
from plan.memory import (
    StageActivations,
    passing_bytes,
    peak_activation_bytes,
    peak_of_ops,
    state_bytes,
)
from plan.search import TRANSIENT_BYTES

MASTER_BYTES = 12  # master and two moments of AdamW, in fp32
HALF = 2  # bytes of fp16 and bf16


@dataclass(frozen=True)
class Framework:
    """Differences in how a framework stores a job.

    grad_bytes: (train.dtype, bytes of a gradient's element); other dtypes are as ours.
    shards_16_bytes: ZeRO-3 holds 16 bytes of each owned element, whatever the dtype.
    live_weights, live_grads: full elements at a time under ZeRO-3; 0 means those of two blocks and of one.
    keeps_outputs: each stage keeps its output for the backward.
    """
    grad_bytes: tuple[tuple[str, int], ...] = ()
    shards_16_bytes: bool = False
    live_weights: int = 0
    live_grads: int = 0
    keeps_outputs: bool = False


MEGATRON = Framework()
# GPU memory beyond tensors: context, communicators (of unknown groups), the allocator's gaps.
RESERVED_BYTES = 3e9
MEGATRON_DEEPSPEED = Framework(grad_bytes=(("fp16", HALF), ("bf16", HALF + 4)), keeps_outputs=True)
DEEPSPEED_ZERO3 = Framework(shards_16_bytes=True, live_weights=10**9, live_grads=5 * 10**8)
FSDP = Framework(shards_16_bytes=True)
# All others store like Megatron-LM: 18 bytes per parameter, masters and moments sharded under ZeRO.
FRAMEWORKS = {
    "Megatron-DeepSpeed": MEGATRON_DEEPSPEED,
    "DeepSpeed ZeRO-3": DEEPSPEED_ZERO3,
    "llm-foundry/Composer FSDP": FSDP,
    "torchtitan": FSDP,
}


def held_bytes(job: Job, framework: str) -> float:
    """Return the bytes that the fullest rank holds, including the GPU's overhead."""
    how = FRAMEWORKS.get(framework, MEGATRON)
    stride = job.layout.world // job.layout.pp
    fullest = 0
    for pipeline_rank in range(job.layout.pp):
        here = replace(job, rank=pipeline_rank * stride)
        state = framework_state_bytes(here, how)
        activations = framework_activation_bytes(here, how)
        fullest = max(fullest, state + activations)
    return fullest + TRANSIENT_BYTES + RESERVED_BYTES


# ---- state -------------------------------------------------------------------------------------------------


def framework_state_bytes(job: Job, how: Framework) -> int:
    """Return the bytes of weights, gradients, masters and moments, including temporary full ones."""
    grad_bytes = dict(how.grad_bytes).get(job.cfg.train.dtype)
    every = unique_buckets(buckets(job))
    owned = sum(bucket.shard_size for bucket in every)
    if how.shards_16_bytes and job.cfg.parallel.zero == 3:
        return 16 * owned + live_bytes(job, every, how)
    if grad_bytes is None:
        return sum(state_bytes(job).values()) + passing_bytes(job)
    full = sum(bucket.size for bucket in every)
    return (HALF + grad_bytes) * full + MASTER_BYTES * owned


def live_bytes(job: Job, every: list[PlannedBucket], how: Framework) -> int:
    """Return the bytes of full weights and gradients under ZeRO-3."""
    element_bytes = compute_bytes(job.cfg.train.dtype)
    if how.live_weights:
        total = sum(bucket.size for bucket in every)
        largest = max(spec.numel for bucket in every for spec in bucket.specs)  # gathered as a whole
        weights = min(total, max(how.live_weights, largest))
        grads = min(total, max(how.live_grads, largest))
        return element_bytes * (weights + grads)
    sizes = [sum(bucket.size for bucket in part) for stage in buckets(job).values() for part in stage]
    return round(element_bytes * (max_consecutive_sum(sizes, 2) + max_consecutive_sum(sizes, 1)))


# ---- activations -------------------------------------------------------------------------------------------


def framework_activation_bytes(job: Job, how: Framework) -> int:
    """Return the activation bytes: like ours with flash attention, otherwise like Megatron-LM's."""
    cfg = job.cfg
    if getattr(cfg.model.mixer, "kernel", None) != "reference":
        return peak_activation_bytes(job)
    stages = {number: megatron_stage(job, number, how) for number in job.stages()}
    return peak_of_ops(job.schedule.order[job.pp], stages)


def megatron_stage(job: Job, number: int, how: Framework) -> StageActivations:
    """Return the activations of one microbatch in one stage."""
    cfg = job.cfg
    first, last = job.cuts[number]
    of_block = megatron_block_bytes(cfg, cfg.parallel.recompute)
    kept = (last - first) * of_block
    recomputed = megatron_block_bytes(cfg, "none") - of_block
    if how.keeps_outputs and job.layout.pp > 1:
        kept += HALF * hidden_elements(cfg)
    if last == cfg.model.layers and job.layout.pp > 1:
        kept += megatron_head_bytes(cfg)
    return StageActivations(kept, forward=kept, backward=recomputed)


def hidden_elements(cfg: Config) -> int:
    """Return sbh: elements of the hidden states of one microbatch."""
    return cfg.train.seq_len * cfg.train.micro_batch * cfg.model.hidden


def megatron_block_bytes(cfg: Config, recompute: str) -> int:
    """Return the bytes that a layer keeps per microbatch (arXiv 2205.05198, table 2)."""
    sbh = hidden_elements(cfg)
    if recompute == "full":
        return HALF * sbh

    tp = cfg.parallel.tp
    outside = 10 * sbh // (tp if cfg.parallel.sp else 1)  # norms, dropout masks, inputs of tp regions
    inside = 24 * sbh // tp
    if recompute == "selective":
        return outside + inside
    scores = cfg.model.mixer.heads * cfg.train.seq_len**2 * cfg.train.micro_batch
    return outside + inside + 5 * scores // tp


def megatron_head_bytes(cfg: Config) -> int:
    """Return the bytes of the inputs of the last norm and of the output layer, and of the logits (section
    4.3)."""
    tp = cfg.parallel.tp
    inputs = 4 * hidden_elements(cfg) // (tp if cfg.parallel.sp else 1)
    logits = 4 * cfg.train.seq_len * cfg.train.micro_batch * (cfg.model.vocab or 0) // tp
    return inputs + logits
