"""Grouped-query causal attention (arXiv 2305.13245): a merged projection of q, k and v, an optional norm of
queries and keys (arXiv 2302.05442, section 2), rotary positions (RoPE, arXiv 2104.09864).

Shapes: b sequences of s tokens, h heads of queries, g of keys and values, d channels per head.
"""
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from config import Config, head_dim, kv_heads, mup_score_scale, recomputes
from kernels import rope
from kernels.attention import BLOCK, KEEP_PROBABILITIES, attention
from kernels.head_norm import split_normalize_and_rotate
from kernels.norm import rms_norm
from model.context import ForwardContext
from model.init import residual_std
from model.precision import fp8_of_layer, fp8_reader_of_layer
from model.recompute import checkpoint_activations
from parallel.context.ring import ring_attention
from parallel.context.ulysses import ulysses_attention
from parallel.cost import AttentionProducts, Cost, Exchange, MemoryTraffic, SavedTensor, Workload, total
from parallel.sharding.spec import ParameterSpec, ShardedParameter, parameter
from parallel.tensor.layers import (
    ColumnLinear,
    RowLinear,
    SharedHeadsLinear,
    replicated_vector,
    row_shard,
    tensor_parallel_norm_cost,
    tensor_parallel_rms_norm,
)
from parallel.topology.mesh import Mesh
from parallel.wire.comm import Group


class Attention(nn.Module):
    """x [b, s/cp, hidden] (sp: [b, s/cp/tp, hidden]) -> the same."""

    def __init__(self, cfg: Config, mesh: Mesh, layer: int) -> None:
        super().__init__()
        model = cfg.model
        key = f"layers.{layer}.attn"
        self.layer = layer
        self.tp = mesh.tp
        self.head_dim = head_dim(model)
        self.heads = model.heads // mesh.tp.size  # of this rank
        self.kv_heads = max(1, kv_heads(model) // mesh.tp.size)  # of this rank
        self.score_scale = mup_score_scale(model)  # of the softmax, beyond 1 / sqrt(head_dim)
        self.has_rope = model.positions == "rope"
        self.compiled = cfg.train.compile
        self.core = AttentionCore.from_config(cfg, mesh)

        # projections
        self.qkv = qkv_projection(cfg, mesh, layer)
        has_bias = model.bias or model.qkv_bias  # it sums the gradient of what the projection made
        self.gradient_reader = None if has_bias else fp8_reader_of_layer(cfg, layer)
        self.out = RowLinear(
            mesh,
            f"{key}.o",
            model.heads * self.head_dim,
            model.hidden,
            std=residual_std(model),
            bias=model.bias,
            sp=cfg.parallel.sp,
            async_tp=cfg.parallel.async_tp,
            fp8=fp8_of_layer(cfg, layer),
        )

        # norms of queries and keys: over all heads of a token, or over each head
        self.eps = model.norm_eps
        self.has_qk_norm = model.qk_norm
        self.qk_norm_over_heads = model.qk_norm_whole
        if model.qk_norm_whole:
            q_features = model.heads * self.head_dim
            k_features = kv_heads(model) * self.head_dim
            self.q_norm = sharded_norm_weight(f"{key}.q_norm.weight", q_features, mesh.tp)
            self.k_norm = sharded_norm_weight(f"{key}.k_norm.weight", k_features, mesh.tp)
        elif model.qk_norm:
            # one weight for all heads; each tp rank applies it to other heads, so its gradient is partial
            # with and without sp
            self.q_norm = replicated_vector(f"{key}.q_norm.weight", self.head_dim, "norm", is_partial=True)
            self.k_norm = replicated_vector(f"{key}.k_norm.weight", self.head_dim, "norm", is_partial=True)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        qkv = self.qkv(x)  # [b, s/cp, (h + 2g) d / tp]; under sp it gathers the sequence
        q, k, v = self.split_heads(qkv, context)
        if self.score_scale != 1:
            q = q * self.score_scale
        if context.cache is not None:
            k, v = context.cache.extend(self.layer, k, v)

        out = self.core(q, k, v, context)  # [b, s/cp, h/tp, d]
        return self.out(out.flatten(2))

    def split_heads(self, qkv: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [b, s/cp, (h + 2g) d / tp] -> q [b, s/cp, h/tp, d], k and v [b, s/cp, g/tp, d], normalized and
        rotated."""
        if self.has_rope and not self.has_qk_norm:
            cos, sin = context.rotation()
            return rope.split_heads_and_apply_rope(
                qkv, cos, sin, self.heads, self.kv_heads,
                compiled=self.compiled,
                reader=self.gradient_reader,
            )

        qkv = qkv.unflatten(-1, (-1, self.head_dim))  # [b, s/cp, (h + 2g)/tp, d]
        if self.has_rope and not self.qk_norm_over_heads:
            cos, sin = context.rotation()
            return split_normalize_and_rotate(
                qkv, self.q_norm, self.k_norm, cos, sin,
                heads=self.heads,
                kv=self.kv_heads,
                eps=self.eps,
                compiled=self.compiled,
            )

        heads = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = qkv.split(heads, dim=2)
        if self.has_qk_norm:
            q = self.normalize_heads(q, self.q_norm)
            k = self.normalize_heads(k, self.k_norm)
        if self.has_rope:
            cos, sin = context.rotation()
            q = rope.apply_rope(q, cos, sin, self.compiled)
            k = rope.apply_rope(k, cos, sin, self.compiled)
        return q, k, v

    def normalize_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [b, s/cp, heads, d]: each head on its own, or all heads of a token together, over tp."""
        if not self.qk_norm_over_heads:
            return rms_norm(x, weight, self.eps, self.compiled)
        normalized = tensor_parallel_rms_norm(x.flatten(2), weight, self.eps, self.tp)
        return normalized.view(x.shape)

    def cost(self, work: Workload) -> Cost:
        core = self.core.cost(
            work,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.head_dim,
        )
        return total((
            self.qkv.cost(work, input_part="norm"),
            self.head_norms_cost(work),
            rope_cost(work, self.heads + self.kv_heads, self.head_dim),
            self.scaled_queries_cost(work),
            core,
            self.out.cost(work),  # its input is the core's output
        ))

    def head_norms_cost(self, work: Workload) -> Cost:
        """Of the norms of queries and keys: they keep the projection's output, and per token a scale of each
        head, or of all together. On a GPU the scales of heads are computed again.
        """
        if not self.has_qk_norm:
            return Cost()
        heads = self.heads + self.kv_heads
        features = (heads + self.kv_heads) * self.head_dim
        values_are_a_view = (work.micro_batch == 1 or work.flash) and not self.core.is_ulysses
        if values_are_a_view:  # the core's, of the same output
            features -= self.kv_heads * self.head_dim
        scales = 2 if self.qk_norm_over_heads else heads
        if work.flash and self.has_rope and not self.qk_norm_over_heads:
            scales = 0
        nbytes = work.tokens * (features * work.compute_bytes + scales * work.accumulation_bytes)
        saved = Cost(saved=(SavedTensor(nbytes),))
        if not self.qk_norm_over_heads:
            return saved
        return saved + tensor_parallel_norm_cost(work).times(2)

    def scaled_queries_cost(self, work: Workload) -> Cost:
        """Of the factor of the scores: without norms of heads, keys and values lie in one tensor with the
        queries before the factor, and keep those too. Ulysses sends copies of all three.
        """
        if self.score_scale == 1:
            return Cost()
        nbytes = work.tokens * self.heads * self.head_dim * work.compute_bytes
        traffic = Cost(traffic=(MemoryTraffic(2 * nbytes),))
        if self.has_qk_norm or self.core.is_ulysses:
            return traffic
        return traffic + Cost(saved=(SavedTensor(nbytes),))


def qkv_projection(cfg: Config, mesh: Mesh, layer: int) -> ColumnLinear | SharedHeadsLinear:
    """The merged projection [b, s/cp, hidden] -> [b, s/cp, (h + 2g) d / tp].

    Where there are fewer heads of keys than tp ranks, several ranks share one.
    """
    model = cfg.model
    key = f"layers.{layer}.attn"
    bias = model.bias or model.qkv_bias
    if kv_heads(model) < mesh.tp.size:
        return SharedHeadsLinear(
            mesh,
            key,
            model.hidden,
            heads=model.heads,
            kv_heads=kv_heads(model),
            head_dim=head_dim(model),
            std=model.init_std,
            bias=bias,
            sp=cfg.parallel.sp,
        )
    outputs = {
        f"{key}.q": model.heads * head_dim(model),
        f"{key}.k": kv_heads(model) * head_dim(model),
        f"{key}.v": kv_heads(model) * head_dim(model),
    }
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


def sharded_norm_weight(key: str, size: int, group: Group) -> ShardedParameter:
    """The weight [size / group] of a norm over features that are divided over the group."""
    box = row_shard(key, (size,), group)
    return parameter(ParameterSpec((box,), "norm"))


def rope_cost(work: Workload, heads: int, head_dim: int) -> Cost:
    """Of the rotation of queries and keys: it reads and writes them. heads: of both, on this rank."""
    nbytes = work.tokens * heads * head_dim * work.compute_bytes
    return Cost(traffic=(MemoryTraffic(2 * nbytes),))


@dataclass(frozen=True)
class AttentionCore:
    """softmax(q k^T / sqrt(d)) v over full sequences, of which this rank has 1 / cp.

    Under context parallelism keys and values travel around a ring (arXiv 2310.01889), or heads are exchanged
    for tokens (Ulysses, arXiv 2309.14509).
    """
    cp: Group
    cp_kind: str
    window: int | None
    kernel: str  # of kernels/attention.py
    recompute: bool

    @staticmethod
    def from_config(cfg: Config, mesh: Mesh) -> "AttentionCore":
        return AttentionCore(
            cp=mesh.cp,
            cp_kind=cfg.parallel.cp_kind,
            window=cfg.model.window,
            kernel=cfg.model.attention,
            recompute=recomputes(cfg, "core"),
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, context: ForwardContext) -> Tensor:
        """q [b, s/cp, h, d], k [b, s/cp, g, d], v [b, s/cp, g, dv] -> [b, s/cp, h, dv]."""
        if context.sequence_is_sharded and self.cp_kind == "ring":
            # it saves no probabilities, so there is nothing to recompute
            return ring_attention(
                q, k, v,
                documents=context.documents,
                window=self.window,
                mask=context.mask,
                group=self.cp,
            )

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if self.recompute and torch.is_grad_enabled():
                return checkpoint_activations(attention, q, k, v, context.mask, self.kernel)
            return attention(q, k, v, context.mask, self.kernel)

        if context.sequence_is_sharded:
            return ulysses_attention(attend, q, k, v, self.cp)
        return attend(q, k, v)

    @property
    def is_ring(self) -> bool:
        return self.cp.size > 1 and self.cp_kind == "ring"

    @property
    def is_ulysses(self) -> bool:
        return self.cp.size > 1 and self.cp_kind == "ulysses"

    def cost(self, work: Workload, *, heads: int, kv_heads: int, head_dim: int, value_dim: int) -> Cost:
        """heads, kv_heads: of this rank. head_dim: of queries and keys; value_dim: of values.

        It keeps q, k, v, its output, and what its backward needs of the scores.
        """
        # q, k, v and the output
        element_bytes = work.compute_bytes
        query_bytes = work.tokens * heads * head_dim * element_bytes
        output_bytes = work.tokens * heads * value_dim * element_bytes
        key_value_elements = work.tokens * kv_heads * (head_dim + value_dim)
        key_value_bytes = key_value_elements * element_bytes
        tensor_bytes = query_bytes + output_bytes + key_value_bytes

        # the two products
        pairs = work.tokens * work.keys_seen(self.window) * heads  # of queries and keys
        flops = 2 * pairs * (head_dim + value_dim)
        if self.is_ring:  # keeps one number per query and head, and is never recomputed
            statistics_bytes = work.tokens * heads * work.accumulation_bytes
            return Cost(
                attention=(AttentionProducts(flops, part="rest", hides="cp"),),
                traffic=(MemoryTraffic(tensor_bytes),),
                saved=(SavedTensor(tensor_bytes + statistics_bytes),),
                exchanges=ring_exchanges(work, key_value_elements, self.cp.size),
            )

        score_bytes = 0.0
        scores = attention_saved_bytes(work, heads, head_dim, self.cp.size)
        if self.kernel == "reference":  # scores, their softmax and the products pass through memory
            score_bytes = 6 * pairs * element_bytes
            copies = work.tokens * heads * (2 * head_dim + value_dim) * work.accumulation_bytes
            scores = copies - query_bytes - key_value_bytes + reference_saved_bytes(work, heads, self.cp.size)
        exchanged_bytes = output_bytes if self.is_ulysses else 0  # the output before and after its exchange
        return Cost(
            attention=(AttentionProducts(flops),),
            traffic=(MemoryTraffic(tensor_bytes + score_bytes, part="core"),),
            saved=(SavedTensor(tensor_bytes + exchanged_bytes), SavedTensor(scores, part="core")),
            exchanges=ulysses_exchanges(query_bytes + key_value_bytes, output_bytes),
        )


def attention_saved_bytes(work: Workload, heads: int, head_dim: int, cp: int) -> int:
    """What attention over full sequences keeps beside its tensors (kernels/attention.py).

    With flash attention one number per query and head; without it the probabilities of short sequences. Under
    Ulysses a rank has 1 / cp of the heads.
    """
    if work.flash:
        return work.tokens * heads * work.accumulation_bytes
    s = work.seq_len
    if s > KEEP_PROBABILITIES * head_dim:
        return 0
    pairs = 0
    for first in range(0, s, BLOCK):
        end = min(first + BLOCK, s)
        pairs += (end - first) * end
    return work.micro_batch * heads // cp * pairs * work.compute_bytes


def reference_saved_bytes(work: Workload, heads: int, cp: int) -> int:
    """What attention_reference keeps beside q, k and v: all probabilities, and the mask of a sequence. torch
    decides which of q, k and v are copies, so the sum is within some percent."""
    s = work.seq_len
    return (work.micro_batch * heads // cp * work.accumulation_bytes + 1) * s * s


def ring_exchanges(work: Workload, key_value_elements: int, ranks: int) -> tuple[Exchange, ...]:
    """Of parallel/context/ring.py: keys and values in the forward and in the backward; their gradients."""
    nbytes = key_value_elements * work.compute_bytes
    grad_bytes = key_value_elements * work.accumulation_bytes
    sends = ranks - 1
    return (
        Exchange("cp", "send", nbytes, sends),
        Exchange("cp", "send", nbytes, sends, phase="backward"),
        Exchange("cp", "send", grad_bytes, sends, phase="backward"),
    )


def ulysses_exchanges(qkv_bytes: int, output_bytes: int) -> tuple[Exchange, ...]:
    """Of parallel/context/ulysses.py: q, k and v as one message; the output; in the backward their gradients.
    """
    return (
        Exchange("cp", "all_to_all", qkv_bytes),
        Exchange("cp", "all_to_all", output_bytes),
        Exchange("cp", "all_to_all", qkv_bytes, phase="backward"),
        Exchange("cp", "all_to_all", output_bytes, phase="backward"),
    )
