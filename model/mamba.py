"""Two mixers with a short convolution: the state space layer of Mamba-2 (arXiv 2405.21060), and the gated
convolution of LFM2, which has no other state.

Shapes: b sequences of s tokens, h heads of p channels, g groups that share B and C of n channels.
"""
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import Config, TokenMixer, recomputes
from config.tree import Count, NotNegative
from kernels.grad import accumulation_dtype, read_weight
from kernels.state_space import recurrent_state_space, state_space, state_space_effect, zero_state
from model.attention import head_vector
from model.context import ForwardContext
from model.precision import fp8_of_layer
from model.recompute import checkpoint_activations
from model.recurrence import ShortConvolution, SplitProjection, TokenStretch, output_projection
from parallel.tensor.layers import ColumnLinear
from parallel.topology.mesh import Mesh


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
    """Gated short convolution (LFM2): out(C conv(B x)), with as many channels as the residual stream."""
    kind: Literal["short_conv"] = "short_conv"
    conv: Count = 3  # tokens that the convolution sees, the token itself included

    def features_over_tp(self, hidden: int) -> dict[str, int]:
        return {"hidden": hidden}


class Mamba(nn.Module):
    """x [b, s/cp, hidden] (sp: [b, s/cp/tp, hidden]) -> the same."""

    def __init__(self, cfg: Config, mesh: Mesh, layer: int) -> None:
        super().__init__()
        mixer = cfg.model.mixer
        assert isinstance(mixer, MambaConfig)
        key = f"layers.{layer}.attn"
        tp = mesh.tp.size
        self.layer = layer
        self.cp = mesh.cp
        self.width = mixer.conv
        self.eps = cfg.model.norm.eps
        self.recompute = recomputes(cfg, "core")
        self.dim = mixer.dim
        self.dt_min = mixer.dt_min
        self.groups = mixer.groups // tp  # of this rank
        inner, shared = mixer.heads * mixer.dim, mixer.groups * mixer.state
        self.widths = (inner // tp, shared // tp, shared // tp)  # of x, B and C

        # projections
        convolved = {"x": inner, "B": shared, "C": shared}
        self.projection = SplitProjection(
            cfg, mesh, layer, features={"z": inner, **convolved}, numbers={"dt": mixer.heads}
        )
        channels = {f"{key}.{name}_conv": size for name, size in convolved.items()}
        self.conv = ShortConvolution(mesh, channels, mixer.conv, bias=True)
        self.out = output_projection(cfg, mesh, layer, inner)

        self.rate = head_vector(f"{key}.A_log", mixer.heads, mesh.tp, role="rate")
        self.step = head_vector(f"{key}.dt_bias", mixer.heads, mesh.tp, role="step")
        self.skip = head_vector(f"{key}.D", mixer.heads, mesh.tp, role="skip")
        self.norm = head_vector(f"{key}.norm.weight", inner, mesh.tp, role="norm")

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        projected = self.projection(x)
        if self.recompute and torch.is_grad_enabled():
            return self.out(checkpoint_activations(self.read_and_write, *projected, context))
        return self.out(self.read_and_write(*projected, context))

    def read_and_write(self, features: Tensor, numbers: Tensor, context: ForwardContext) -> Tensor:
        """features [b, s/cp, (2h p + 2g n)/tp], numbers [b, s/cp, h/tp] -> [b, s/cp, h p/tp]."""
        stretch = TokenStretch.of(context, self.layer, self.cp, self.width)
        features, numbers = stretch.split(features), stretch.split(numbers)
        z, convolved = features.split((self.widths[0], sum(self.widths)), -1)
        x, B, C = self.conv(convolved, stretch).split(self.widths, -1)
        B, C = (y.unflatten(-1, (self.groups, -1)) for y in (B, C))
        dt = F.softplus(numbers.to(accumulation_dtype(numbers.dtype)) + read_weight(self.step))
        dt = dt.clamp(min=self.dt_min) if self.dt_min else dt
        out = self.run_state_space(x.unflatten(-1, (-1, self.dim)), dt, B, C, stretch)
        out = gate_and_normalize(out.flatten(2), z, self.norm, groups=self.groups, eps=self.eps)
        return stretch.join(out)

    def run_state_space(self, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, stretch: TokenStretch) -> Tensor:
        """Run state_space from the state before the stretch, and keep the final state. Same shapes as
        state_space."""
        A, D = -read_weight(self.rate).exp(), read_weight(self.skip)
        documents = stretch.state_documents()
        state = stretch.state_before(
            lambda b: zero_state(x[:b], B[:b]), lambda: state_space_effect(x, dt, A, B, **documents)
        )
        function = recurrent_state_space if stretch.is_one_token(x) else state_space
        out, state = function(x, dt, A, B, C, D, state=state, **documents)
        stretch.keep_state(state)
        return out


def gate_and_normalize(x: Tensor, z: Tensor, weight: Tensor, *, groups: int, eps: float) -> Tensor:
    """x, z [b, s, h p/tp] -> the same: RMSNorm of x SiLU(z) within each group, in fp32 or better."""
    dtype = accumulation_dtype(x.dtype)
    gated = (x.to(dtype) * F.silu(z.to(dtype))).unflatten(-1, (groups, -1))
    scale = torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps)
    return ((gated * scale).flatten(-2) * read_weight(weight)).to(x.dtype)


class GatedShortConvolution(nn.Module):
    """x [b, s/cp, hidden] (sp: [b, s/cp/tp, hidden]) -> the same: out(C conv(B x)) with projections B, C
    and x."""

    def __init__(self, cfg: Config, mesh: Mesh, layer: int) -> None:
        super().__init__()
        model, mixer = cfg.model, cfg.model.mixer
        assert isinstance(mixer, ShortConvConfig)
        key = f"layers.{layer}.attn"
        self.layer = layer
        self.cp = mesh.cp
        self.width = mixer.conv
        self.projection = ColumnLinear(
            mesh,
            {f"{key}.{name}": model.hidden for name in "BCx"},
            model.hidden,
            std=model.init_std,
            bias=False,
            sp=cfg.parallel.sp,
            async_tp=cfg.parallel.async_tp,
            fp8=fp8_of_layer(cfg, layer),
        )
        self.conv = ShortConvolution(mesh, {f"{key}.conv": model.hidden}, mixer.conv, silu=False)
        self.out = output_projection(cfg, mesh, layer, model.hidden)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        stretch = TokenStretch.of(context, self.layer, self.cp, self.width)
        B, C, x = stretch.split(self.projection(x)).chunk(3, -1)
        return self.out(stretch.join(C * self.conv(B * x, stretch)))
