"""The keys of the parts of a model. The comment of a key is its help text (config/usage.py prints it)."""
import math
from dataclasses import dataclass
from typing import Literal

from config.tree import BelowOne, Count, CountOrZero, NotNegative, Portion, Positive, Positives

# ---- rotary positions --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """RoPE for a longer context by interpolation of positions (arXiv 2306.15595)."""
    kind: Literal["linear"] = "linear"
    factor: Positive  # all positions are divided by it


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """RoPE for a longer context, as in Llama 3.1 (arXiv 2407.21783)."""
    kind: Literal["llama3"] = "llama3"
    factor: Positive  # context length / original
    original: Count = 8192  # context length before scaling
    low_freq: Positive = 1.0  # channels that rotate fewer times than this within `original` are slowed down
    #   by the factor
    high_freq: Positive = 4.0  # channels that rotate more often than this stay unchanged, with a ramp between
    #   the two limits


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """RoPE for a longer context by YaRN (arXiv 2309.00071)."""
    kind: Literal["yarn"] = "yarn"
    factor: Positive  # context length / original
    original: Count = 8192  # context length before scaling
    low_freq: Positive = 1.0  # channels that rotate fewer times than this within `original` are slowed down
    #   by the factor (beta_slow)
    high_freq: Positive = 32.0  # channels that rotate more often than this stay unchanged, with a ramp
    #   between the two limits (beta_fast)
    mscale: NotNegative = 1.0  # cos and sin are multiplied by f(mscale) / f(mscale_all), where f(m) = 1 + m
    #   ln(factor) / 10
    truncate: bool = True  # the limits of the ramp are whole channels (false: gpt-oss)
    mscale_all: NotNegative = 0.0  # latent attention multiplies its scores by f(mscale_all) squared
    #   (DeepSeek)


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling:
    """RoPE for a longer context by LongRoPE (arXiv 2402.13753)."""
    kind: Literal["longrope"] = "longrope"
    factor: Positive  # context length / original; above 1, cos and sin are multiplied by sqrt(1 + ln(factor)
    #   / ln(original))
    original: Count = 8192  # context length before scaling
    short: Positives  # each pair of channels is slowed by its own number here, at all positions of a run
    #   whose sequences (train.seq_len) have at most `original` tokens
    long: Positives  # the same where the sequences are longer; a text that grows beyond `original` while it
    #   is generated is read again with them


Scaling = Llama3Scaling | YarnScaling | LinearScaling | LongRopeScaling


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary positions (arXiv 2104.09864)."""
    base: Positive = 10000.0  # base of the rotary wavelengths
    share: Portion = 1.0  # of the channels of a head, the first ones: those that are rotated (GPT-NeoX)
    pairs: bool = False  # true: rotate channels 2i and 2i + 1 together; false: i and i + dim/2
    scaling: Scaling | None = None  # for a longer context than the model was trained on


@dataclass(frozen=True, kw_only=True)
class GrowthConfig:
    """Queries at position p are multiplied by 1 + rate ln(1 + floor((p + first) / every)) (Llama 4)."""
    rate: Positive = 0.1  # of the growth
    every: Count = 8192  # positions that share a factor
    first: CountOrZero = 0  # number of the first position: 1 in Llama 4, 0 in Ministral 3


# ---- mixers of tokens --------------------------------------------------------------------------------------

class TokenMixer:
    """What a mixer says beside its keys, for rules and planner.

    has_softmax: a token sees all tokens before it; in the other mixers it sees a state.
    """
    has_softmax = False

    def heads_over_tp(self) -> dict[str, int]:
        """{key of the mixer: its number} of the heads that tp divides, and of what several heads share."""
        return {}

    def features_over_tp(self, hidden: int) -> dict[str, int]:
        """{key of the model that sets the size: features of a matrix that tp divides}."""
        return {}


GateFunction = Literal["sigmoid", "softplus"]


@dataclass(frozen=True, kw_only=True)
class ChannelGate:
    """One number for each channel of the output."""
    kind: Literal["channel"] = "channel"
    by: GateFunction = "sigmoid"  # what is taken of x W


@dataclass(frozen=True, kw_only=True)
class HeadGate:
    """One number for each head."""
    kind: Literal["head"] = "head"
    by: GateFunction = "sigmoid"  # what is taken of x W; softplus: Laguna


AttentionKernel = Literal["auto", "flash", "sdpa", "triton", "reference"]


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(TokenMixer):
    """Grouped-query attention (arXiv 2305.13245)."""
    kind: Literal["attention"] = "attention"
    heads: Count = 4  # number of query heads
    kv_heads: Count | None = None  # number of key and value heads (GQA); none: equal to heads
    head_dim: Count | None = None  # channels of one head; none: hidden / heads
    value_dim: Count | None = None  # channels of a value head; none: equal to head_dim
    value_scale: Positive = 1.0  # values are multiplied by it (MiMo-V2)
    window: Count | None = None  # sliding-window attention (Mistral): a token attends to this many tokens,
    #   itself included; none: to all tokens before it
    chunk: Count | None = None  # chunked attention (Llama 4): a token attends to its chunk of this many
    #   tokens, counted from the start of its document
    bias: Literal["qkv", "all"] | None = None  # biases of the projections of q, k and v (Qwen2), or of all
    #   four (GPT-2)
    qk_norm: Literal["head", "whole", "after_rope", "unweighted"] | None = None  # RMSNorm of q and k: of each
    #   head (Qwen3); over all heads of q together, and all heads of k together (OLMoE); of each head after
    #   RoPE instead of before it (Hunyuan); the same without a weight (Llama 4)
    rope: RopeConfig | None = RopeConfig()  # rotary positions; none: the scores know no positions
    scale: Positive | None = None  # factor of the scores; none: 1 / sqrt(head_dim)
    growth: GrowthConfig | None = None  # scores grow with the position of their query
    softcap: Positive | None = None  # scores are bounded: softcap tanh(score / softcap) (Gemma 2, arXiv
    #   2408.00118)
    gate: ChannelGate | HeadGate | None = None  # the output is multiplied by sigmoid(x W) (arXiv 2505.06708)
    sinks: bool = False  # a learned score for each head beside those of the keys, whose value is 0 (gpt-oss)
    kernel: AttentionKernel = "auto"  # attention kernel; auto: the fastest that supports this model and
    #   device

    has_softmax = True

    def heads_over_tp(self) -> dict[str, int]:
        return {"heads": self.heads, "kv_heads": self.kv_heads or self.heads}

    def features_over_tp(self, hidden: int) -> dict[str, int]:
        size = self.head_dim or hidden // self.heads
        of_value = self.value_dim or size
        shared = (self.kv_heads or self.heads) * math.gcd(size, of_value)
        return {"mixer.heads": self.heads * of_value, "mixer.kv_heads": shared}


@dataclass(frozen=True, kw_only=True)
class LatentConfig(TokenMixer):
    """Multi-head latent attention (MLA, arXiv 2405.04434)."""
    kind: Literal["latent"] = "latent"
    heads: Count = 4  # number of heads
    kv_rank: Count  # width of the latent vector of keys and values
    q_rank: Count | None = None  # width of the latent vector of queries; none: queries are projected from the
    #   hidden state directly
    nope_dim: Count = 128  # channels of a query or key head that have no positions
    rope_dim: Count = 64  # channels of a query or key head that have positions; all heads share this part of
    #   the key
    v_dim: Count = 128  # channels of a value head
    window: Count | None = None  # sliding-window attention: a token attends to this many tokens, itself
    #   included; none: to all tokens before it
    rope: RopeConfig | None = RopeConfig()  # rotary positions; none: no channel has any (Kimi Linear)
    norm_eps: Positive = 1e-6  # added to the mean square in the norms of the latents: 1e-6 in the published
    #   models, whatever norm.eps is
    growth: GrowthConfig | None = None  # scores grow with the position of their query
    kernel: AttentionKernel = "auto"  # attention kernel; auto: the fastest that supports this model and
    #   device

    has_softmax = True

    def heads_over_tp(self) -> dict[str, int]:
        return {"heads": self.heads}

    def features_over_tp(self, hidden: int) -> dict[str, int]:
        size = self.nope_dim + self.rope_dim
        return {"mixer.heads": self.heads * (self.v_dim if self.q_rank else math.gcd(size, self.v_dim))}


@dataclass(frozen=True, kw_only=True)
class DeltaConfig(TokenMixer):
    """Gated delta net (arXiv 2412.06464): linear attention with a state for each head, which forgets."""
    kind: Literal["delta"] = "delta"
    heads: Count  # number of value heads, each with a state [key_dim, v_dim]
    key_heads: Count | None = None  # number of query and key heads; none: equal to heads
    key_dim: Count = 128  # channels of a query or key head
    v_dim: Count = 128  # channels of a value head
    conv: Count = 4  # tokens that the convolution of q, k and v sees, the token itself included
    negative_eigenvalues: bool = False  # the rate at which a state learns is twice as high, in (0, 2), so
    #   that a key may turn its value around (arXiv 2411.12537)
    norm_eps: Positive | None = None  # added to the mean square in the norm of the output; none: that of
    #   model.norm

    def heads_over_tp(self) -> dict[str, int]:
        return {"heads": self.heads, "key_heads": self.key_heads or self.heads}

    def features_over_tp(self, hidden: int) -> dict[str, int]:
        keys = (self.key_heads or self.heads) * self.key_dim
        return {"mixer.heads": self.heads * self.v_dim, "mixer.key_heads": keys}


@dataclass(frozen=True, kw_only=True)
class KimiConfig(TokenMixer):
    """Kimi delta attention (arXiv 2510.26692): as delta, but each channel of a key forgets on its own."""
    kind: Literal["kimi"] = "kimi"
    heads: Count  # number of heads, each with a state [dim, dim]
    dim: Count = 128  # channels of a query, key or value head, and the rank of both gates' matrices
    conv: Count = 4  # tokens that the convolution of q, k and v sees, the token itself included

    def heads_over_tp(self) -> dict[str, int]:
        return {"heads": self.heads}

    def features_over_tp(self, hidden: int) -> dict[str, int]:
        return {"mixer.heads": self.heads * self.dim}


@dataclass(frozen=True, kw_only=True)
class MambaConfig(TokenMixer):
    """The state space layer of Mamba-2 (arXiv 2405.21060)."""
    kind: Literal["mamba"] = "mamba"
    heads: Count  # number of heads, each with a state [dim, state]
    dim: Count = 64  # channels of a head
    groups: Count = 1  # number of groups of heads; a group shares what is written by (B) and read by (C), and
    #   the norm of its outputs
    state: Count = 128  # channels of B and C
    conv: Count = 4  # tokens that the convolution of x, B and C sees, the token itself included
    dt_min: NotNegative = 0.0  # the steps dt of all tokens are at least this (Nemotron-H: 0.001)

    def heads_over_tp(self) -> dict[str, int]:
        return {"heads": self.heads, "groups": self.groups}

    def features_over_tp(self, hidden: int) -> dict[str, int]:
        return {"mixer.heads": self.heads * self.dim, "mixer.groups": self.groups * self.state}


@dataclass(frozen=True, kw_only=True)
class ShortConvConfig(TokenMixer):
    """A gated short convolution (LFM2): out(C conv(B x)), of as many channels as the residual stream has."""
    kind: Literal["short_conv"] = "short_conv"
    conv: Count = 3  # tokens that the convolution sees, the token itself included

    def features_over_tp(self, hidden: int) -> dict[str, int]:
        return {"hidden": hidden}


@dataclass(frozen=True, kw_only=True)
class NoPart(TokenMixer):
    """A block without this part: with an MLP alone, or a mixer of tokens alone (Nemotron-H, arXiv
    2504.03624)."""
    kind: Literal["none"] = "none"


Mixer = AttentionConfig | LatentConfig | DeltaConfig | KimiConfig | MambaConfig | ShortConvConfig | NoPart


# ---- mixers of channels, norms -----------------------------------------------------------------------------

ExpertActivationName = Literal["swiglu", "geglu", "clamped_swiglu", "gelu", "gelu_erf", "relu2"]
ActivationName = Literal[ExpertActivationName, "xielu"]  # which learns two numbers of each MLP


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """The MLP of a block."""
    kind: Literal["mlp"] = "mlp"
    width: Count = 352  # inner width
    activation: ActivationName = "swiglu"  # gelu, geglu: with the tanh approximation (GPT-2, Gemma);
    #   clamped_swiglu: of gpt-oss; gelu_erf: GELU without the approximation; relu2: squared ReLU (Nemotron);
    #   xielu: of Apertus, learns two numbers
    bias: bool = False  # biases of its linear layers (GPT-2)


@dataclass(frozen=True, kw_only=True)
class SharedExpertsConfig:
    """Experts that process every token (arXiv 2401.06066), as one MLP of their widths together."""
    experts: Count = 1  # number of shared experts, each as wide as a routed one
    gate: bool = False  # multiply their output by sigmoid(x w) (Qwen2-MoE)


@dataclass(frozen=True, kw_only=True)
class BalanceLossConfig:
    """The load-balance loss of a router."""
    weight: NotNegative  # what a balanced layer adds to the loss; in Hugging Face's Mixtral a balanced layer
    #   adds top_k times its coefficient
    over: Literal["sequence", "global", "micro"] = "sequence"  # which load it balances: that of each
    #   sequence; that of the step, measured in the step before (arXiv 2501.11873); that of a micro-batch
    #   (arXiv 2101.03961), the only one that depends on micro_batch and layout


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Which experts a token gets, and with which weights."""
    scores: Literal["softmax", "sigmoid"] = "softmax"  # of experts: a softmax over all of them, or a sigmoid
    #   for each (DeepSeek-V3, arXiv 2412.19437)
    renorm: bool = True  # divide the scores of the chosen experts by their sum
    groups: Count = 1  # number of groups of experts; the experts of a token come from its best groups
    group_top_k: Count = 1  # number of groups that the experts of a token come from; the score of a group is
    #   the score of its best expert (softmax, arXiv 2405.04434) or the sum of its two best (sigmoid,
    #   arXiv 2412.19437)
    scale: Positive = 1.0  # factor of the weights of the chosen experts
    weighs: Literal["output", "input"] = "output"  # what the score of a routed expert multiplies: what it
    #   gives, or what it reads (Llama 4)
    logit_bias: bool = False  # a learned bias of the logits (gpt-oss)
    bias_rate: NotNegative | None = None  # a bias that affects only the choice of experts moves by this
    #   against the load after each step (aux-loss-free, arXiv 2408.15664); none: there is no such bias
    jitter: BelowOne = 0.0  # training: multiply the router's input by uniform(1 - jitter, 1 + jitter)
    #   (arXiv 2101.03961)
    aux: BalanceLossConfig | None = None  # load-balance loss
    z_loss: NotNegative = 0.0  # factor of the mean squared logsumexp of the logits (arXiv 2202.08906)


@dataclass(frozen=True, kw_only=True)
class CapacityConfig:
    """How many tokens an expert takes in training."""
    factor: Positive  # an expert takes at most this times its fair share of the tokens of a sequence
    drop: Literal["probability", "position"] = "probability"  # which tokens an expert over capacity drops:
    #   the least likely ones, or the last ones
    pad: bool = False  # each rank pads what it sends to every expert, so that no tensor shape depends on the
    #   routing


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts in the place of the MLP (arXiv 2101.03961): a router sends each token to some."""
    kind: Literal["experts"] = "experts"
    experts: Count = 8  # number of routed experts
    top_k: Count = 2  # number of routed experts that process a token
    width: Count = 352  # inner width of one expert
    activation: ExpertActivationName = "swiglu"  # of each expert, as that of an MLP
    bias: bool = False  # biases of the linear layers of each expert (gpt-oss)
    shared: SharedExpertsConfig | None = None  # experts that process every token
    router: RouterConfig = RouterConfig()
    capacity: CapacityConfig | None = None  # training: tokens beyond it are dropped; none: no token is

    @property
    def shared_width(self) -> int:
        """Inner width of the shared experts together; 0 without any."""
        return self.shared.experts * self.width if self.shared else 0


ChannelMixer = MLPConfig | ExpertsConfig | NoPart

NormPlace = Literal["before", "after", "around"]


@dataclass(frozen=True, kw_only=True)
class RMSNormConfig:
    """RMSNorm (arXiv 1910.07467)."""
    kind: Literal["rmsnorm"] = "rmsnorm"
    eps: Positive = 1e-5  # added to the mean square
    place: NormPlace = "before"  # what a block normalizes: what its mixer and MLP read; what they give
    #   (after: OLMo 2); or both (around: Gemma 2)


@dataclass(frozen=True, kw_only=True)
class LayerNormConfig:
    """LayerNorm (arXiv 1607.06450)."""
    kind: Literal["layernorm"] = "layernorm"
    eps: Positive = 1e-5  # added to the variance
    place: NormPlace = "before"  # what a block normalizes: what its mixer and MLP read; what they give
    #   (after); or both (around)
    bias: bool = True  # it has one (GPT-2); false: a weight alone (Cohere)


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
