"""The config keys of Bevatron: one tree of frozen dataclasses, and plain functions of their values.

Keys of a model part are defined next to its module, in model/. The comment of a key is its help text, and its
type has its range. config/reading/ reads the tree from recipes, files and the command line, and has the rules
that involve several keys.
"""
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from config.optimizers import OPTIMIZERS
from config.pattern import BlockVariant, kinds_of_layers
from config.rule import Rule
from config.strict import ConfigError
from config.tree import (
    AtLeastOne,
    BelowOne,
    Count,
    CountOrZero,
    NotNegative,
    Portion,
    Positive,
    Share,
    with_values,
)

MAX_LOSS_SCALE = 2.0**24  # largest loss scale of fp16 training (optim/scaler.py)
FP8_SIDES = {"blockwise": 128, "mxfp8": 32, "nvfp4": 16}  # {train.fp8 with blocks: side of a block}
FIXED_SIDES = ("mxfp8", "nvfp4")  # of them, those whose format fixes the side

if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]  # type checkers reject a computed Literal


# ---- base classes of the parts of a block ------------------------------------------------------------------


class HeadShape(NamedTuple):
    """Head sizes of softmax attention. `rotated` counts the channels of a query or key head that RoPE
    rotates."""
    head_dim: int  # channels of a query or key head
    value_dim: int  # channels of a value head
    kv_heads: int
    rotated: int


class TokenMixer:
    """Base class of the keys of sequence mixers: attention, delta rule, state space, short convolution.

    `has_softmax` says that a token attends to all tokens before it; other mixers keep a state.
    """
    has_softmax = False

    def heads_over_tp(self) -> dict[str, int]:
        """Return {key of the mixer: count} of the heads that tp shards, and of what several heads share."""
        return {}

    def features_over_tp(self, hidden: int) -> dict[str, int]:
        """Return {key of the model that sets the size: matrix features that tp shards}."""
        return {}

    def head_shape(self, hidden: int) -> HeadShape:
        """Return the head sizes of softmax attention. Raises TypeError for other mixers."""
        raise TypeError(f"{type(self).__name__} has no softmax attention")

    def rules(self, cfg: "Config") -> Iterator[Rule]:
        """Check which values go together. `cfg` is that of a layer with this mixer."""
        for name, shared in self.heads_over_tp().items():
            heads = self.heads_over_tp()["heads"]
            yield Rule(
                heads % shared == 0,
                f"model.mixer.{name}: {shared} does not divide model.mixer.heads={heads}",
                f"model.mixer.{name}", divisors(heads))


class ChannelMixer:
    """Base class of the keys of channel mixers: an MLP, or a mixture of experts."""

    def features_over_tp(self, hidden: int) -> dict[str, int]:
        """Return {key of the model that sets the size: matrix features that tp shards}."""
        return {}

    def rules(self, cfg: "Config") -> Iterator[Rule]:
        """Check which values go together. `cfg` is that of a layer with these keys."""
        yield from ()


@dataclass(frozen=True, kw_only=True)
class NoPart(TokenMixer, ChannelMixer):
    """A block without this part: only an MLP, or only a token mixer (Nemotron-H, arXiv 2504.03624)."""
    kind: Literal["none"] = "none"


NormPlace = Literal["before", "after", "around"]


class NormConfig:
    """A norm around the mixer and the MLP of every block, and after the last block."""
    eps: float  # added to the mean square, or to the variance
    place: NormPlace
    weight: bool  # false: no learned scale


# ---- around the blocks -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MTPConfig:
    """Multi-token prediction (arXiv 2412.19437)."""
    modules: Count = 1  # after the last block; each predicts one token further ahead
    weight: NotNegative = 0.3  # of their mean loss, which is added to the next-token loss


@dataclass(frozen=True, kw_only=True)
class MupConfig:
    """muP (arXiv 2203.03466): MLP, heads and ranks grow with the width."""
    base: Count  # width of the model whose learning rates and init_std are tuned
    head_dim: Count | None = None  # head_dim of the tuned model; attention scores change as 1 / head_dim from
    #   there; none: head_dim is the same as in the tuned model


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA (arXiv 2106.09685): low-rank adapters of linear layers, which train alone."""
    rank: Count = 16  # inner width of an adapter
    alpha: Positive = 16.0  # its output is multiplied by alpha / rank
    scale: Literal["lora", "rslora"] = "lora"  # rslora: by alpha / sqrt(rank) instead (arXiv 2312.03732)
    targets: str = "attn.q,attn.v"  # projections with an adapter, by name within a layer or in checkpoints:
    #   patterns such as attn.*,mlp.* or layers.3.*, separated by commas; *: all that take one
    dropout: BelowOne = 0.0  # of what adapters read, in training; masks as those of model.dropout


# ---- sections ----------------------------------------------------------------------------------------------

@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture of the model."""

    # ---- sizes
    preset: str | None = "llama-mini"  # entry of configs/models.yaml; gives every model key that is not set;
    #   none: no preset, as for some imported models
    layers: Count = 4  # number of transformer blocks
    hidden: Count = 128  # width of the residual stream
    vocab: Count | None = None  # number of token ids; none: that of the tokenizer
    vocab_multiple: Count = 128  # pad the rows of the embedding to a multiple of this, in every layout
    context: Count = 2048  # longest sequence that the positions are made for

    # ---- parts of a block
    mixer: TokenMixer  # what mixes the tokens of a sequence
    mlp: ChannelMixer  # what mixes the channels of a token
    norm: NormConfig  # around the mixer and the MLP of every block, and after the last block
    residual: Literal["sequential", "parallel", "parallel_norms"] = "sequential"  # a block adds its mixer's
    #   output to the residual stream before the MLP reads it; parallel: both read the same norm, and are
    #   added together (PaLM, arXiv 2204.02311); parallel_norms: likewise, each with its own norm (GPT-NeoX,
    #   arXiv 2204.06745)
    residual_scale: Positive = 1.0  # factor of what mixer and MLP add to the residual stream (Granite)
    blocks: tuple[BlockVariant, ...] = ()  # kinds of blocks: blocks.NAME.mixer.KEY VALUE, where each
    #   differs from the mixer, mlp and norm above
    pattern: str | None = None  # the kind of each layer, e.g. (5 local, full) x 3, local; `block` is one
    #   without changes, and ... at the end fills the remaining layers; none: all layers are alike

    # ---- around the blocks
    positions: Literal["learned"] | None = None  # learned absolute positions, added to the embedding (GPT-2);
    #   none: positions are left to the mixer
    embed_scale: Positive = 1.0  # factor of the embedding (Gemma: sqrt(hidden))
    embed_norm: bool = False  # a norm of the embedding, before the first block (nanochat)
    logit_scale: Positive = 1.0  # factor of the logits (Granite, Cohere)
    logit_cap: Positive | None = None  # logits are bounded: cap tanh(logit / cap) (Gemma 2, arXiv 2408.00118)
    tied: bool = False  # the output head uses the weight of the embedding
    mtp: MTPConfig | None = None  # multi-token prediction (arXiv 2412.19437), in training only
    lora: LoraConfig | None = None  # low-rank adapters (LoRA, arXiv 2106.09685), which train alone: all other
    #   parameters are frozen, unless optim.groups names them
    dropout: BelowOne = 0.0  # of embeddings and both residual branches; masks depend on (seed, step, layer,
    #   position)
    init_std: Positive = 0.02  # of initial matrices; output projections have init_std / sqrt(2 layers)
    mup: MupConfig | None = None  # muP (arXiv 2203.03466): learning rates and init_std of a narrower model


@dataclass(frozen=True)
class TrainConfig:
    """Run length, batch sizes and numerics."""
    steps: Count | None = None  # length of the run in steps; set exactly one of steps, tokens and flops
    tokens: Positive | None = None  # length of the run in tokens, rounded up to whole steps
    flops: Positive | None = None  # length of the run in model FLOPs (forward and backward without recompute;
    #   attention over whole sequences, whatever doc_mask says)
    seq_len: Count = 256  # tokens in a sequence
    micro_batch: Count = 8  # sequences in one forward pass of one rank
    global_batch: Count = 16  # sequences in a step, over all ranks and micro-batches
    ramp: str | None = None  # START,INCREMENT,SAMPLES: the first steps take START sequences, and the number
    #   grows by INCREMENT until it is global_batch, evenly over the first SAMPLES sequences (Megatron-LM's
    #   --rampup-batch-size); none: every step takes global_batch sequences. A fourth number: sequences of the
    #   ramp already read, in a branch that continues it
    phases: str | None = None  # YAML file (or the list itself): the step or token from which keys change
    #   (docs/phases.md); none: the same values throughout the run
    seed: CountOrZero = 1234  # of weights, sample order and dropout
    dtype: Literal["fp64", "fp32", "bf16", "fp16", "fp8"] = "fp32"  # compute dtype; all below fp32 keep fp32
    #   master weights and gradients; fp16 scales the loss; fp8 is bf16 with most linear layers in fp8
    fp8: Literal["tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"] | None = None  # scales of dtype
    #   fp8 (kernels/fp8_linear.py; experts: kernels/fp8_grouped.py); nvfp4: operands of 4 bits
    #   (kernels/nvfp4_linear.py); none: tensorwise; with dtype fp64: the same rounding, with everything else
    #   in fp64, for proofs
    fp8_block: Count | None = None  # side of a block that shares a scale; none: 128 for blockwise
    #   (DeepSeek-V3), 32 for mxfp8 and 16 for nvfp4, whose formats allow no other: only dtype fp64 does, for
    #   proofs
    fp8_keep: CountOrZero = 1  # number of first layers, and of last layers, that stay in bf16
    loss_scale: float = 65536.0  # fp16: initial factor of the loss, a power of two (arXiv 1710.03740)
    loss_scale_window: Count = 1000  # fp16: the loss scale doubles after this many good steps in a row; a
    #   step that overflows halves it
    ema: float | None = None  # decay of an exponential moving average of the master weights, which is
    #   validated and saved beside them: after a good step, ema x itself + (1 - ema) x the weights. It begins
    #   at the initial weights, without warmup of the decay (as timm's ModelEmaV3 does); none: no average
    max_minutes: Positive | None = None  # after this many minutes: save, exit with code 75; none: no limit
    deterministic: bool | None = None  # deterministic kernels only, so that a run repeats bit for bit;
    #   none: on a CPU, where they cost nothing, and with rerun_every or rerun_suspects; else not on a GPU,
    #   where attention's backward is slower
    rerun_every: Count | None = None  # steps between those whose forward and backward are computed twice
    #   and compared bit by bit on each rank; a difference ends the run (80) and names the rank that computed
    #   wrongly; none: never
    rerun_suspects: bool = False  # compute a step that would be skipped (not finite, or a spike) twice: the
    #   same bits blame the data or the code, different bits a device (80). Every step is recorded for this,
    #   and the host waits for it
    replay_routing: str | None = None  # folder of a run that has recorded its routers (log.routing_every 1):
    #   in each step the tokens go to the experts of the record (arXiv 2510.11370), and the routers learn
    #   their weights; none: the routers choose
    compile: bool = False  # torch.compile the elementwise kernels (on a CPU: needs a C++ compiler)
    unproven: bool = False  # on a GPU: run the kernels of kernels/unproven/ where they apply. A model says
    #   that they gain, and no GPU has confirmed it; without the key they are not even imported
    cuda_graphs: bool = False  # record forward and backward once and replay them; helps steps in which the
    #   host is busier than the GPU. With experts: in bf16 or fp16, from Hopper on, where none drops tokens
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: cuda if the machine has it, else cpu; mps:
    #   the GPU of a Mac, in one process
    threads: Count | None = None  # CPU threads; none: at most 4, and one core of more than 2 stays free


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning rate."""
    name: OptimizerName = "adamw"  # AdamW (arXiv 1711.05101), or another one in optim/
    lr: Positive = 1e-3  # peak learning rate
    min_lr: NotNegative | None = None  # learning rate at the end of the decay; none: lr / 10
    lr_rule: Literal["linear", "sqrt"] | None = None  # lr and min_lr are those of base_batch, and are
    #   multiplied by train.global_batch / base_batch (arXiv 1706.02677), or by its root (arXiv 2205.10287);
    #   none: they are those of train.global_batch
    base_batch: Count | None = None  # sequences per step at which lr was tuned, for lr_rule
    warmup: CountOrZero = 100  # steps of linear warmup, at most a tenth of the run
    decay: Literal["cosine", "wsd", "linear", "constant"] = "cosine"  # shape of the decay after the warmup
    decay_fraction: float = 0.2  # wsd: the last fraction of the run, in which the rate falls linearly
    decay_steps: Count | None = None  # the step at which the schedule ends; later steps keep its last
    #   rate; none: where the next schedule begins (train.phases), or the end of the run
    beta1: BelowOne = 0.9  # decay of the first moment
    beta2: BelowOne = 0.95  # decay of the second moment
    momentum: BelowOne = 0.95  # decay of the momentum, for optimizers that have one instead of beta1
    orthogonalize: Literal["newton-schulz", "polar-express"] = "newton-schulz"  # of a matrix: one polynomial
    #   five times, or the best five (arXiv 2505.16932)
    rank_fraction: Portion = 0.25  # of dion: rank of the update of a matrix, over its smaller side
    eps: Positive = 1e-8  # added to the square root of the second moment
    weight_decay: NotNegative = 0.1  # decoupled weight decay of matrices; norms and biases have none
    groups: str | None = None  # rates of some parameters, by role or by pattern of names, separated by ";":
    #   "embedding: lr_factor 0.3, weight_decay 0; layers.*.attn.*: lr_factor 0.5"; lr_factor 0 freezes
    clip: Positive | None = 1.0  # largest global gradient norm; none: gradients are not clipped
    qk_clip: Positive | None = None  # after a step in which the largest attention score of a head exceeds it,
    #   the weights of its queries and keys are scaled down (MuonClip, arXiv 2507.20534: 100); none: never
    spike_sigma: Positive | None = None  # a step whose loss or gradient norm is more than this many standard
    #   deviations above the mean of the last spike_window applied steps is not applied (OLMo: 6); none: each
    #   finite step is applied
    spike_window: Count = 128  # applied steps in the statistics of spike_sigma; at least half are needed
    spike_rewind: Count | None = None  # after this many such steps in a row, rewind to the last checkpoint
    #   before them and skip their data (PaLM, arXiv 2204.02311); none: never
    spike_rewinds: Count = 3  # times that the run may rewind before the same steps; one more ends it (77)
    states: Literal["fp32", "bf16", "8bit"] = "fp32"  # of master weights and moments; bf16 (of adamw) is
    #   rounded stochastically (arXiv 2010.06192) and takes half the bytes; 8bit (of adamw): moments in 8 bits
    #   with a scale for each block (arXiv 2110.02861), masters in fp32


@dataclass(frozen=True)
class ParallelConfig:
    """How ranks share the work and the state."""
    tp: Count = 1  # tensor-parallel degree (arXiv 1909.08053)
    sp: bool = False  # sequence parallelism (arXiv 2205.05198): activations between tp regions are sharded
    #   along the sequence
    async_tp: bool = False  # tp regions multiply each rank's part of the sequence while the others travel;
    #   needs sp
    pp: Count = 1  # pipeline-parallel degree
    vpp: Count | None = None  # number of stages on a pipeline rank; none: that of the schedule (interleaved:
    #   2)
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"] = "1f1b"  # of the
    #   pipeline: the order of forwards and backwards
    stages: str | None = None  # number of layers in each stage, in order, e.g. 3,2,2,1; none: divided by cost
    cp: Count = 1  # context-parallel degree: number of ranks that share each sequence
    cp_kind: Literal["ring", "ulysses"] = "ring"  # keys and values travel around a ring (arXiv 2310.01889),
    #   or all-to-all over heads (arXiv 2309.14509)
    ep: Count = 1  # expert-parallel degree: number of ranks that share the experts (arXiv 2006.16668); ep x
    #   etp divides dp x cp x tp, whose ranks it uses
    etp: Count = 1  # expert-tensor-parallel degree: number of ranks that share the inner width of each expert
    ep_chunks: Count = 1  # chunks in which rows are sent to the experts and back, overlapped with the
    #   products of other chunks (arXiv 2206.03382); each has a share of the experts of every rank
    ep_bound: AtLeastOne | None = None  # each rank sends this multiple of the mean number of rows to every
    #   rank of experts, so the host reads no counts; a step with more rows is computed again, exactly; none:
    #   what is routed is sent
    dp_rep: Count = 1  # number of replicas of the ZeRO shard group (HSDP)
    zero: Literal[0, 1, 2, 3] = 0  # what data-parallel ranks shard (arXiv 1910.02054): 1 optimizer state, 2
    #   also gradients, 3 also weights
    bucket_mb: Positive = 64.0  # gradients that are reduced together, in MiB; a parameter is never split
    reduce: Literal["collective", "ring", "hierarchy", "server"] = "collective"  # how data-parallel gradients
    #   are summed: by a collective of the backend, or by point-to-point sends in one of three patterns
    node: Count | None = None  # ranks of a node, for reduce=hierarchy; none: all ranks are on one node
    compress: Literal["none", "int8", "fp8", "powersgd"] = "none"  # lossy compression of data-parallel
    #   gradients: 8 bits (qgZ, arXiv 2306.10209), or low rank (arXiv 1905.13727; zero 0 only)
    compress_weights: Literal["none", "int8", "fp8"] = "none"  # lossy compression of the weights that zero 1
    #   to 3 gather (qwZ, arXiv 2306.10209); master weights stay exact
    compress_tokens: Literal["none", "fp8"] = "none"  # lossy compression of the rows that go to the experts:
    #   tokens, and backward the gradients of what experts return, in e4m3 with a scale for every 128 channels
    #   (arXiv 2412.19437)
    compress_block: Count = 256  # number of elements that share a scale in int8 and fp8, a multiple of 64
    powersgd_rank: Count = 4  # rank of the compressed gradient of a matrix; a rank of at least the smaller
    #   side of the matrix loses nothing
    timeout_s: Positive = 300.0  # seconds that a rank waits for another rank, or for its data, before it
    #   stops
    elastic: bool = False  # the layout adapts to the number of ranks at each start: dp, then dp_rep and
    #   train.micro_batch are lowered, then the planner's layout; the global batch and the samples stay
    auto: str | None = None  # a cluster of configs/clusters.yaml: keys of the layout that are not set, and
    #   train.micro_batch, come from the planner's best layout for this number of its ranks
    recompute: Literal["none", "selective", "full"] = "none"  # activations that the backward recomputes:
    #   parts of a block, or whole blocks
    offload: Literal["none", "optimizer", "activations", "both"] = "none"  # what is kept in host memory:
    #   master weights and moments; activations that the backward needs
    recompute_parts: str = "core"  # what selective recomputes, any of core,norm,act: core attention, the
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
    #   disagree, or differ from the ids of a file without an index; none: the one that they name
    bos: bool | None = None  # put the tokenizer's start token (BOS) before each document and prompt; none:
    #   follow the tokenizer's files
    dtype: Literal["uint16", "uint32", "int32", "uint64", "int64"] | None = None  # of the ids in a file that
    #   has neither an index nor a header; none: uint16, where the vocabulary and the file allow no other
    split: str = "95,5"  # train,valid[,test]: shares of the documents
    valid: str | None = None  # separate validation data, named as in path; each source of a blend is
    #   validated separately. The share of split for valid is then trained on; none: that share of path
    doc_mask: bool = False  # attention and positions restart at document boundaries; MFU counts attention
    #   within documents, with the document lengths of the first million tokens of the run
    span: Count | None = None  # consecutive tokens that stay together when samples are shuffled, so that a
    #   later phase can read longer sequences of what is unread; none: the longest train.seq_len of all phases
    pack: Literal["stream", "best_fit"] = "stream"  # how documents fill sequences: one after the other, or
    #   placed whole, and cut only where they are longer than a sequence (arXiv 2404.10830), with padding
    fim_rate: Share = 0.0  # share of the documents in a sequence whose middle moves to the end
    #   (fill-in-the-middle, arXiv 2207.14255); conversations stay as they are
    fim_spm_rate: Share = 0.5  # of these, the share in the order suffix, prefix, middle (SPM); the others are
    #   in the order prefix, suffix, middle (PSM)
    fim_split: Literal["character", "token"] = "character"  # where a document may be cut; parts cut
    #   between characters are tokenized again
    fim_tokens: str | None = None  # names of the tokenizer's sentinels: PREFIX,MIDDLE,SUFFIX; none: those of
    #   StarCoder, Qwen, SantaCoder, DeepSeek or Code Llama, whichever it has
    fim_valid: bool = False  # cut the documents of the valid split, too
    cache: str = "runs/data"  # folder for data that is made or downloaded when the run starts; downloads are
    #   whole, one on each node, and stay there
    prefetch: CountOrZero = 2  # steps that the loader thread reads ahead; 0: each step is read when needed


@dataclass(frozen=True)
class DistillConfig:
    """Distillation while training: the model also follows a teacher (arXiv 1503.02531)."""
    teacher: str | None = None  # run, checkpoint or Hugging Face folder, as checkpoint.init_from reads them:
    #   a model with the same tokenizer, whose probabilities of the next token are also targets; none: no
    #   teacher
    weight: Portion = 0.5  # of the divergence KL(teacher, model) in the loss, times temperature^2; the rest
    #   is cross-entropy
    temperature: Positive = 1.0  # both models' logits are divided by it in the divergence


@dataclass(frozen=True)
class EvalConfig:
    """Validation during training."""
    every: Count | None = 100  # steps between validations; none: only at the end
    batches: Count = 8  # number of global batches of a validation, the same ones every time
    source_batches: CountOrZero | None = None  # of a blend: number of global batches to validate each source
    #   separately; none: as many as eval.batches; 0: sources are not validated separately
    sample: CountOrZero = 48  # number of tokens of text that each validation samples; 0: no text
    prompt: str | None = None  # start of the sampled text; none: the first words of the validation data
    temperature: NotNegative = 0.8  # sampling temperature
    special: bool = False  # parse control tokens spelled in eval.prompt and eval.tasks
    tasks: str | None = None  # PATH[,PATH...]: files and folders of tasks with known answers, in the form of
    #   CORE (arXiv 2406.11794) or in JSONL (docs/training.md); none: no tasks
    tasks_every: Count | None = None  # steps between scores of the tasks, a multiple of every; none: with
    #   each validation
    tasks_limit: Count | None = 500  # examples of each task, the same ones every time; none: all


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and resuming."""
    every: Count | None = 100  # steps between saves; none: only at the end
    keep: Count = 2  # number of newest checkpoints that are kept; beside them, permanent ones are never
    #   removed
    keep_every: Count | None = None  # steps between permanent checkpoints
    keep_at: str | None = None  # save permanent checkpoints after these steps: a list, e.g. 100,200,1000, or
    #   log2: 1, 2, 4, 8, ...
    keep_minutes: Positive | None = None  # minutes after which the next checkpoint that is saved becomes
    #   permanent
    resume: str = "auto"  # auto: the newest good checkpoint of this run | none | a checkpoint or run folder
    init_from: str | None = None  # checkpoint, run, Hugging Face folder, adapters of PEFT or checkpoint of
    #   another system (docs/checkpoints.md) that gives the initial weights (no optimizer state, step 0), of a
    #   model that computes the same
    init_changes: str | None = None  # KEY[,KEY...]: what may differ from the model of init_from, e.g.
    #   model.layers,model.mixer.window: keys of model.*, data.bos, data.tokenizer (or data.tokenizer=text:
    #   rows go to the tokens of the same text), and weights by name (head.weight, layers.*.attn.q.weight)
    #   that are skipped; none: nothing (docs/checkpoints.md)
    branch: str | None = None  # RUN or RUN@STEP: begin at that checkpoint of another run, with its weights,
    #   optimizer state, step, settings and position in the data; what else is set begins there
    failed_saves: CountOrZero = 2  # consecutive saves that may fail because of the storage, such as a full
    #   disk: the run continues, and saves again when the next save is due; one more ends it. The last save
    #   of a run may not fail
    check_replicas: Count | None = 100  # steps between two comparisons, bit by bit, of weights and moments
    #   that several ranks hold; none: only before each save
    mirror: str | None = None  # URL of a folder in an object store, such as s3://bucket/runs: checkpoints are
    #   also uploaded to URL/log.name in the background, and a run whose folder has none, or an older one,
    #   resumes from there (docs/checkpoints.md); none: they are only in the run folder
    mirror_failures: Count | None = 5  # consecutive uploads that may fail before the run ends with exit
    #   code 82; none: any number
    memory_every: Count | None = None  # steps between saves to the memory of each node, from which a
    #   restarted rank resumes without the disk (docs/checkpoints.md); none: never
    replicas: CountOrZero = 0  # copies of each node's part, each in the memory of another node: a node that
    #   replaces a lost one receives them
    memory_dir: str = "/dev/shm"  # folder in memory, on each node, for checkpoint.memory_every
    async_save: bool = False  # write checkpoints in a background thread while training continues
    timeout_s: Positive = 3600.0  # time limit of a rank for its part of a save or a resume


@dataclass(frozen=True)
class LogConfig:
    """The run folder and what is logged."""
    dir: str = "runs"  # parent of the run folder
    name: str | None = None  # name of the run folder; none: that of the recipe
    every: Count = 10  # steps between lines on the console
    slow_window: Count | None = 10  # minimum number of steps over which the times of ranks are compared to
    #   find a slow rank or link (docs/training.md); none: they are not compared
    noise_scale: bool = False  # measure the gradient noise scale (arXiv 1812.06162); reads the gradients of
    #   matrices two more times in each step
    inside_every: Count | None = None  # in every such step, record of each layer norms of gradients, weights
    #   and updates, activations, router and largest attention logit (docs/training.md); none: in no step
    routing_every: Count | None = None  # in every such step, record the experts that the routers of a mixture
    #   choose for each token (docs/training.md); none: in no step
    wandb: Literal["off", "offline", "online"] = "off"  # Weights & Biases
    tensorboard: bool = False  # write TensorBoard's event files into the run folder
    mlflow: str | None = None  # MLflow: the address of a server, or sqlite:///runs/mlflow.db; none: off
    comet: Literal["off", "offline", "online"] = "off"  # Comet
    project: str = "bevatron"  # project of W&B and Comet, experiment of MLflow
    entity: str | None = None  # the team or user that owns the project in W&B; in Comet the workspace
    group: str | None = None  # group of runs in W&B; a tag in MLflow and Comet
    tags: str | None = None  # tags of the run in W&B, MLflow and Comet, with commas between them
    notes: str | None = None  # notes of the run in W&B, MLflow and Comet
    alert_command: str | None = None  # a program that rank 0 runs, with one message, if the run fails or
    #   diverges


@dataclass(frozen=True)
class ProfileConfig:
    """Recordings of single steps."""
    steps: str | None = None  # FIRST:LAST: write a profiler trace of these steps into the run folder
    memory: str | None = None  # FIRST:LAST: write a GPU's allocations in these steps into the run folder,
    #   also if memory runs out in them; for pytorch.org/memory_viz


@dataclass(frozen=True)
class Config:
    """All settings of a run, one field per section."""
    model: ModelConfig
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)


# ---- what follows from the keys: the model -----------------------------------------------------------------

def layer_kinds(model: ModelConfig) -> tuple[str, ...]:
    """Return the kind of block of each layer. Raises ConfigError for a pattern that does not fit the
    layers."""
    return kinds_of_layers(model.pattern, tuple(variant.name for variant in model.blocks), model.layers)


@lru_cache(maxsize=1 << 12)
def layer_model(model: ModelConfig, layer: int) -> ModelConfig:
    """Return the model of one layer: with the mixer, MLP and norm of the layer's kind.

    Modules of multi-token prediction, whose indices follow the last layer, have the last layer's kind.
    """
    if model.pattern is None:
        return model
    name = layer_kinds(model)[min(layer, model.layers - 1)]
    changes = next((variant.changes for variant in model.blocks if variant.name == name), ())
    return with_values(replace(model, blocks=(), pattern=None), dict(changes))


def layer_models(model: ModelConfig) -> dict[str, ModelConfig]:
    """Return {kind: model of its layers} for the kinds that some layer has, in order."""
    kinds = layer_kinds(model)
    return {name: layer_model(model, kinds.index(name)) for name in dict.fromkeys(kinds)}


def config_of_layer(cfg: Config, layer: int) -> Config:
    """Return the config of one layer (layer_model)."""
    if cfg.model.pattern is None:
        return cfg
    return replace(cfg, model=layer_model(cfg.model, layer))


def head_shape(model: ModelConfig) -> HeadShape:
    """Return the head sizes of softmax attention."""
    return model.mixer.head_shape(model.hidden)


def head_dim(model: ModelConfig) -> int:
    """Return the channels of a query or key head."""
    return head_shape(model).head_dim


def value_dim(model: ModelConfig) -> int:
    """Return the channels of a value head."""
    return head_shape(model).value_dim


def kv_heads(model: ModelConfig) -> int:
    """Return the number of key and value heads."""
    return head_shape(model).kv_heads


def rotated_dim(model: ModelConfig) -> int:
    """Return the channels of a head that RoPE rotates, or 0 without RoPE."""
    return head_shape(model).rotated


def modules_ahead(model: ModelConfig) -> int:
    """Return the number of multi-token prediction modules."""
    return model.mtp.modules if model.mtp else 0


def mup_width_ratio(model: ModelConfig) -> float:
    """Return the width of this model / width of the tuned model (muP), or 1 without muP."""
    return model.hidden / model.mup.base if model.mup else 1.0


def mup_score_scale(model: ModelConfig) -> float:
    """Factor of the attention scores that muP adds to 1 / sqrt(head_dim)."""
    if model.mup is None or model.mup.head_dim is None:
        return 1.0
    if not model.mixer.has_softmax:
        return 1.0
    return (model.mup.head_dim / head_dim(model)) ** 0.5


def vocab_size(model: ModelConfig) -> int:
    """Return the number of token ids.

    Raises ConfigError if model.vocab is none (build.with_vocab sets it from the tokenizer).
    """
    if model.vocab is None:
        raise ConfigError("model.vocab: none, and no tokenizer was read; set the number of token ids")
    return model.vocab


def padded_vocab(model: ModelConfig) -> int:
    """Return the number of embedding rows: the vocabulary rounded up to a multiple of
    model.vocab_multiple."""
    return ceil_div(vocab_size(model), model.vocab_multiple) * model.vocab_multiple


# ---- batches and steps ------------------------------------------------------------------------------------

class BatchPhase(NamedTuple):
    """Consecutive steps with one batch size. Steps and sequences are counted from 0."""
    first_step: int
    first_sequence: int  # of the run: the first sequence that first_step reads
    batch_size: int  # sequences in a step


def batch_size_phases(train: TrainConfig) -> list[BatchPhase]:
    """Return the phases of train.ramp, in order; the last one has train.global_batch.

    If train.ramp is too short for a batch size, its phase is empty: the next one starts at the same step.
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
    """Return the number of sequences in a step (counted from 0), over all ranks."""
    for phase in reversed(batch_size_phases(train)):
        if phase.first_step <= step:
            return phase.batch_size
    raise ValueError(f"step {step} is below 0")


def sequences_seen(train: TrainConfig, steps: int) -> int:
    """Return the number of sequences in the first `steps` steps, which is also the next step's first
    sequence."""
    for phase in reversed(batch_size_phases(train)):
        if phase.first_step <= steps:
            return phase.first_sequence + (steps - phase.first_step) * phase.batch_size
    raise ValueError(f"{steps} steps are fewer than 0")


def steps_to_see(train: TrainConfig, wanted: int) -> int:
    """Return the smallest number of steps that reads at least `wanted` sequences."""
    for phase in reversed(batch_size_phases(train)):
        if phase.first_sequence <= wanted:
            return phase.first_step + ceil_div(wanted - phase.first_sequence, phase.batch_size)
    raise ValueError(f"{wanted} sequences are fewer than 0")


def rest_of_ramp(train: TrainConfig, steps: int) -> str | None:
    """Return train.ramp for a run that resumes after the first `steps` steps, or None if the ramp is over."""
    if not train.ramp or global_batch_at(train, steps) == train.global_batch:
        return None
    *ramp, seen = [*positive_integers(train.ramp), 0][:4]
    return ",".join(map(str, [*ramp, seen + sequences_seen(train, steps)]))


def global_batch_sizes(train: TrainConfig) -> list[int]:
    """Return every batch size that some step has, in ascending order."""
    first_steps = [phase.first_step for phase in batch_size_phases(train)]
    return sorted({global_batch_at(train, step) for step in first_steps})


def is_due(every: int | None, step: int) -> bool:
    """Return whether something done every `every` steps is due after this step. With None it never is."""
    return every is not None and step % every == 0


def is_permanent_step(checkpoint: CheckpointConfig, step: int) -> bool:
    """Return whether checkpoint.keep_every or keep_at asks for a permanent checkpoint after this step."""
    if step == 0:
        return False
    if checkpoint.keep_every and step % checkpoint.keep_every == 0:
        return True
    if checkpoint.keep_at == "log2":
        return step & (step - 1) == 0
    return step in positive_integers(checkpoint.keep_at)


def profiled_steps(text: str | None, key: str = "steps") -> range:
    """Parse a key of profile: "10:12" is 10, 11 and 12; "10" is one step; None is an empty range.

    Raises ConfigError for any other form.
    """
    if text is None:
        return range(0)
    first, _, last = text.partition(":")
    last = last or first
    if not (first.isdigit() and last.isdigit() and 0 < int(first) <= int(last)):
        raise ConfigError(f"profile.{key}: {text!r} must be FIRST:LAST, counted from 1, e.g. 10:12")
    return range(int(first), int(last) + 1)


# ---- precision, recompute, compression --------------------------------------------------------------------

def fp8_recipe(train: TrainConfig) -> str | None:
    """Return the granularity of the fp8 scales, or None if no layer runs in fp8."""
    return train.fp8 or ("tensorwise" if train.dtype == "fp8" else None)


def fp8_block(train: TrainConfig) -> int:
    """Return the side of a block of fp8 scales; 1 for a recipe without blocks."""
    return train.fp8_block or FP8_SIDES.get(train.fp8 or "", 1)


def rounds_gradients(train: TrainConfig) -> bool:
    """Return whether gradients of the fp8 layers round stochastically."""
    return train.fp8 == "nvfp4"


def layer_in_fp8(cfg: Config, layer: int) -> bool:
    """Return whether the linear layers of this block run in fp8.

    Modules of multi-token prediction, whose indices follow the last block, never do.
    """
    if fp8_recipe(cfg.train) is None:
        return False
    return cfg.train.fp8_keep <= layer < cfg.model.layers - cfg.train.fp8_keep


def config_of_stage(cfg: Config, stage: int) -> Config:
    """Return the config with the recompute mode of one pipeline stage."""
    modes = comma_separated(cfg.parallel.recompute_stages)
    if not modes:
        return cfg
    return replace(cfg, parallel=replace(cfg.parallel, recompute=modes[stage]))


def recomputes(cfg: Config, part: str) -> bool:
    """Return whether selective recompute covers this part (core, norm or act)."""
    selective = cfg.parallel.recompute == "selective"
    return selective and part in comma_separated(cfg.parallel.recompute_parts)


def compression_block(parallel: ParallelConfig) -> int | None:
    """Return the number of elements per scale in compressed exchanges, or None without scales.

    Every parameter, and every rank's shard of it, starts with a new scale.
    """
    in_8_bits = {parallel.compress, parallel.compress_weights} & {"int8", "fp8"}
    return parallel.compress_block if in_8_bits else None


# ---- text and arithmetic ----------------------------------------------------------------------------------

def comma_separated(text: str | None) -> list[str]:
    """Split "a, b" into ["a", "b"]. Empty text and None give []."""
    return [word.strip() for word in text.split(",")] if text else []


def positive_integers(text: str | None) -> list[int]:
    """Parse "3,2" into [3, 2]. Returns [] unless all are whole numbers from 1 to 999,999,999."""
    words = comma_separated(text)
    if not all(re.fullmatch("0*[1-9][0-9]{0,8}", word) for word in words):
        return []
    return [int(word) for word in words]


def as_number(word: str) -> Fraction | None:
    """Return the number that `word` spells exactly, as for blend weights, or None if it is not a number."""
    try:
        return Fraction(word)
    except (ValueError, ZeroDivisionError):
        return None


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, in ascending order."""
    low = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    high = [number // divisor for divisor in reversed(low) if divisor * divisor < number]
    return low + high


def ceil_div(dividend: int, divisor: int) -> int:
    """Return the quotient, rounded up."""
    return -(-dividend // divisor)
