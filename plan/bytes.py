"""Calls and bytes on the wire of one training step, by process group and verb.

They exactly equal the counts of the ledger in parallel/wire/comm.py, for every layout
(tests/parallel/wire/test_ledger.py): the payload of the larger side of each exchange. On a ring an all-reduce
sends it twice, a reduce-scatter or an all-gather once (`ring_bytes`). What modules exchange in a microbatch
is recorded (plan/parts.py); this file adds the communication of sharding, the pipeline and the loop.

    n gradient bytes, w weight bytes of a bucket; A = b s d activation bytes; m microbatches
    data parallel     all-reduce n                                     weight 2 n
    ZeRO-1            reduce-scatter n + all-gather w                  n + w <= 2 n
    ZeRO-2            m reduce-scatters n + all-gather w
    ZeRO-3            m (reduce-scatter n + 2 all-gathers w); w once for the embedding, the head and, if a
                      backward follows, a stage's last block; m = 1: <= 3 n = 1.5 x 2 n
    int8, fp8         compress: all-to-all n' instead of a reduce-scatter, all-to-all + all-gather n'
                      instead of an all-reduce; compress_weights: all-gather w'; n', w': elements x
                      (1 + 4/block) bytes
    powersgd          2 all-reduces: r m for a matrix [m, n] and all else whole; r n for a matrix
    tensor            4 all-reduces A per block and microbatch         weight 8 A
    + sequence        4 all-gathers + 4 reduce-scatters A              weight 8 A
    + async_tp        6 of them (all but the reduce-scatters of input gradients) as tp - 1 sends A / tp
    pipeline          A (sp: A / tp) per boundary, direction and microbatch
    + latent          q_rank: 6 A + 2 A' per block (A': of the latents), else 8 A + 2 A'
    context, ring     (n-1) (4 K + 2 K') per layer and microbatch: keys and values both ways, their gradients
                      once; K: bytes of a rank's keys, K': the same in fp32
    context, ulysses  4 Q + 4 K per layer and microbatch; Q: bytes of a rank's queries
    experts           4 k etp A / tp, and counts, per MoE layer and microbatch; 2 A over tp without sp
    + ep_chunks       the same bytes, with the row exchanges split into that many messages
    + ep_bound        ep_bound times the bytes; a step that is computed again is not counted
    + compress_tokens in two of the four, d + ceil(d / 128) g bytes for d channels; g: 4, in fp64 8
    recompute full    repeats the communication of a block's forward, except for its last sum if nothing after
                      it is kept
    recompute norm    with sp, 2 more all-gathers A per block and microbatch

Under context parallelism b s is a rank's share of the tokens, s / cp of each sequence.
"""
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from config import Config, modules_ahead
from model.precision import accumulation_bytes, compute_bytes
from model.router import ROUTER_STATS, has_experts, mixture
from model.shared_keys import widths_between_stages
from parallel.pipeline.schedule import Op, StagePlacement
from parallel.topology.dims import GROUP_AXES, ParallelDims
from parallel.wire.compress import CODECS, SCALE_BYTES
from plan.buckets import BucketsOfParts, PlannedBucket, buckets, trained_buckets
from plan.job import Job, has_row_bound
from plan.parts import records_of_stage

Ledger = dict[tuple[str, str], tuple[int, int]]  # (group, verb): (calls, bytes)

COUNTER_BYTES = 8  # of a router statistic


def ring_bytes(ledger: Ledger) -> int:
    """Return the bytes that a rank sends per (N-1)/N on a ring: an all-reduce counts twice."""
    total = 0
    for (_, verb), (_, nbytes) in ledger.items():
        total += nbytes * (2 if verb == "all_reduce" else 1)
    return total


def group_size(layout: ParallelDims, group: str) -> int:
    """Return the number of ranks in a group of the mesh."""
    if group == "embedding_ends":
        return min(layout.pp, 2)
    return layout.group_size(*GROUP_AXES[group])


@dataclass(frozen=True)
class StepLedger:
    """Accumulates the exchanges of one rank in a step."""
    job: Job
    counts: Ledger = field(default_factory=dict)

    def add(self, group: str, verb: str, nbytes: int, calls: int = 1) -> None:
        """Add `calls` exchanges of nbytes each. A group of one rank has none."""
        if calls and group_size(self.job.layout, group) > 1:
            calls_before, bytes_before = self.counts.get((group, verb), (0, 0))
            bytes_now = bytes_before + calls * nbytes
            self.counts[group, verb] = calls_before + calls, bytes_now

    # ---- bytes of buckets

    @property
    def grad_bytes(self) -> int:
        """Bytes per gradient element."""
        return accumulation_bytes(self.job.cfg.train.dtype)

    def coded_bytes(self, elements: int) -> int:
        """Return the bytes of elements coded in 8 bits with their scales (parallel/wire/compress.py)."""
        return elements + elements // self.job.cfg.parallel.compress_block * SCALE_BYTES

    def weight_bytes(self, bucket: PlannedBucket) -> int:
        """Return the bytes of a bucket's weights in an all-gather."""
        if self.job.cfg.parallel.compress_weights != "none":
            return self.coded_bytes(bucket.size)
        return bucket.size * compute_bytes(self.job.cfg.train.dtype)


def step_bytes(job: Job) -> Ledger:
    """Count one step of one rank (train.train_step), scalars included."""
    ledger = StepLedger(job)
    planned = buckets(job)
    add_scalars(ledger)
    for stage, parts in planned.items():
        ops = job.schedule.order[job.pp]
        kinds = [op.kind for op in ops if op.stage == stage]
        add_modules(ledger, stage, microbatches=kinds.count("F"))
        if job.cfg.parallel.zero:
            add_sharding(ledger, parts, stage, kinds)

    every = trained_buckets(planned)
    for bucket, repeats in Counter(every).items():
        add_end_of_step(ledger, bucket, repeats)
    add_partial_grads(ledger, every)
    add_pipeline(ledger)
    return ledger.counts


def add_scalars(ledger: StepLedger) -> None:
    """Add the loss, the gradient norm, the router statistics, and rows over a bound."""
    cfg = ledger.job.cfg
    model = cfg.model
    groups = ["dp_cp", "pp", "model_parallel"]  # the loss is summed over the first two; the norm
    if cfg.parallel.zero:
        groups.append("fsdp")
    experts = mixture(model)
    if experts:
        groups.append("expert_model_parallel")
        if cfg.parallel.zero:
            groups.append("expert_fsdp")
    for group in groups:
        ledger.add(group, "all_reduce", ledger.grad_bytes)

    if experts:
        layers = range(model.layers + modules_ahead(model))
        mixtures = sum(has_experts(model, layer) for layer in layers)
        statistics = mixtures * (experts.experts + len(ROUTER_STATS))
        ledger.add("world", "all_reduce", statistics * COUNTER_BYTES)
    if has_row_bound(ledger.job):
        ledger.add("world", "all_reduce", COUNTER_BYTES)


def add_modules(ledger: StepLedger, stage: int, microbatches: int) -> None:
    """Add the exchanges of a stage's modules."""
    job = ledger.job
    for record, repeats in Counter(records_of_stage(job, stage)).items():
        first = min(1, microbatches)
        times_of_phases = (
            (record.first, first),
            (record.forward, microbatches - first),
            (record.backward, microbatches),
        )
        for phase, times in times_of_phases:
            for one in phase.exchanges:
                ledger.add(one.group, one.verb, round(one.nbytes), times * repeats)


# ---- pipeline ----------------------------------------------------------------------------------------------


def boundary_bytes(job: Job) -> list[int]:
    """Return the bytes received by each stage for a microbatch, on one rank: hidden states, and keys shared
    by layers on both sides (model/shared_keys.py). The first stage receives nothing."""
    widths = widths_between_stages(job.cfg, job.cuts)
    return [0, *(width * channel_bytes(job.cfg) for width in widths[1:])]


def shared_key_bytes(job: Job, stage: int) -> int:
    """Return the part of boundary_bytes for keys that a stage shares with earlier ones."""
    hidden = job.cfg.model.hidden * channel_bytes(job.cfg)
    return max(0, boundary_bytes(job)[stage] - hidden)


def channel_bytes(cfg: Config) -> int:
    """Return the bytes of one channel of a microbatch's hidden states, on one rank."""
    tokens = cfg.train.micro_batch * cfg.train.seq_len // cfg.parallel.cp
    if cfg.parallel.sp:
        tokens //= cfg.parallel.tp
    return tokens * compute_bytes(cfg.train.dtype)


def add_pipeline(ledger: StepLedger) -> None:
    job = ledger.job
    nbytes = boundary_bytes(job)
    for reader, sends in sends_by_reader(job.schedule.order[job.pp], job.schedule.rank_of_stage).items():
        ledger.add("pp", "send", nbytes[reader], sends)


def sends_by_reader(ops: Iterable[Op], rank_of_stage: StagePlacement) -> Counter[int]:
    """Return {stage: sends of one rank over the boundary before it}. Their number equals that of
    add_transfers, which needs the order of all ranks."""
    ops_of_stage = Counter((op.kind, op.stage) for op in ops)
    sends: Counter[int] = Counter()
    for (kind, stage), repeats in ops_of_stage.items():
        target = stage + {"F": 1, "B": -1, "I": -1, "W": 0}[kind]
        if 0 <= target < len(rank_of_stage) and rank_of_stage[target] != rank_of_stage[stage]:
            sends[max(stage, target)] += repeats
    return sends


# ---- sharding, during the step -----------------------------------------------------------------------------


def add_sharding(ledger: StepLedger, parts: BucketsOfParts, stage: int, kinds: list[str]) -> None:
    """Add one stage under ZeRO: reduce-scatters of gradients, and under ZeRO-3 all-gathers of weights.
    `kinds` are its ops, in order."""
    job = ledger.job
    zero = job.cfg.parallel.zero
    first, last = job.cuts[stage]
    head = len(parts) - 1 if last == job.cfg.model.layers else None
    last_block = len(parts) - 1 if head is None else head - 1
    backwards = kinds.count("B") + kinds.count("W")

    for index, part in enumerate(parts):
        is_lookup = index == 0 and first == 0
        has_backward = job.parts[stage][index].has_backward and not is_lookup
        gathers = count_gathers(kinds, has_backward=has_backward, is_head=index == head,
                                is_last_block=index == last_block)
        for bucket in part:
            is_shared = bucket.num_users > 1  # a table, gathered at its first part: once per step
            if is_shared and not is_lookup:
                continue
            once = zero == 1 or is_shared
            if bucket.trains:
                add_reduce_scatter(ledger, bucket, calls=1 if once else backwards)
            if zero == 3:
                group = shard_group(bucket)
                ledger.add(group, "all_gather", ledger.weight_bytes(bucket), 1 if is_shared else gathers)


def shard_group(bucket: PlannedBucket) -> str:
    return "expert_fsdp" if bucket.is_expert else "fsdp"


def add_reduce_scatter(ledger: StepLedger, bucket: PlannedBucket, calls: int) -> None:
    parallel = ledger.job.cfg.parallel
    group = shard_group(bucket)
    nbytes = bucket.size * ledger.grad_bytes
    if parallel.compress in CODECS:
        ledger.add(group, "all_to_all", ledger.coded_bytes(bucket.size), calls)
    elif parallel.reduce == "ring":
        ranks = ledger.job.shards(bucket.is_expert)
        ledger.add(group, "send", nbytes // ranks, calls * (ranks - 1))
    else:
        ledger.add(group, "reduce_scatter", nbytes, calls)


def count_gathers(kinds: list[str], *, has_backward: bool, is_head: bool, is_last_block: bool) -> int:
    """Return how often ZeRO-3 gathers a part's weights in a step (parallel/sharding/zero.py).

    After a forward, the head's weights stay full, and the last block's if its backward follows; after an I
    any part's do. The backward of a lookup reads none, and parts below all that trains have none.
    """
    count = 0
    is_full = False
    for kind, next_kind in zip(kinds, [*kinds[1:], ""]):
        needs_weights = kind == "F" or (kind in ("B", "I") and has_backward)
        if needs_weights:
            count += not is_full
            backward_follows = is_last_block and has_backward and next_kind in ("B", "I")
            is_full = kind == "I" or (kind == "F" and (is_head or backward_follows))
        elif kind == "W":
            is_full = False
    return count


# ---- sharding, at the end of the step ----------------------------------------------------------------------


def add_end_of_step(ledger: StepLedger, bucket: PlannedBucket, repeats: int) -> None:
    """Add the sum over replicas, or over all data-parallel ranks without ZeRO, and the all-gather of updated
    weights, for `repeats` such buckets."""
    parallel = ledger.job.cfg.parallel
    if parallel.zero in (1, 2):
        ledger.add(shard_group(bucket), "all_gather", ledger.weight_bytes(bucket), repeats)
    if parallel.zero:
        add_all_reduce(ledger, "dp_replicate", bucket.shard_size, repeats)
        return

    group = "expert_dp" if bucket.is_expert else "dp_cp"
    if parallel.compress == "powersgd":
        first, second = bucket.powersgd_elements(parallel.powersgd_rank)
        if second:
            ledger.add(group, "all_reduce", first * ledger.grad_bytes, repeats)
            ledger.add(group, "all_reduce", second * ledger.grad_bytes, repeats)
            return
    add_all_reduce(ledger, group, bucket.size, repeats)


def add_all_reduce(ledger: StepLedger, group: str, elements: int, repeats: int) -> None:
    """Add a sum of gradients over a data-parallel group, as in parallel/wire/algorithms.py."""
    job = ledger.job
    parallel = job.cfg.parallel
    if parallel.compress in CODECS:
        ledger.add(group, "all_to_all", ledger.coded_bytes(elements), repeats)
        ledger.add(group, "all_gather", ledger.coded_bytes(elements), repeats)
        return

    nbytes = elements * ledger.grad_bytes
    ranks = job.layout.group(job.rank, *GROUP_AXES[group])
    size = len(ranks)
    if parallel.reduce == "collective":
        ledger.add(group, "all_reduce", nbytes, repeats)
    elif parallel.reduce == "ring":
        ledger.add(group, "send", nbytes // size, repeats * 2 * (size - 1))
    elif parallel.reduce == "server":
        is_server = job.rank == ranks[0]
        ledger.add(group, "send", nbytes, repeats * (size - 1) if is_server else repeats)
    else:  # hierarchy: a ring within the node, then one across nodes
        in_node = size
        if parallel.node:
            node = job.rank // parallel.node
            in_node = sum(rank // parallel.node == node for rank in ranks)
        nodes = size // in_node
        ledger.add(group, "send", nbytes // in_node, repeats * 2 * (in_node - 1))
        ledger.add(group, "send", nbytes // size, repeats * 2 * (nodes - 1))


def add_partial_grads(ledger: StepLedger, every: list[PlannedBucket]) -> None:
    """Add gradients that are partial over tp, and those of a table at both ends of the pipeline."""
    for axis in ("tp", "embedding_ends"):
        elements = sum(bucket.partial_elements(axis) for bucket in every)
        if elements:
            ledger.add(axis, "all_reduce", elements * ledger.grad_bytes)
