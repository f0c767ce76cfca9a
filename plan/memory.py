"""What one rank holds, in bytes, as closed forms (no torch): its state, and what a microbatch keeps for its backward.

P: elements of the rank's buckets with padding, N: ranks that share them; c, g: bytes of compute and accumulation dtype.

    zero   weights   masters (bf16)   gradients   AdamW's moments
    0      P c       P g              P g         2 P g
    1      P c       P g / N          P g         2 P g / N
    2      P c       P g / N          P g / N     2 P g / N         + the whole gradients of at most 2 parts in passing
    3      P c / N   P g / N          P g / N     2 P g / N         + the whole weights of at most 3 parts in passing

tests/plan/test_memory.py holds both against what a rank really holds.
"""
from config import Config, head_dim, kv_heads
from parallel.schedule import in_flight
from plan.parts import BYTES, Job, buckets, unique

KEYS = 128  # kernels/attention.py: queries that meet their keys together


def state_bytes(job: Job) -> dict[str, int]:
    """{"weights", "masters", "gradients", "optimizer"}: between two steps."""
    zero, (c, g) = job.cfg.parallel.zero, BYTES[job.cfg.train.dtype]
    every = unique(buckets(job))
    size, share = sum(b.size for b in every), sum(b.share for b in every)
    return {"weights": c * (share if zero == 3 else size), "masters": g * share if c != g else 0,
            "gradients": g * (size if zero < 2 else share), "optimizer": g * sum(b.share * moments(job.cfg.optim.name, b.params[0].hidden) for b in every)}


def moments(optimizer: str, hidden: bool) -> int:
    """How many elements it keeps for each of a bucket's."""
    return {"adamw": 2, "lamb": 2, "muon": 1 if hidden else 2}.get(optimizer, 1)


def passing_bytes(job: Job) -> int:
    """The most that whole gradients (ZeRO-2, 3) and whole weights (ZeRO-3) add to it during a step, at most, a stage."""
    zero, (c, g) = job.cfg.parallel.zero, BYTES[job.cfg.train.dtype]
    most = 0
    for parts in buckets(job).values():
        sizes = [sum(b.size for b in part) for part in parts]
        most = max(most, max(g * sum(sizes[i:i + 3]) * (zero >= 2) + c * sum(sizes[i:i + 3]) * (zero == 3) for i in range(len(sizes))))
    return most


def activation_bytes(cfg: Config, first: int, last: int, flash: bool = False) -> int:
    """What blocks first .. last - 1 (with the embedding and the head at the model's ends) keep of one microbatch.

    flash: attention keeps a number a query and head (SDPA on a GPU), not the probabilities (kernels/attention.py's blocks)."""
    m, t = cfg.model, cfg.train
    c, g = BYTES[t.dtype]
    tp, cut = cfg.parallel.tp, cfg.parallel.tp if cfg.parallel.sp else 1
    b, s, d, hd = t.micro_batch, t.seq_len, m.hidden, head_dim(m)
    tokens, h, kv = b * s, m.heads // tp, kv_heads(m) // tp
    full, own = tokens * d * c, tokens // cut * d * c  # [b, s, d]; what lies between two tp regions
    norm = own + tokens // cut * g * (2 if m.norm == "layernorm" else 1)  # its input, and the statistics
    drop = tokens // cut * d if m.dropout else 0  # a mask of bools
    attend = tokens * (2 * h + 2 * kv) * hd * c  # q, k, v and the output
    if m.qk_norm:  # before the norm as well; of one sequence, v is a part of that
        attend += tokens * ((h + 2 * kv) * hd * c + (h + kv) * g) - (tokens * kv * hd * c if b == 1 else 0)
    if flash:
        attend += tokens * h * g
    elif s <= 16 * hd:
        attend += sum(b * h * (min(lo + KEYS, s) - lo) * min(lo + KEYS, s) * c for lo in range(0, s, KEYS))
    inner = tokens * m.ffn // tp * c * (3 if m.activation == "swiglu" else 2)  # the activation's input and output
    out = (last - first) * (2 * norm + 2 * full + attend + inner + 2 * drop)
    if m.positions == "rope":
        out += tokens * hd * g  # the tables of cos and sin, shared by the blocks
    if cfg.data.doc_mask or (m.window and m.window < s):
        out += s * s * (b if cfg.data.doc_mask else 1)  # who sees whom
    if first == 0:
        out += drop + tokens * 8 * (2 if m.positions == "learned" else 1) + (tokens if tp > 1 else 0)
    if last == m.layers:
        out += norm + full  # and the gradient of the head's input, made in the forward
    return out


def peak_activation_bytes(job: Job, flash: bool = False) -> int:
    """All microbatches in flight, at most: the schedule decides how many chunks that are (1F1B: p - r, GPipe: all)."""
    most = max(activation_bytes(job.cfg, *job.cuts[stage], flash) for stage in job.stages())
    return in_flight(job.schedule.order[job.pp]) * most
