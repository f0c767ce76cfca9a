"""Every config key of Bevatron: one tree of frozen dataclasses, and plain functions of their values.

The comment of a key is its help text (config/usage.py prints it). config/loading.py reads the tree from
recipes, files and the command line, and exports everything in this file. The ranges of single values follow
the keys; config/rules.py holds the rules that involve several keys.
"""
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, NamedTuple

from config.optimizers import OPTIMIZERS
from config.strict import ConfigError

MAX_LOSS_SCALE = 2.0**24  # largest loss scale of fp16 training (optim/scaler.py)

if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]  # a type checker takes no computed Literal


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of the model."""

    # ---- sizes
    preset: str | None = "llama-mini"  # entry of configs/models.yaml; gives every model key that is not set;
    #   none: a model of no entry, as an imported one may be
    layers: int = 4  # number of transformer blocks
    hidden: int = 128  # width of the residual stream
    heads: int = 4  # number of query heads
    kv_heads: int | None = None  # number of key and value heads (GQA); none: equal to heads
    head_dim: int | None = None  # channels of one head; none: hidden / heads
    ffn: int = 352  # inner width of the MLP
    vocab: int | None = None  # number of token ids; none: that of the tokenizer
    vocab_multiple: int = 128  # the rows of the embedding are padded to a multiple of this, at any layout
    context: int = 2048  # length of the longest sequence that the positions are made for

    # ---- blocks and positions
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"  # normalization before attention and MLP of every block
    norm_eps: float = 1e-5  # added to the variance
    activation: Literal["swiglu", "gelu"] = "swiglu"  # of the MLP; gelu is the tanh approximation (GPT-2)
    positions: Literal["rope", "learned"] = "rope"  # rotary (arXiv 2104.09864) or learned absolute positions
    rope_theta: float = 10000.0  # base of the rotary wavelengths
    rope_factor: float | None = None  # context length / rope_original; none: no scaling
    rope_kind: Literal["llama3", "yarn"] = "llama3"  # scaling as in Llama 3.1, or YaRN (arXiv 2309.00071)
    rope_low_freq: float = 1.0  # channels that rotate fewer times than this within rope_original are slowed
    #   down by rope_factor (yarn: beta_slow)
    rope_high_freq: float = 4.0  # channels that rotate more often than this stay unchanged, with a ramp
    #   between the two limits (yarn: beta_fast)
    rope_original: int = 8192  # context length before scaling
    rope_mscale: float = 1.0  # yarn: cos and sin are multiplied by f(rope_mscale) / f(rope_mscale_all), where
    #   f(m) = 1 + m ln(rope_factor) / 10
    rope_mscale_all: float = 0.0  # yarn with MLA: the softmax scale is multiplied by f(rope_mscale_all)
    #   squared (DeepSeek)
    rope_pairs: bool = False  # true: rotate channels 2i and 2i + 1 together (DeepSeek); false: i and i +
    #   dim/2
    tied: bool = False  # the output head uses the weight of the embedding
    bias: bool = False  # biases in every linear layer and norm (GPT-2)
    qkv_bias: bool = False  # biases in the projections of q, k and v only (Qwen2)
    qk_norm: bool = False  # RMSNorm of each head of q and k, before RoPE (Qwen3)
    qk_norm_whole: bool = False  # qk_norm over all heads of q together, and all heads of k together (OLMoE)

    # ---- multi-head latent attention (MLA), multi-token prediction (MTP)
    kv_rank: int | None = None  # multi-head latent attention (MLA, arXiv 2405.04434): width of the latent
    #   vector of keys and values; none: no MLA
    q_rank: int | None = None  # MLA: width of the latent vector of queries; none: queries are projected from
    #   the hidden state directly
    nope_dim: int = 128  # MLA: channels of a query or key head that have no positions
    rope_dim: int = 64  # MLA: channels of a query or key head that have positions; all heads share this part
    #   of the key
    v_dim: int = 128  # MLA: channels of a value head
    mtp: int = 0  # multi-token prediction (arXiv 2412.19437): number of modules after the last block, each of
    #   which predicts one token further ahead; used in training only
    mtp_weight: float = 0.3  # weight of their mean loss, which is added to the next-token loss

    # ---- window, dropout, initialization, muP, kernel
    window: int | None = None  # sliding-window attention (Mistral): a token attends to this many tokens,
    #   itself included; none: to all tokens before it
    dropout: float = 0.0  # of embeddings and both residual branches; masks depend on (seed, step, layer,
    #   position)
    init_std: float = 0.02  # of initial matrices; output projections have init_std / sqrt(2 layers)
    mup_base: int | None = None  # muP (arXiv 2203.03466): width of the model whose learning rates and
    #   init_std are tuned; ffn, heads and ranks grow with the width; none: no muP
    mup_head_dim: int | None = None  # muP: head_dim of the tuned model; attention scores change as 1 /
    #   head_dim from there; none: head_dim is the same as in the tuned model
    attention: Literal["auto", "flash", "sdpa", "triton", "reference"] = "auto"  # attention kernel; auto: the
    #   fastest that supports this model and device

    # ---- mixture of experts (MoE)
    experts: int | None = None  # routed experts of a mixture layer (arXiv 2101.03961); none: dense model
    top_k: int = 2  # number of routed experts that process a token
    moe_ffn: int | None = None  # inner width of one expert; none: ffn
    shared_experts: int = 0  # experts that process every token (arXiv 2401.06066), as one MLP whose inner
    #   width is shared_experts x moe_ffn
    shared_gate: bool = False  # multiply the output of the shared experts by sigmoid(x w) (Qwen2-MoE)
    first_dense: int = 0  # number of first layers that have a dense MLP (DeepSeek)
    moe_every: int = 1  # n: of the other layers, those with index n-1, 2n-1, ... have experts
    router: Literal["softmax", "sigmoid"] = "softmax"  # scores of experts: a softmax over all experts, or a
    #   sigmoid for each expert (DeepSeek-V3, arXiv 2412.19437)
    router_renorm: bool = True  # divide the scores of the chosen experts by their sum
    router_groups: int = 1  # number of groups of experts; the experts of a token come from its best groups
    router_group_top_k: int = 1  # number of groups that the experts of a token come from; the score of a
    #   group is the score of its best expert (softmax, arXiv 2405.04434) or the sum of its two best (sigmoid,
    #   arXiv 2412.19437)
    router_scale: float = 1.0  # factor of the output of the routed experts
    router_bias: bool = False  # a bias that affects only the choice of experts; after each step it moves
    #   against the load (aux-loss-free, arXiv 2408.15664)
    router_bias_rate: float = 1e-3  # size of the move of router_bias in one step
    jitter: float = 0.0  # training: multiply the input of the router by uniform(1 - jitter, 1 + jitter)
    #   (arXiv 2101.03961)
    aux_loss: float = 0.0  # load-balance loss: what a balanced layer adds to the loss; in Hugging Face's
    #   Mixtral a balanced layer adds top_k times its coefficient
    aux_kind: Literal["sequence", "global", "micro"] = "sequence"  # which load aux_loss balances: that of
    #   each sequence; that of the step, measured in the step before (arXiv 2501.11873); that of a micro-batch
    #   (arXiv 2101.03961), the only kind that depends on micro_batch and layout
    z_loss: float = 0.0  # factor of the mean squared logsumexp of the router's logits (arXiv 2202.08906)
    capacity: float | None = None  # training: an expert takes at most this times its fair share of the tokens
    #   of a sequence; none: no token is dropped
    drop: Literal["probability", "position"] = "probability"  # which tokens an expert over capacity drops:
    #   the least likely ones, or the last ones
    pad: bool = False  # training, with a capacity: each rank pads what it sends to every expert, so that no
    #   tensor shape depends on the routing


@dataclass(frozen=True)
class TrainConfig:
    """The length of a run, its batches and its numerics."""
    steps: int | None = None  # length of the run in steps; set exactly one of steps, tokens and flops
    tokens: float | None = None  # length of the run in tokens, rounded up to whole steps
    flops: float | None = None  # length of the run in model FLOPs (forward and backward without recompute;
    #   attention over whole sequences, whatever doc_mask says)
    seq_len: int = 256  # tokens in a sequence
    micro_batch: int = 8  # sequences in one forward pass of one rank
    global_batch: int = 16  # sequences in a step, over all ranks and micro-batches
    ramp: str | None = None  # START,INCREMENT,SAMPLES: the first steps take START sequences, and the number
    #   grows by INCREMENT until it is global_batch, evenly over the first SAMPLES sequences (Megatron-LM's
    #   --rampup-batch-size); none: every step takes global_batch sequences. A fourth number: sequences of the
    #   ramp that were read before, where a branch goes on with it
    phases: str | None = None  # YAML file (or the list itself): from which step or token on which keys have
    #   other values (docs/phases.md); none: the same values from the first step to the last
    seed: int = 1234  # of weights, sample order and dropout
    dtype: Literal["fp64", "fp32", "bf16", "fp16", "fp8"] = "fp32"  # compute dtype; all below fp32 keep fp32
    #   master weights and gradients; fp16 scales the loss; fp8 is bf16 with most linear layers in fp8
    fp8: Literal["tensorwise", "rowwise", "blockwise"] | None = None  # granularity of the scales of dtype fp8
    #   (kernels/fp8_linear.py; experts: kernels/fp8_grouped.py); none: tensorwise; with dtype fp64: the same
    #   rounding to 8 bits, with everything else in fp64, for proofs
    fp8_block: int = 128  # side of a block of blockwise scales (DeepSeek-V3)
    fp8_keep: int = 1  # number of first layers, and of last layers, that stay in bf16
    loss_scale: float = 65536.0  # fp16: initial factor of the loss, a power of two (arXiv 1710.03740)
    loss_scale_window: int = 1000  # fp16: the loss scale doubles after this many good steps in a row; a step
    #   that overflows halves it
    ema: float | None = None  # decay of an exponential moving average of the master weights, which is
    #   validated and saved beside them: after a good step, ema x itself + (1 - ema) x the weights. It begins
    #   at the initial weights, without warmup of the decay (as timm's ModelEmaV3 does); none: no average
    max_minutes: float | None = None  # after this many minutes: save, exit with code 75; none: no limit
    deterministic: bool | None = None  # deterministic kernels only, so that a run repeats bit for bit;
    #   none: on a CPU, where they cost nothing, and with rerun_every or rerun_suspects; else not on a GPU,
    #   where attention's backward is slower
    rerun_every: int | None = None  # every so many steps forward and backward are computed twice and compared
    #   bit by bit on each rank; other bits end the run (80), and the rank that computed wrongly is named;
    #   none: never
    rerun_suspects: bool = False  # a step that would be skipped (not finite, or a spike) is computed twice:
    #   the same bits are due to the data or the code, others to a device (80). Each step is recorded for it,
    #   and the host waits for each
    compile: bool = False  # torch.compile the elementwise kernels (on a CPU: needs a C++ compiler)
    cuda_graphs: bool = False  # record forward and backward once and replay them; helps steps in which the
    #   host is busier than the GPU. With experts: in bf16 or fp16, from Hopper on, where none drops tokens
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: cuda if the machine has it, else cpu; mps:
    #   the GPU of a Mac, in one process
    threads: int | None = None  # CPU threads; none: at most 4, and of more than 2 cores one stays free


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning rate."""
    name: OptimizerName = "adamw"  # AdamW (arXiv 1711.05101), or another one that optim/ describes
    lr: float = 1e-3  # peak learning rate
    min_lr: float | None = None  # learning rate at the end of the decay; none: lr / 10
    warmup: int = 100  # steps of linear warmup, at most a tenth of the run
    decay: Literal["cosine", "wsd", "linear", "constant"] = "cosine"  # shape of the decay after the warmup
    decay_fraction: float = 0.2  # wsd: the last fraction of the run, in which the rate falls linearly
    decay_steps: int | None = None  # the step of the run at which the schedule ends; later ones have its last
    #   rate; none: where the next schedule begins (train.phases), or with the run
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.95  # decay of the second moment
    momentum: float = 0.95  # decay of the momentum, of optimizers that have one in the place of beta1
    eps: float = 1e-8  # added to the square root of the second moment
    weight_decay: float = 0.1  # decoupled weight decay of matrices; norms and biases have none
    clip: float | None = 1.0  # largest global gradient norm; none: gradients are not clipped
    spike_sigma: float | None = None  # a step whose loss or gradient norm is more than this many standard
    #   deviations above the mean of the last spike_window applied steps is not applied (OLMo: 6); none: each
    #   finite step is applied
    spike_window: int = 128  # applied steps that say what is usual; from half of them on, steps are judged
    spike_rewind: int | None = None  # after this many such steps in a row, go back to the last checkpoint
    #   before them and leave their data out (PaLM, arXiv 2204.02311); none: never
    spike_rewinds: int = 3  # times that the run may go back before the same steps; one more ends it (77)
    states: Literal["fp32", "bf16"] = "fp32"  # dtype of master weights and moments; bf16 (of adamw) is
    #   rounded stochastically (arXiv 2010.06192) and takes half the bytes


@dataclass(frozen=True)
class ParallelConfig:
    """How ranks share the work and the state."""
    tp: int = 1  # tensor-parallel degree (arXiv 1909.08053)
    sp: bool = False  # sequence parallelism (arXiv 2205.05198): activations between tp regions are sharded
    #   along the sequence
    async_tp: bool = False  # tp regions multiply each rank's part of the sequence while the others travel;
    #   needs sp
    pp: int = 1  # pipeline-parallel degree
    vpp: int | None = None  # number of stages on a pipeline rank; none: that of the schedule (interleaved: 2)
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"] = "1f1b"  # of the
    #   pipeline: the order of forwards and backwards
    stages: str | None = None  # number of layers in each stage, in order, e.g. 3,2,2,1; none: divided by cost
    cp: int = 1  # context-parallel degree: number of ranks that share each sequence
    cp_kind: Literal["ring", "ulysses"] = "ring"  # keys and values travel around a ring (arXiv 2310.01889),
    #   or all-to-all over heads (arXiv 2309.14509)
    ep: int = 1  # expert-parallel degree: number of ranks that share the experts (arXiv 2006.16668); ep x etp
    #   divides dp x cp x tp, whose ranks it uses
    etp: int = 1  # expert-tensor-parallel degree: number of ranks that share the inner width of each expert
    ep_chunks: int = 1  # chunks in which rows travel to the experts and back, beside the products of other
    #   chunks (arXiv 2206.03382); each has a share of the experts of every rank
    dp_rep: int = 1  # number of replicas of the ZeRO shard group (HSDP)
    zero: Literal[0, 1, 2, 3] = 0  # what data-parallel ranks shard (arXiv 1910.02054): 1 optimizer state, 2
    #   also gradients, 3 also weights
    bucket_mb: float = 64.0  # gradients that are reduced together, in MiB; a parameter is never split
    reduce: Literal["collective", "ring", "hierarchy", "server"] = "collective"  # how data-parallel gradients
    #   are summed: by a collective of the backend, or by point-to-point sends in one of three patterns
    node: int | None = None  # ranks of a node, for reduce=hierarchy; none: all ranks are on one node
    compress: Literal["none", "int8", "fp8", "powersgd"] = "none"  # lossy compression of data-parallel
    #   gradients: 8 bits (qgZ, arXiv 2306.10209), or low rank (arXiv 1905.13727; zero 0 only)
    compress_weights: Literal["none", "int8", "fp8"] = "none"  # lossy compression of the weights that zero 1
    #   to 3 gather (qwZ, arXiv 2306.10209); master weights stay exact
    compress_block: int = 256  # number of elements that share a scale in int8 and fp8, a multiple of 64
    powersgd_rank: int = 4  # rank of the compressed gradient of a matrix; a rank of at least the smaller side
    #   of the matrix loses nothing
    timeout_s: float = 300.0  # seconds that a rank waits for another rank, or for its data, before it stops
    elastic: bool = False  # the layout follows the number of ranks that a start has: dp, then dp_rep and
    #   train.micro_batch are lowered, then the planner's layout; the global batch and the samples stay
    auto: str | None = None  # a cluster of configs/clusters.yaml: what is not stated of the layout, and
    #   train.micro_batch, are those of the planner's best one for this number of ranks of it
    recompute: Literal["none", "selective", "full"] = "none"  # activations that the backward computes again:
    #   parts of a block, or whole blocks
    offload: Literal["none", "optimizer", "activations", "both"] = "none"  # what is kept in host memory:
    #   master weights and moments; activations that the backward needs
    recompute_parts: str = "core"  # what selective computes again, any of core,norm,act: core attention, the
    #   norms, the activation of the MLP
    recompute_stages: str | None = None  # a mode for each stage, e.g. full,selective,none,none; none:
    #   recompute applies to every stage


@dataclass(frozen=True)
class DataConfig:
    """The training and validation data."""
    path: str = "stdlib"  # prefix of a .bin/.idx pair, here or in an object store (s3://bucket/prefix), or a
    #   blend "0.7 a 0.3 b"; stdlib: the source of Python's standard library, which is tokenized when the run
    #   starts
    tokenizer: str | None = None  # bytes | bpe-N (trained when the run starts) | x.model | tokenizer.json;
    #   none: that of the data
    eod: str | None = None  # text or id of the token that ends documents, for a data.tokenizer whose files
    #   name different ones, or another than the ids of a file without an index have; none: what they name
    bos: bool | None = None  # put the tokenizer's start token (BOS) before each document and prompt; none: as
    #   the tokenizer's files say
    dtype: Literal["uint16", "uint32", "int32", "uint64", "int64"] | None = None  # of the ids in a file that
    #   has neither an index nor a header; none: uint16, where the vocabulary and the file allow no other
    split: str = "95,5"  # train,valid[,test]: shares of the documents
    valid: str | None = None  # validation data of its own, named as in path; of a blend, each source is
    #   validated apart. What split leaves to valid is then trained on; none: that share of path
    doc_mask: bool = False  # attention and positions restart at document boundaries; MFU counts attention
    #   within documents, with the document lengths of the first million tokens of the run
    span: int | None = None  # consecutive tokens that stay together when samples are shuffled, so that a
    #   later phase can read longer sequences of what is unread; none: the longest train.seq_len of all phases
    pack: Literal["stream", "best_fit"] = "stream"  # how documents fill sequences: one after the other, or
    #   placed whole, and cut only where they are longer than a sequence (arXiv 2404.10830), with padding
    fim_rate: float = 0.0  # share of the documents in a sequence whose middle is moved to the end
    #   (fill-in-the-middle, arXiv 2207.14255); conversations stay as they are
    fim_spm_rate: float = 0.5  # of these, the share in the order suffix, prefix, middle (SPM); the others are
    #   in the order prefix, suffix, middle (PSM)
    fim_split: Literal["character", "token"] = "character"  # between what a document is cut; cut between
    #   characters, its parts are tokenized anew
    fim_tokens: str | None = None  # names of the tokenizer's sentinels: PREFIX,MIDDLE,SUFFIX; none: those of
    #   StarCoder, Qwen, SantaCoder, DeepSeek or Code Llama, whichever it has
    fim_valid: bool = False  # cut the documents of the valid split, too
    cache: str = "runs/data"  # folder for data that is made or downloaded when the run starts; downloads are
    #   whole, one on each node, and stay there
    prefetch: int = 2  # steps that the loader thread reads ahead; 0: each step is read when needed


@dataclass(frozen=True)
class EvalConfig:
    """Validation during training."""
    every: int | None = 100  # steps between validations; none: only at the end
    batches: int = 8  # number of global batches of a validation, the same ones every time
    source_batches: int | None = None  # of a blend: number of global batches with which each source is
    #   validated apart; none: as many as eval.batches; 0: no source is
    sample: int = 48  # number of tokens of text that each validation samples; 0: no text
    prompt: str | None = None  # start of the sampled text; none: the first words of the validation data
    temperature: float = 0.8  # sampling temperature
    special: bool = False  # control tokens that eval.prompt and eval.tasks spell are such, and not text
    tasks: str | None = None  # PATH[,PATH...]: files and folders of tasks with known answers, in the form of
    #   CORE (arXiv 2406.11794) or in JSONL (docs/training.md); none: no tasks
    tasks_every: int | None = None  # steps between scores of the tasks, a multiple of every; none: with each
    #   validation
    tasks_limit: int | None = 500  # examples of each task, the same ones every time; none: all


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and resuming."""
    every: int | None = 100  # steps between saves; none: only at the end
    keep: int = 2  # number of newest checkpoints that are kept; beside them, permanent ones are never removed
    keep_every: int | None = None  # save a permanent checkpoint after every so many steps
    keep_at: str | None = None  # save permanent checkpoints after these steps: a list, e.g. 100,200,1000, or
    #   log2: 1, 2, 4, 8, ...
    keep_minutes: float | None = None  # of the checkpoints that are saved, one in so many minutes is made
    #   permanent
    resume: str = "auto"  # auto: the newest good checkpoint of this run | none | a checkpoint or run folder
    init_from: str | None = None  # checkpoint or run folder that gives the initial weights (no optimizer
    #   state, step 0), of a model that computes the same
    init_changes: str | None = None  # KEY[,KEY...]: what may differ from the model of init_from, e.g.
    #   model.layers,model.window: keys of model.*, data.bos, data.tokenizer (or data.tokenizer=text: rows go
    #   to the tokens of the same text), and weights by name (head.weight, layers.*.attn.q.weight) that are
    #   not taken; none: nothing (docs/checkpoints.md)
    branch: str | None = None  # RUN or RUN@STEP: begin at that checkpoint of another run, with its weights,
    #   optimizer state, step, settings and position in the data; what else is set begins there
    failed_saves: int = 2  # saves in a row that may fail for their storage, such as a full disk: the run goes
    #   on, and saves again when the next save is due; one more ends it. The last save of a run may not fail
    check_replicas: int | None = 100  # steps between two comparisons, bit by bit, of weights and moments that
    #   several ranks hold; none: only before each save
    mirror: str | None = None  # URL of a folder in an object store, such as s3://bucket/runs: checkpoints are
    #   also sent to URL/log.name, behind training, and a run whose folder has none, or an older one, goes on
    #   from there (docs/checkpoints.md); none: they are in the run folder alone
    mirror_failures: int | None = 5  # uploads in a row that may fail before the run ends, with exit code 82;
    #   none: any number
    memory_every: int | None = None  # steps between saves into the memory of each node, from where a rank
    #   that is started again resumes without the disk (docs/checkpoints.md); none: never
    replicas: int = 0  # copies of each node's part, in the memory of so many other nodes: a node that takes
    #   the place of a lost one is sent them
    memory_dir: str = "/dev/shm"  # folder in memory, on each node, for checkpoint.memory_every
    async_save: bool = False  # write checkpoints in a background thread while training continues
    timeout_s: float = 3600.0  # seconds that a rank may take for its part of a save or a resume


@dataclass(frozen=True)
class LogConfig:
    """The run folder and what is logged."""
    dir: str = "runs"  # parent of the run folder
    name: str | None = None  # name of the run folder; none: that of the recipe
    every: int = 10  # steps between lines on the console
    slow_window: int | None = 10  # steps over which the times of ranks are compared, at least, to name a rank
    #   or a link that is slow (docs/training.md); none: they are not
    noise_scale: bool = False  # measure the gradient noise scale (arXiv 1812.06162); reads the gradients of
    #   matrices two more times in each step
    wandb: Literal["off", "offline", "online"] = "off"  # Weights & Biases
    tensorboard: bool = False  # write TensorBoard's event files into the run folder
    project: str = "bevatron"  # W&B project


@dataclass(frozen=True)
class ProfileConfig:
    """Profiler traces."""
    steps: str | None = None  # FIRST:LAST: write a profiler trace of these steps into the run folder


@dataclass(frozen=True)
class Config:
    """All settings of a run; one field for each section."""
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)


# ---- ranges of single values ------------------------------------------------------------------------------

class Range(NamedTuple):
    """An interval in which values of keys must lie; config/rules.py checks it. A key may be none as well."""
    must: str  # the end of the message, after "KEY: VALUE"
    holds: Callable[[float], bool]
    keys: dict[str, str]  # {section: its keys, separated by spaces}


POSITIVE = Range("must be above 0", lambda value: value > 0, {
    "model": "layers hidden heads kv_heads head_dim ffn vocab vocab_multiple context window experts top_k "
             "moe_ffn moe_every router_groups router_group_top_k router_scale capacity kv_rank q_rank "
             "nope_dim rope_dim v_dim mup_base mup_head_dim norm_eps init_std rope_theta rope_factor "
             "rope_low_freq rope_high_freq rope_original",
    "train": "steps tokens flops seq_len micro_batch global_batch max_minutes rerun_every threads fp8_block "
             "loss_scale_window",
    "optim": "lr eps clip decay_steps spike_sigma spike_window spike_rewind spike_rewinds",
    "parallel": "tp pp vpp cp ep etp ep_chunks dp_rep bucket_mb node compress_block powersgd_rank timeout_s",
    "data": "span",
    "eval": "every batches tasks_every tasks_limit",
    "checkpoint": "every keep keep_every keep_minutes check_replicas mirror_failures memory_every "
                  "timeout_s",
    "log": "every slow_window",
})
NOT_NEGATIVE = Range("must not be negative", lambda value: value >= 0, {
    "model": "mtp mtp_weight shared_experts first_dense aux_loss z_loss router_bias_rate rope_mscale "
             "rope_mscale_all",
    "train": "seed fp8_keep",
    "checkpoint": "failed_saves replicas",
    "optim": "min_lr weight_decay warmup",
    "data": "prefetch",
    "eval": "source_batches sample temperature",
})
BELOW_ONE = Range("must lie in [0, 1)", lambda value: 0 <= value < 1, {
    "model": "dropout jitter",
    "optim": "beta1 beta2 momentum",
})
SHARE = Range("must lie in [0, 1]", lambda value: 0 <= value <= 1, {
    "data": "fim_rate fim_spm_rate",
})
RANGES = (POSITIVE, NOT_NEGATIVE, BELOW_ONE, SHARE)


# ---- what follows from the keys: the model ----------------------------------------------------------------

def head_dim(model: ModelConfig) -> int:
    """Channels of a query or key head."""
    if model.kv_rank:
        return model.nope_dim + model.rope_dim
    return model.head_dim or model.hidden // model.heads


def value_dim(model: ModelConfig) -> int:
    """Channels of a value head."""
    return model.v_dim if model.kv_rank else head_dim(model)


def kv_heads(model: ModelConfig) -> int:
    """Number of key and value heads."""
    return model.kv_heads or model.heads


def mup_width_ratio(model: ModelConfig) -> float:
    """Width of this model / width of the tuned model (muP); 1 without muP."""
    return model.hidden / model.mup_base if model.mup_base else 1.0


def mup_score_scale(model: ModelConfig) -> float:
    """Factor of the attention scores that muP adds to 1 / sqrt(head_dim)."""
    return (model.mup_head_dim / head_dim(model)) ** 0.5 if model.mup_head_dim else 1.0


def expert_ffn_size(model: ModelConfig) -> int:
    """Inner width of one expert."""
    return model.moe_ffn or model.ffn


def has_experts(model: ModelConfig, layer: int) -> bool:
    """Whether the layer with this index has experts instead of a dense MLP."""
    if model.experts is None or layer < model.first_dense:
        return False
    return (layer + 1) % model.moe_every == 0


def vocab_size(model: ModelConfig) -> int:
    """Number of token ids.

    Raises ConfigError if model.vocab is none (build.with_vocab sets it from the tokenizer).
    """
    if model.vocab is None:
        raise ConfigError("model.vocab: none, and no tokenizer was read; set the number of token ids")
    return model.vocab


def padded_vocab(model: ModelConfig) -> int:
    """Number of rows of the embedding: the vocabulary, rounded up to a multiple of model.vocab_multiple."""
    return ceil_div(vocab_size(model), model.vocab_multiple) * model.vocab_multiple


# ---- keys of the model without effect ----------------------------------------------------------------------

class UnusedModelKeys(NamedTuple):
    """Keys of model.* that have no effect under the same condition."""
    keys: str  # names without their section, separated by spaces
    when: Callable[[ModelConfig], bool]


WITHOUT_EXPERTS = UnusedModelKeys(
    "top_k moe_ffn shared_experts shared_gate first_dense moe_every router router_renorm router_groups "
    "router_group_top_k router_scale router_bias router_bias_rate jitter aux_loss aux_kind z_loss drop pad",
    lambda model: model.experts is None,
)
WITHOUT_ROUTER_BIAS = UnusedModelKeys("router_bias_rate", lambda model: not model.router_bias)
WITHOUT_AUX_LOSS = UnusedModelKeys("aux_kind", lambda model: not model.aux_loss)
WITHOUT_CAPACITY = UnusedModelKeys("drop", lambda model: model.capacity is None)
WITHOUT_ROPE = UnusedModelKeys(
    "rope_theta rope_factor rope_kind rope_low_freq rope_high_freq rope_original rope_mscale rope_mscale_all",
    lambda model: model.positions == "learned",
)
WITHOUT_ROPE_SCALING = UnusedModelKeys(
    "rope_kind rope_low_freq rope_high_freq rope_original rope_mscale rope_mscale_all",
    lambda model: model.rope_factor is None,
)
WITHOUT_YARN = UnusedModelKeys("rope_mscale rope_mscale_all", lambda model: model.rope_kind != "yarn")
WITHOUT_MLA = UnusedModelKeys("nope_dim rope_dim v_dim", lambda model: model.kv_rank is None)
WITH_BIAS = UnusedModelKeys("qkv_bias", lambda model: model.bias)
WITHOUT_MTP = UnusedModelKeys("mtp_weight", lambda model: not model.mtp)

# config/unused.py refuses the keys of these rows where they are set; an export leaves them out.
UNUSED_MODEL_KEYS = (
    WITHOUT_EXPERTS,
    WITHOUT_ROUTER_BIAS,
    WITHOUT_AUX_LOSS,
    WITHOUT_CAPACITY,
    WITHOUT_ROPE,
    WITHOUT_ROPE_SCALING,
    WITHOUT_YARN,
    WITHOUT_MLA,
    WITH_BIAS,
    WITHOUT_MTP,
)


def no_effect(model: ModelConfig) -> set[str]:
    """The keys of model.* that have no effect in this model: every value of them gives the same model."""
    names: set[str] = set()
    for row in UNUSED_MODEL_KEYS:
        if row.when(model):
            names.update(row.keys.split())
    return names


# ---- batches and steps ------------------------------------------------------------------------------------

class BatchPhase(NamedTuple):
    """Consecutive steps of one batch size. Steps and sequences are counted from 0."""
    first_step: int
    first_sequence: int  # of the run: the first sequence that first_step reads
    batch_size: int  # sequences in a step


def batch_size_phases(train: TrainConfig) -> list[BatchPhase]:
    """The phases of train.ramp, in order; the last one has train.global_batch.

    If train.ramp is too short for a batch size, its phase has no steps: the next one starts at the same step.
    """
    start, increment, samples, seen = train.global_batch, 1, 1, 0
    if train.ramp:
        start, increment, samples, *rest = positive_integers(train.ramp)
        seen = sum(rest)
    rises = (train.global_batch - start) // increment

    step, sequence = 0, 0
    phases: list[BatchPhase] = []
    for rise in range(rises):
        batch_size = start + rise * increment
        phases.append(BatchPhase(step, sequence, batch_size))

        last_sequence = ceil_div(samples * (rise + 1), rises) - seen
        steps = max(0, ceil_div(last_sequence - sequence, batch_size))
        step += steps
        sequence += steps * batch_size
    return [*phases, BatchPhase(step, sequence, train.global_batch)]


def global_batch_at(train: TrainConfig, step: int) -> int:
    """Number of sequences in a step (counted from 0), over all ranks."""
    for phase in reversed(batch_size_phases(train)):
        if phase.first_step <= step:
            return phase.batch_size
    raise ValueError(f"step {step} is below 0")


def sequences_seen(train: TrainConfig, steps: int) -> int:
    """Number of sequences in the first `steps` steps; also the first sequence of the step after them."""
    for phase in reversed(batch_size_phases(train)):
        if phase.first_step <= steps:
            return phase.first_sequence + (steps - phase.first_step) * phase.batch_size
    raise ValueError(f"{steps} steps are fewer than 0")


def steps_to_see(train: TrainConfig, wanted: int) -> int:
    """The smallest number of steps that reads at least `wanted` sequences."""
    for phase in reversed(batch_size_phases(train)):
        if phase.first_sequence <= wanted:
            return phase.first_step + ceil_div(wanted - phase.first_sequence, phase.batch_size)
    raise ValueError(f"{wanted} sequences are fewer than 0")


def rest_of_ramp(train: TrainConfig, steps: int) -> str | None:
    """train.ramp for a run that goes on after the first `steps` steps of this one; None: the ramp is over."""
    if not train.ramp or global_batch_at(train, steps) == train.global_batch:
        return None
    *ramp, seen = [*positive_integers(train.ramp), 0][:4]
    return ",".join(map(str, [*ramp, seen + sequences_seen(train, steps)]))


def global_batch_sizes(train: TrainConfig) -> list[int]:
    """Every batch size that some step has, in ascending order."""
    first_steps = [phase.first_step for phase in batch_size_phases(train)]
    return sorted({global_batch_at(train, step) for step in first_steps})


def is_due(every: int | None, step: int) -> bool:
    """Whether something that is done every so many steps is done after this one. every: None: never."""
    return every is not None and step % every == 0


def is_permanent_step(checkpoint: CheckpointConfig, step: int) -> bool:
    """Whether checkpoint.keep_every or keep_at asks for a permanent checkpoint after this step."""
    if step == 0:
        return False
    if checkpoint.keep_every and step % checkpoint.keep_every == 0:
        return True
    if checkpoint.keep_at == "log2":
        return step & (step - 1) == 0
    return step in positive_integers(checkpoint.keep_at)


def profiled_steps(text: str | None) -> range:
    """The steps of profile.steps: "10:12" is 10, 11 and 12; "10" is one step; none is no step.

    Raises ConfigError if the text has another form.
    """
    if text is None:
        return range(0)
    first, _, last = text.partition(":")
    last = last or first
    if not (first.isdigit() and last.isdigit() and 0 < int(first) <= int(last)):
        raise ConfigError(f"profile.steps: {text!r} must be FIRST:LAST, counted from 1, e.g. 10:12")
    return range(int(first), int(last) + 1)


# ---- precision, recompute, compression --------------------------------------------------------------------

def fp8_recipe(train: TrainConfig) -> str | None:
    """Granularity of the fp8 scales; None if no layer runs in fp8."""
    return train.fp8 or ("tensorwise" if train.dtype == "fp8" else None)


def layer_in_fp8(cfg: Config, layer: int) -> bool:
    """Whether the linear layers of this block run in fp8.

    The modules of multi-token prediction have indices after the last block, and do not.
    """
    if fp8_recipe(cfg.train) is None:
        return False
    return cfg.train.fp8_keep <= layer < cfg.model.layers - cfg.train.fp8_keep


def config_of_stage(cfg: Config, stage: int) -> Config:
    """The config with the recompute mode of one pipeline stage."""
    modes = comma_separated(cfg.parallel.recompute_stages)
    if not modes:
        return cfg
    return replace(cfg, parallel=replace(cfg.parallel, recompute=modes[stage]))


def recomputes(cfg: Config, part: str) -> bool:
    """Whether the backward computes this part (core, norm or act) again, and not the whole block."""
    selective = cfg.parallel.recompute == "selective"
    return selective and part in comma_separated(cfg.parallel.recompute_parts)


def compression_block(parallel: ParallelConfig) -> int | None:
    """Number of elements that share a scale in compressed exchanges; None if there are no scales.

    Every parameter, and every rank's shard of it, starts with a scale of its own.
    """
    in_8_bits = {parallel.compress, parallel.compress_weights} & {"int8", "fp8"}
    return parallel.compress_block if in_8_bits else None


# ---- text and arithmetic ----------------------------------------------------------------------------------

def comma_separated(text: str | None) -> list[str]:
    """["a", "b"] of "a, b"; [] of an empty text and of none."""
    return [word.strip() for word in text.split(",")] if text else []


def positive_integers(text: str | None) -> list[int]:
    """[3, 2] of "3,2"; [] if the text is not a list of whole numbers from 1 to 999,999,999."""
    words = comma_separated(text)
    if not all(re.fullmatch("0*[1-9][0-9]{0,8}", word) for word in words):
        return []
    return [int(word) for word in words]


def as_number(word: str) -> Fraction | None:
    """The number that `word` spells exactly, as the weight of a blend; None if it is none."""
    try:
        return Fraction(word)
    except (ValueError, ZeroDivisionError):
        return None


def divisors(number: int) -> list[int]:
    """The divisors of a number, in ascending order."""
    low = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    high = [number // divisor for divisor in reversed(low) if divisor * divisor < number]
    return low + high


def ceil_div(dividend: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-dividend // divisor)
