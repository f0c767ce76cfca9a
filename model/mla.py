"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values are computed from one narrow latent, and only that latent is cached in generation. Positions
are on a few channels whose key is shared by all heads.

    q = W_qb norm(W_qa x)               [h, nope | rope]    (without q_rank: W_q x)
    c = norm(latent), r = rope(...)     W_kva x = [latent | r]
    k = [W_kb c | r],  v = W_vb c       [h, nope | rope], [h, v]; W_kb, W_vb: rows of kv_b, head by head

The up-projections and the output are sharded over tp by heads. The down-projections and the latents' norms
are replicated and see only their rank's tokens: the latents, not the hidden state, enter the tensor-parallel
region. So sequence parallelism gathers q_rank + kv_rank + rope_dim numbers per token instead of d (without
q_rank it gathers x as well), and their gradients are partial over tp exactly where tokens are sharded.
"""
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from config import Config, HeadShape, ModelConfig, TokenMixer, mup_score_scale
from config.rule import Rule
from config.tree import Count, Positive
from kernels import rope
from kernels.attention import attention
from kernels.latent_heads import keys_and_values, rotate_heads
from kernels.linear import linear
from kernels.norm import rms_norm
from model.attention import AttentionCore, AttentionKernel, kernel_rules
from model.context import ForwardContext
from model.init import residual_std
from model.precision import fp8_of_layer
from model.rope import GrowthConfig, RopeConfig, YarnScaling, get_rotation, scaling_rules
from parallel.sharding.boxes import Box
from parallel.sharding.spec import ParameterSpec, ShardedParameter, parameter
from parallel.tensor.layers import ColumnLinear, RowLinear, partial_over_tp, replicated_vector, row_shard
from parallel.tensor.regions import enter_region
from parallel.topology.mesh import Mesh
from parallel.wire.comm import Group

if TYPE_CHECKING:  # an optional part, imported only if the config enables it
    from model.lora import ColumnAdapter


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
    rope: RopeConfig | None = RopeConfig()  # rotary positions; none: no positions (Kimi Linear)
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

    def head_shape(self, hidden: int) -> HeadShape:
        return HeadShape(
            head_dim=self.nope_dim + self.rope_dim,
            value_dim=self.v_dim,
            kv_heads=self.heads,
            rotated=self.rope_dim if self.rope else 0,
        )

    def rules(self, cfg: Config) -> Iterator[Rule]:
        yield from kernel_rules(self.kernel, cfg.train)
        yield Rule(
            self.rope_dim % 2 == 0,
            f"model.mixer.rope_dim: {self.rope_dim} must be even for RoPE",
            "model.mixer.rope_dim", (self.rope_dim - 1, self.rope_dim + 1))
        share = self.rope.share if self.rope else 1.0
        yield Rule(
            share == 1,
            f"model.mixer.rope.share: {share}, but for latent attention model.mixer.rope_dim sets how many "
            "channels are rotated; leave it out")
        yield from scaling_rules(self.rope, self.rope_dim)


class MultiLatentAttention(nn.Module):
    """x [b, s/cp, d] (sp: [b, s/cp/tp, d]) -> the same."""

    def __init__(self, cfg: Config, mesh: Mesh, layer: int) -> None:
        super().__init__()
        model = cfg.model
        assert isinstance(model.mixer, LatentConfig)
        self.layer = layer
        self.tp = mesh.tp
        self.sp = cfg.parallel.sp
        self.compiled = cfg.train.compile
        self.heads = model.mixer.heads // mesh.tp.size  # of this rank
        self.q_rank = model.mixer.q_rank or 0
        self.kv_rank = model.mixer.kv_rank
        self.nope_dim = model.mixer.nope_dim
        self.rope_dim = model.mixer.rope_dim
        self.value_dim = model.mixer.v_dim
        self.norm_eps = model.mixer.norm_eps  # of the latents
        self.rotation = get_rotation(model)
        self.rope_in_pairs = model.mixer.rope is not None and model.mixer.rope.pairs
        self.score_scale = score_scale(model)
        self.growth = model.mixer.growth
        self.core = AttentionCore.from_config(cfg, mesh)
        self.rotate_heads = rotate_heads  # model/unproven.py may set others
        self.keys_and_values = keys_and_values

        self.down = down_projection(cfg, layer)
        self.make_query_projection(cfg, mesh, layer)
        self.make_key_value_projection(cfg, mesh, layer)
        # what model/lora.py adds to their results
        self.down_adapter: "ColumnAdapter | None" = None
        self.q_up_adapter: "ColumnAdapter | None" = None
        self.kv_up_adapter: "ColumnAdapter | None" = None
        self.out = RowLinear(
            mesh,
            f"layers.{layer}.attn.o",
            model.mixer.heads * model.mixer.v_dim,
            model.hidden,
            std=residual_std(model),
            bias=False,
            sp=self.sp,
            async_tp=cfg.parallel.async_tp,
            fp8=fp8_of_layer(cfg, layer),
        )

    def make_query_projection(self, cfg: Config, mesh: Mesh, layer: int) -> None:
        """Project from the queries' latent, normalized by q_norm, or from the hidden state without q_rank."""
        model = cfg.model
        key = f"layers.{layer}.attn"
        rank = self.q_rank
        features = model.mixer.heads * (self.nope_dim + self.rope_dim)
        if rank:
            self.q_norm = replicated_vector(f"{key}.q_norm.weight", rank, "norm", is_partial=self.sp)
            self.q_up = up_projection(f"{key}.q_b.weight", (features, rank), model.init_std, mesh.tp)
        else:
            self.q = ColumnLinear(
                mesh,
                {f"{key}.q": features},
                model.hidden,
                std=model.init_std,
                bias=False,
                sp=self.sp,
                async_tp=cfg.parallel.async_tp,
                fp8=fp8_of_layer(cfg, layer),
            )

    def make_key_value_projection(self, cfg: Config, mesh: Mesh, layer: int) -> None:
        """Project from the latent of keys and values, normalized by kv_norm."""
        model = cfg.model
        key = f"layers.{layer}.attn"
        features = model.mixer.heads * (model.mixer.nope_dim + model.mixer.v_dim)
        rank = self.kv_rank
        self.kv_norm = replicated_vector(f"{key}.kv_norm.weight", rank, "norm", is_partial=self.sp)
        self.kv_up = up_projection(f"{key}.kv_b.weight", (features, rank), model.init_std, mesh.tp)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        q, latent, rope_key = self.project(x)
        s = q.shape[1]
        angles = None if self.rotation is None else context.rotations[self.rotation]  # cos and sin
        rotation = {"pairs": self.rope_in_pairs, "compiled": self.compiled}
        q = q.unflatten(-1, (self.heads, -1))  # [b, s, h/tp, nope + rope]
        if angles is not None:
            q = self.rotate_heads(q, *angles, nope_dim=self.nope_dim, scale=self.score_scale, **rotation)
        elif self.score_scale != 1:
            q = q * self.score_scale
        if self.growth is not None:
            q = q * context.growths[self.growth].to(q.dtype)

        if context.cache is not None:
            if angles is not None:
                rope_key = self.rotate_heads(rope_key[:, :, None], *angles, nope_dim=0, **rotation)[:, :, 0]
                angles = None
            latent, rope_key = context.cache.extend(self.layer, latent, rope_key)
            if s == 1:
                out = self.absorbed_attention(q, latent, rope_key, context)
                return self.out(out.flatten(2))

        # keys and values of each head
        kv = adapted_linear(latent, self.kv_up, self.kv_up_adapter).unflatten(-1, (self.heads, -1))
        k, v = self.keys_and_values(kv, rope_key, angles, nope_dim=self.nope_dim, **rotation)
        out = self.core(q, k, v, context)
        return self.out(out.flatten(2))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x -> q [b, s/cp, h/tp (nope + rope)], latent [b, s/cp, kv_rank], rope_key [b, s/cp, rope].

        Under sp x is a tp rank's shard of the sequence; the results cover all s/cp tokens.
        """
        # latents of this rank's tokens
        widths = [self.q_rank, self.kv_rank, self.rope_dim]
        q_latent, latent, rope_key = adapted_linear(x, self.down, self.down_adapter).split(widths, -1)
        latent = rms_norm(latent, self.kv_norm, self.norm_eps, self.compiled)
        latents = [latent, rope_key]
        if self.q_rank:
            q_latent = rms_norm(q_latent, self.q_norm, self.norm_eps, self.compiled)
            latents.append(q_latent)

        # gather the latents of all tp ranks' tokens; project the queries
        entered = enter_region(torch.cat(latents, -1), self.tp, self.sp)
        widths = [self.kv_rank, self.rope_dim, self.q_rank]
        latent, rope_key, q_latent = entered.split(widths, -1)
        if self.q_rank:
            return adapted_linear(q_latent, self.q_up, self.q_up_adapter), latent, rope_key
        return self.q(x), latent, rope_key

    def absorbed_attention(self, q: Tensor, latent: Tensor, rope_key: Tensor,
                           context: ForwardContext) -> Tensor:
        """Attend from one new token per sequence, with W_kb absorbed into the query and W_vb into the result,
        so that keys and values of earlier tokens are never materialized (2405.04434, section 2.1.2).

        q [b, 1, h/tp, nope + rope], latent [b, s, kv_rank], rope_key [b, s, rope] -> [b, 1, h/tp, v].
        """
        kv_up = self.kv_up if self.kv_up_adapter is None else self.kv_up + self.kv_up_adapter.delta()
        kv_up = kv_up.unflatten(0, (self.heads, -1))  # [h, nope + v, kv_rank]
        k_up, v_up = kv_up.split((self.nope_dim, self.value_dim), 1)
        q_nope, q_rope = q.split((self.nope_dim, self.rope_dim), -1)
        q_latent = torch.einsum("bshn,hnr->bshr", q_nope, k_up)
        # undo attention's 1 / sqrt(latent width), and divide by sqrt(head width) instead
        key_dim = self.nope_dim + self.rope_dim
        latent_key_dim = self.kv_rank + self.rope_dim
        q = torch.cat((q_latent, q_rope), -1) * math.sqrt(latent_key_dim / key_dim)

        k = torch.cat((latent, rope_key), -1)
        k, v = k[:, :, None], latent[:, :, None]  # one key head
        out = attention(q, k, v, context.masks[self.core.view], self.core.kernel)  # [b, 1, h, kv_rank]
        return torch.einsum("bshr,hvr->bshv", out, v_up)


def adapted_linear(x: Tensor, weight: Tensor, adapter: "ColumnAdapter | None") -> Tensor:
    """Return linear(x, weight), and what an adapter adds."""
    y = linear(x, weight)
    return y if adapter is None else y + adapter(x)


def score_scale(model: ModelConfig) -> float:
    """Return the factor of the attention scores beyond 1 / sqrt(nope + rope). It is applied to the queries.

    The product of muP's factor (arXiv 2203.03466, definition 4.1) and YaRN's (arXiv 2309.00071, section 3.4).
    """
    scale = mup_score_scale(model)
    settings = model.mixer.rope
    if settings is not None and isinstance(settings.scaling, YarnScaling):
        scale *= rope.yarn_mscale(settings.scaling.factor, settings.scaling.mscale_all) ** 2
    return scale


def down_projection(cfg: Config, layer: int) -> ShardedParameter:
    """Create the matrix [q_rank + kv_rank + rope, d] from the hidden state to all latents, replicated over
    tp.

    A tp rank's gradient covers its own tokens, so under sp it is a partial sum.
    """
    model = cfg.model
    widths = {"kv_a": model.mixer.kv_rank + model.mixer.rope_dim}
    if model.mixer.q_rank:
        widths = {"q_a": model.mixer.q_rank, **widths}
    boxes: list[Box] = []
    for name, width in widths.items():
        boxes.append(Box.whole(f"layers.{layer}.attn.{name}.weight", (width, model.hidden)))
    partial_over = partial_over_tp(cfg.parallel.sp)
    return parameter(ParameterSpec(tuple(boxes), "hidden", model.init_std, partial_over=partial_over))


def up_projection(
    key: str, shape: tuple[int, int], std: float, group: Group, role: str = "hidden"
) -> ShardedParameter:
    """Create a matrix between hidden features whose rows are sharded over the group."""
    box = row_shard(key, shape, group)
    return parameter(ParameterSpec((box,), role, std))
