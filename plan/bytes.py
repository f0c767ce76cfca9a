"""Calls and bytes on the wire of one training step, by process group and verb, as closed forms (no torch).

They equal what parallel/comm.py's ledger counts, exactly, for every layout (tests/parallel/test_ledger.py): the payload of
the exchange's larger side. On a ring an all-reduce sends that twice, a reduce-scatter or an all-gather once (`weight`).

    n gradient bytes, w weight bytes of a bucket; A = b s d activation bytes; m microbatches
    data parallel     all-reduce n                                     weight 2 n
    ZeRO-1            reduce-scatter n + all-gather w                  n + w <= 2 n
    ZeRO-2            m reduce-scatters n + all-gather w
    ZeRO-3            m (reduce-scatter n + 2 all-gathers w), w of the embedding, the head and, where a backward follows, a
                      stage's last block once; m = 1: <= 3 n = 1.5 x 2 n
    int8, fp8         compress: all-to-all n' for a reduce-scatter, all-to-all + all-gather n' for an all-reduce; compress_weights: all-gather w';
                      n', w': elements x (1 + 4/block) bytes
    powersgd          2 all-reduces: r m a matrix [m, n] and all else whole; r n a matrix
    tensor            4 all-reduces A a block and microbatch           weight 8 A
    + sequence        4 all-gathers + 4 reduce-scatters A              weight 8 A
    pipeline          A (sp: A / tp) a boundary, direction and microbatch
    + latent          q_rank: 6 A + 2 A' a block (A': of the latents), else 8 A + 2 A'
    context, ring     (n-1) (4 K + 2 K') a layer and microbatch: keys and values both ways, their gradients once
    experts           4 k etp A / tp, and small change, a mixture layer and microbatch (parallel/expert.py); 2 A over tp without sp
    recompute full    once more what a forward exchanges in a block, but for its last sum where nothing after it is kept
    recompute norm    with sp, 2 all-gathers A more a block and microbatch, beside the GEMMs of the input's gradient
    fp8               tensorwise, rowwise: the largest elements of what a scale spans, where it is cut: a number a tensor, row or
                      feature (scale_bytes); blockwise none
    context, ulysses  4 Q + 4 K a layer and microbatch; Q, K: bytes of a rank's queries and keys, K': of its keys in fp32
Under context parallelism b s is a rank's share of the tokens, s / cp of each sequence.
"""
from collections import defaultdict
from math import prod

from config import Config, fp8_recipe, head_dim, in_fp8, is_moe, kv_heads, moe_ffn, of_stage, padded_vocab, remakes, value_dim
from parallel.layout import SPANS
from parallel.schedule import lower
from plan.parts import BYTES, CODED, Bucket, Job, buckets, unique

CHUNK, BLOCK = 1 << 25, 1 << 21  # kernels/cross_entropy.py: bytes of logits at a time, elements of a softmax

Ledger = dict[tuple[str, str], tuple[int, int]]  # (group, verb): (calls, bytes)


def weight(ledger: Ledger) -> int:
    """Bytes that a rank sends per (N-1)/N on a ring: an all-reduce counts twice."""
    return sum(n * (2 if verb == "all_reduce" else 1) for (_, verb), (_, n) in ledger.items())


def step_bytes(job: Job) -> Ledger:
    """One step of one rank (train.train_step), scalars included."""
    out: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    L, p = job.layout, job.cfg.parallel
    sizes = {name: prod(map(L.size, axes)) for name, axes in SPANS.items()} | {"tied": 2 if L.pp > 1 else 1}

    def add(group: str, verb: str, calls: int, n: int) -> None:
        """`calls` exchanges of n bytes each."""
        if sizes[group] > 1 and calls:
            out[group, verb][0] += calls
            out[group, verb][1] += calls * n

    stages, (c, g) = buckets(job), BYTES[job.cfg.train.dtype]
    add("loss", "all_reduce", 1, 8)  # counted tokens
    m, every_layer = job.cfg.model, range(job.cfg.model.layers + job.cfg.model.mtp)
    norms = ("model", "shard", *(("emodel", "eshard") if m.experts else ()))
    for group in ("loss", "pp", *(n for n in norms if p.zero or "model" in n)):
        add(group, "all_reduce", 1, g)  # the loss; the norm
    for stage, parts in stages.items():
        kinds = [op.kind for op in job.schedule.order[job.pp] if op.stage == stage]
        tensor_bytes(job, stage, kinds.count("F"), add)
        scale_bytes(job, stage, kinds.count("F"), add)
        context_bytes(job, stage, kinds.count("F"), add)
        mixture_bytes(job, stage, kinds.count("F"), add)
        share_bytes(job, parts, stage, kinds, add)
    if m.experts:
        add("world", "all_reduce", 1, sum(is_moe(m, i) for i in every_layer) * (m.experts + 4) * 8)  # what the routers tell
    every = unique(stages)
    for b in every:
        if p.zero in (1, 2):
            add("eshard" if b.expert else "shard", "all_gather", 1, b.size * c if p.compress_weights == "none" else coded(job, b.size))
        if p.zero:
            reduce_bytes(job, "dp_rep", b.share, add)
        elif p.compress == "powersgd" and any(factors := [x.factors(p.powersgd_rank) for x in b.params]):
            group = "eloss" if b.expert else "loss"
            add(group, "all_reduce", 1, sum(f[0] if f else x.numel for x, f in zip(b.params, factors)) * g)
            add(group, "all_reduce", 1, sum(f[1] for f in factors if f) * g)
        else:
            reduce_bytes(job, "eloss" if b.expert else "loss", b.size, add)
    for axis in ("tp", "tied"):
        n = sum(b.partial(axis) for b in every)
        add(axis, "all_reduce", n > 0, n * g)
    sends = [op for op in lower(job.schedule.order, job.schedule.place)[job.pp] if op.kind in ("SF", "SB")]
    add("pp", "send", len(sends), activation(job.cfg) // (L.tp if p.sp else 1))
    return {key: tuple(value) for key, value in out.items()}


def coded(job: Job, n: int) -> int:
    """Bytes of n elements in 8 bits with their scales in fp32 (parallel/compress.py)."""
    return n + n // job.cfg.parallel.compress_block * 4


def activation(cfg: Config) -> int:
    """Bytes of [b, s/cp, d]."""
    return cfg.train.micro_batch * cfg.train.seq_len // cfg.parallel.cp * cfg.model.hidden * BYTES[cfg.train.dtype][0]


def tensor_bytes(job: Job, stage: int, m: int, add) -> None:
    """Over tp, for the m microbatches of a stage."""
    (first, last), L, n = job.cuts[stage], job.layout, activation(job.cfg)
    model, blocks, moe, cfg = job.cfg.model, len(layers(job, stage)), sparse(job, stage), of_stage(job.cfg, stage)
    ends = (first == 0) + (last == model.layers) * (1 + 2 * model.mtp)  # the embedding is left, the head entered; MTP: both again
    leaves = 2 * blocks - (0 if model.shared_experts else moe)  # a block: two regions, a mixture's second is its shared experts
    enters, latent = leaves, 0
    if model.kv_rank:  # the latents enter; with q_rank instead of the hidden state, else beside it
        enters -= blocks * (model.q_rank is not None)
        latent = n // model.hidden * ((model.q_rank or 0) + model.kv_rank + model.rope_dim)
    full, kept = cfg.parallel.recompute == "full", bool(model.dropout)  # made again: a block's last sum only if something after it is kept
    left = full * ((blocks - moe) * (1 + kept) + moe * (1 + bool(model.shared_experts)))
    if job.cfg.parallel.sp:  # each region entered and left, forward and backward
        add("tp", "all_gather", m * (leaves + enters * (1 + (full or remakes(cfg, "norm"))) + ends), n)
        add("tp", "reduce_scatter", m * (leaves + enters + left + ends), n)
        add("tp", "all_gather", m * blocks * (1 + full) * (latent > 0), latent)
        add("tp", "reduce_scatter", m * blocks * (latent > 0), latent)
    else:
        add("tp", "all_reduce", m * (leaves + enters + left + ends), n)
        add("tp", "all_reduce", m * blocks * (latent > 0), latent)
        add("tp", "all_gather", m * moe * (2 + full * kept), n)  # a mixture's outputs, and the gradients of its inputs
    if model.qk_norm_whole:  # a number a token for q and one for k, forward and backward
        c, g = BYTES[job.cfg.train.dtype]
        add("tp", "all_reduce", m * (4 + 2 * full) * blocks, n // model.hidden // c * g)
    if last == model.layers:
        rows = [r for _ in range(m * (1 + model.mtp)) for r in softmax_rows(job)]
        for r in set(rows):
            add("tp", "all_gather", rows.count(r), L.tp * 2 * r * BYTES[job.cfg.train.dtype][1])


def scale_bytes(job: Job, stage: int, m: int, add) -> None:
    """What fp8's scales exchange over tp and cp (kernels/fp8_linear.py), for the m microbatches of a stage."""
    cfg, L, g = of_stage(job.cfg, stage), job.layout, BYTES[job.cfg.train.dtype][1]
    k, recipe = cfg.model, fp8_recipe(cfg.train)
    if recipe not in ("tensorwise", "rowwise"):
        return
    here = [is_moe(k, i) for i in layers(job, stage) if in_fp8(cfg, i)]
    rows, forward = cfg.train.micro_batch * cfg.train.seq_len // L.cp, 1 + (cfg.parallel.recompute == "full")
    queries = k.heads * head_dim(k) + (0 if k.kv_rank else 2 * kv_heads(k) * head_dim(k))
    columns = [(k.hidden, queries // L.tp, len(here))] if not k.q_rank else []  # (inputs, outputs on this rank, blocks that have it)
    heads = [(k.heads * value_dim(k) // L.tp, k.hidden, len(here))]
    for width, blocks in ((k.ffn, here.count(False)), (k.shared_experts * moe_ffn(k), here.count(True) * bool(k.shared_experts))):
        columns.append((k.hidden, width * (2 if k.activation == "swiglu" else 1) // L.tp, blocks))
        heads.append((width // L.tp, k.hidden, blocks))
    for (ins, outs, blocks), out_cut in [(c, True) for c in columns] + [(h, False) for h in heads]:
        blocks, one = m * blocks, recipe == "tensorwise"
        add("tp", "all_reduce", blocks * forward * (one or not out_cut), (1 if one else outs) * g)  # W
        add("tp", "all_reduce", blocks * forward * (not out_cut), (1 if one else rows) * g)  # x
        add("cp", "all_reduce", blocks * forward, (1 if one else ins) * g)
        add("tp", "all_reduce", blocks * out_cut, (1 if one else rows) * g)  # dy
        add("tp", "all_reduce", blocks * (out_cut and not one), ins * g)  # W, the other way
        add("cp", "all_reduce", blocks, (1 if one else outs) * g)


def layers(job: Job, stage: int) -> list[int]:
    """Blocks of a stage, those of multi-token prediction too."""
    n = job.cfg.model.layers
    return [*range(*job.cuts[stage]), *(range(n, n + job.cfg.model.mtp) if job.cuts[stage][1] == n else ())]


def sparse(job: Job, stage: int) -> int:
    """Mixture layers of a stage."""
    return sum(is_moe(job.cfg.model, i) for i in layers(job, stage))


def mixture_bytes(job: Job, stage: int, m: int, add) -> None:
    """Over experts and tokens (parallel/expert.py, model/moe.py), for the m microbatches of a stage; dropless."""
    cfg, L, (c, g) = of_stage(job.cfg, stage), job.layout, BYTES[job.cfg.train.dtype]
    t, k, times = cfg.train, cfg.model, m * sparse(job, stage)
    rows, experts = t.micro_batch * t.seq_len // L.cp // L.tp * k.top_k * L.etp, k.experts or 0
    full = cfg.parallel.recompute == "full"
    add("experts", "all_to_all", times * (1 + full), L.etp * experts * 8)
    add("experts", "all_to_all", times * (4 + full * (2 if k.dropout else 1)), rows * k.hidden * c)
    add("experts", "all_to_all", times * (2 + full), rows * g)
    if k.aux_loss and k.aux_kind != "global":
        add("tokens", "all_reduce", times * (1 + full), (t.micro_batch if k.aux_kind == "sequence" else 1) * experts * g)


def context_bytes(job: Job, stage: int, m: int, add) -> None:
    """Over cp (parallel/ring.py, parallel/ulysses.py), for the m microbatches of a stage."""
    L, cfg, times = job.layout, job.cfg, m * len(layers(job, stage))
    tokens, (c, g) = cfg.train.micro_batch * cfg.train.seq_len // L.cp, BYTES[cfg.train.dtype]
    heads, kv = tokens * cfg.model.heads // L.tp, tokens * max(1, kv_heads(cfg.model) // L.tp)
    q, k, v, out = heads * head_dim(cfg.model), kv * head_dim(cfg.model), kv * value_dim(cfg.model), heads * value_dim(cfg.model)
    again = of_stage(cfg, stage).parallel.recompute == "full"
    if cfg.parallel.cp_kind == "ring":
        add("cp", "send", (2 + again) * times * (L.cp - 1), (k + v) * c)
        add("cp", "send", times * (L.cp - 1), (k + v) * g)
    else:
        add("cp", "all_to_all", (2 + again) * times, (q + k + v) * c)
        add("cp", "all_to_all", (2 + again) * times, out * c)


def softmax_rows(job: Job) -> list[int]:
    """Rows of each block whose statistics the vocabulary-parallel cross entropy merges in one exchange."""
    t, v = job.cfg.train.micro_batch * job.cfg.train.seq_len // job.layout.cp, padded_vocab(job.cfg.model) // job.layout.tp
    most = max(1, CHUNK // (v * BYTES[job.cfg.train.dtype][0]))
    chunk, step = -(-t // -(-t // most)), max(1, BLOCK // v)
    return [min(step, end - at) for first in range(0, t, chunk) for end in [min(first + chunk, t)] for at in range(first, end, step)]


def share_bytes(job: Job, parts: list[list[Bucket]], stage: int, kinds: list[str], add) -> None:
    """Over the shard group, for one stage: gradients scattered; weights gathered under ZeRO-3. kinds: its ops, in order."""
    p, (c, g) = job.cfg.parallel, BYTES[job.cfg.train.dtype]
    if not p.zero:
        return
    ends = kinds.count("B") + kinds.count("W")
    at_end = job.cuts[stage][1] == job.cfg.model.layers
    for i, part in enumerate(parts):
        lookup, head = i == 0 and job.cuts[stage][0] == 0, i == len(parts) - 1 and at_end
        for b in part:
            shared = b.users > 1  # a tied table, at its first part: once a step
            if shared and not lookup:
                continue
            times, group, n = 1 if p.zero == 1 or shared else ends, "eshard" if b.expert else "shard", job.shards(b.expert)
            if p.compress in CODED:
                add(group, "all_to_all", times, coded(job, b.size))
            elif p.reduce == "ring":
                add(group, "send", times * (n - 1), b.size * g // n)
            else:
                add(group, "reduce_scatter", times, b.size * g)
            if p.zero == 3:
                add(group, "all_gather", 1 if shared else gathers(kinds, lookup, head, i == len(parts) - 1 - at_end),
                    b.size * c if p.compress_weights == "none" else coded(job, b.size))


def gathers(kinds: list[str], lookup: bool, head: bool, hinge: bool) -> int:
    """How often a step makes a part's weights whole. A forward leaves only the head's so, and the last block's (hinge) where a
    backward follows; an I any; an embedding's backward reads none."""
    count, whole = 0, False
    for kind, then in zip(kinds, [*kinds[1:], ""]):
        if kind == "F" or (kind in "BI" and not lookup):
            count += not whole
            whole = (kind == "F" and (head or hinge and then in ("B", "I"))) or kind == "I"
        elif kind == "W":
            whole = False
    return count


def reduce_bytes(job: Job, group: str, n: int, add) -> None:
    """The sum of n elements over a data-parallel group, as parallel/reduce.py does it."""
    p = job.cfg.parallel
    if p.compress in CODED:
        add(group, "all_to_all", 1, coded(job, n))
        add(group, "all_gather", 1, coded(job, n))
        return
    n *= BYTES[job.cfg.train.dtype][1]
    ranks = job.layout.group(job.rank, *SPANS[group])
    N, kind = len(ranks), p.reduce
    if kind == "collective":
        add(group, "all_reduce", 1, n)
    elif kind == "ring":
        add(group, "send", 2 * (N - 1), n // N)
    elif kind == "server":
        add(group, "send", 1 if job.rank != ranks[0] else N - 1, n)
    else:
        node = p.node
        k = sum(r // node == job.rank // node for r in ranks) if node else N
        add(group, "send", 2 * (k - 1), n // k)
        add(group, "send", 2 * (N // k - 1), n // N)
