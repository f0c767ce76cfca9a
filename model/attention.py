"""Grouped-query causal attention (arXiv 2305.13245): merged q|k|v projection, optional per-head norm, RoPE, output."""
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from config import Config, head_dim, kv_heads, mup_scores, remakes
from kernels import rope
from kernels.attention import attention
from kernels.norm import rms_norm
from kernels.sight import Sight, sight
from model.precision import of_layer
from model.recompute import again
from parallel.comm import Group
from parallel.mesh import Mesh
from parallel.ring import ring_attention
from parallel.rng import Noise
from parallel.spec import Spec, parameter
from parallel.tensor import ColumnLinear, RowLinear, SharedHeads, replicated, rows, split_norm
from parallel.ulysses import ulysses_attention


@dataclass(frozen=True)
class Context:
    """What every block of one forward pass shares. cos, sin [b, s, 1, d/2] or None; see: who sees whom (None: the ring knows);
    noise: dropout (None: evaluation); cache: keys and values of earlier tokens, for generation; cut: the sequence is cut over
    cp, and docs [b, s] the documents of all of it (None: no document mask); learn: what routers need (model/moe.py: Learning)."""
    cos: Tensor | None
    sin: Tensor | None
    see: Sight | None
    noise: Noise | None = None
    cache: "Cache | None" = None
    cut: bool = False
    docs: Tensor | None = None
    learn: object | None = None


@dataclass
class Cache:
    """Keys and values of the tokens seen so far, by layer: [b, s_past, kv_heads, head_dim]; of MLA, the latent [b, s_past,
    kv_rank] and the turned key that all heads share [b, s_past, rope_dim] instead.

    length: tokens that every layer has seen. It grows when a pass has been through all stages (parallel/pipeline.py: logits):
    they start from the same length, and a rank may hold several of them."""
    length: int = 0
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.keys:
            k, v = torch.cat((self.keys[layer], k), 1), torch.cat((self.values[layer], v), 1)
        self.keys[layer], self.values[layer] = k, v
        return k, v


def context(cfg: Config, positions: Tensor, docs: Tensor | None, noise: Noise | None = None,
            cache: Cache | None = None, cut: bool = False, learn: object | None = None) -> Context:
    """positions [b, s] (cut: [b, s/cp]; restarting where a document does), docs [b, s] or None -> the Context of a forward
    pass."""
    m, p = cfg.model, cfg.parallel
    cos = sin = None
    if m.positions == "rope":
        freq = rope.frequencies(m.rope_dim if m.kv_rank else head_dim(m), m.rope_theta, m.rope_factor, m.rope_low_freq, m.rope_high_freq,
                                m.rope_original, m.rope_kind, positions.device)  # made there: a copy would stop the host
        dtype = torch.float64 if cfg.train.dtype == "fp64" else torch.float32
        scale = rope.mscale(m.rope_factor, m.rope_mscale) / rope.mscale(m.rope_factor, m.rope_mscale_all) if m.rope_kind == "yarn" else 1.0
        cos, sin = rope.tables(positions, freq, dtype, scale)
    past = cache.length if cache else 0
    whole = positions.shape[1] * (p.cp if cut else 1)
    see = None if cut and p.cp_kind == "ring" else sight(past, whole, 0, past + whole, m.window, docs, positions.device)
    return Context(cos, sin, see, noise, cache, cut, docs, learn)


class Attention(nn.Module):
    def __init__(self, cfg: Config, mesh: Mesh, layer: int) -> None:
        super().__init__()
        m, key = cfg.model, f"layers.{layer}.attn"
        self.layer, self.eps, self.core = layer, m.norm_eps, Core.of(cfg, mesh)
        self.dim = head_dim(m)
        self.heads, self.kv = m.heads // mesh.tp.size, max(1, kv_heads(m) // mesh.tp.size)  # of this rank
        outs = {f"{key}.q": m.heads * self.dim, f"{key}.k": kv_heads(m) * self.dim, f"{key}.v": kv_heads(m) * self.dim}
        how = m.hidden, m.init_std, m.bias or m.qkv_bias, cfg.parallel.sp
        shared = kv_heads(m) < mesh.tp.size
        self.qkv = SharedHeads(mesh, key, m.heads, kv_heads(m), self.dim, *how) if shared else ColumnLinear(mesh, outs, *how, of_layer(cfg, layer))
        self.out = RowLinear(mesh, f"{key}.o", m.heads * self.dim, m.hidden, m.init_std / math.sqrt(2 * m.layers), m.bias,
                             cfg.parallel.sp, of_layer(cfg, layer))
        if m.qk_norm_whole:
            self.q_norm, self.k_norm = (parameter(Spec((rows(f"{key}.{n}.weight", (h * self.dim,), mesh.tp),), "ones", decay=False))
                                        for n, h in (("q_norm", m.heads), ("k_norm", kv_heads(m))))
        elif m.qk_norm:
            # one weight for all heads, of which a tp rank sees its own: the gradient is partial with or without sp
            self.q_norm = replicated(f"{key}.q_norm.weight", (self.dim,), "ones", True)
            self.k_norm = replicated(f"{key}.k_norm.weight", (self.dim,), "ones", True)
        self.tp, self.whole, self.scale = mesh.tp, m.qk_norm_whole, mup_scores(m)  # the softmax's scale beyond 1 / sqrt(d)
        self.qk_norm, self.rope, self.fused = m.qk_norm, m.positions == "rope", cfg.train.compile

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        qkv = self.qkv(x)
        b, s, _ = qkv.shape  # sp: x has s/tp, the column layer gathered it
        qkv = qkv.view(b, s, self.heads + 2 * self.kv, self.dim)  # [b, s, (h + 2g)/tp, d]
        if self.rope and not self.qk_norm:
            q, k, v = rope.split_rope(qkv, ctx.cos, ctx.sin, self.heads, self.kv, self.fused)
        else:
            q, k, v = qkv.split((self.heads, self.kv, self.kv), 2)
        if self.whole:
            q, k = (split_norm(t.flatten(2), w, self.eps, self.tp).view(t.shape) for t, w in ((q, self.q_norm), (k, self.k_norm)))
        elif self.qk_norm:
            q, k = rms_norm(q, self.q_norm, self.eps, self.fused), rms_norm(k, self.k_norm, self.eps, self.fused)
        if self.rope and self.qk_norm:
            q, k = rope.rope(q, ctx.cos, ctx.sin, self.fused), rope.rope(k, ctx.cos, ctx.sin, self.fused)
        q = q if self.scale == 1 else q * self.scale
        if ctx.cache is not None:
            k, v = ctx.cache.extend(self.layer, k, v)
        return self.out(self.core(q, k, v, ctx).reshape(b, s, self.heads * self.dim))


@dataclass(frozen=True)
class Core:
    """softmax(q k^T / sqrt(d)) v over the whole sequence, of which this rank may hold a part."""
    cp: Group
    cp_kind: str
    window: int | None
    kind: str  # of kernels/attention.py
    recompute: bool

    @staticmethod
    def of(cfg: Config, mesh: Mesh) -> "Core":
        return Core(mesh.cp, cfg.parallel.cp_kind, cfg.model.window, cfg.model.attention, remakes(cfg, "core"))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q [b, s/cp, h, d], k [b, s/cp, g, d], v [b, s/cp, g, dv] -> [b, s/cp, h, dv]."""
        if ctx.cut and self.cp_kind == "ring":  # keeps no probabilities, so there is nothing to make again
            return ring_attention(q, k, v, ctx.docs, self.window, self.cp)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if self.recompute and torch.is_grad_enabled():
                return again(attention, q, k, v, ctx.see, self.kind)
            return attention(q, k, v, ctx.see, self.kind)
        return ulysses_attention(attend, q, k, v, self.cp) if ctx.cut else attend(q, k, v)
