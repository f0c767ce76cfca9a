"""Grouped-query causal attention (arXiv 2305.13245): a merged projection of q, k and v, an optional norm of
queries and keys (arXiv 2302.05442, section 2), rotary positions (RoPE, arXiv 2104.09864).

Shapes: b sequences of s tokens, h query heads, g key and value heads, d channels per head, dv per value head.
dv equals d unless model.mixer.value_dim is set.
"""
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import (
    Config,
    HeadShape,
    TokenMixer,
    TrainConfig,
    divisors,
    head_dim,
    kv_heads,
    mup_score_scale,
    recomputes,
    value_dim,
)
from config.rule import Rule
from config.tree import Count, Positive
from kernels import rope
from kernels.attention import attention
from kernels.attention_mask import AttentionMask
from kernels.grad import read_weight
from kernels.norm import rms_norm
from model.context import ForwardContext, View, get_view
from model.init import residual_std
from model.precision import fp8_of_layer
from model.recompute import checkpoint_activations
from model.rope import GrowthConfig, RopeConfig, get_rotation, scaling_rules
from parallel.context.ring import ring_attention
from parallel.context.ulysses import ulysses_attention
from parallel.sharding.spec import ParameterSpec, ShardedParameter, parameter
from parallel.tensor.layers import (
    ColumnLinear,
    RowLinear,
    SharedHeadsLinear,
    replicated_vector,
    row_shard,
    tensor_parallel_rms_norm,
)
from parallel.topology.mesh import Mesh
from parallel.wire.comm import Group

GateFunction = Literal["sigmoid", "softplus"]


@dataclass(frozen=True, kw_only=True)
class ChannelGate:
    """One gate per channel of the output."""
    kind: Literal["channel"] = "channel"
    by: GateFunction = "sigmoid"  # applied to x W


@dataclass(frozen=True, kw_only=True)
class HeadGate:
    """One gate per head."""
    kind: Literal["head"] = "head"
    by: GateFunction = "sigmoid"  # applied to x W; softplus: Laguna


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
    rope: RopeConfig | None = RopeConfig()  # rotary positions; none: no positions in the scores
    scale: Positive | None = None  # factor of the scores; none: 1 / sqrt(head_dim)
    growth: GrowthConfig | None = None  # scores grow with the position of their query
    softcap: Positive | None = None  # scores are bounded: softcap tanh(score / softcap) (Gemma 2, arXiv
    #   2408.00118)
    gate: ChannelGate | HeadGate | None = None  # the output is multiplied by sigmoid(x W) (arXiv 2505.06708)
    keys_of: str | None = None  # kind of block: read the keys and values of the last layer of that kind
    #   before this one, and project only queries (arXiv 2405.12981; Gemma 3n); none: compute them
    sinks: bool = False  # a learned score for each head beside those of the keys, whose value is 0 (gpt-oss)
    kernel: AttentionKernel = "auto"  # attention kernel; auto: the fastest that supports this model and
    #   device

    has_softmax = True

    def heads_over_tp(self) -> dict[str, int]:
        return {"heads": self.heads, "kv_heads": self.kv_heads or self.heads}

    def features_over_tp(self, hidden: int) -> dict[str, int]:
        shape = self.head_shape(hidden)
        shared = shape.kv_heads * math.gcd(shape.head_dim, shape.value_dim)
        return {"mixer.heads": self.heads * shape.value_dim, "mixer.kv_heads": shared}

    def head_shape(self, hidden: int) -> HeadShape:
        size = self.head_dim or hidden // self.heads
        return HeadShape(
            head_dim=size,
            value_dim=self.value_dim or size,
            kv_heads=self.kv_heads or self.heads,
            rotated=round(size * self.rope.share) if self.rope else 0,
        )

    def rules(self, cfg: Config) -> Iterator[Rule]:
        model = cfg.model
        yield Rule(
            self.head_dim or model.hidden % self.heads == 0,
            f"model.mixer.heads: {self.heads} does not divide model.hidden={model.hidden}, "
            "and model.mixer.head_dim is not set",
            "model.mixer.heads", divisors(model.hidden))
        yield from super().rules(cfg)
        yield from kernel_rules(self.kernel, cfg.train)

        # positions
        size, _, _, rotated = self.head_shape(model.hidden)
        share = self.rope.share if self.rope else 1.0
        yield Rule(
            share != 1 or rotated % 2 == 0,
            f"model.mixer.head_dim: {rotated} must be even for RoPE",
            "model.mixer.head_dim", (rotated - 1, rotated + 1))
        yield Rule(
            share == 1 or (rotated > 0 and rotated % 2 == 0 and rotated == size * share),
            f"model.mixer.rope.share: {share} of {size} channels is not an even number of them; use "
            f"{2 * max(1, round(size * share / 2)) / size:g}")
        yield Rule(
            self.rope is not None or self.qk_norm != "after_rope",
            "model.mixer.qk_norm: after_rope, and model.mixer.rope is none; use head")
        yield from scaling_rules(self.rope, rotated)

        yield Rule(
            not (self.scale and model.mup and model.mup.head_dim),
            "model.mixer.scale: says how scores are scaled, and so does model.mup.head_dim; leave one of "
            "them out")


def kernel_rules(kernel: AttentionKernel, train: TrainConfig) -> Iterator[Rule]:
    """Check which devices and dtypes the softmax attention kernels support."""
    yield Rule(
        kernel not in ("flash", "triton") or train.device not in ("cpu", "mps"),
        f"model.mixer.kernel: {kernel} needs a CUDA GPU, and train.device is {train.device}; use auto")
    yield Rule(
        kernel != "flash" or train.dtype in ("bf16", "fp8"),
        f"model.mixer.kernel: flash-attn has no {train.dtype}; set train.dtype bf16 or use auto")
    yield Rule(
        kernel != "triton" or train.dtype != "fp64",
        "model.mixer.kernel: the Triton kernels have no fp64; use auto or reference")


GATE_FUNCTIONS = {"sigmoid": torch.sigmoid, "softplus": F.softplus}  # by model.mixer.gate.by


class Attention(nn.Module):
    """x [b, s/cp, hidden] (sp: [b, s/cp/tp, hidden]) -> the same."""

    def __init__(self, cfg: Config, mesh: Mesh, layer: int) -> None:
        super().__init__()
        model, mixer = cfg.model, cfg.model.mixer
        assert isinstance(mixer, AttentionConfig)
        key = f"layers.{layer}.attn"
        self.layer = layer
        self.reads_keys = mixer.keys_of is not None
        self.tp = mesh.tp
        self.head_dim = head_dim(model)
        self.v_dim = value_dim(model)
        self.v_scale = mixer.value_scale
        self.heads = model.mixer.heads // mesh.tp.size  # of this rank
        self.kv_heads = max(1, kv_heads(model) // mesh.tp.size)  # of this rank
        self.query_scale = mup_score_scale(model)  # muP's; AttentionCore has the scale of the scores
        self.growth = mixer.growth
        self.rotation = get_rotation(model)
        self.rope_in_pairs = mixer.rope is not None and mixer.rope.pairs
        self.rotates_in_part = mixer.rope is not None and mixer.rope.share < 1
        is_plain_rope = mixer.rope is not None and not (self.rope_in_pairs or self.rotates_in_part)
        self.may_fuse_rope = is_plain_rope and self.v_dim == self.head_dim
        # whether one kernel splits the heads and rotates them (model/unproven.py may take others)
        self.fuses_rope = self.may_fuse_rope and mixer.qk_norm is None
        self.rotate_heads = rope.split_heads_and_apply_rope
        self.compiled = cfg.train.compile
        self.core = AttentionCore.from_config(cfg, mesh)

        # projections
        self.qkv = qkv_projection(cfg, mesh, layer)
        self.gate = gate_projection(cfg, mesh, layer) if mixer.gate else None
        self.gate_function = GATE_FUNCTIONS[mixer.gate.by] if mixer.gate else None
        self.out = RowLinear(
            mesh,
            f"{key}.o",
            model.mixer.heads * self.v_dim,
            model.hidden,
            std=residual_std(model),
            bias=mixer.bias == "all",
            sp=cfg.parallel.sp,
            async_tp=cfg.parallel.async_tp,
            fp8=fp8_of_layer(cfg, layer),
        )

        self.sinks = head_vector(f"{key}.sinks", mixer.heads, mesh.tp, role="bias") if mixer.sinks else None

        # norms of queries and keys: over all heads of a token, or per head
        self.eps = model.norm.eps
        self.norms_first = mixer.qk_norm in ("head", "whole")
        self.norms_last = mixer.qk_norm in ("after_rope", "unweighted")
        self.qk_norm_over_heads = mixer.qk_norm == "whole"
        self.q_norm = self.k_norm = None
        if mixer.qk_norm == "whole":
            q_features = model.mixer.heads * self.head_dim
            k_features = kv_heads(model) * self.head_dim
            self.q_norm = head_vector(f"{key}.q_norm.weight", q_features, mesh.tp, role="norm")
            if not self.reads_keys:
                self.k_norm = head_vector(f"{key}.k_norm.weight", k_features, mesh.tp, role="norm")
        elif mixer.qk_norm in ("head", "after_rope"):
            # one weight for all heads; tp ranks have different heads, so its gradient is partial with or
            # without sp
            self.q_norm = replicated_vector(f"{key}.q_norm.weight", self.head_dim, "norm", is_partial=True)
            if not self.reads_keys:
                self.k_norm = replicated_vector(
                    f"{key}.k_norm.weight", self.head_dim, "norm", is_partial=True)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        qkv = self.qkv(x)  # [b, s/cp, (h d + g d + g dv) / tp]; under sp it gathers the sequence
        if self.reads_keys:  # qkv [b, s/cp, h d / tp]
            q = self.normalize_and_rotate(qkv.unflatten(-1, (-1, self.head_dim)), self.q_norm, context)
            k, v = context.shared_keys.read(self.layer)
        else:
            split = self.split_and_rotate if self.fuses_rope else self.split_heads
            q, k, v = split(qkv, context)
            if context.shared_keys.sources:
                context.shared_keys.keep(self.layer, k, v)
        if self.query_scale != 1:
            q = q * self.query_scale
        if self.growth is not None:
            q = q * context.growths[self.growth].to(q.dtype)
        if context.cache is not None:
            k, v = context.cache.extend(context.shared_keys.get_source(self.layer), k, v)

        sinks = None if self.sinks is None else read_weight(self.sinks).to(self.sinks.dtype)
        out = self.core(q, k, v, context, sinks)  # [b, s/cp, h/tp, dv]
        if self.v_scale != 1:
            out = out * self.v_scale
        if self.gate is not None:
            gate = self.gate(x).unflatten(-1, (self.heads, -1))  # [b, s/cp, h/tp, dv or 1]
            out = out * self.gate_function(gate)
        return self.out(out.flatten(2))

    def split_and_rotate(self, qkv: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Split and rotate in one kernel: the results of split_heads."""
        cos, sin = context.rotations[self.rotation]
        return self.rotate_heads(qkv, cos, sin, self.heads, self.kv_heads, compiled=self.compiled)

    def split_heads(self, qkv: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Split into heads, normalize and rotate.

        qkv [b, s/cp, (h d + g d + g dv) / tp] -> q [b, s/cp, h/tp, d], k [b, s/cp, g/tp, d] and v
        [b, s/cp, g/tp, dv].
        """
        sizes = (self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.v_dim)
        q, k, v = qkv.split(sizes, -1)
        q = self.normalize_and_rotate(q.unflatten(-1, (-1, self.head_dim)), self.q_norm, context)
        k = self.normalize_and_rotate(k.unflatten(-1, (-1, self.head_dim)), self.k_norm, context)
        return q, k, v.unflatten(-1, (-1, self.v_dim))

    def normalize_and_rotate(self, x: Tensor, weight: Tensor | None, context: ForwardContext) -> Tensor:
        """Normalize (by `weight`) and rotate queries or keys x [b, s/cp, heads, d] in separate passes."""
        if self.norms_first:
            x = self.normalize_heads(x, weight)
        if self.rotation is not None:
            x = self.rotate(x, *context.rotations[self.rotation])
        return self.normalize_heads(x, weight) if self.norms_last else x

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first channels of x [b, s/cp, heads, d], as many as cos and sin cover."""
        turned, plain = x.split((2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]), -1)
        if self.rope_in_pairs:  # scores are invariant to permuting the channels of q and k alike
            turned = rope.pairs_to_halves(turned)
        turned = rope.apply_rope(turned.contiguous(), cos, sin, self.compiled)
        return torch.cat((turned, plain), -1) if self.rotates_in_part else turned

    def normalize_heads(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Normalize x [b, s/cp, heads, d]: per head, or over all heads of a token, across tp."""
        if weight is None:
            weight = x.new_ones(self.head_dim)
        if not self.qk_norm_over_heads:
            return rms_norm(x, weight, self.eps, self.compiled)
        normalized = tensor_parallel_rms_norm(x.flatten(2), weight, self.eps, self.tp)
        return normalized.view(x.shape)


def qkv_projection(cfg: Config, mesh: Mesh, layer: int) -> ColumnLinear | SharedHeadsLinear:
    """Create the merged projection [b, s/cp, hidden] -> [b, s/cp, (h d + g d + g dv) / tp], or only the query
    projection if the layer reads another layer's keys.

    With fewer key heads than tp ranks, several ranks share one.
    """
    model = cfg.model
    key = f"layers.{layer}.attn"
    bias = model.mixer.bias is not None
    reads_keys = model.mixer.keys_of is not None
    if kv_heads(model) < mesh.tp.size and not reads_keys:
        return SharedHeadsLinear(
            mesh,
            key,
            model.hidden,
            heads=model.mixer.heads,
            kv_heads=kv_heads(model),
            head_dim=head_dim(model),
            v_dim=value_dim(model),
            std=model.init_std,
            bias=bias,
            sp=cfg.parallel.sp,
        )
    outputs = {f"{key}.q": model.mixer.heads * head_dim(model)}
    if not reads_keys:
        outputs[f"{key}.k"] = kv_heads(model) * head_dim(model)
        outputs[f"{key}.v"] = kv_heads(model) * value_dim(model)
    return ColumnLinear(
        mesh,
        outputs,
        model.hidden,
        std=model.init_std,
        bias=bias,
        sp=cfg.parallel.sp,
        async_tp=cfg.parallel.async_tp,
        fp8=fp8_of_layer(cfg, layer),
    )


def gate_projection(cfg: Config, mesh: Mesh, layer: int) -> ColumnLinear:
    """Create the projection of gates.

    x [b, s/cp, hidden] -> a gate per head [b, s/cp, h/tp] or per channel [b, s/cp, h dv / tp].
    """
    model, mixer = cfg.model, cfg.model.mixer
    assert isinstance(mixer, AttentionConfig)
    numbers = value_dim(model) if isinstance(mixer.gate, ChannelGate) else 1
    return ColumnLinear(
        mesh,
        {f"layers.{layer}.attn.gate": mixer.heads * numbers},
        model.hidden,
        std=model.init_std,
        bias=mixer.bias == "all",
        sp=cfg.parallel.sp,
        async_tp=cfg.parallel.async_tp,
        fp8=fp8_of_layer(cfg, layer),
    )


def head_vector(key: str, size: int, group: Group, role: str) -> ShardedParameter:
    """Create a vector [size / group] of per-head or per-channel numbers, sharded over the group."""
    box = row_shard(key, (size,), group)
    return parameter(ParameterSpec((box,), role))


@dataclass(frozen=True)
class AttentionCore:
    """softmax(q k^T / sqrt(d)) v over full sequences; each rank holds 1 / cp of the tokens.

    Under context parallelism keys and values travel around a ring (arXiv 2310.01889), or an all-to-all trades
    heads for tokens (Ulysses, arXiv 2309.14509).
    """
    cp: Group
    cp_kind: str
    view: View
    kernel: str  # of kernels/attention.py
    recompute: bool
    scale: float | None = None
    softcap: float | None = None

    @staticmethod
    def from_config(cfg: Config, mesh: Mesh) -> "AttentionCore":
        mixer = cfg.model.mixer
        has_form = isinstance(mixer, AttentionConfig)
        return AttentionCore(
            cp=mesh.cp,
            cp_kind=cfg.parallel.cp_kind,
            view=get_view(cfg.model),
            kernel=mixer.kernel,
            recompute=recomputes(cfg, "core"),
            scale=mixer.scale if has_form else None,
            softcap=mixer.softcap if has_form else None,
        )

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, context: ForwardContext, sinks: Tensor | None = None
    ) -> Tensor:
        """q [b, s/cp, h, d], k [b, s/cp, g, d], v [b, s/cp, g, dv] -> [b, s/cp, h, dv]. sinks [h]."""
        mask = context.masks[self.view]
        if context.sequence_is_sharded and self.cp_kind == "ring":
            return self.attend_around_ring(q, k, v, context, mask, sinks)
        attend = partial(attention, mask=mask, kind=self.kernel, scale=self.scale, softcap=self.softcap)
        if self.recompute and torch.is_grad_enabled():
            attend = partial(checkpoint_activations, attend)
        if context.sequence_is_sharded:
            return ulysses_attention(attend, q, k, v, self.cp, sinks)
        return attend(q, k, v, sinks=sinks)

    def attend_around_ring(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: ForwardContext,
        mask: AttentionMask | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attend over the cp ranks' parts. It stores no probabilities, so there is nothing to recompute."""
        return ring_attention(
            q, k, v,
            documents=context.documents,
            window=self.view.window,
            chunk=self.view.chunk,
            mask=mask,
            group=self.cp,
            sinks=sinks,
            scale=self.scale,
            softcap=self.softcap,
        )
