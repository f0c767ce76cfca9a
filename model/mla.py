"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values are made from one narrow latent, and so is what
generation keeps of a token; positions ride on a few channels, of which all heads share one key.

    q  = W_qb norm(W_qa x)               [h, nope | rope]     (no q_rank: W_q x)
    c  = norm(latent), r = rope(...)     of W_kva x = [latent | r]
    k  = [W_kb c | r],  v = W_vb c       [h, nope | rope], [h, v]; W_kb and W_vb are the rows of kv_b, head by head

The up-projections and the output are split over tp by heads. The down-projections and the latents' norms are whole on every
rank and see that rank's tokens alone: the latents, not the hidden state, are what enters the tensor-parallel region, so under
sequence parallelism q_rank + kv_rank + rope_dim numbers a token are gathered instead of d (twice with no q_rank: x as well),
and their gradients are partial over tp exactly where the tokens are cut.
"""
import math

import torch
from torch import Tensor, nn

from config import Config, mup_scores
from kernels import rope
from kernels.attention import attention
from kernels.linear import linear
from kernels.norm import rms_norm
from model.attention import Context, Core
from model.precision import of_layer
from parallel.boxes import Box
from parallel.collectives import enter
from parallel.mesh import Mesh
from parallel.spec import Spec, parameter
from parallel.tensor import ColumnLinear, RowLinear, replicated, rows

LATENT_EPS = 1e-6  # of the latents' norms in every published model, whatever norm_eps is


class MLA(nn.Module):
    """x [b, s, d] (sp: [b, s/tp, d]) -> the same."""

    def __init__(self, cfg: Config, mesh: Mesh, layer: int) -> None:
        super().__init__()
        m, key, sp = cfg.model, f"layers.{layer}.attn", cfg.parallel.sp
        self.layer, self.core, self.tp, self.sp, self.fused = layer, Core.of(cfg, mesh), mesh.tp, sp, cfg.train.compile
        self.heads, self.pairs = m.heads // mesh.tp.size, m.rope_pairs  # heads of this rank
        self.q_rank, self.kv_rank, self.nope, self.rope, self.v = m.q_rank or 0, m.kv_rank, m.nope_dim, m.rope_dim, m.v_dim
        # the softmax's scale beyond 1 / sqrt(d): it rides on the queries
        self.scale = mup_scores(m) * (rope.mscale(m.rope_factor, m.rope_mscale_all) ** 2 if m.rope_kind == "yarn" else 1.0)
        downs = ({"q_a": m.q_rank} if m.q_rank else {}) | {"kv_a": m.kv_rank + m.rope_dim}
        self.down = parameter(Spec(tuple(Box.whole(f"{key}.{n}.weight", (r, m.hidden)) for n, r in downs.items()), "normal", m.init_std,
                                   partial=("tp",) if sp else ()))
        width = m.heads * (m.nope_dim + m.rope_dim)
        if m.q_rank:
            self.q_norm = replicated(f"{key}.q_norm.weight", (m.q_rank,), "ones", sp)
            self.q_up = parameter(Spec((rows(f"{key}.q_b.weight", (width, m.q_rank), mesh.tp),), "normal", m.init_std))
        else:
            self.q = ColumnLinear(mesh, {f"{key}.q": width}, m.hidden, m.init_std, False, sp, of_layer(cfg, layer))
        self.kv_norm = replicated(f"{key}.kv_norm.weight", (m.kv_rank,), "ones", sp)
        self.kv_up = parameter(Spec((rows(f"{key}.kv_b.weight", (m.heads * (m.nope_dim + m.v_dim), m.kv_rank), mesh.tp),), "normal", m.init_std))
        self.out = RowLinear(mesh, f"{key}.o", m.heads * m.v_dim, m.hidden, m.init_std / math.sqrt(2 * m.layers), False, sp, of_layer(cfg, layer))

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        q, c, r = linear(x, self.down).split((self.q_rank, self.kv_rank, self.rope), -1)
        latents = [rms_norm(c, self.kv_norm, LATENT_EPS, self.fused), r]
        if self.q_rank:
            latents.append(rms_norm(q, self.q_norm, LATENT_EPS, self.fused))
        c, r, *q = enter(torch.cat(latents, -1), self.tp, self.sp).split((self.kv_rank, self.rope, self.q_rank)[:len(latents)], -1)
        q = linear(q[0], self.q_up) if self.q_rank else self.q(x)
        b, s, _ = q.shape
        q_nope, q_rope = q.view(b, s, self.heads, self.nope + self.rope).split((self.nope, self.rope), -1)
        q = torch.cat((q_nope if self.scale == 1 else q_nope * self.scale, self.turn(q_rope, ctx, self.scale)), -1)  # [b, s, h/tp, nope + rope]
        r = self.turn(r[:, :, None], ctx)[:, :, 0]  # [b, s, rope]
        if ctx.cache is not None:
            c, r = ctx.cache.extend(self.layer, c, r)
            if s == 1:
                return self.out(self.absorbed(q, c, r, ctx).reshape(b, s, -1))
        k, v = linear(c, self.kv_up).view(b, -1, self.heads, self.nope + self.v).split((self.nope, self.v), -1)
        k = torch.cat((k, r[:, :, None].expand(-1, -1, self.heads, -1)), -1)
        return self.out(self.core(q, k, v, ctx).reshape(b, s, self.heads * self.v))

    def turn(self, x: Tensor, ctx: Context, scale: float = 1.0) -> Tensor:
        """x [b, s, h, rope] in the order of the weights -> turned, rotate-half order, times scale."""
        cos, sin = (ctx.cos, ctx.sin) if scale == 1 else (ctx.cos * scale, ctx.sin * scale)
        return rope.rope(rope.halves(x) if self.pairs else x, cos, sin, self.fused)

    def absorbed(self, q: Tensor, c: Tensor, r: Tensor, ctx: Context) -> Tensor:
        """One new token a sequence: W_kb goes over to the query and W_vb to the result, so that no earlier token's keys and
        values are ever made. q [b, 1, h, nope + rope], c [b, s, kv_rank], r [b, s, rope] -> [b, 1, h, v]."""
        w_k, w_v = self.kv_up.view(self.heads, self.nope + self.v, self.kv_rank).split((self.nope, self.v), 1)
        q = torch.cat((torch.einsum("bshn,hnr->bshr", q[..., :self.nope], w_k), q[..., self.nope:]), -1)
        q = q * math.sqrt(q.shape[-1] / (self.nope + self.rope))  # attention divides by the root of the width it sees
        out = attention(q, torch.cat((c, r), -1)[:, :, None], c[:, :, None], ctx.see, self.core.kind)  # one key head
        return torch.einsum("bshr,hvr->bshv", out, w_v)
