"""Linear attention by the delta rule (kernels/delta_rule.py): the gated delta net (arXiv 2412.06464), in the
form of Qwen3-Next, and Kimi delta attention (arXiv 2510.26692), with a gate for each channel of a key.

Shapes: b sequences of s tokens, h heads of values, g of queries and keys, d channels of a key, e of a value.
"""
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import Config, TokenMixer, recomputes
from config.tree import Count, Positive
from kernels.delta_rule import delta_rule, delta_rule_effect, recurrent_delta_rule, zero_state
from kernels.grad import accumulation_dtype, read_weight
from kernels.linear import linear
from kernels.norm import rms_norm
from model.attention import head_vector
from model.context import ForwardContext
from model.mla import up_projection
from model.recompute import checkpoint_activations
from model.recurrence import ShortConvolution, SplitProjection, TokenStretch, output_projection
from parallel.sharding.boxes import Box
from parallel.sharding.spec import ParameterSpec, parameter
from parallel.tensor.layers import partial_over_tp, replicated_vector
from parallel.tensor.regions import enter_region
from parallel.topology.mesh import Mesh

UNIT_EPS = 1e-6  # below the root of the length of queries and keys


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


class GatedDeltaNet(nn.Module):
    """x [b, s/cp, hidden] (sp: [b, s/cp/tp, hidden]) -> the same."""

    def __init__(self, cfg: Config, mesh: Mesh, layer: int) -> None:
        super().__init__()
        model, mixer = cfg.model, cfg.model.mixer
        assert isinstance(mixer, DeltaConfig)
        key = f"layers.{layer}.attn"
        tp = mesh.tp.size
        self.layer = layer
        self.cp = mesh.cp
        self.width = mixer.conv
        self.eps = model.norm.eps if mixer.norm_eps is None else mixer.norm_eps
        self.largest_rate = 2 if mixer.negative_eigenvalues else 1
        self.compiled = cfg.train.compile
        self.recompute = recomputes(cfg, "core")
        self.key_dim, self.value_dim = mixer.key_dim, mixer.v_dim
        self.heads = mixer.heads // tp  # of this rank
        self.key_features = mixer.heads_over_tp()["key_heads"] * mixer.key_dim // tp
        self.value_features = self.heads * mixer.v_dim

        # projections
        keys, values = self.key_features * tp, self.value_features * tp
        self.projection = SplitProjection(
            cfg, mesh, layer,
            features={"q": keys, "k": keys, "v": values, "z": values},
            numbers={"b": mixer.heads, "a": mixer.heads},
        )
        self.conv = ShortConvolution(
            mesh, {f"{key}.q_conv": keys, f"{key}.k_conv": keys, f"{key}.v_conv": values}, mixer.conv
        )
        self.out = output_projection(cfg, mesh, layer, values)

        # how fast heads forget, and the norm of what they read: one weight for all heads, of which a tp rank
        # has some
        self.rate = head_vector(f"{key}.A_log", mixer.heads, mesh.tp, role="rate")
        self.step = head_vector(f"{key}.dt_bias", mixer.heads, mesh.tp, role="step")
        self.norm = replicated_vector(f"{key}.norm.weight", mixer.v_dim, "norm", is_partial=True)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        projected = self.projection(x)
        if self.recompute and torch.is_grad_enabled():
            return self.out(checkpoint_activations(self.read_and_write, *projected, context))
        return self.out(self.read_and_write(*projected, context))

    def read_and_write(self, features: Tensor, numbers: Tensor, context: ForwardContext) -> Tensor:
        """features [b, s/cp, (2g d + 2h e)/tp], numbers [b, s/cp, 2h/tp] -> [b, s/cp, h e/tp]."""
        stretch = TokenStretch.of(context, self.layer, self.cp, self.width)
        features, numbers = stretch.split(features), stretch.split(numbers)
        qkv, z = features.split((2 * self.key_features + self.value_features, self.value_features), -1)
        widths = (self.key_features, self.key_features, self.value_features)
        q, k, v = self.conv(qkv, stretch).split(widths, -1)
        q, k = (unit(y.unflatten(-1, (-1, self.key_dim))) for y in (q, k))
        v = v.unflatten(-1, (-1, self.value_dim))

        b, a = numbers.to(accumulation_dtype(numbers.dtype)).chunk(2, -1)
        g = -read_weight(self.rate).exp() * F.softplus(a + read_weight(self.step))  # [b, s, h/tp]
        out = run_delta_rule(q, k, v, g, self.largest_rate * b.sigmoid(), stretch)

        out = rms_norm(out, self.norm, self.eps, self.compiled)
        out = out * F.silu(z.unflatten(-1, (-1, self.value_dim)))
        return stretch.join(out.flatten(2))


class KimiDeltaAttention(nn.Module):
    """x [b, s/cp, hidden] (sp: [b, s/cp/tp, hidden]) -> the same. d = e, g = h."""

    def __init__(self, cfg: Config, mesh: Mesh, layer: int) -> None:
        super().__init__()
        model, mixer = cfg.model, cfg.model.mixer
        assert isinstance(mixer, KimiConfig)
        key = f"layers.{layer}.attn"
        self.layer = layer
        self.tp, self.cp = mesh.tp, mesh.cp
        self.sp = cfg.parallel.sp
        self.width = mixer.conv
        self.eps = model.norm.eps
        self.compiled = cfg.train.compile
        self.recompute = recomputes(cfg, "core")
        self.dim = mixer.dim

        # projections
        features = mixer.heads * mixer.dim
        of_each = dict.fromkeys("qkv", features)
        self.projection = SplitProjection(cfg, mesh, layer, features=of_each, numbers={"b": mixer.heads})
        convolved = {f"{key}.{name}_conv": size for name, size in of_each.items()}
        self.conv = ShortConvolution(mesh, convolved, mixer.conv)
        self.out = output_projection(cfg, mesh, layer, features)

        # the gates of the state and of the output, each a product of two matrices, whose rank stays as models
        # widen by heads: muP has other rates for them than for matrices between hidden features
        boxes = tuple(Box.whole(f"{key}.{name}.weight", (mixer.dim, model.hidden)) for name in ("f_a", "g_a"))
        partial_over = partial_over_tp(self.sp)
        self.gates_down = parameter(
            ParameterSpec(boxes, "narrowing", model.init_std, partial_over=partial_over)
        )
        shape = (features, mixer.dim)
        self.forget_up, self.output_up = (
            up_projection(f"{key}.{name}.weight", shape, model.init_std, mesh.tp, role="widening")
            for name in ("f_b", "g_b")
        )

        self.rate = head_vector(f"{key}.A_log", mixer.heads, mesh.tp, role="rate")
        self.step = head_vector(f"{key}.dt_bias", features, mesh.tp, role="step")
        self.norm = replicated_vector(f"{key}.norm.weight", mixer.dim, "norm", is_partial=True)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        qkv, numbers = self.projection(x)
        gates = enter_region(linear(x, self.gates_down), self.tp, self.sp)  # [b, s/cp, 2d]
        forget, gate = gates.chunk(2, -1)
        inputs = (qkv, numbers, linear(forget, self.forget_up), linear(gate, self.output_up))
        if self.recompute and torch.is_grad_enabled():
            return self.out(checkpoint_activations(self.read_and_write, *inputs, context))
        return self.out(self.read_and_write(*inputs, context))

    def read_and_write(
        self, qkv: Tensor, numbers: Tensor, forget: Tensor, gate: Tensor, context: ForwardContext
    ) -> Tensor:
        """qkv [b, s/cp, 3h d/tp], numbers [b, s/cp, h/tp], forget, gate [b, s/cp, h d/tp] -> [b, s/cp, h
        d/tp]."""
        stretch = TokenStretch.of(context, self.layer, self.cp, self.width)
        qkv, numbers, forget, gate = map(stretch.split, (qkv, numbers, forget, gate))
        q, k, v = self.conv(qkv, stretch).unflatten(-1, (3, -1, self.dim)).unbind(2)

        dtype = accumulation_dtype(forget.dtype)
        step = F.softplus(forget.to(dtype) + read_weight(self.step)).unflatten(-1, (-1, self.dim))
        g = -read_weight(self.rate).exp()[:, None] * step  # [b, s, h/tp, d]
        out = run_delta_rule(unit(q), unit(k), v, g, numbers.to(dtype).sigmoid(), stretch)

        out = rms_norm(out, self.norm, self.eps, self.compiled)
        out = out * gate.unflatten(-1, (-1, self.dim)).sigmoid()
        return stretch.join(out.flatten(2))


def run_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, stretch: TokenStretch) -> Tensor:
    """delta_rule from the state before the stretch, whose last state is kept. Shapes: as there."""
    documents = stretch.state_documents()
    state = stretch.state_before(
        lambda b: zero_state(k[:b], v[:b]),
        lambda: delta_rule_effect(k, v, g, beta, counts=stretch.counts, **documents),
    )
    if stretch.is_one_token(q):
        out, state = recurrent_delta_rule(q, k, v, g, beta, state=state, **documents)
    else:
        out, state = delta_rule(q, k, v, g, beta, state=state, counts=stretch.counts, **documents)
    stretch.keep_state(state)
    return out


def unit(x: Tensor) -> Tensor:
    """x [..., d], of length 1. Arithmetic in fp32 or better."""
    values = x.to(accumulation_dtype(x.dtype))
    return (values * torch.rsqrt(values.square().sum(-1, keepdim=True) + UNIT_EPS)).to(x.dtype)
