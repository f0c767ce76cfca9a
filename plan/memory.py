"""What one rank holds, in bytes, as closed forms (no torch): its state, and what a microbatch keeps for its backward.

P: elements of the rank's buckets with padding, N: ranks that share them; c, g: bytes of compute and accumulation dtype.

    zero   weights   masters (bf16)   gradients   AdamW's moments
    0      P c       P g              P g         2 P g
    1      P c       P g / N          P g         2 P g / N
    2      P c       P g / N          P g / N     2 P g / N         + the whole gradients of at most 2 parts in passing
    3      P c / N   P g / N          P g / N     2 P g / N         + the whole weights of at most 3 parts in passing

Quantized weights (parallel.compress_weights, ZeRO-1 and 2) have masters in every dtype; optim.states bf16: 2 bytes for g in masters
and moments, and none for masters where the weights are bf16 themselves; PowerSGD's errors are P g more beside the gradients.
tests/plan/test_memory.py holds both against what a rank really holds.
"""
from config import Config, fp8_recipe, head_dim, in_fp8, is_moe, kv_heads, moe_ffn, of_stage, remakes, value_dim
from parallel.schedule import in_flight
from plan.parts import BYTES, Job, buckets, unique

KEYS = 128  # kernels/attention.py: queries that meet their keys together


def state_bytes(job: Job) -> dict[str, int]:
    """{"weights", "masters", "gradients", "optimizer"}: on the device, between two steps."""
    zero, (c, g) = job.cfg.parallel.zero, BYTES[job.cfg.train.dtype]
    every = unique(buckets(job))
    size, share = sum(b.size for b in every), sum(b.share for b in every)
    here = job.cfg.parallel.offload not in ("optimizer", "both")
    kept = sum(b.share * moments(job.cfg.optim.name, b.params[0].hidden) for b in every)
    s = wide(job)
    p, shared = job.cfg.parallel, [b for b in every if job.shards(b.expert) > 1]
    apart = job.cfg.train.dtype != "bf16" if job.cfg.optim.states == "bf16" else c != g
    exact = every if apart else [b for b in shared if p.compress_weights != "none" and zero in (1, 2)]  # beside what computes
    errors = sum(b.size for b in shared if p.compress == "powersgd" and any(x.factors(p.powersgd_rank) for x in b.params))
    return {"weights": c * (share if zero == 3 else size), "masters": s * sum(b.share for b in exact) if here else 0,
            "gradients": g * ((size if zero < 2 else share) + errors), "optimizer": s * kept if here else 0}


def wide(job: Job) -> int:
    """Bytes of an element of masters and moments."""
    return 2 if job.cfg.optim.states == "bf16" else BYTES[job.cfg.train.dtype][1]


def moments(optimizer: str, hidden: bool) -> int:
    """How many elements it keeps for each of a bucket's."""
    return {"adamw": 2, "lamb": 2, "muon": 1 if hidden else 2}.get(optimizer, 1)


def host_bytes(job: Job) -> int:
    """Masters and AdamW's moments in host memory (parallel.offload)."""
    offloaded = job.cfg.parallel.offload in ("optimizer", "both")
    return 3 * wide(job) * sum(b.share for b in unique(buckets(job))) if offloaded else 0


def passing_bytes(job: Job) -> int:
    """The most that whole gradients (ZeRO-2, 3) and whole weights (ZeRO-3) add to it during a step, at most, a stage."""
    zero, (c, g) = job.cfg.parallel.zero, BYTES[job.cfg.train.dtype]
    most = 0
    for parts in buckets(job).values():
        sizes = [sum(b.size for b in part) for part in parts]
        most = max(most, max(g * sum(sizes[i:i + 3]) * (zero >= 2) + c * sum(sizes[i:i + 3]) * (zero == 3) for i in range(len(sizes))))
    return most


def mixture_bytes(cfg: Config) -> int:
    """What a mixture keeps in the place of an MLP, where all experts get their fair share, without the activation's outputs of its
    shared experts. Rows that travel are kept once, in the order of experts; in fp8, too, as they are (kernels/fp8_grouped.py)."""
    m, p, (c, g) = cfg.model, cfg.parallel, BYTES[cfg.train.dtype]
    tokens = cfg.train.micro_batch * cfg.train.seq_len
    own = tokens // p.tp
    rows = own * m.top_k * p.etp
    router = own * m.experts * (4 * g) + (own * m.hidden * g if c != g or (p.tp > 1 and not p.sp) else 0)  # its input, logits, scores
    numbers = 8 * (rows * (5 if p.ep * p.etp > 1 else 3) + own * m.top_k)  # who goes where
    experts = rows * (m.hidden + 3 * moe_ffn(m) // p.etp) * c + rows * g
    shared = tokens * m.shared_experts * moe_ffn(m) // p.tp * c
    gate = tokens // (p.tp if p.sp else 1) * (m.hidden * (c + (g if c != g else 0)) + g) if m.shared_gate else 0
    return router + numbers + experts + 2 * shared + gate


def block_bytes(cfg: Config, flash: bool = False, layer: int = 0) -> dict[str, int]:
    """What one block keeps of one microbatch when nothing is made again, by parts of recompute: "norm" the outputs of its
    norms, "core" the probabilities, "act" the activation's output, "rest" all else; of that "mlp" in its second half, "input" its
    input.

    flash: attention keeps a number a query and head (SDPA on a GPU), not the probabilities (kernels/attention.py's blocks)."""
    m, t = cfg.model, cfg.train
    c, g = BYTES[t.dtype]
    tp, cut = cfg.parallel.tp, cfg.parallel.tp if cfg.parallel.sp else 1
    b, s, d, hd = t.micro_batch, t.seq_len, m.hidden, head_dim(m)
    tokens, h, kv = b * s, m.heads // tp, max(1, kv_heads(m) // tp)
    eight = fp8_recipe(t) if in_fp8(cfg, layer) else None
    of_scales = {"tensorwise": 0, "rowwise": g, "blockwise": -(-tokens // t.fp8_block) * g}.get(eight, 0)  # a feature's

    def kept_by_linear(features: int) -> int:
        """Its input: in 8 bits with scales along the tokens, or as it is."""
        return features * (tokens + of_scales) if eight else features * tokens * c

    own = tokens // cut * d * c  # what lies between two tp regions: [b, s/tp, d] under sp
    inner = tokens * m.ffn // tp * c
    half = own + tokens // cut * g * (2 if m.norm == "layernorm" else 1)  # a norm's input and statistics
    half += tokens // cut * d if m.dropout else 0  # a mask of bools
    kept = inner * (2 if m.activation == "swiglu" else 1)  # the activation's input
    act = kept_by_linear(m.ffn // tp)
    if is_moe(m, layer):
        kept, act = mixture_bytes(cfg), kept_by_linear(m.shared_experts * moe_ffn(m) // tp)
    mlp = half + kept
    norms = kept_by_linear(d) + (tokens * d * c if is_moe(m, layer) and not m.shared_experts else kept_by_linear(d))
    rest = half + mlp + tokens * (h * (hd + value_dim(m)) + kv * (hd + value_dim(m))) * c  # q, k, v and the output
    rest += kept_by_linear(h * value_dim(m)) if eight else 0  # the output, beside attention's own
    if m.kv_rank:
        latent = (m.q_rank or 0) + m.kv_rank + m.rope_dim
        rest += (tokens // cut + tokens) * latent * c + tokens // cut * g * (2 if m.q_rank else 1)  # before the latents' norms, and entered
        rest += tokens * h * m.nope_dim * c if b == 1 or flash else 0  # v is a part of what was made from the latent
        rest += tokens * m.rope_dim * g if m.rope_kind == "yarn" and m.rope_mscale_all and m.rope_factor else 0  # tables of the queries
        norms = kept_by_linear(d) + (own if m.q_rank else kept_by_linear(d) + (own if cut > 1 or eight else 0))  # x as it is, and gathered for q
    if m.qk_norm:  # before the norm as well; of one sequence, v is a part of that
        rest += tokens * ((h + 2 * kv) * hd * c + (h + kv) * g) - (tokens * kv * hd * c if b == 1 else 0)
    core = 0
    if flash:
        core = tokens * h * g
    elif s <= 16 * hd:
        core = sum(b * h * (min(lo + KEYS, s) - lo) * min(lo + KEYS, s) * c for lo in range(0, s, KEYS))
    return {"norm": norms, "core": core, "act": act, "rest": rest, "mlp": mlp, "input": own}


def activation_bytes(cfg: Config, first: int, last: int, flash: bool = False) -> int:
    """What blocks first .. last - 1 (with the embedding and the head at the model's ends) keep of one microbatch. cfg: with
    the stage's recompute mode."""
    m, t = cfg.model, cfg.train
    c, g = BYTES[t.dtype]
    tp, cut = cfg.parallel.tp, cfg.parallel.tp if cfg.parallel.sp else 1
    b, s, d = t.micro_batch, t.seq_len, m.hidden
    tokens, every = b * s, [block_bytes(cfg, flash, i) for i in range(first, last)]
    drop = tokens // cut * d if m.dropout else 0
    out = sum(x["input"] if cfg.parallel.recompute == "full"
              else x["rest"] + sum(x[part] for part in ("norm", "core", "act") if not remakes(cfg, part))
              for x in every)
    if m.positions == "rope":
        out += tokens * (m.rope_dim if m.kv_rank else head_dim(m)) * g  # the tables of cos and sin, shared by the blocks
    if cfg.data.doc_mask or (m.window and m.window < s):
        out += s * s * (b if cfg.data.doc_mask else 1)  # who sees whom
    if first == 0:
        out += drop + tokens * 8 * (2 if m.positions == "learned" else 1) + (tokens if tp > 1 else 0)
    return out + (head_bytes(cfg, m.mtp) if last == m.layers else 0)


def head_bytes(cfg: Config, modules: int) -> int:
    """The last norm, and the gradient of the head's input, made in the forward; for each module of multi-token prediction that again,
    its block, the inputs of two more norms and of the join, and the tokens."""
    m, t = cfg.model, cfg.train
    (c, g), tokens = BYTES[t.dtype], t.micro_batch * t.seq_len
    own = tokens // (cfg.parallel.tp if cfg.parallel.sp else 1)
    norm = own * m.hidden * c + own * g * (2 if m.norm == "layernorm" else 1)
    head = norm + tokens * m.hidden * c
    x = block_bytes(cfg, layer=m.layers)
    block = x["input"] if cfg.parallel.recompute == "full" else x["rest"] + sum(x[part] for part in ("norm", "core", "act") if not remakes(cfg, part))
    return head + modules * (head + block + 2 * norm + 2 * own * m.hidden * c + tokens * (8 + (cfg.parallel.tp > 1)))


def again_bytes(cfg: Config, last: int, flash: bool = False) -> int:
    """What is made again in the backward of the last block (of further tokens, where there are), less what was freed before:
    its head, then the MLP's half."""
    x, head = block_bytes(cfg, flash, last - 1), head_bytes(cfg, 0) if last == cfg.model.layers else 0
    if cfg.parallel.recompute == "full":
        return max(0, sum(x[part] for part in ("norm", "core", "act", "rest")) - x["input"] - head)
    kept = sum(x[part] // n for part, n in (("norm", 2), ("act", 1)) if not remakes(cfg, part)) + x["mlp"]
    return max(0, x["core"] - kept - head) if remakes(cfg, "core") else 0


def peak_activation_bytes(job: Job, flash: bool = False) -> int:
    """All microbatches in flight, at most: the schedule decides how many chunks that are (1F1B: p - r, GPipe: all)."""
    stages = [(of_stage(job.cfg, stage), job.cuts[stage]) for stage in job.stages()]
    most = max(activation_bytes(cfg, *cut, flash) for cfg, cut in stages)
    return in_flight(job.schedule.order[job.pp]) * most + max(again_bytes(cfg, last, flash) for cfg, (_, last) in stages)
