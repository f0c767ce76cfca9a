"""Every knob of Bevatron, in one tree of frozen dataclasses, and what follows from a few of them alone.

config.py fills the tree from recipes, files and the command line, and gives all of this on; rules.py holds every rule that spans keys.
"""
import math
import re
from dataclasses import dataclass, field, replace
from typing import Literal

from strict import ConfigError

LARGEST_SCALE = 2.0**24  # of the loss in fp16: it grows no further (optim/scaler.py)


@dataclass(frozen=True)
class Model:
    preset: str = "llama-mini"  # entry of configs/models.yaml that the fields below start from
    layers: int = 4  # transformer blocks
    hidden: int = 128  # width of the residual stream
    heads: int = 4  # query heads
    kv_heads: int | None = None  # key/value heads (GQA); none: as many as heads
    head_dim: int | None = None  # none: hidden / heads
    ffn: int = 352  # inner width of the MLP
    vocab: int | None = None  # token ids; none: what the tokenizer has
    vocab_multiple: int = 128  # the embedding is padded to a multiple of this (never of a parallel degree)
    context: int = 2048  # longest sequence the positions are made for
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"  # pre-norm of every block
    norm_eps: float = 1e-5  # added to the variance
    activation: Literal["swiglu", "gelu"] = "swiglu"  # gelu is the tanh form (GPT-2)
    positions: Literal["rope", "learned"] = "rope"  # rotary (arXiv 2104.09864) or learned absolute
    rope_theta: float = 10000.0  # base of the rotary wavelengths
    rope_factor: float | None = None  # how many times longer than rope_original the context is made; none: no scaling
    rope_kind: Literal["llama3", "yarn"] = "llama3"  # how: as Llama 3.1 does, or YaRN (arXiv 2309.00071)
    rope_low_freq: float = 1.0  # channels that turn less often than this within rope_original are slowed by the factor (yarn: beta_slow)
    rope_high_freq: float = 4.0  # those that turn more often stay; a ramp between (yarn: beta_fast)
    rope_original: int = 8192  # context before scaling
    rope_mscale: float = 1.0  # yarn: cos and sin times f(this) / f(rope_mscale_all), f(m) = 1 + m ln(rope_factor) / 10
    rope_mscale_all: float = 0.0  # yarn with MLA: the softmax's scale times f(this) squared (DeepSeek)
    rope_pairs: bool = False  # channels 2i and 2i + 1 turn together (DeepSeek), not i and i + dim/2
    tied: bool = False  # output head shares the embedding
    bias: bool = False  # biases on every linear and norm (GPT-2)
    qkv_bias: bool = False  # biases on q, k, v alone (Qwen2)
    qk_norm: bool = False  # RMSNorm on each head of q and k, before RoPE (Qwen3)
    qk_norm_whole: bool = False  # qk_norm over all heads of q, and all of k, at once (OLMoE)
    kv_rank: int | None = None  # multi-head latent attention (MLA, arXiv 2405.04434): width of the latent of keys and values; none: off
    q_rank: int | None = None  # MLA: width of the queries' latent; none: queries straight from the hidden state
    nope_dim: int = 128  # MLA: channels of a query and key head without positions
    rope_dim: int = 64  # MLA: channels with positions; such a key is shared by all heads
    v_dim: int = 128  # MLA: channels of a value head
    mtp: int = 0  # multi-token prediction (arXiv 2412.19437): modules behind the last block, each for one token further ahead; training only
    mtp_weight: float = 0.3  # of their mean loss, beside the next token's
    window: int | None = None  # sliding-window attention: a token sees this many, itself included (Mistral)
    dropout: float = 0.0  # on embeddings and both residual branches; masks depend on (seed, step, layer, position)
    init_std: float = 0.02  # of every matrix; output projections get init_std / sqrt(2 layers)
    mup_base: int | None = None  # muP (arXiv 2203.03466): width of the tuned model (rates, init_std); ffn, heads and ranks grow with it; none: off
    mup_head_dim: int | None = None  # muP: that model's head_dim; attention scores go as 1 / head_dim from there; none: the same as here
    attention: Literal["auto", "flash", "sdpa", "triton", "reference"] = "auto"  # attention kernel; auto: the fastest that fits
    experts: int | None = None  # routed experts of a mixture layer (arXiv 2101.03961); none: a dense model
    top_k: int = 2  # experts that a token goes to
    moe_ffn: int | None = None  # inner width of one expert; none: ffn
    shared_experts: int = 0  # experts that every token goes to (arXiv 2401.06066), as one MLP that is this many times moe_ffn wide
    shared_gate: bool = False  # the shared experts' output times sigmoid(x w) (Qwen2-MoE)
    first_dense: int = 0  # this many first layers have a dense MLP (DeepSeek)
    moe_every: int = 1  # of the others, layers n-1, 2n-1, ... have experts
    router: Literal["softmax", "sigmoid"] = "softmax"  # scores over all experts; sigmoid: each its own (DeepSeek-V3, arXiv 2412.19437)
    router_renorm: bool = True  # the chosen scores are divided by their sum
    router_groups: int = 1  # experts are in this many groups, and chosen from the best router_group_top_k of them; a group's score is
    router_group_top_k: int = 1  # its best expert's (softmax, arXiv 2405.04434) or its best two experts' sum (sigmoid, arXiv 2412.19437)
    router_scale: float = 1.0  # factor of the routed experts' output
    router_bias: bool = False  # a bias that only chooses, moved against the load after each step (aux-loss-free, arXiv 2408.15664)
    router_bias_rate: float = 1e-3  # how far it moves a step
    jitter: float = 0.0  # training: the router's input times uniform(1 - jitter, 1 + jitter) (arXiv 2101.03961)
    aux_loss: float = 0.0  # load-balance loss: what a balanced layer adds to the loss; Hugging Face's Mixtral calls top_k times this so
    aux_kind: Literal["sequence", "global", "micro"] = "sequence"  # whose load it balances: a sequence's; the step's (as of the step before,
    #   arXiv 2501.11873); a micro-batch's (arXiv 2101.03961), which alone depends on micro_batch and layout
    z_loss: float = 0.0  # factor of the mean squared logsumexp of the router's logits (arXiv 2202.08906)
    capacity: float | None = None  # training: an expert takes at most this times its fair share of a sequence; none: nothing is dropped
    drop: Literal["probability", "position"] = "probability"  # whom an expert over capacity turns away: the least likely, or the last
    pad: bool = False  # training: with a capacity, each rank fills up what it sends to every expert, so that no shape depends on the routing


@dataclass(frozen=True)
class Train:
    steps: int | None = None  # horizon; exactly one of steps, tokens and flops decides
    tokens: float | None = None  # horizon in tokens, rounded up to whole steps
    flops: float | None = None  # horizon in model FLOPs (forward + backward, no recompute; attention over whole sequences, whatever doc_mask)
    seq_len: int = 256  # tokens a sequence
    micro_batch: int = 8  # sequences a forward pass and rank
    global_batch: int = 16  # sequences a step, over all ranks and micro-batches
    ramp: str | None = None  # START,INCREMENT,SAMPLES: a step takes START sequences at first, and INCREMENT more at a time until it takes
    #   global_batch, evenly over the first SAMPLES sequences (Megatron-LM's --rampup-batch-size); none: global_batch throughout
    seed: int = 1234  # of weights, sample order, dropout
    dtype: Literal["fp64", "fp32", "bf16", "fp16", "fp8"] = "fp32"  # compute; all below fp32 keep fp32 master weights and gradients; fp16 scales
    #   the loss; fp8: bf16, but for the products of most linears
    fp8: Literal["tensorwise", "rowwise", "blockwise"] | None = None  # how dtype fp8 scales (kernels/fp8_linear.py; experts:
    #   fp8_grouped.py); none: tensorwise; with dtype fp64: the same 8-bit grids, all else in fp64, for proofs
    fp8_block: int = 128  # side of a block of blockwise (DeepSeek-V3)
    fp8_keep: int = 1  # this many first and last layers stay in bf16
    loss_scale: float = 65536.0  # fp16: what the loss is multiplied by at first, a power of two (arXiv 1710.03740)
    loss_scale_window: int = 1000  # fp16: so many good steps in a row double it; a step that overflows halves it
    max_minutes: float | None = None  # stop after this long: save, exit 75
    deterministic: bool = True  # only deterministic kernels
    compile: bool = False  # torch.compile the elementwise kernels (CPU: needs a C++ compiler)
    cuda_graphs: bool = False  # record forward and backward once, and replay them: for steps that keep the host busier than the GPU
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where there is one
    threads: int | None = None  # CPU threads; none: at most 4, one left free when there are more than 2


@dataclass(frozen=True)
class Optim:
    name: Literal["adamw", "muon", "lamb", "lars", "lion", "sgd"] = "adamw"  # AdamW (arXiv 1711.05101), or what optim/ says of the others
    lr: float = 1e-3  # peak learning rate
    min_lr: float | None = None  # floor of the decay; none: lr / 10
    warmup: int = 100  # steps of linear warmup (cut to a tenth of a horizon shorter than 10x this)
    decay: Literal["cosine", "wsd", "linear", "constant"] = "cosine"  # shape after the warmup
    decay_fraction: float = 0.2  # wsd: the last share of the horizon, in which the rate falls linearly
    beta1: float = 0.9  # first-moment decay
    beta2: float = 0.95  # second-moment decay
    momentum: float = 0.95  # of muon, lars and sgd
    eps: float = 1e-8  # added to the root of the second moment
    weight_decay: float = 0.1  # decoupled; on matrices, not on norms and biases
    clip: float | None = 1.0  # global gradient norm; none: off
    states: Literal["fp32", "bf16"] = "fp32"  # adamw's masters and moments; bf16: stochastically rounded (arXiv 2010.06192), half the bytes


@dataclass(frozen=True)
class Parallel:
    tp: int = 1  # tensor parallel degree (arXiv 1909.08053)
    sp: bool = False  # sequence parallelism: activations between tp regions are cut along the sequence (arXiv 2205.05198)
    pp: int = 1  # pipeline ranks
    vpp: int | None = None  # stages a pipeline rank holds; none: what the schedule has (interleaved: 2)
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"] = "1f1b"  # pipeline schedule
    stages: str | None = None  # layers of each stage, in order, e.g. 3,2,2,1; none: cut by cost
    cp: int = 1  # context parallel degree: ranks that share each sequence
    cp_kind: Literal["ring", "ulysses"] = "ring"  # keys and values go round (arXiv 2310.01889), or all-to-all over heads (2309.14509)
    ep: int = 1  # ranks that share a mixture's experts (arXiv 2006.16668); ep x etp is folded out of dp x cp x tp
    etp: int = 1  # ranks that share each expert's inner width
    dp_rep: int = 1  # replicas of the ZeRO shard group (HSDP)
    zero: Literal[0, 1, 2, 3] = 0  # what data-parallel ranks shard: 1 optimizer state, 2 + gradients, 3 + weights (arXiv 1910.02054)
    bucket_mb: float = 64.0  # gradients that are reduced together, in MiB; a parameter is never cut
    reduce: Literal["collective", "ring", "hierarchy", "server"] = "collective"  # how data-parallel gradients are summed; the last three by sends
    node: int | None = None  # ranks of a node, for reduce=hierarchy; none: all are on one
    compress: Literal["none", "int8", "fp8", "powersgd"] = "none"  # these gradients on the wire, lossy: in 8 bits (qgZ, arXiv 2306.10209); of low
    #   rank (arXiv 1905.13727), zero 0 only
    compress_weights: Literal["none", "int8", "fp8"] = "none"  # weights that zero 1 to 3 gather, lossy (qwZ, arXiv 2306.10209); masters stay exact
    compress_block: int = 256  # elements that have a scale together in int8 and fp8, a multiple of 64
    powersgd_rank: int = 4  # of a matrix's gradient; the smaller of its sides, or more, loses nothing
    timeout_s: float = 300.0  # how long a rank waits for a peer before it gives up
    recompute: Literal["none", "selective", "full"] = "none"  # activations made again in the backward: parts of a block; whole blocks
    offload: Literal["none", "optimizer", "activations", "both"] = "none"  # kept in host memory: masters and moments; what the backward needs
    recompute_parts: str = "core"  # what selective makes again, any of core,norm,act: attention's inside, norms, the MLP's activation
    recompute_stages: str | None = None  # a mode for each stage, e.g. full,selective,none,none; none: recompute for all


@dataclass(frozen=True)
class Data:
    path: str = "stdlib"  # prefix of .bin/.idx, or a blend "0.7 a 0.3 b"; stdlib: Python's own source, made on the spot
    tokenizer: str | None = None  # bytes | bpe-N (trained on the spot) | x.model | tokenizer.json; none: the data's own
    split: str = "95,5"  # train,valid[,test] shares by document
    doc_mask: bool = False  # attention and positions restart at document boundaries; MFU counts attention within documents,
    #   as long as they are in the run's first million tokens
    cache: str = "runs/data"  # where data made on the spot is kept
    prefetch: int = 2  # steps read ahead by the loader thread; 0: read when asked


@dataclass(frozen=True)
class Eval:
    every: int | None = 100  # steps between validations; none: only at the end
    batches: int = 8  # global batches of validation, the same ones every time
    sample: int = 48  # tokens of text sampled at each validation; 0: none
    prompt: str = "def "  # what the sample starts from
    temperature: float = 0.8  # of the sample


@dataclass(frozen=True)
class Checkpoint:
    every: int | None = 100  # steps between saves; none: only at the end
    keep: int = 2  # newest checkpoints kept
    resume: str = "auto"  # auto: the newest good one of this run | none | a checkpoint or run folder
    init_from: str | None = None  # take the weights (not optimizer, not position) of this checkpoint or run folder
    async_save: bool = False  # write in a thread while training goes on
    timeout_s: float = 3600.0  # how long a rank may take over its part of a save or a resume


@dataclass(frozen=True)
class Log:
    dir: str = "runs"  # parent of the run folder
    name: str | None = None  # run folder's name; none: the recipe's
    every: int = 10  # steps between console lines
    noise_scale: bool = False  # gradient noise scale (arXiv 1812.06162): reads the gradients of matrices twice more a step
    wandb: Literal["off", "offline", "online"] = "off"  # Weights & Biases
    project: str = "bevatron"  # W&B project


@dataclass(frozen=True)
class Profile:
    steps: str | None = None  # FIRST:LAST: a profiler trace of these steps into the run folder


@dataclass(frozen=True)
class Config:
    model: Model = field(default_factory=Model)
    train: Train = field(default_factory=Train)
    optim: Optim = field(default_factory=Optim)
    parallel: Parallel = field(default_factory=Parallel)
    data: Data = field(default_factory=Data)
    eval: Eval = field(default_factory=Eval)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    log: Log = field(default_factory=Log)
    profile: Profile = field(default_factory=Profile)


# ---- what follows from them ---------------------------------------------------------------------------------------------

def head_dim(m: Model) -> int:
    """Channels of a query and key head."""
    return m.nope_dim + m.rope_dim if m.kv_rank else m.head_dim or m.hidden // m.heads


def value_dim(m: Model) -> int:
    return m.v_dim if m.kv_rank else head_dim(m)


def kv_heads(m: Model) -> int:
    return m.kv_heads or m.heads


def mup_width(m: Model) -> float:
    """How many times wider this is than the model that was tuned; 1 without muP."""
    return m.hidden / m.mup_base if m.mup_base else 1.0


def mup_scores(m: Model) -> float:
    """What muP multiplies attention scores by, beside 1 / sqrt(head_dim)."""
    return (m.mup_head_dim / head_dim(m)) ** 0.5 if m.mup_head_dim else 1.0


def attention_weights(m: Model) -> int:
    """Elements of a block's attention matrices."""
    if not m.kv_rank:
        return m.hidden * head_dim(m) * 2 * (m.heads + kv_heads(m))
    queries = (m.q_rank or m.hidden) * m.heads * head_dim(m) + (m.q_rank or 0) * m.hidden
    return queries + m.hidden * (m.kv_rank + m.rope_dim + m.heads * m.v_dim) + m.kv_rank * m.heads * (m.nope_dim + m.v_dim)


def moe_ffn(m: Model) -> int:
    return m.moe_ffn or m.ffn


def is_moe(m: Model, layer: int) -> bool:
    """Has this layer experts?"""
    return m.experts is not None and layer >= m.first_dense and (layer + 1) % m.moe_every == 0


def span(text: str | None) -> range:
    """The steps that "10:12" names, both ends included; "10" is one. Raises ConfigError."""
    first, _, last = (text or "").partition(":")
    if text is not None and not (first.isdigit() and (last or first).isdigit() and 0 < int(first) <= int(last or first)):
        raise ConfigError(f"profile.steps: {text!r} must be FIRST:LAST, counted from 1, e.g. 10:12")
    return range(0) if text is None else range(int(first), int(last or first) + 1)


def phases(t: Train) -> list[tuple[int, int, int]]:
    """[(step, sequence, batch)], counted from 0: from this step on, which begins with this sequence of the run, steps take so many
    sequences. A batch that train.ramp is too short for stands here with the step of the next."""
    start, more, samples = numbers(t.ramp) if t.ramp else (t.global_batch, 1, 1)
    step = sequence = 0
    out, rises = [], (t.global_batch - start) // more
    for i in range(rises):
        batch = start + i * more
        out.append((step, sequence, batch))
        took = max(0, -(-(-(-samples * (i + 1) // rises) - sequence) // batch))  # until (i + 1)/rises of the samples are seen
        step, sequence = step + took, sequence + took * batch
    return [*out, (step, sequence, t.global_batch)]


def batch_size(t: Train, step: int) -> int:
    """Sequences of a step, counted from 0, over all ranks."""
    return next(batch for first, _, batch in reversed(phases(t)) if first <= step)


def sequences(t: Train, steps: int) -> int:
    """Sequences that so many steps see: the first sequence of step `steps`, counted from 0."""
    return next(sequence + (steps - first) * batch for first, sequence, batch in reversed(phases(t)) if first <= steps)


def steps_of(t: Train, wanted: int) -> int:
    """The fewest steps that see as many sequences."""
    return next(first + -(-(wanted - sequence) // batch) for first, sequence, batch in reversed(phases(t)) if sequence <= wanted)


def batch_sizes(t: Train) -> list[int]:
    """Every batch that some step takes, the smallest first."""
    return sorted({batch_size(t, first) for first, _, _ in phases(t)})


def numbers(text: str) -> list[int]:
    """[3, 2] of "3,2"; [] where it is no list of whole numbers above 0."""
    return [int(w) for w in words(text)] if all(re.fullmatch("0*[1-9][0-9]{0,8}", w) for w in words(text)) else []


def words(text: str | None) -> list[str]:
    return [w.strip() for w in text.split(",")] if text else []


def of_stage(cfg: Config, stage: int) -> Config:
    """The config with the recompute mode of one pipeline stage."""
    modes = words(cfg.parallel.recompute_stages)
    return replace(cfg, parallel=replace(cfg.parallel, recompute=modes[stage])) if modes else cfg


def fp8_recipe(t: Train) -> str | None:
    return t.fp8 or ("tensorwise" if t.dtype == "fp8" else None)


def in_fp8(cfg: Config, layer: int) -> bool:
    """Do this layer's linears run in fp8? (Modules of multi-token prediction come after the last layer, and do not.)"""
    return fp8_recipe(cfg.train) is not None and cfg.train.fp8_keep <= layer < cfg.model.layers - cfg.train.fp8_keep


def remakes(cfg: Config, part: str) -> bool:
    """Is core, norm or act made again in the backward, alone (not with its block)?"""
    return cfg.parallel.recompute == "selective" and part in words(cfg.parallel.recompute_parts)


def scale_block(p: Parallel) -> int | None:
    """Elements that have a scale together on the wire: parameters, and ranks' shares of them, begin with a scale of their own."""
    return p.compress_block if {p.compress, p.compress_weights} & {"int8", "fp8"} else None


def padded_vocab(m: Model) -> int:
    return -(-m.vocab // m.vocab_multiple) * m.vocab_multiple


def divisors(n: int) -> list[int]:
    """In their order."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d < n]
